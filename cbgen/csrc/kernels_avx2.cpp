#include "attention.h"
#include "decoder.h"
#include "int8.h"
#include "largest.h"
#include "linear.h"
#include "peak.h"
#include "screen.h"

const CbgenKernels cbgen_avx2 = {
    "avx2", linear_block, attention_scratch, attend, merge, norm_rows, place_heads, activate_rows,
    &int8_kernels, multiply_add, largest, bound_scores,
};
