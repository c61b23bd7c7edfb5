// Products of rows with int8 weights.
//
// Rows are quantized as they come: each 64 depths are rotated as those of the weights were, and one
// scale makes the whole row int8. All sums are exact in int32, and the few float operations around
// them are neither fused nor reordered, so every instruction set gives the same bits, and a row's
// result depends on nothing but the row.
#pragma once

#include "kernels.h"
#include "rows.h"
#include "vector.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int VECTORS = CBGEN_PANEL / W;  // of int32 sums of a panel's columns
// A block of sums in registers: rows x vectors of columns.
constexpr int INT8_ROWS = W < 16 ? 4 : 12;
constexpr int FEW_INT8_ROWS = INT8_ROWS / 2;
constexpr int ACROSS = 2;
constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
constexpr int32_t ROUNDING_BITS = 0x4b400000;
constexpr float SMALLEST_ROW = 1e-30f;  // the inverse of its scale is still finite
constexpr uint32_t INFINITY_BITS = 0x7f800000;
constexpr float ROUNDED_UP = 1.0f + 1.0f / 1024;  // more than the errors of a long sum of squares

typedef int32_t vi_anywhere __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef int32_t int_anywhere __attribute__((aligned(1), may_alias));

// Four depths of some columns and of one row.
#if defined(__AVX512VNNI__)

constexpr int64_t INT8_BYTES = 1;  // of a quantized value of a row

struct WeightsOf4 {
  vi bytes;
  explicit WeightsOf4(const char* p) : bytes(*reinterpret_cast<const vi_anywhere*>(p)) {}
};
struct RowOf4 {
  vi bytes;
  explicit RowOf4(const char* p) {
    bytes = vi{} + *reinterpret_cast<const int_anywhere*>(p);
  }
};
inline vi add_products(vi sums, const WeightsOf4& w, const RowOf4& x) {
  return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                  reinterpret_cast<__m512i>(w.bytes),
                                                  reinterpret_cast<__m512i>(x.bytes)));
}

#else

// As 16-bit numbers in pairs: depths 0 and 2, and depths 1 and 3.
constexpr int64_t INT8_BYTES = 2;

struct WeightsOf4 {
  vi even, odd;
  explicit WeightsOf4(const char* p) {
    const vu bytes = reinterpret_cast<vu>(static_cast<vi>(*reinterpret_cast<const vi_anywhere*>(p)));
    even = reinterpret_cast<vi>(bytes & 0x00ff00ffu);
    odd = reinterpret_cast<vi>(bytes >> 8 & 0x00ff00ffu);
  }
};
struct RowOf4 {
  vi even, odd;
  explicit RowOf4(const char* p) {
    even = vi{} + reinterpret_cast<const int_anywhere*>(p)[0];
    odd = vi{} + reinterpret_cast<const int_anywhere*>(p)[1];
  }
};
// Products of the 16-bit halves, added.
inline vi multiply_halves(vi a, vi b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<vi>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vi>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<vi>(
      _mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
inline vi add_products(vi sums, const WeightsOf4& w, const RowOf4& x) {
  return sums + (multiply_halves(w.even, x.even) + multiply_halves(w.odd, x.odd));
}

#endif

inline int64_t padded_depth(int64_t depth) {
  return (depth + CBGEN_ROTATION - 1) / CBGEN_ROTATION * CBGEN_ROTATION;
}
inline int64_t int8_row_bytes(int64_t depth) {
  return CBGEN_INT8_HEADER + padded_depth(depth) * INT8_BYTES;
}

template <int DISTANCE>
inline vf swapped(vf x) {
#if defined(__clang__)
  vf result;
  for (int i = 0; i < W; i++) result[i] = x[i ^ DISTANCE];
  return result;
#else
  vi from;
  for (int i = 0; i < W; i++) from[i] = i ^ DISTANCE;
  return __builtin_shuffle(x, from);
#endif
}

// One step of the fast Walsh-Hadamard transform: x[i] + x[i + D] and x[i] - x[i + D] take the places
// of x[i] and x[i + D].
template <int DISTANCE>
inline void butterflies(vf (&x)[CBGEN_ROTATION / W]) {
  if constexpr (DISTANCE >= W) {
    constexpr int apart = DISTANCE / W;
    for (int i = 0; i < CBGEN_ROTATION / W; i++) {
      if (i & apart) continue;
      const vf sum = x[i] + x[i + apart];
      x[i + apart] = x[i] - x[i + apart];
      x[i] = sum;
    }
  } else {
    vu sign;
    for (int i = 0; i < W; i++) sign[i] = i & DISTANCE ? 0x80000000u : 0;
    for (vf& v : x) v = swapped<DISTANCE>(v) + reinterpret_cast<vf>(reinterpret_cast<vu>(v) ^ sign);
  }
}

inline void rotate_64(vf (&x)[CBGEN_ROTATION / W]) {
  butterflies<32>(x);
  butterflies<16>(x);
  butterflies<8>(x);
  butterflies<4>(x);
  butterflies<2>(x);
  butterflies<1>(x);
}

// Rotates a row and returns the bits of its largest magnitude; those of a number that is not finite
// are larger than all others.
inline uint32_t rotate_row(const float* input, int64_t depth, float* rotated) {
  vi largest{};
  for (int64_t k = 0; k < depth; k += CBGEN_ROTATION) {
    vf x[CBGEN_ROTATION / W];
    if (k + CBGEN_ROTATION <= depth) {
      for (int i = 0; i < CBGEN_ROTATION / W; i++) x[i] = load(input + k + i * W);
    } else {
      float last[CBGEN_ROTATION] = {};
      for (int64_t i = k; i < depth; i++) last[i - k] = input[i];
      for (int i = 0; i < CBGEN_ROTATION / W; i++) x[i] = load(last + i * W);
    }
    rotate_64(x);
    for (int i = 0; i < CBGEN_ROTATION / W; i++) {
      const vi magnitude = reinterpret_cast<vi>(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      store(rotated + k + i * W, x[i]);
    }
  }
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) {
    const uint32_t lane = static_cast<uint32_t>(largest[i]);
    bits = lane > bits ? lane : bits;
  }
  return bits;
}

// The low bytes of W numbers, as the products want those of a row.
inline void store_values(vi numbers, char* place) {
#if defined(__AVX512VNNI__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(place),
                   _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(numbers)));
#else
  auto* pairs = reinterpret_cast<int_anywhere*>(place);
  for (int i = 0; i < W; i += 4) {
    pairs[i / 2] = (numbers[i] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(numbers[i + 2]) << 16);
    pairs[i / 2 + 1] = (numbers[i + 1] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(numbers[i + 3]) << 16);
  }
#endif
}

