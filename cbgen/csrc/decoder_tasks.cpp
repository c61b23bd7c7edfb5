// Runs the decoder layers of a Llama-like model: norm, queries, keys and values, rotary embedding and
// cache, attention, output, norm, gated feed-forward; with one call a step.
//
// Products go through the same kernels as everywhere, over blocks of rows whose intermediate results
// stay in the caches between them. What the two halves of a layer add to the hidden states is added
// together with the norm that follows.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "decoder_tasks.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace {

// Rows whose intermediate results are worked on together: a few MiB for models of usual widths.
constexpr int64_t ROW_BLOCK = 192;
// Fewer floats than this are not worth waking a thread for.
constexpr int64_t FLOATS_PER_TASK = 4096;
// Rows of scratch lie a cache line further apart than they are wide, so that rows whose size is a
// power of two do not fall on the same lines of the first-level cache.
constexpr int64_t ROW_GAP = 16;

int64_t stride_of(int64_t width) { return (width + 15) / 16 * 16 + ROW_GAP; }

// Adds the time since it was made, or since the last part ended, to one part's seconds after another.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(seconds) {}

  void ends(CbgenPart part) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

class Step {
 public:
  Step(const CbgenDecoder& decoder, const CbgenStep& step, int64_t threads)
      : d_(decoder), s_(step), threads_(threads), clock_(step.seconds) {
    const int64_t block = std::min(ROW_BLOCK, step.tokens);
    normed_stride_ = stride_of(decoder.hidden_size);
    heads_stride_ = stride_of(decoder.heads_width);
    attended_size_ = decoder.heads * decoder.head_dim;
    gated_stride_ = stride_of(decoder.intermediate_size);
    thread_local std::vector<float> memory;
    float* next = reserve(memory, step.tokens * (normed_stride_ + heads_stride_ + attended_size_) +
                                      block * (normed_stride_ + gated_stride_));
    const auto take = [&next](int64_t floats) {
      float* taken = next;
      next += floats;
      return taken;
    };
    addend_ = take(step.tokens * normed_stride_);
    heads_ = take(step.tokens * heads_stride_);
    attended_ = take(step.tokens * attended_size_);
    normed_ = take(block * normed_stride_);
    gated_ = take(block * gated_stride_);
  }

  void run() {
    for (int64_t i = 0; i < d_.num_layers; i++) {
      const CbgenDecoderLayer& layer = d_.layers[i];
      for_row_blocks([&](int64_t first, int64_t last) { before_attention(layer, first, last); });
      if (i + 1 == d_.num_layers) keep_wanted();
      attend(layer);
      for_row_blocks([&](int64_t first, int64_t last) { after_attention(layer, first, last); });
      has_addend_ = true;
    }
    norm(nullptr, 0, s_.tokens);
    give_wanted();
  }

