#include "attention.h"
#include "decoder.h"
#include "int8.h"
#include "largest.h"
#include "linear.h"
#include "peak.h"
#include "screen.h"

const CbgenKernels cbgen_avx512 = {
    "avx512", linear_block, attention_scratch, attend, merge, norm_rows, place_heads, activate_rows,
    &int8_kernels, multiply_add, largest, bound_scores,
};

// The same functions but for int8, whose are compiled apart.
const CbgenKernels cbgen_avx512vnni = {
    "avx512vnni", linear_block, attention_scratch, attend, merge, norm_rows, place_heads,
    activate_rows, &cbgen_int8_avx512vnni, multiply_add, largest, bound_scores,
};
