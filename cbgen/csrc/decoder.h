// The small operations of a decoder layer, row by row: norms, rotary embedding, activation.
//
// What is computed for a row depends on that row alone.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

// 1 / sqrt(mean of squares + epsilon), from four chains of vectors and one of what is left.
inline float inverse_root_mean_square(const float* x, int64_t size, float epsilon) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W) {
    for (int v = 0; v < 4; v++) {
      const vf value = load(x + i + v * W);
      sums[v] = fma(value, value, sums[v]);
    }
  }
  float rest = 0;
  for (; i < size; i++) rest += x[i] * x[i];
  const float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + epsilon);
}

// Root mean square norm (Zhang and Sennrich 2019); output may be the input.
inline void norm_row(const float* x, const float* weight, int64_t size, float epsilon,
                     float* output) {
  const float factor = inverse_root_mean_square(x, size, epsilon);
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    store(output + i, load(weight + i) * (load(x + i) * splat(factor)));
  }
  for (; i < size; i++) output[i] = weight[i] * (x[i] * factor);
}

inline void add_row(float* x, const float* more, int64_t size) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(x + i, load(x + i) + load(more + i));
  for (; i < size; i++) x[i] += more[i];
}

// Adds what the last block computed to the hidden states, then norms them, if there is a weight.
void norm_rows(const CbgenNorm& norm, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row++) {
    float* hidden = norm.hidden + row * norm.size;
    if (norm.addend != nullptr) add_row(hidden, norm.addend + row * norm.addend_stride, norm.size);
    if (norm.weight == nullptr) continue;
    norm_row(hidden, norm.weight, norm.size, norm.epsilon, norm.output + row * norm.output_stride);
  }
}

// Rotates a head: the first half of the rotary dimensions against the second (Su et al. 2021, in the
// order of dimensions of GPT-NeoX). Behind them it stays as it is.
inline void rotate(const float* cos, const float* sin, int64_t rotary_dim, float* head) {
  const int64_t half = rotary_dim / 2;
  int64_t d = 0;
  for (; d + W <= half; d += W) {
    const vf low = load(head + d), high = load(head + half + d);
    store(head + d, low * load(cos + d) - high * load(sin + d));
    store(head + half + d, high * load(cos + half + d) + low * load(sin + half + d));
  }
  for (; d < half; d++) {
    const float low = head[d], high = head[half + d];
    head[d] = low * cos[d] - high * sin[d];
    head[half + d] = high * cos[half + d] + low * sin[half + d];
  }
}

// Norms and rotates the queries and keys of some tokens, and writes keys and values to their pages.
void place_heads(const CbgenHeads& heads, int64_t first_token, int64_t last_token) {
  const CbgenCache& cache = heads.cache;
  const int64_t dim = heads.head_dim;
  for (int64_t token = first_token; token < last_token; token++) {
    const float* cos = heads.cos + token * heads.rotary_dim;
    const float* sin = heads.sin + token * heads.rotary_dim;
    const auto prepare = [&](float* head, const float* weight) {
      if (weight != nullptr) norm_row(head, weight, dim, heads.epsilon, head);
      if (heads.rotary_dim) rotate(cos, sin, heads.rotary_dim, head);
    };
    float* row = heads.rows + token * heads.stride;
    for (int64_t h = 0; h < heads.heads; h++) {
      prepare(row + heads.query_offset + h * dim, heads.query_norm);
    }
    const int64_t block = heads.slots[token] / cache.page_size;
    const int64_t place = heads.slots[token] % cache.page_size;
    float* keys = cache.keys + block * cache.key_block_stride + place * cache.key_token_stride;
    float* values =
        cache.values + block * cache.value_block_stride + place * cache.value_token_stride;
    for (int64_t h = 0; h < heads.kv_heads; h++) {
      float* key = row + heads.key_offset + h * dim;
      prepare(key, heads.key_norm);
      const float* value = row + heads.value_offset + h * dim;
      float* key_place = keys + h * cache.key_head_stride;
      float* value_place = values + h * cache.value_head_stride;
      for (int64_t d = 0; d < dim; d++) key_place[d] = key[d];
      for (int64_t d = 0; d < dim; d++) value_place[d] = value[d];
    }
  }
}

// x / (1 + exp(-x)), with the exponential of a number that is not positive.
inline vf silu(vf x) {
  const vf e = exp2((x < 0.0f ? x : -x) * splat(1.44269504f));
  return x * (x < 0.0f ? e : splat(1.0f)) / (splat(1.0f) + e);
}

// output = silu(gate) * up.
void activate_rows(const CbgenGates& g) {
  for (int64_t row = 0; row < g.rows; row++) {
    const float* gates = g.gates + row * g.stride;
    const float* ups = g.ups + row * g.stride;
    float* output = g.output + row * g.output_stride;
    int64_t i = 0;
    for (; i + W <= g.columns; i += W) store(output + i, silu(load(gates + i)) * load(ups + i));
    for (; i < g.columns; i++) output[i] = silu(splat(gates[i]))[0] * ups[i];
  }
}

}  // namespace
