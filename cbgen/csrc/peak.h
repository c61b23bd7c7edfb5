// What the machine could do at most: multiply-adds of registers alone.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

// Runs so many rounds; returns the floating-point operations of one. `result` keeps them from being
// left out.
int64_t multiply_add(int64_t rounds, float* result) {
  constexpr int CHAINS = W == 16 ? 24 : 12;  // enough to hide the latency, few enough for registers
  vf sums[CHAINS];
  for (int i = 0; i < CHAINS; i++) sums[i] = splat(static_cast<float>(i));
  const vf a = splat(*result), b = splat(1.0f - *result);
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) sums[i] = fma(sums[i], a, b);
  }
  vf total = sums[0];
  for (int i = 1; i < CHAINS; i++) total = total + sums[i];
  *result = total[0];
  return 2 * CHAINS * W;
}

}  // namespace
