#include "attention.h"
#include "linear.h"

const CbgenKernels cbgen_avx512 = {"avx512", linear_block, attention_scratch, attend, merge};
