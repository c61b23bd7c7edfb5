// One task of an attention: its rows, what they see, and the scratch that it works in.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

constexpr int TILE = CBGEN_TILE;
constexpr int LANES = 16;  // partial sums of a denominator: key i goes to sum i mod 16
constexpr int LINES_A_STEP = 4;  // of memory, fetched ahead with each step of an inner loop
constexpr int TILES_AHEAD = 2;   // of the one that is computed, as far as memory is fetched
constexpr int MAX_GROUP = 6;  // rows of a register block
constexpr float LOWEST = -3e38f;  // a maximum before the first key, finite so that differences are
constexpr float SLACK = 8;  // powers of two by which a score may exceed the maximum that stands for it
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t ALL_KEYS = INT64_MAX / 2;
constexpr float NO_SCORE = -__builtin_inff();

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
inline float exp2_of(float x) { return exp2(splat(x))[0]; }

// The scratch of a thread, carved into what one task needs.
struct Scratch {
  int64_t* first_keys;  // [rows] keys [first, end) that a row sees
  int64_t* end_keys;
  float* query;        // [rows][padded key_dim], scaled
  float* transposed;   // [padded key_dim][TILE] keys
  float* scores;       // [rows][TILE]; probabilities after the softmax
  float* output;       // [rows][padded value_dim] of the segment
  float* denominator;  // [rows][LANES] of the segment
  float* maximum;      // [rows] of the segment
  float* merged;       // [rows][padded value_dim + 2] of the segments so far: output, maximum, sum
  float* next;         // [padded value_dim + 2] of one row over the segment
  float* wide_keys;    // [TILE][padded key_dim] float32 copies of other formats and odd sizes
  float* wide_values;  // [TILE][padded value_dim]
  float* zeros;        // [padded key_dim] stands for keys that must not be read
};

inline int64_t most_rows(const CbgenAttention& a) {
  return larger(CBGEN_ATTENTION_ROWS, a.heads / a.kv_heads);
}

int64_t carve(const CbgenAttention& a, float* base, Scratch* scratch) {
  const int64_t rows = most_rows(a), key = padded(a.key_dim), value = padded(a.value_dim);
  float* next = base;
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += padded(count);
    return taken;
  };
  scratch->first_keys = reinterpret_cast<int64_t*>(take(2 * rows));
  scratch->end_keys = reinterpret_cast<int64_t*>(take(2 * rows));
  scratch->query = take(rows * key);
  scratch->transposed = take(key * TILE);
  scratch->scores = take(rows * TILE);
  scratch->output = take(rows * value);
  scratch->denominator = take(rows * LANES);
  scratch->maximum = take(rows);
  scratch->merged = take(rows * (value + 2));
  scratch->next = take(value + 2);
  scratch->wide_keys = take(TILE * key);
  scratch->wide_values = take(TILE * value);
  scratch->zeros = take(key);
  return next - base;
}

int64_t attention_scratch(const CbgenAttention& a) {
  Scratch scratch;
  return carve(a, nullptr, &scratch);
}

// One task with everything that its loops ask for. Rows are ordered by key head, token and head.
struct Work {
  const CbgenAttention& a;
  const CbgenAttentionTask& task;
  Scratch s;
  int64_t group;           // heads that share a key head
  int64_t head_rows;       // rows under one key head
  int64_t rows;            // of all key heads
  int64_t first_position;  // of the first token
  int64_t key_dim, value_dim;  // padded

  Work(const CbgenAttention& attention, const CbgenAttentionTask& t, float* base)
      : a(attention), task(t) {
    carve(a, base, &s);
    group = a.heads / a.kv_heads;
    head_rows = task.num_tokens * group;
    rows = task.num_heads * head_rows;
    first_position = position_of(a, task);
    key_dim = padded(a.key_dim);
    value_dim = padded(a.value_dim);
  }

  static int64_t position_of(const CbgenAttention& a, const CbgenAttentionTask& task) {
    return a.key_lens[task.request] - a.query_starts[task.request + 1] + task.first_token;
  }
  static int64_t first_key_of(const CbgenAttention& a, int64_t position) {
    if (a.window) return larger(0, position - a.window + 1);
    return a.chunk ? position / a.chunk * a.chunk : 0;
  }

  int64_t token(int64_t row) const { return row % head_rows / group; }
  int64_t query_token(int64_t row) const {
    return task.shared != nullptr ? task.shared[token(row)].token : task.first_token + token(row);
  }
  int64_t head(int64_t row) const {
    return (task.first_head + row / head_rows) * group + row % group;
  }
  int64_t end_key(int64_t row) const {
    return task.shared != nullptr ? ALL_KEYS : first_position + token(row) + 1;
  }
  int64_t first_key(int64_t row) const {
    return task.shared != nullptr ? 0 : first_key_of(a, first_position + token(row));
  }
  bool is_partial() const { return task.partial != nullptr || task.shared != nullptr; }
  // Where a row's state over a segment of the task goes.
  float* partial(int64_t row, int64_t number) const {
    const int64_t size = value_dim + 2;
    if (task.shared != nullptr) return task.shared[token(row)].partial + head(row) * size;
    return task.partial + number * task.segment_stride + row * size;
  }
};

}  // namespace