// The header of a row of which nothing is left but zeros.
inline CbgenInt8Row emptied_row(bool is_finite, int64_t depth) {
  if (!is_finite) {
    const float infinity = __builtin_inff();
    return {__builtin_nanf(""), 0, infinity, infinity};
  }
  const float norm = SMALLEST_ROW * static_cast<float>(depth);
  return {0.0f, 0, norm, norm};
}

inline CbgenInt8Row quantize_row(const float* input, int64_t depth, float* rotated, char* values) {
  const uint32_t bits = rotate_row(input, depth, rotated);
  const int64_t padded = padded_depth(depth);
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  const bool is_finite = bits < INFINITY_BITS;
  if (!is_finite || largest < SMALLEST_ROW) {
    for (int64_t k = 0; k < padded; k += W) store_values(vi{}, values + k * INT8_BYTES);
    return emptied_row(is_finite, depth);
  }
  const vf inverse = splat(127.0f / largest);
  vi sums{};
  vf squares{}, errors{};
  for (int64_t k = 0; k < padded; k += W) {
    const vf x = load(rotated + k) * inverse;
    const vf shifted = x + splat(ROUNDING);
    const vi numbers = reinterpret_cast<vi>(shifted) - ROUNDING_BITS;
    sums += numbers;
    store_values(numbers, values + k * INT8_BYTES);
    const vf lost = x - (shifted - splat(ROUNDING));
    squares = fma(x, x, squares);
    errors = fma(lost, lost, errors);
  }
  int32_t sum = 0;
  for (int i = 0; i < W; i++) sum += sums[i];
  const float scale = largest / 127.0f;
  // The rotation makes rows longer by the root of the depths that it spans.
  const float length = scale * (ROUNDED_UP / 8);
  static_assert(CBGEN_ROTATION == 8 * 8, "");
  return {scale, sum * 128, length * __builtin_sqrtf(sum_of(squares)),
          length * __builtin_sqrtf(sum_of(errors))};
}

void quantize_rows(const CbgenLinear& linear, int64_t first_row, int64_t last_row, char* rows,
                   float* scratch) {
  for (int64_t row = first_row; row < last_row; row++) {
    char* place = rows + row * int8_row_bytes(linear.depth);
    *reinterpret_cast<CbgenInt8Row*>(place) =
        quantize_row(linear.input + row * linear.input_stride, linear.depth, scratch,
                     place + CBGEN_INT8_HEADER);
  }
}

// Vectors of columns side by side, each somewhere in a panel.
struct Int8Columns {
  const char* weights[2 * ACROSS];
  const float* scales[2 * ACROSS];
  int64_t column[2 * ACROSS];
};

// In this order, unfused: what other instruction sets do.
inline vf scaled(vi sums, float row_scale, const float* scales) {
  return __builtin_convertvector(sums, vf) * splat(row_scale) * load(scales);
}

inline void write_all(const CbgenLinear& linear, vf result, int64_t row, int64_t column) {
  if (linear.bias != nullptr) result = result + load(linear.bias + column);
  store(linear.output + row * linear.output_stride + column, result);
}

// Of a vector that is not whole, or not there at all, what columns exist.
inline void write_some(const CbgenLinear& linear, vf result, int64_t row, int64_t column) {
  float* output = linear.output + row * linear.output_stride + column;
  for (int64_t n = 0; n < linear.columns - column && n < W; n++) {
    output[n] = linear.bias != nullptr ? result[n] + linear.bias[column + n] : result[n];
  }
}

