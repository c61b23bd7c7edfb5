// Products of float32 rows with packed weights.
//
// Every output is one chain of fused multiply-adds over the depth, in order, starting from 0, with
// the bias added last: it does not depend on the rows beside it, on the blocking or on the threads.
// Blocks of rows x columns are held in registers. A unit is the narrowest block of columns, a pair
// of vectors: W columns of a panel and the W columns 16 further on.
#pragma once

#include "kernels.h"
#include "rows.h"
#include "vector.h"

namespace {

constexpr int UNITS = CBGEN_PANEL / (2 * W);  // of a panel
// Rows of a block and units side by side: as many accumulators as registers hold, and with few
// rows more units, because an accumulator waits several cycles for its next term.
constexpr int MAX_ROWS = W == 16 ? 12 : 6;
constexpr int FEW_ROWS = MAX_ROWS / 2;
// Blocks of rows from which on their outputs are fetched ahead.
constexpr int64_t MANY_BLOCKS = 6;
constexpr int64_t LINE = 64;           // bytes of a line of the caches
constexpr int64_t DEPTHS_AHEAD = 32;  // as far as a block fetches its own weights ahead
// Deeper products are done in parts, so that a part of a panel and of some rows stays in the
// second-level cache.
constexpr int64_t DEPTH_BLOCK = 1024;

// How the weights of a panel lie: bytes of a value, bytes from one depth to the next, and whether they
// come from memory.
struct Bfloat16 {
  static constexpr bool is_far = true;
  static constexpr int64_t size = 2, stride = CBGEN_PANEL * size;
  static void widen(const char* p, int64_t unit, vf& low, vf& high) {
    widen_pairs(reinterpret_cast<const uint16_t*>(p) + unit * 2 * W, low, high);
  }
};

struct Float16 {
  static constexpr bool is_far = true;
  static constexpr int64_t size = 2, stride = CBGEN_PANEL * size;
  static void widen(const char* p, int64_t unit, vf& low, vf& high) {
    low = load_float16(reinterpret_cast<const uint16_t*>(p) + unit * W);
    high = load_float16(reinterpret_cast<const uint16_t*>(p) + unit * W + 16);
  }
};

struct Float32 {
  static constexpr bool is_far = true;
  static constexpr int64_t size = 4, stride = CBGEN_PANEL * size;
  static void widen(const char* p, int64_t unit, vf& low, vf& high) {
    low = load(reinterpret_cast<const float*>(p) + unit * W);
    high = load(reinterpret_cast<const float*>(p) + unit * W + 16);
  }
};

// One unit that has been widened.
struct Widened {
  static constexpr bool is_far = false;
  static constexpr int64_t size = 4, stride = 2 * W * size;
  static void widen(const char* p, int64_t, vf& low, vf& high) {
    low = load(reinterpret_cast<const float*>(p));
    high = load(reinterpret_cast<const float*>(p) + W);
  }
};

// Where a block of columns is: one panel, and the units of it that are computed together.
struct Columns {
  const char* weights[2];  // of the first depth that is computed; one panel for each unit
  int64_t unit[2];
  float* output[2];  // of the unit's first column, first row
};

// Memory that blocks fetch whose own weights are near: so many bytes with each depth.
struct NextWeights {
  const char* place;
  int64_t step;
};

// The heart: rows x units blocks of accumulators over [first, last) of the depth. The sums go to
// (and, behind the first part of the depth, come from) the output. A block that keeps writes the
// widened weights of its one unit to `kept`, for the blocks of more rows; those fetch `ahead`.
template <class Format, int ROWS, int NUM_UNITS, bool KEEPS = false>
inline void block(const float* input, int64_t input_stride, const Columns& columns,
                  int64_t output_stride, int64_t first, int64_t last, float* kept = nullptr,
                  NextWeights ahead = {}) {
  vf low[ROWS][NUM_UNITS], high[ROWS][NUM_UNITS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
    for (int u = 0; u < NUM_UNITS; u++) {
      const float* sums = columns.output[u] + r * output_stride;
      low[r][u] = first ? load(sums) : vf{};
      high[r][u] = first ? load(sums + 16) : vf{};
    }
  }
  const char* weights[NUM_UNITS];
  for (int u = 0; u < NUM_UNITS; u++) {
    weights[u] = columns.weights[u];
  }
  RowAddresses<float, ROWS> rows(input + first, input_stride);
  for (int64_t k = first; k < last; k++) {
    vf w_low[NUM_UNITS], w_high[NUM_UNITS];
#pragma GCC unroll 2
    for (int u = 0; u < NUM_UNITS; u++) {
      Format::widen(weights[u], columns.unit[u], w_low[u], w_high[u]);
      if constexpr (Format::is_far) {
#pragma GCC unroll 2
        for (int64_t line = 0; line < Format::stride; line += LINE) {
          __builtin_prefetch(weights[u] + DEPTHS_AHEAD * Format::stride + line);
        }
      }
      weights[u] += Format::stride;
    }
    if constexpr (!Format::is_far) {
      __builtin_prefetch(ahead.place);
      ahead.place += ahead.step;
    }
    if constexpr (KEEPS) {
      store(kept, w_low[0]);
      store(kept + W, w_high[0]);
      kept += 2 * W;
    }
  #pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
      const vf x = splat(*rows.row(r));
  #pragma GCC unroll 2
    for (int u = 0; u < NUM_UNITS; u++) {
        low[r][u] = fma(x, w_low[u], low[r][u]);
        high[r][u] = fma(x, w_high[u], high[r][u]);
      }
    }
    rows.advance(1);
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
    for (int u = 0; u < NUM_UNITS; u++) {
      float* sums = columns.output[u] + r * output_stride;
      store(sums, low[r][u]);
      store(sums + 16, high[r][u]);
    }
  }
}

