#include "attention.h"
#include "linear.h"

const CbgenKernels cbgen_portable = {"portable", linear_block, attention_scratch, attend, merge};
