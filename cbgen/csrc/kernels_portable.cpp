#include "attention.h"
#include "decoder.h"
#include "linear.h"

const CbgenKernels cbgen_portable = {
    "portable", linear_block, attention_scratch, attend, merge, norm_rows, place_heads, activate_rows,
};