template <class Format, int NUM_UNITS, int ROWS, bool KEEPS = false>
inline void block_of(int rows, const float* input, int64_t input_stride, const Columns& columns,
                     int64_t output_stride, int64_t first, int64_t last, float* kept = nullptr,
                     NextWeights ahead = {}) {
  if (rows == ROWS) {
    block<Format, ROWS, NUM_UNITS, KEEPS>(input, input_stride, columns, output_stride, first, last,
                                          kept, ahead);
  } else if constexpr (ROWS > 1) {
    block_of<Format, NUM_UNITS, ROWS - 1, KEEPS>(rows, input, input_stride, columns, output_stride,
                                                 first, last, kept, ahead);
  }
}

// Asks for the lines that the first unit's sums will be written to: those of many rows are in no
// cache any more, and a block would wait for them at its end.
inline void fetch_output(const Columns& columns, int64_t output_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    __builtin_prefetch(columns.output[0] + r * output_stride, 1);
    __builtin_prefetch(columns.output[0] + r * output_stride + 16, 1);
  }
}

// Rows are cut into blocks of nearly the same number: 13 are 7 and 6, not 12 and 1. The first block
// brings the weights near, and keeps them as it widens them; the others read those, and share out what
// they fetch of the weights that come next, if that is not null.
template <class Format, int NUM_UNITS>
void all_rows(const CbgenLinear& linear, const Columns& columns, int64_t first_row,
              int64_t last_row, int64_t first, int64_t last, const char* next) {
  constexpr int most = NUM_UNITS == 2 ? FEW_ROWS : MAX_ROWS;
  constexpr bool keeps = NUM_UNITS == 1 && Format::size < Widened::size;
  constexpr bool is_wide = NUM_UNITS == 1 && Format::size == Widened::size &&
                           Format::stride == Widened::stride;
  const int64_t rows = last_row - first_row, stride = linear.input_stride;
  const int64_t blocks = (rows + most - 1) / most;
  alignas(64) float kept[keeps ? DEPTH_BLOCK * 2 * W : 1];
  int64_t begin = 0;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t end = rows * (b + 1) / blocks;
    const int count = static_cast<int>(end - begin);
    const float* input = linear.input + (first_row + begin) * stride;
    Columns here = columns;
    for (int u = 0; u < NUM_UNITS; u++) here.output[u] += begin * linear.output_stride;
    if (blocks >= MANY_BLOCKS) fetch_output(here, linear.output_stride, count);
    begin = end;
    if constexpr (keeps || is_wide) {
      if (b > 0) {
        if (keeps) here.weights[0] = reinterpret_cast<const char*>(kept);
        NextWeights ahead{here.weights[0], 0};
        if (next != nullptr) {
          const int64_t step = Format::stride / (blocks - 1);
          ahead.place = next + (last - first) * Format::stride * (b - 1) / (blocks - 1);
          ahead.step = step < LINE ? step : LINE;
        }
        block_of<Widened, 1, most>(count, input, stride, here, linear.output_stride, first, last,
                                   nullptr, ahead);
        continue;
      }
    }
    if constexpr (keeps) {
      if (blocks > 1) {
        block_of<Format, 1, most, true>(count, input, stride, here, linear.output_stride, first,
                                        last, kept);
        continue;
      }
    }
    block_of<Format, NUM_UNITS, most>(count, input, stride, here, linear.output_stride, first,
                                      last);
  }
}

inline void add_bias(float* output, const float* bias, int64_t columns) {
  for (int64_t n = 0; n < columns; n++) output[n] += bias[n];
}

