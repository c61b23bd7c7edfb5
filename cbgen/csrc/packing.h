// The packed form of weights: writing, reading back, rows of it, and which format holds a tensor
// exactly. Compiled once, for every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace packing {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | magnitude << 13);
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

// The float16 of a value that one holds exactly; of others, something else.
inline uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude >= 0x7f800000) {
    const uint16_t payload = static_cast<uint16_t>(magnitude >> 13 & 0x3ff);
    return static_cast<uint16_t>(sign | 0x7c00 | payload);
  }
  const float scaled = float_of(magnitude) * 0x1p-112f;
  return static_cast<uint16_t>(sign | (bits_of(scaled) >> 13 & 0x7fff));
}

inline bool is_float16(float x) { return bits_of(from_float16(to_float16(x))) == bits_of(x); }

// How values of a format are read and written.
struct Float32Values {
  using Item = float;
  static float read(Item item) { return item; }
  static Item write(float value) { return value; }
};

struct Bfloat16Values {
  using Item = uint16_t;
  static float read(Item item) { return float_of(static_cast<uint32_t>(item) << 16); }
  static Item write(float value) { return static_cast<Item>(bits_of(value) >> 16); }
};

struct Float16Values {
  using Item = uint16_t;
  static float read(Item item) { return from_float16(item); }
  static Item write(float value) { return to_float16(value); }
};

// Calls function(values of the format).
template <class Function>
auto with_values(int32_t format, const Function& function) {
  switch (format) {
    case CBGEN_BFLOAT16: return function(Bfloat16Values{});
    case CBGEN_FLOAT16: return function(Float16Values{});
    default: return function(Float32Values{});
  }
}

// A strided matrix [rows][columns] of float32, bfloat16 or float16.
struct Matrix {
  const void* data;
  int64_t row_stride, column_stride;  // elements
  int32_t format;
};

inline int64_t item_size(int32_t format) { return format == CBGEN_FLOAT32 ? 4 : 2; }

// Index of a column's value among the 32 of one depth.
inline int64_t place(int64_t column, int32_t format) {
  return format == CBGEN_BFLOAT16 ? 2 * (column % 16) + column / 16 : column;
}

// Whether every value of a row is exact in bfloat16, and in float16.
template <class Source>
void exact_row(const Matrix& matrix, int64_t row, int64_t columns, bool& bfloat16, bool& float16) {
  const auto* items = static_cast<const typename Source::Item*>(matrix.data) + row * matrix.row_stride;
  uint32_t beyond_bfloat16 = 0;
  for (int64_t k = 0; k < columns; k++) {
    beyond_bfloat16 |= bits_of(Source::read(items[k * matrix.column_stride])) & 0xffff;
  }
  bfloat16 = beyond_bfloat16 == 0;
  float16 = true;
  for (int64_t k = 0; k < columns && float16; k++) {
    float16 = is_float16(Source::read(items[k * matrix.column_stride]));
  }
}

// One panel of `columns` (at most 32) weight rows; the rest is zeros.
template <class Source, class Target>
void pack_panel(const Matrix& weights, int64_t first_row, int64_t columns, int64_t depth,
                int32_t format, void* packed) {
  const auto* items = static_cast<const typename Source::Item*>(weights.data);
  const typename Source::Item* rows[CBGEN_PANEL];
  int64_t places[CBGEN_PANEL];
  for (int64_t n = 0; n < CBGEN_PANEL; n++) {
    rows[n] = items + (first_row + std::min(n, columns - 1)) * weights.row_stride;
    places[n] = place(n, format);
  }
  auto* target = static_cast<typename Target::Item*>(packed);
  for (int64_t k = 0; k < depth; k++, target += CBGEN_PANEL) {
    const int64_t offset = k * weights.column_stride;
    for (int64_t n = 0; n < columns; n++) {
      target[places[n]] = Target::write(Source::read(rows[n][offset]));
    }
    for (int64_t n = columns; n < CBGEN_PANEL; n++) target[places[n]] = 0;
  }
}

template <class Source>
void unpack_row(const void* packed, int64_t row, int64_t depth, int32_t format, float* output) {
  const int64_t first = row / CBGEN_PANEL * CBGEN_PANEL * depth + place(row % CBGEN_PANEL, format);
  const auto* items = static_cast<const typename Source::Item*>(packed) + first;
  for (int64_t k = 0; k < depth; k++) output[k] = Source::read(items[k * CBGEN_PANEL]);
}

}  // namespace packing
