// Bounds of exact products, from products that were rounded to int8.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

// Longer rows may have products that are not finite, which no bound speaks of.
constexpr float LONGEST_ROW = 1e30f;

// More than what products and bounds lose where float32 holds numbers with few bits or none.
constexpr float SMALLEST = 1e-36f;

// The largest bound of one row and one panel. By Cauchy and Schwarz, with x' and w' the rounded row
// and column: |xw - x'w'| = |x(w - w') + (x - x')w'| <= |x||w - w'| + |x - x'||w'|.
inline float bound_of(const float* scores, const float* errors, const CbgenInt8Row& row) {
  const vf norm = splat(row.norm), error = splat(row.error);
  vf most = splat(-__builtin_inff());
  for (int64_t n = 0; n < CBGEN_PANEL; n += W) {
    const vf bound = fma(norm, load(errors + n), load(scores + n));
    most = maximum(fma(error, load(errors + CBGEN_PANEL + n), bound), most);
  }
  return largest_of(most) + SMALLEST;
}

// The same of the first columns of a panel alone.
inline float bound_of_few(const float* scores, const float* errors, const CbgenInt8Row& row,
                          int64_t columns) {
  float most = -__builtin_inff();
  for (int64_t n = 0; n < columns; n++) {
    const float bound =
        scores[n] + row.norm * errors[n] + row.error * errors[CBGEN_PANEL + n];
    if (bound > most) most = bound;
  }
  return most + SMALLEST;
}

void bound_scores(const CbgenScores& s) {
  for (int64_t r = 0; r < s.rows; r++) {
    const auto& row = *reinterpret_cast<const CbgenInt8Row*>(s.quantized + r * s.row_bytes);
    const bool is_bounded = row.norm < LONGEST_ROW;
    const float* scores = s.scores + r * s.panels * CBGEN_PANEL;
    for (int64_t p = 0; p < s.panels; p++) {
      const float* errors = s.errors + p * 2 * CBGEN_PANEL;
      const int64_t first = p * CBGEN_PANEL, columns = s.columns - first;
      float bound = __builtin_inff();
      if (is_bounded) {
        bound = columns >= CBGEN_PANEL ? bound_of(scores + first, errors, row)
                                       : bound_of_few(scores + first, errors, row, columns);
      }
      s.bounds[p * s.bounds_stride + r] = bound;
    }
  }
}

}  // namespace
