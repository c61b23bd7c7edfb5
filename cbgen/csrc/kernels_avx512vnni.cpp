#include "int8.h"

const CbgenInt8Kernels cbgen_int8_avx512vnni = int8_kernels;
