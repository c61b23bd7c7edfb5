// The packed form of int8 weights: rounding, writing, and reading rows of it back. Compiled once, for
// every machine.
#pragma once

#include "packing.h"

namespace packing {

inline int64_t int8_depth(int64_t depth) {
  return (depth + CBGEN_ROTATION - 1) / CBGEN_ROTATION * CBGEN_ROTATION;
}

inline int64_t int8_panel_bytes(int64_t depth) { return (int8_depth(depth) + 4) * CBGEN_PANEL; }

// Multiplies 64 numbers by a Hadamard matrix, whose square is 64 times the identity.
inline void rotate(float* x) {
  for (int64_t apart = CBGEN_ROTATION / 2; apart > 0; apart /= 2) {
    for (int64_t first = 0; first < CBGEN_ROTATION; first += 2 * apart) {
      for (int64_t i = first; i < first + apart; i++) {
        const float low = x[i], high = x[i + apart];
        x[i] = low + high;
        x[i + apart] = low - high;
      }
    }
  }
}

// Rotates and rounds one weight row; its largest magnitude becomes 127. A row that holds what is not
// finite gets a scale that is no number.
template <class Source>
void pack_int8_row(const typename Source::Item* items, int64_t stride, int64_t depth, char* values,
                   float* scale) {
  float rotated[CBGEN_ROTATION];
  const auto rotate_at = [&](int64_t k) {
    for (int64_t i = 0; i < CBGEN_ROTATION; i++) {
      const bool is_there = k + i < depth;
      rotated[i] = is_there ? Source::read(items[(k + i) * stride]) / CBGEN_ROTATION : 0.0f;
    }
    rotate(rotated);
  };
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t k = 0; k < depth; k += CBGEN_ROTATION) {
    rotate_at(k);
    for (float x : rotated) {
      largest = std::max(largest, std::fabs(x));
      is_finite = is_finite && std::isfinite(x);
    }
  }
  const bool is_zero = !is_finite || largest < 1e-30f;
  *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
  for (int64_t k = 0; k < depth; k += CBGEN_ROTATION) {
    rotate_at(k);
    for (int64_t i = 0; i < CBGEN_ROTATION; i++) {
      const float value = is_zero ? 0.0f : rotated[i] * (127.0f / largest);
      const int64_t place = (k + i) / 4 * (4 * CBGEN_PANEL) + (k + i) % 4;
      values[place] = static_cast<char>(static_cast<uint8_t>(128 + std::lrintf(value)));
    }
  }
}

// One panel of `columns` (at most 32) weight rows; the rest is zeros.
template <class Source>
void pack_int8_panel(const Matrix& weights, int64_t first_row, int64_t columns, int64_t depth,
                     char* packed) {
  const auto* items = static_cast<const typename Source::Item*>(weights.data);
  const int64_t values_bytes = int8_depth(depth) * CBGEN_PANEL;
  auto* scales = reinterpret_cast<float*>(packed + values_bytes);
  std::memset(packed, 128, values_bytes);
  std::fill(scales, scales + CBGEN_PANEL, 0.0f);
  for (int64_t n = 0; n < columns; n++) {
    pack_int8_row<Source>(items + (first_row + n) * weights.row_stride, weights.column_stride, depth,
                          packed + n * 4, scales + n);
  }
}

inline void unpack_int8_row(const void* packed, int64_t row, int64_t depth, float* output) {
  const char* panel = static_cast<const char*>(packed) + row / CBGEN_PANEL * int8_panel_bytes(depth);
  const int64_t column = row % CBGEN_PANEL;
  const auto* scales = reinterpret_cast<const float*>(panel + int8_depth(depth) * CBGEN_PANEL);
  for (int64_t k = 0; k < depth; k += CBGEN_ROTATION) {
    float rotated[CBGEN_ROTATION];
    for (int64_t i = 0; i < CBGEN_ROTATION; i++) {
      const char* place = panel + (k + i) / 4 * (4 * CBGEN_PANEL) + column * 4 + (k + i) % 4;
      rotated[i] = static_cast<float>(static_cast<uint8_t>(*place) - 128) * scales[column];
    }
    rotate(rotated);
    std::copy(rotated, rotated + std::min(CBGEN_ROTATION, depth - k), output + k);
  }
}

}  // namespace packing