 private:
  // Leaves the rows that are wanted alone: behind the last keys and values the others serve nobody.
  // They must be the last ones of their requests, as attention takes queries to be.
  void keep_wanted() {
    if (s_.num_wanted == s_.tokens) return;
    std::vector<int64_t> starts{0};
    int64_t count = 0;
    for (int64_t r = 0; r < s_.requests; r++) {
      const int64_t end = s_.query_starts[r + 1];
      const int64_t first = count;
      while (count < s_.num_wanted && s_.wanted[count] < end) count++;
      for (int64_t i = first; i < count; i++) {
        if (s_.wanted[i] != end - count + i) return;
      }
      starts.push_back(count);
    }
    if (count != s_.num_wanted) return;
    query_starts_.swap(starts);
    wanted_hidden_.resize(count * d_.hidden_size);
    const int64_t queries = attended_size_;
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = s_.wanted[i];
      std::memcpy(&wanted_hidden_[i * d_.hidden_size], s_.hidden + row * d_.hidden_size,
                  d_.hidden_size * sizeof(float));
      std::memmove(heads_ + i * heads_stride_ + d_.query_offset,
                   heads_ + row * heads_stride_ + d_.query_offset, queries * sizeof(float));
    }
    is_apart_ = true;
    s_.hidden = wanted_hidden_.data();
    s_.tokens = count;
    s_.query_starts = query_starts_.data();
  }

  void give_wanted() {
    for_rows(s_.num_wanted, d_.hidden_size, [&](int64_t begin, int64_t end) {
      CbgenNorm norm{};
      norm.size = d_.hidden_size;
      norm.weight = d_.last_norm;
      norm.epsilon = d_.epsilon;
      for (int64_t i = begin; i < end; i++) {
        norm.hidden = s_.hidden + (is_apart_ ? i : s_.wanted[i]) * d_.hidden_size;
        norm.output = s_.output + i * d_.hidden_size;
        current_kernels().norm(norm, 0, 1);
      }
    });
  }

  template <class Function>
  void for_row_blocks(const Function& function) {
    const int64_t blocks = (s_.tokens + ROW_BLOCK - 1) / ROW_BLOCK;
    for (int64_t i = 0; i < blocks; i++) {
      function(s_.tokens * i / blocks, s_.tokens * (i + 1) / blocks);
    }
  }

  // Runs function(first, last) over parts of the rows, on as many threads as they are worth.
  template <class Function>
  void for_rows(int64_t rows, int64_t floats_a_row, const Function& function) {
    const int64_t least = (FLOATS_PER_TASK + floats_a_row - 1) / floats_a_row;
    const int64_t step = std::max(least, (rows + 4 * threads_ - 1) / (4 * threads_));
    for_each((rows + step - 1) / step, threads_, [&](int64_t i, int64_t) {
      function(i * step, std::min(rows, (i + 1) * step));
    });
    clock_.ends(CBGEN_SMALL);
  }

  void norm(const float* weight, int64_t first, int64_t last) {
    CbgenNorm norm{};
    norm.hidden = s_.hidden + first * d_.hidden_size;
    norm.size = d_.hidden_size;
    norm.addend = has_addend_ ? addend_ + first * normed_stride_ : nullptr;
    norm.addend_stride = normed_stride_;
    norm.weight = weight;
    norm.output = normed_;
    norm.output_stride = normed_stride_;
    norm.epsilon = d_.epsilon;
    for_rows(last - first, 2 * d_.hidden_size,
             [&](int64_t begin, int64_t end) { current_kernels().norm(norm, begin, end); });
  }

  void multiply(const CbgenProduct& product, const float* input, int64_t input_stride, int64_t rows,
                float* output, int64_t output_stride) {
    for (int64_t i = 0; i < product.count; i++) {
      CbgenLinear linear = product.parts[i];
      linear.input = input;
      linear.input_stride = input_stride;
      linear.rows = rows;
      linear.output = output + product.offsets[i];
      linear.output_stride = output_stride;
      run_linear(linear, threads_);
    }
    clock_.ends(CBGEN_PRODUCTS);
  }

  CbgenLinear of_normed(CbgenLinear linear, int64_t rows) {
    linear.input = normed_;
    linear.input_stride = normed_stride_;
    linear.rows = rows;
    return linear;
  }

  void before_attention(const CbgenDecoderLayer& layer, int64_t first, int64_t last) {
    norm(layer.attention_norm, first, last);
    float* rows = heads_ + first * heads_stride_;
    multiply(layer.query_key_value, normed_, normed_stride_, last - first, rows, heads_stride_);
    CbgenHeads heads{};
    heads.rows = rows;
    heads.stride = heads_stride_;
    heads.query_offset = d_.query_offset;
    heads.key_offset = d_.key_offset;
    heads.value_offset = d_.value_offset;
    heads.heads = d_.heads;
    heads.kv_heads = d_.kv_heads;
    heads.head_dim = d_.head_dim;
    heads.rotary_dim = layer.rotary_dim;
    heads.cos = s_.cos + first * layer.rotary_dim;
    heads.sin = s_.sin + first * layer.rotary_dim;
    heads.query_norm = layer.query_norm;
    heads.key_norm = layer.key_norm;
    heads.slots = s_.groups[layer.group].slots + first;
    heads.cache = layer.cache;
    heads.epsilon = d_.epsilon;
    for_rows(last - first, 2 * d_.heads_width,
             [&](int64_t begin, int64_t end) { current_kernels().place_heads(heads, begin, end); });
  }

  void attend(const CbgenDecoderLayer& layer) {
    const CbgenStepGroup& group = s_.groups[layer.group];
    CbgenAttention a{};
    a.query = heads_ + d_.query_offset;
    a.query_token_stride = heads_stride_;
    a.query_head_stride = d_.head_dim;
    a.keys = layer.cache.keys;
    a.values = layer.cache.values;
    a.key_block_stride = layer.cache.key_block_stride;
    a.key_token_stride = layer.cache.key_token_stride;
    a.key_head_stride = layer.cache.key_head_stride;
    a.value_block_stride = layer.cache.value_block_stride;
    a.value_token_stride = layer.cache.value_token_stride;
    a.value_head_stride = layer.cache.value_head_stride;
    a.page_size = layer.cache.page_size;
    a.block_tables = group.block_tables;
    a.block_table_stride = group.block_table_stride;
    a.window = group.window;
    a.chunk = group.chunk;
    a.query_starts = s_.query_starts;
    a.key_lens = s_.key_lens;
    a.requests = s_.requests;
    a.heads = d_.heads;
    a.kv_heads = d_.kv_heads;
    a.key_dim = a.value_dim = d_.head_dim;
    a.output = attended_;
    a.scaling = layer.scaling;
    a.format = CBGEN_FLOAT32;
    run_attention(a, threads_);
    clock_.ends(CBGEN_ATTENTION);
  }

  void after_attention(const CbgenDecoderLayer& layer, int64_t first, int64_t last) {
    const int64_t rows = last - first;
    float* addend = addend_ + first * normed_stride_;
    multiply(layer.output, attended_ + first * attended_size_, attended_size_, rows, addend,
             normed_stride_);
    has_addend_ = true;
    norm(layer.mlp_norm, first, last);
    run_gated(of_normed(layer.gate, rows), of_normed(layer.up, rows), gated_, gated_stride_,
              threads_);
    multiply(layer.down, gated_, gated_stride_, rows, addend, normed_stride_);
  }

  const CbgenDecoder& d_;
  CbgenStep s_;
  const int64_t threads_;
  Clock clock_;
  std::vector<float> wanted_hidden_;
  std::vector<int64_t> query_starts_;  // of the rows that are wanted
  bool is_apart_ = false;  // whether the hidden states are those of the rows that are wanted
  bool has_addend_ = false;  // whether `addend_` is still to be added to the hidden states
  int64_t normed_stride_, heads_stride_, attended_size_, gated_stride_;
  float *addend_, *heads_, *attended_, *normed_, *gated_;
};

}  // namespace

CBGEN_API int32_t cbgen_decoder_layer_bytes() { return sizeof(CbgenDecoderLayer); }
CBGEN_API int32_t cbgen_decoder_bytes() { return sizeof(CbgenDecoder); }
CBGEN_API int32_t cbgen_step_bytes() { return sizeof(CbgenStep); }

CBGEN_API void cbgen_decode(const CbgenDecoder* decoder, const CbgenStep* step, int64_t threads) {
  if (step->tokens == 0) return;
  Team::run(threads, [&] { Step(*decoder, *step, threads).run(); });
}
