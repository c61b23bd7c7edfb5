// Keys and values in their pages: where they are, fetching them ahead, widening and transposing them.
#pragma once

#include "attention_work.h"

namespace {

inline float widen_one(const void* from, int64_t index, int32_t format) {
  if (format == CBGEN_FLOAT32) return static_cast<const float*>(from)[index];
  const uint16_t bits = static_cast<const uint16_t*>(from)[index];
  if (format == CBGEN_BFLOAT16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
  }
  uint16_t vector[W] = {bits};
  return load_float16(vector)[0];
}

// float32 copy of one key or value, zeros behind its end.
void widen(const void* from, int64_t dim, int64_t padded_dim, int32_t format, float* to) {
  int64_t d = 0;
  const uint16_t* half = static_cast<const uint16_t*>(from);
  if (format == CBGEN_FLOAT32) {
    for (; d + W <= dim; d += W) store(to + d, load(static_cast<const float*>(from) + d));
  } else if (format == CBGEN_FLOAT16) {
    for (; d + W <= dim; d += W) store(to + d, load_float16(half + d));
  } else {
    for (; d < dim; d++) to[d] = widen_one(from, d, CBGEN_BFLOAT16);
  }
  for (; d < dim; d++) to[d] = widen_one(from, d, format);
  for (; d < padded_dim; d++) to[d] = 0;
}

// Keys (or values) in their pages, under the first head of a task.
struct Pages {
  const char* base;
  int64_t block_stride, token_stride, head_stride;  // bytes
  int64_t bytes;                                    // of one key
};

inline Pages keys_of(const CbgenAttention& a, const CbgenAttentionTask& task) {
  const int64_t size = a.format == CBGEN_FLOAT32 ? 4 : 2, stride = a.key_head_stride * size;
  return {static_cast<const char*>(a.keys) + task.first_head * stride, a.key_block_stride * size,
          a.key_token_stride * size, stride, a.key_dim * size};
}

inline Pages values_of(const CbgenAttention& a, const CbgenAttentionTask& task) {
  const int64_t size = a.format == CBGEN_FLOAT32 ? 4 : 2, stride = a.value_head_stride * size;
  return {static_cast<const char*>(a.values) + task.first_head * stride,
          a.value_block_stride * size, a.value_token_stride * size, stride, a.value_dim * size};
}

// A tile of keys and values: those of its places [begin, end) that some row of the task sees.
struct Tile {
  int64_t position;  // of the first place
  int64_t begin = 0, end = 0;
  Pages key_pages, value_pages;
  const char* keys[TILE];  // under the first head of the task
  const char* values[TILE];

  // The tile of a segment that holds `first_key`, cut to the keys before `end_key`.
  void find(const CbgenAttention& a, const CbgenAttentionTask& task, int64_t first_key,
            int64_t end_key) {
    key_pages = keys_of(a, task);
    value_pages = values_of(a, task);
    position = first_key / TILE * TILE;
    begin = first_key - position;
    end = smaller(end_key - position, TILE);
    const int64_t* table = a.block_tables + task.request * a.block_table_stride;
    int64_t place = begin;
    while (place < end) {
      const int64_t block = table[(position + place) / a.page_size];
      const int64_t offset = (position + place) % a.page_size;
      const int64_t stop = smaller(end, place + a.page_size - offset);
      const char* key =
          key_pages.base + block * key_pages.block_stride + offset * key_pages.token_stride;
      const char* value =
          value_pages.base + block * value_pages.block_stride + offset * value_pages.token_stride;
      for (; place < stop; place++) {
        keys[place] = key;
        values[place] = value;
        key += key_pages.token_stride;
        value += value_pages.token_stride;
      }
    }
  }
};

// The first key that a task reads.
inline int64_t task_begin(const CbgenAttention& a, const CbgenAttentionTask& task) {
  return larger(task.first_segment * CBGEN_SEGMENT,
                Work::first_key_of(a, Work::position_of(a, task)));
}

inline int64_t task_end(const CbgenAttention& a, const CbgenAttentionTask& task) {
  return smaller((task.first_segment + task.num_segments) * CBGEN_SEGMENT,
                 Work::position_of(a, task) + task.num_tokens);
}

// Fetches the tiles behind the one that is computed, to the end of the task and into the next one:
// token by token and line by line, in the order of addresses, which the processor's own prefetching
// follows and then runs ahead. Some tiles hold few keys, so it may run more than one tile ahead.
class Ahead {
 public:
  // Begins behind the first tile of a task.
  Ahead(const CbgenAttention& a, const CbgenAttentionTask& task, const CbgenAttentionTask* next)
      : a_(a), task_(&task), next_(next), last_(task_end(a, task)) {
    position_ = task_begin(a, task) / TILE * TILE + TILE;
    aim_at_tile();
  }

  // Asks for the next few lines; a key that ends between them costs lines behind it. It runs within
  // inner loops, whose time it must not take.
  void step() {
    if (line_ == nullptr) return;
    for (int i = 0; i < LINES_A_STEP; i++) __builtin_prefetch(line_ + i * 64, 0, 2);
    line_ += LINES_A_STEP * 64;
    if (line_ < line_end_) return;
    if (++place_ < tile_.end) {
      aim_at_token();
    } else {
      aim();
    }
  }

  // Says that a tile has been computed.
  void allow_tile() {
    tiles_left_++;
    if (line_ == nullptr) aim_at_tile();
  }