// The panels [first_panel, last_panel), all of whose columns exist.
template <class Format>
void whole_panels(const CbgenLinear& linear, int64_t first_row, int64_t last_row,
                  int64_t first_panel, int64_t last_panel) {
  const int64_t panel_bytes = linear.depth * CBGEN_PANEL * Format::size;
  const char* weights = static_cast<const char*>(linear.weights);
  float* output = linear.output + first_row * linear.output_stride;
  const int64_t first_unit = first_panel * UNITS, last_unit = last_panel * UNITS;
  const int64_t together = last_row - first_row <= FEW_ROWS ? 2 : 1;
  for (int64_t unit = first_unit; unit < last_unit; unit += together) {
    Columns columns;
    const char* panels[2];
    const int64_t count = unit + together <= last_unit ? together : 1;
    for (int64_t u = 0; u < count; u++) {
      const int64_t panel = (unit + u) / UNITS, place = (unit + u) % UNITS;
      panels[u] = weights + panel * panel_bytes;
      columns.unit[u] = place;
      columns.output[u] = output + panel * CBGEN_PANEL + place * W;
    }
    for (int64_t first = 0; first < linear.depth; first += DEPTH_BLOCK) {
      const int64_t last = first + DEPTH_BLOCK < linear.depth ? first + DEPTH_BLOCK : linear.depth;
      for (int64_t u = 0; u < count; u++) columns.weights[u] = panels[u] + first * Format::stride;
      const char* next = last < linear.depth ? panels[0] + last * Format::stride
                         : unit + count < last_unit
                             ? weights + (unit + count) / UNITS * panel_bytes
                             : static_cast<const char*>(linear.next);
      if (count == 2) {
        all_rows<Format, 2>(linear, columns, first_row, last_row, first, last, next);
      } else {
        all_rows<Format, 1>(linear, columns, first_row, last_row, first, last, next);
      }
    }
  }
  if (linear.bias == nullptr) return;
  const int64_t begin = first_panel * CBGEN_PANEL, columns = (last_panel - first_panel) * CBGEN_PANEL;
  for (int64_t row = first_row; row < last_row; row++) {
    add_bias(linear.output + row * linear.output_stride + begin, linear.bias + begin, columns);
  }
}

// The last panel, some of whose columns do not exist: computed aside, then copied.
template <class Format>
void cut_panel(const CbgenLinear& linear, int64_t first_row, int64_t last_row, int64_t panel) {
  float sums[MAX_ROWS * CBGEN_PANEL];
  const int64_t begin = panel * CBGEN_PANEL, columns = linear.columns - begin;
  for (int64_t row = first_row; row < last_row; row += MAX_ROWS) {
    const int64_t rows = last_row - row < MAX_ROWS ? last_row - row : MAX_ROWS;
    CbgenLinear aside = linear;
    aside.weights = static_cast<const char*>(linear.weights) + begin * linear.depth * Format::size;
    aside.input = linear.input + row * linear.input_stride;
    aside.columns = CBGEN_PANEL;
    aside.bias = nullptr;
    aside.output = sums;
    aside.output_stride = CBGEN_PANEL;
    whole_panels<Format>(aside, 0, rows, 0, 1);
    for (int64_t r = 0; r < rows; r++) {
      float* output = linear.output + (row + r) * linear.output_stride + begin;
      for (int64_t n = 0; n < columns; n++) output[n] = sums[r * CBGEN_PANEL + n];
      if (linear.bias != nullptr) add_bias(output, linear.bias + begin, columns);
    }
  }
}

template <class Format>
void linear_of(const CbgenLinear& linear, int64_t first_row, int64_t last_row, int64_t first_panel,
               int64_t last_panel) {
  const int64_t whole = linear.columns / CBGEN_PANEL;
  const int64_t last_whole = last_panel < whole ? last_panel : whole;
  if (first_panel < last_whole) {
    whole_panels<Format>(linear, first_row, last_row, first_panel, last_whole);
  }
  if (last_panel > whole) cut_panel<Format>(linear, first_row, last_row, whole);
}

void linear_block(const CbgenLinear& linear, int64_t first_row, int64_t last_row,
                  int64_t first_panel, int64_t last_panel) {
  switch (linear.format) {
    case CBGEN_BFLOAT16:
      return linear_of<Bfloat16>(linear, first_row, last_row, first_panel, last_panel);
    case CBGEN_FLOAT16:
      return linear_of<Float16>(linear, first_row, last_row, first_panel, last_panel);
    default:
      return linear_of<Float32>(linear, first_row, last_row, first_panel, last_panel);
  }
}

}  // namespace
