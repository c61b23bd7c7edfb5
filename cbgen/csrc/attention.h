// Attention of packed queries to keys and values that stay in their pages.
//
// Rows (the queries of some tokens under the heads that share a key head) meet tiles of 64 keys,
// one key head after the other, while the next tile is on its way from memory. The keys of a tile
// are transposed once, so that a vector holds one dimension of neighbouring keys; scores and the
// weighted sum of values are then products of register blocks. The softmax is online (Milakov and
// Gimelshein 2018), in base 2. A row's maximum moves only where a tile exceeds it by more than some
// powers of two: numbers above 1 harm nobody, and moving it costs as much as all else of a softmax.
//
// What is computed for a row never depends on the rows beside it: scores are chains of fused
// multiply-adds over the dimensions, values are added in the order of keys, tiles and segments lie
// at fixed positions, and the results of segments are merged in order.
#pragma once

#include "attention_pages.h"
#include "rows.h"

namespace {

// Scales the queries, and notes which keys each row sees: that takes divisions.
void prepare_rows(const Work& w) {
  const float scale = w.a.softcap > 0 ? w.a.scaling / w.a.softcap : w.a.scaling * LOG2_E;
  for (int64_t row = 0; row < w.rows; row++) {
    const float* query = w.a.query + w.query_token(row) * w.a.query_token_stride +
                         w.head(row) * w.a.query_head_stride;
    float* scaled = w.s.query + row * w.key_dim;
    for (int64_t d = 0; d < w.a.key_dim; d++) scaled[d] = query[d] * scale;
    for (int64_t d = w.a.key_dim; d < w.key_dim; d++) scaled[d] = 0;
    w.s.first_keys[row] = w.first_key(row);
    w.s.end_keys[row] = w.end_key(row);
  }
}

// Vectors side by side in a register block of so many rows: 32 registers, or 16.
constexpr int vectors_of(int rows) { return W == 16 || rows <= 2 ? 4 : 2; }

// Compiled by itself: among others its inner loop would not get the registers it needs.
#define CBGEN_ALONE __attribute__((noinline))

// Fetches nothing ahead.
struct Nothing {
  void step() {}
};

// Scores of V vectors of keys.
template <int ROWS, int V, class Fetch>
CBGEN_ALONE void score_vectors(const float* query, int64_t key_dim, const float* transposed,
                               float* scores, Fetch& ahead) {
  vf sums[ROWS][V] = {};
  RowAddresses<float, ROWS> rows(query, key_dim);
  for (int64_t d = 0; d < key_dim; d++) {
    ahead.step();
    vf keys[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) keys[v] = load(transposed + d * TILE + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const vf x = splat(*rows.row(r));
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = fma(x, keys[v], sums[r][v]);
    }
    rows.advance(1);
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(scores + r * TILE + v * W, sums[r][v]);
  }
}

// Scores of the keys of a tile before `end`, and of some behind it.
template <int ROWS, class Fetch>
inline void score(const float* query, int64_t key_dim, const float* transposed, float* scores,
                  int64_t end, Fetch& ahead) {
  constexpr int V = vectors_of(ROWS);
  for (int64_t key = 0; key < end; key += V * W) {
    const int64_t vectors = (end - key + W - 1) / W;
    const float* keys = transposed + key;
    float* place = scores + key;
    if (vectors >= V) {
      score_vectors<ROWS, V>(query, key_dim, keys, place, ahead);
    } else if (vectors == 3) {
      score_vectors<ROWS, 3>(query, key_dim, keys, place, ahead);
    } else if (vectors == 2) {
      score_vectors<ROWS, 2>(query, key_dim, keys, place, ahead);
    } else {
      score_vectors<ROWS, 1>(query, key_dim, keys, place, ahead);
    }
  }
}

template <int ROWS, int V, class Fetch>
CBGEN_ALONE void add_values(const float* probabilities, const float* const* values, int64_t begin,
                            int64_t end, int64_t dim, float* output, int64_t value_dim,
                            Fetch& ahead) {
  vf sums[ROWS][V];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[r][v] = load(output + r * value_dim + dim + v * W);
  }
  for (int64_t key = begin; key < end; key++) {
    vf value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) value[v] = load(values[key] + dim + v * W);
    ahead.step();
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const vf x = splat(probabilities[r * TILE + key]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = fma(x, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(output + r * value_dim + dim + v * W, sums[r][v]);
  }
}

template <int ROWS, class Fetch>
inline void all_values(const float* probabilities, const float* const* values, int64_t begin,
                       int64_t end, float* output, int64_t value_dim, Fetch& ahead) {
  constexpr int V = vectors_of(ROWS);
  Nothing nothing;
  int64_t dim = 0;
  for (; dim + V * W <= value_dim; dim += V * W) {
    if (dim == 0) {
      add_values<ROWS, V>(probabilities, values, begin, end, dim, output, value_dim, ahead);
    } else {
      add_values<ROWS, V>(probabilities, values, begin, end, dim, output, value_dim, nothing);
    }
  }
  for (; dim < value_dim; dim += W) {
    add_values<ROWS, 1>(probabilities, values, begin, end, dim, output, value_dim, nothing);
  }
}

// tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.
inline vf softcapped(vf x, float softcap) {
  const vf e = exp2((x < 0.0f ? x : -x) * splat(2 * LOG2_E));
  const vf t = (splat(1.0f) - e) / (splat(1.0f) + e);
  return (x < 0.0f ? -t : t) * splat(softcap * LOG2_E);
}

// Turns a row's scores into probabilities and moves its maximum, denominator and output along. Those
// of places from `used` on stay what they are.
inline void softmax_row(const Work& w, int64_t row, int64_t position, int64_t used) {
  float* scores = w.s.scores + row * TILE;
  constexpr int V = TILE / W;
  vf x[V];
  for (int v = 0; v < V; v++) x[v] = load(scores + v * W);
  if (w.a.softcap > 0) {
    for (int v = 0; v < V; v++) x[v] = softcapped(x[v], w.a.softcap);
  }
  const int64_t first = w.s.first_keys[row] - position, end = w.s.end_keys[row] - position;
  if (first > 0 || end < TILE) {
    const int32_t begin_key = static_cast<int32_t>(larger(first, 0));
    const int32_t end_key = static_cast<int32_t>(smaller(end, TILE));
    vi key;
    for (int i = 0; i < W; i++) key[i] = i;
    for (int v = 0; v < V; v++, key += W) {
      x[v] = (key >= begin_key) & (key < end_key) ? x[v] : splat(NO_SCORE);
    }
  }
  vf most = x[0];
  for (int v = 1; v < V; v++) most = maximum(most, x[v]);
  const float old_maximum = w.s.maximum[row];
  const float largest = largest_of(most);
  float* sums = w.s.denominator + row * LANES;
  if (largest > old_maximum + SLACK) {
    if (old_maximum > LOWEST) {
      const vf factor = exp2(splat(old_maximum - largest));
      float* output = w.s.output + row * w.value_dim;
      for (int64_t d = 0; d < w.value_dim; d += W) store(output + d, load(output + d) * factor);
      for (int i = 0; i < LANES; i += W) store(sums + i, load(sums + i) * factor);
    }
    w.s.maximum[row] = largest;
  }
  const float maximum = w.s.maximum[row];
  vf total[LANES / W];
  for (int i = 0; i < LANES / W; i++) total[i] = load(sums + i * W);
  const auto add = [&](int v) {
    const vf p = exp2(x[v] - splat(maximum));
    total[v % (LANES / W)] = total[v % (LANES / W)] + p;
    store(scores + v * W, p);
  };
  if (used > TILE - W) {  // apart, so that the exponentials overlap
    for (int v = 0; v < V; v++) add(v);
  } else {
    for (int v = 0; v < V && v * W < used; v++) add(v);
  }
  for (int i = 0; i < LANES / W; i++) store(sums + i * W, total[i]);
}

// Rows that are in registers together.
struct Group {
  int64_t row, count;
  int64_t begin, end;  // places of the tile that some of the rows see; begin >= end: none
};

template <int ROWS, class Fetch>
void score_group(const Work& w, const Group& group, Fetch& ahead) {
  score<ROWS>(w.s.query + group.row * w.key_dim, w.key_dim, w.s.transposed,
              w.s.scores + group.row * TILE, group.end, ahead);
}

template <int ROWS, class Fetch>
void add_group(const Work& w, const Group& group, const float* const* values, Fetch& ahead) {
  all_values<ROWS>(w.s.scores + group.row * TILE, values, group.begin, group.end,
                   w.s.output + group.row * w.value_dim, w.value_dim, ahead);
}

// Calls one of the functions for the number of rows of a group.
#define CBGEN_BY_ROWS(function, ...)                  \
  switch (group.count) {                              \
    case 6: function<6>(__VA_ARGS__); break;          \
    case 5: function<5>(__VA_ARGS__); break;          \
    case 4: function<4>(__VA_ARGS__); break;          \
    case 3: function<3>(__VA_ARGS__); break;          \
    case 2: function<2>(__VA_ARGS__); break;          \
    default: function<1>(__VA_ARGS__); break;         \
  }

// The rows of one key head, in groups of nearly the same size: scores of all, then values, so that
// one of keys and values at a time wants the first-level cache.
void head_and_tile(const Work& w, int64_t head, int64_t position, const float* const* values,
                   Ahead& next) {
  const int64_t groups = (w.head_rows + MAX_GROUP - 1) / MAX_GROUP;
  const auto group_of = [&](int64_t g) {
    const int64_t row = w.head_rows * g / groups, count = w.head_rows * (g + 1) / groups - row;
    const int64_t first = head * w.head_rows + row;
    return Group{first, count, larger(w.s.first_keys[first] - position, 0),
                 smaller(w.s.end_keys[first + count - 1] - position, TILE)};
  };
  const auto for_groups = [&](const auto& work) {
    Nothing nothing;
    bool is_first = true;  // of those that have something to do: it fetches ahead
    for (int64_t g = 0; g < groups; g++) {
      const Group group = group_of(g);
      if (group.begin >= group.end) continue;
      if (is_first) {
        work(group, next);
      } else {
        work(group, nothing);
      }
      is_first = false;
    }
  };
  for_groups([&](const Group& group, auto& ahead) {
    CBGEN_BY_ROWS(score_group, w, group, ahead)
    for (int64_t row = 0; row < group.count; row++) {
      softmax_row(w, group.row + row, position, group.end);
    }
  });
  for_groups([&](const Group& group, auto& ahead) {
    CBGEN_BY_ROWS(add_group, w, group, values, ahead)
  });
}

void attend_tile(const Work& w, const Tile& tile, Ahead& ahead) {
  const float* keys[TILE];
  const float* values[TILE];
  for (int64_t head = 0; head < w.task.num_heads; head++) {
    for (int64_t i = 0; i < tile.begin; i++) keys[i] = w.s.zeros;
    for (int64_t i = tile.end; i < TILE; i++) keys[i] = w.s.zeros;
    read_all(w, tile.keys, tile.key_pages, head, tile.begin, tile.end, w.a.key_dim, w.s.wide_keys,
             keys);
    read_all(w, tile.values, tile.value_pages, head, tile.begin, tile.end, w.a.value_dim,
             w.s.wide_values, values);
    transpose_keys(keys, w.key_dim, tile.begin, tile.end, w.s.transposed);
    head_and_tile(w, head, tile.position, values, ahead);
  }
}

void start_segment(const Work& w) {
  for (int64_t i = 0; i < w.rows; i++) w.s.maximum[i] = LOWEST;
  for (int64_t i = 0; i < w.rows * LANES; i++) w.s.denominator[i] = 0;
  for (int64_t i = 0; i < w.rows * w.value_dim; i++) w.s.output[i] = 0;
}

// Sum of 16 partial sums, neighbours of distance 8 first, then 4, 2 and 1.
inline float sum_of_lanes(const float* lanes) {
  const v4 sums = (load4(lanes) + load4(lanes + 8)) + (load4(lanes + 4) + load4(lanes + 12));
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// A row's state over one or more segments: [value_dim] output, then maximum and denominator.
inline void save_row(const Work& w, int64_t row, float* state) {
  const float* output = w.s.output + row * w.value_dim;
  for (int64_t d = 0; d < w.value_dim; d += W) store(state + d, load(output + d));
  state[w.value_dim] = w.s.maximum[row];
  state[w.value_dim + 1] = sum_of_lanes(w.s.denominator + row * LANES);
}

inline void merge_row(float* state, const float* next, int64_t value_dim) {
  const float old_maximum = state[value_dim], next_maximum = next[value_dim];
  const float most = next_maximum > old_maximum ? next_maximum : old_maximum;
  const float keep = exp2_of(old_maximum - most), add = exp2_of(next_maximum - most);
  for (int64_t d = 0; d < value_dim; d += W) {
    store(state + d, fma(load(next + d), splat(add), load(state + d) * splat(keep)));
  }
  state[value_dim] = most;
  state[value_dim + 1] = state[value_dim + 1] * keep + next[value_dim + 1] * add;
}

inline void write_row(const Work& w, int64_t row, const float* state) {
  float denominator = state[w.value_dim + 1], factor = 1;
  if (w.a.sinks != nullptr) {
    const float sink = w.a.sinks[w.head(row)] * LOG2_E, maximum = state[w.value_dim];
    const float most = sink > maximum ? sink : maximum;
    factor = exp2_of(maximum - most);
    denominator = denominator * factor + exp2_of(sink - most);
  }
  const float scale = factor / denominator;
  float* output = w.a.output +
                  ((w.task.first_token + w.token(row)) * w.a.heads + w.head(row)) * w.a.value_dim;
  for (int64_t d = 0; d < w.a.value_dim; d++) output[d] = state[d] * scale;
}

// The rows' results over the segment of that number among the task's.
void end_segment(const Work& w, int64_t number) {
  const int64_t state_size = w.value_dim + 2;
  for (int64_t row = 0; row < w.rows; row++) {
    if (w.is_partial()) {
      save_row(w, row, w.partial(row, number));
    } else if (number == 0) {
      save_row(w, row, w.s.merged + row * state_size);
    } else {
      save_row(w, row, w.s.next);
      merge_row(w.s.merged + row * state_size, w.s.next, w.value_dim);
    }
  }
}

void attend(const CbgenAttention& a, const CbgenAttentionTask& task, const CbgenAttentionTask* next,
            float* scratch) {
  const Work w(a, task, scratch);
  prepare_rows(w);
  for (int64_t d = 0; d < w.key_dim; d++) w.s.zeros[d] = 0;
  const int64_t last = task_end(a, task);
  Ahead ahead(a, task, next);
  Tile tile;
  start_segment(w);
  for (int64_t position = task_begin(a, task);;) {
    tile.find(a, task, position, last);
    attend_tile(w, tile, ahead);
    ahead.allow_tile();
    position = tile.position + TILE;
    if (position % CBGEN_SEGMENT == 0 || position >= last) {
      end_segment(w, (position - 1) / CBGEN_SEGMENT - task.first_segment);
      if (position >= last) break;
      start_segment(w);
    }
  }
  if (w.is_partial()) return;
  for (int64_t row = 0; row < w.rows; row++) {
    write_row(w, row, w.s.merged + row * (w.value_dim + 2));
  }
}

void merge(const CbgenAttention& attention, const CbgenAttentionTask& task, float* scratch) {
  const Work w(attention, task, scratch);
  for (int64_t row = 0; row < w.rows; row++) {
    float* state = w.partial(row, 0);
    for (int64_t i = 1; i < task.num_segments; i++) {
      merge_row(state, w.partial(row, i), w.value_dim);
    }
    write_row(w, row, state);
  }
}

}  // namespace