 private:
  // Goes to the values behind the keys, or to the next tile.
  __attribute__((noinline)) void aim() {
    if (tokens_ == tile_.values) return aim_at_tile();
    tokens_ = tile_.values;
    bytes_ = value_bytes_;
    place_ = tile_.begin;
    aim_at_token();
  }

  void aim_at_token() {
    line_ = tokens_[place_];
    line_end_ = line_ + bytes_;
  }

  void aim_at_tile() {
    line_ = nullptr;
    if (tiles_left_ == 0) return;
    if (position_ >= last_) {
      if (next_ == nullptr) return;
      task_ = next_;
      next_ = nullptr;
      position_ = task_begin(a_, *task_);
      last_ = task_end(a_, *task_);
    }
    tile_.find(a_, *task_, position_, last_);
    position_ = tile_.position + TILE;
    tiles_left_--;
    const int64_t more_heads = task_->num_heads - 1;
    bytes_ = more_heads * tile_.key_pages.head_stride + tile_.key_pages.bytes;
    value_bytes_ = more_heads * tile_.value_pages.head_stride + tile_.value_pages.bytes;
    tokens_ = tile_.keys;
    place_ = tile_.begin;
    aim_at_token();
  }

  const CbgenAttention& a_;
  const CbgenAttentionTask* task_;
  const CbgenAttentionTask* next_;
  int64_t position_;  // of the tile behind `tile_`
  int64_t last_;      // end of the task
  int64_t tiles_left_ = TILES_AHEAD;  // that may be begun
  Tile tile_;
  const char* const* tokens_ = nullptr;  // keys or values of the tile
  int64_t bytes_, value_bytes_;          // of one token under all heads of the task
  int64_t place_;
  const char* line_ = nullptr;  // null = nothing is left
  const char* line_end_ = nullptr;
};

// float32 keys (or values) of the padded size: where they are, or copied. Those that are read more
// than once are copied where their distance would send them to a few sets of the first-level cache.
inline void read_all(const Work& w, const char* const* addresses, const Pages& pages, int64_t head,
                     int64_t begin, int64_t end, int64_t dim, float* wide, const float** pointers) {
  const int64_t padded_dim = padded(dim), offset = head * pages.head_stride;
  const bool is_crowded = pages.token_stride % 1024 == 0 && w.head_rows > MAX_GROUP;
  if (w.a.format == CBGEN_FLOAT32 && dim == padded_dim && !is_crowded) {
    for (int64_t i = begin; i < end; i++) {
      pointers[i] = reinterpret_cast<const float*>(addresses[i] + offset);
    }
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    widen(addresses[i] + offset, dim, padded_dim, w.a.format, wide + i * padded_dim);
    pointers[i] = wide + i * padded_dim;
  }
}

// Transposes 4 dimensions of W keys: out[i] holds dimension d + i of the keys from `key` on.
inline void transpose(const float* const* keys, int64_t d, vf out[4]) {
#if defined(__AVX512F__)
  __m512 rows[4];
  for (int i = 0; i < 4; i++) {
    __m512 row = _mm512_castps128_ps512(_mm_loadu_ps(keys[i] + d));
    row = _mm512_mask_broadcast_f32x4(row, 0x00f0, _mm_loadu_ps(keys[4 + i] + d));
    row = _mm512_mask_broadcast_f32x4(row, 0x0f00, _mm_loadu_ps(keys[8 + i] + d));
    rows[i] = _mm512_mask_broadcast_f32x4(row, 0xf000, _mm_loadu_ps(keys[12 + i] + d));
  }
  const __m512 a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpackhi_ps(rows[0], rows[1]);
  const __m512 c = _mm512_unpacklo_ps(rows[2], rows[3]), e = _mm512_unpackhi_ps(rows[2], rows[3]);
  out[0] = _mm512_shuffle_ps(a, c, 0x44);
  out[1] = _mm512_shuffle_ps(a, c, 0xee);
  out[2] = _mm512_shuffle_ps(b, e, 0x44);
  out[3] = _mm512_shuffle_ps(b, e, 0xee);
#elif defined(__AVX2__)
  __m256 rows[4];
  for (int i = 0; i < 4; i++) {
    const __m256 row = _mm256_castps128_ps256(_mm_loadu_ps(keys[i] + d));
    rows[i] = _mm256_insertf128_ps(row, _mm_loadu_ps(keys[4 + i] + d), 1);
  }
  const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
  const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]), e = _mm256_unpackhi_ps(rows[2], rows[3]);
  out[0] = _mm256_shuffle_ps(a, c, 0x44);
  out[1] = _mm256_shuffle_ps(a, c, 0xee);
  out[2] = _mm256_shuffle_ps(b, e, 0x44);
  out[3] = _mm256_shuffle_ps(b, e, 0xee);
#else
  for (int i = 0; i < 4; i++) {
    out[i] = vf{keys[0][d + i], keys[1][d + i], keys[2][d + i], keys[3][d + i]};
  }
#endif
}

void transpose_keys(const float* const* keys, int64_t key_dim, int64_t begin, int64_t end,
                    float* transposed) {
  for (int64_t key = begin / W * W; key < end; key += W) {
    for (int64_t d = 0; d < key_dim; d += 4) {
      vf out[4];
      transpose(keys + key, d, out);
      for (int i = 0; i < 4; i++) store(transposed + (d + i) * TILE + key, out[i]);
    }
  }
}

}  // namespace