template <int ROWS, int NUM>
inline void int8_block(const CbgenLinear& linear, const char* rows, int64_t first_row,
                       const Int8Columns& columns) {
  const int64_t row_bytes = int8_row_bytes(linear.depth);
  const char* row = rows + first_row * row_bytes;
  vi sums[ROWS][NUM];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
    const int32_t offset = reinterpret_cast<const CbgenInt8Row*>(row + r * row_bytes)->offset;
#pragma GCC unroll 4
    for (int n = 0; n < NUM; n++) sums[r][n] = vi{} - offset;
  }
  RowAddresses<char, ROWS> values(row + CBGEN_INT8_HEADER, row_bytes);
  const int64_t steps = padded_depth(linear.depth) / 4;
  for (int64_t k = 0; k < steps; k++) {
    const auto weights = [&](int n) {
      const char* place = columns.weights[n] + k * (4 * CBGEN_PANEL);
      __builtin_prefetch(place + 4096);
      return WeightsOf4(place);
    };
    const auto add = [&](const auto&... w) {
    #pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
        const RowOf4 x(values.row(r));
        int n = 0;
        ((sums[r][n] = add_products(sums[r][n], w, x), n++), ...);
      }
    };
    if constexpr (NUM == 4) {
      add(weights(0), weights(1), weights(2), weights(3));
    } else {
      add(weights(0), weights(1));
    }
    values.advance(4 * INT8_BYTES);
  }
  const auto scale_of = [&](int r) {
    return reinterpret_cast<const CbgenInt8Row*>(row + r * row_bytes)->scale;
  };
  if (columns.column[NUM - 1] + W <= linear.columns) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const float scale = scale_of(r);
#pragma GCC unroll 4
      for (int n = 0; n < NUM; n++) {
        write_all(linear, scaled(sums[r][n], scale, columns.scales[n]), first_row + r,
                  columns.column[n]);
      }
    }
    return;
  }
  // Only the last panel comes here, so it may leave the registers.
  vi stored[ROWS][NUM];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int n = 0; n < NUM; n++) stored[r][n] = sums[r][n];
  }
  for (int r = 0; r < ROWS; r++) {
    for (int n = 0; n < NUM; n++) {
      write_some(linear, scaled(stored[r][n], scale_of(r), columns.scales[n]), first_row + r,
                 columns.column[n]);
    }
  }
}

template <int NUM, int ROWS>
inline void int8_block_of(int64_t count, const CbgenLinear& linear, const char* rows,
                          int64_t first_row, const Int8Columns& columns) {
  if (count == ROWS) {
    int8_block<ROWS, NUM>(linear, rows, first_row, columns);
  } else if constexpr (ROWS > 1) {
    int8_block_of<NUM, ROWS - 1>(count, linear, rows, first_row, columns);
  }
}

// Rows are cut into blocks of nearly the same number: 13 are 7 and 6, not 12 and 1.
template <int NUM>
void all_int8_rows(const CbgenLinear& linear, const char* rows, int64_t first_row,
                   int64_t last_row, const Int8Columns& columns) {
  constexpr int most = NUM == ACROSS ? INT8_ROWS : FEW_INT8_ROWS;
  const int64_t count = last_row - first_row, blocks = (count + most - 1) / most;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t begin = count * b / blocks, end = count * (b + 1) / blocks;
    int8_block_of<NUM, most>(end - begin, linear, rows, first_row + begin, columns);
  }
}

void int8_linear(const CbgenLinear& linear, const char* rows, int64_t first_row, int64_t last_row,
                 int64_t first_panel, int64_t last_panel) {
  const int64_t values_bytes = padded_depth(linear.depth) * CBGEN_PANEL;
  const int64_t panel_bytes = values_bytes + CBGEN_PANEL * 4;
  const int64_t end = last_panel * VECTORS;
  // With few rows more columns, because a sum waits several cycles for its next term.
  const int64_t together = last_row - first_row <= FEW_INT8_ROWS ? 2 * ACROSS : ACROSS;
  for (int64_t vector = first_panel * VECTORS; vector < end;) {
    const int64_t count = vector + together <= end ? together : ACROSS;
    Int8Columns columns;
    for (int64_t i = 0; i < count; i++, vector++) {
      const int64_t panel = vector / VECTORS, place = vector % VECTORS * W;
      const char* weights = static_cast<const char*>(linear.weights) + panel * panel_bytes;
      columns.weights[i] = weights + place * 4;
      columns.scales[i] = reinterpret_cast<const float*>(weights + values_bytes) + place;
      columns.column[i] = panel * CBGEN_PANEL + place;
    }
    if (count == ACROSS) {
      all_int8_rows<ACROSS>(linear, rows, first_row, last_row, columns);
    } else {
      all_int8_rows<2 * ACROSS>(linear, rows, first_row, last_row, columns);
    }
  }
}

int64_t int8_scratch(int64_t depth) { return padded_depth(depth); }

constexpr CbgenInt8Kernels int8_kernels = {int8_row_bytes, int8_scratch, quantize_rows, int8_linear};

}  // namespace
