#include "attention.h"
#include "decoder.h"
#include "linear.h"

const CbgenKernels cbgen_avx512 = {
    "avx512", linear_block, attention_scratch, attend, merge, norm_rows, place_heads, activate_rows,
};
