// Runs the decoder layers of a Llama-like model: norm, queries, keys and values, rotary embedding and
// cache, attention, output, norm, gated feed-forward; with one call a step.
//
// Only attention needs more of a step than its own rows. Between two attentions, of one layer and the
// next, many rows are cut into tasks: a thread does all that is to be done for some rows, whose
// intermediate results stay in its caches. Few rows are done by all threads together, product by
// product. What the two halves of a layer add to the hidden states is added together with the norm
// that follows.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

#include "decoder_tasks.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace {

// Rows that one thread does by itself: at most, and at least for each thread. Their intermediate
// results are half a MiB for models of usual widths.
constexpr int64_t MOST_ROWS = 96;
constexpr int64_t LEAST_ROWS = 96;
// Rows that all threads do together, at most.
constexpr int64_t ROWS_TOGETHER = 192;
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

// Who works on some rows, and where the intermediate results lie.
struct Place {
  int64_t threads;
  float* normed;
  float* gated;
  Clock* clock;  // null for threads beside the one whose time is taken
};

class Step {
 public:
  Step(const CbgenDecoder& decoder, const CbgenStep& step, int64_t threads)
      : d_(decoder), s_(step), threads_(threads), clock_(step.seconds) {
    normed_stride_ = stride_of(decoder.hidden_size);
    heads_stride_ = stride_of(decoder.heads_width);
    attended_size_ = decoder.heads * decoder.head_dim;
    gated_stride_ = stride_of(decoder.intermediate_size);
    const int64_t rows_together = std::min(step.tokens, ROWS_TOGETHER);
    const int64_t rows_alone = are_many() ? threads * MOST_ROWS : 0;
    tasks_ = (step.tokens + MOST_ROWS - 1) / MOST_ROWS;
    tasks_ = (tasks_ + threads - 1) / threads * threads;
    thread_local std::vector<float> memory;
    float* next = reserve(memory, step.tokens * (normed_stride_ + heads_stride_ + attended_size_) +
                                      (rows_together + rows_alone) *
                                          (normed_stride_ + gated_stride_));
    const auto take = [&next](int64_t floats) {
      float* taken = next;
      next += floats;
      return taken;
    };
    addend_ = take(step.tokens * normed_stride_);
    heads_ = take(step.tokens * heads_stride_);
    attended_ = take(step.tokens * attended_size_);
    const auto place = [&](int64_t number, int64_t rows, Clock* clock) {
      float* normed = take(rows * normed_stride_);
      return Place{number, normed, take(rows * gated_stride_), clock};
    };
    together_ = place(threads, rows_together, &clock_);
    for (int64_t i = 0; i < threads && are_many(); i++) {
      places_.push_back(place(1, MOST_ROWS, i == 0 ? &clock_ : nullptr));
    }
  }

  void run() {
    const CbgenDecoderLayer* done = nullptr;
    for (int64_t i = 0; i < d_.num_layers; i++) {
      const CbgenDecoderLayer& layer = d_.layers[i];
      between(done, &layer);
      if (i + 1 == d_.num_layers) keep_wanted();
      attend(layer);
      done = &layer;
    }
    between(done, nullptr);
    give_wanted();
  }

 private:
  // Whether each thread does some rows by itself.
  bool are_many() const { return s_.tokens >= threads_ * LEAST_ROWS; }

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
    shared_.clear();  // that of the queries before
  }

  void give_wanted() {
    for_rows(s_.num_wanted, d_.hidden_size, together_, [&](int64_t begin, int64_t end) {
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

  // Does what lies between the attentions of two layers; before the first or behind the last one
  // layer is null.
  void between(const CbgenDecoderLayer* done, const CbgenDecoderLayer* next) {
    const auto work = [&](int64_t first, int64_t last, const Place& place) {
      if (done != nullptr) after_attention(*done, first, last, place);
      norm(next != nullptr ? next->attention_norm : nullptr, done != nullptr, first, last, place);
      if (next != nullptr) before_attention(*next, first, last, place);
    };
    if (are_many()) {
      for_each(tasks_, threads_, [&](int64_t i, int64_t thread) {
        work(s_.tokens * i / tasks_, s_.tokens * (i + 1) / tasks_, places_[thread]);
      });
      clock_.ends(CBGEN_PRODUCTS);  // waiting for the last task
      return;
    }
    const int64_t blocks = (s_.tokens + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    for (int64_t i = 0; i < blocks; i++) {
      work(s_.tokens * i / blocks, s_.tokens * (i + 1) / blocks, together_);
    }
  }

  // Runs function(first, last) over parts of the rows, on as many threads as they are worth.
  template <class Function>
  void for_rows(int64_t rows, int64_t floats_a_row, const Place& place, const Function& function) {
    const int64_t least = (FLOATS_PER_TASK + floats_a_row - 1) / floats_a_row;
    const int64_t step = std::max(least, (rows + 4 * place.threads - 1) / (4 * place.threads));
    for_each((rows + step - 1) / step, place.threads, [&](int64_t i, int64_t) {
      function(i * step, std::min(rows, (i + 1) * step));
    });
    if (place.clock != nullptr) place.clock->ends(CBGEN_SMALL);
  }

  void norm(const float* weight, bool has_addend, int64_t first, int64_t last, const Place& place) {
    CbgenNorm norm{};
    norm.hidden = s_.hidden + first * d_.hidden_size;
    norm.size = d_.hidden_size;
    norm.addend = has_addend ? addend_ + first * normed_stride_ : nullptr;
    norm.addend_stride = normed_stride_;
    norm.weight = weight;
    norm.output = place.normed;
    norm.output_stride = normed_stride_;
    norm.epsilon = d_.epsilon;
    for_rows(last - first, 2 * d_.hidden_size, place,
             [&](int64_t begin, int64_t end) { current_kernels().norm(norm, begin, end); });
  }

  void multiply(const CbgenProduct& product, const float* input, int64_t input_stride, int64_t rows,
                float* output, int64_t output_stride, const Place& place) {
    for (int64_t i = 0; i < product.count; i++) {
      CbgenLinear linear = product.parts[i];
      linear.input = input;
      linear.input_stride = input_stride;
      linear.rows = rows;
      linear.output = output + product.offsets[i];
      linear.output_stride = output_stride;
      run_linear(linear, place.threads);
    }
    if (place.clock != nullptr) place.clock->ends(CBGEN_PRODUCTS);
  }

  CbgenLinear of_normed(CbgenLinear linear, int64_t rows, const Place& place) {
    linear.input = place.normed;
    linear.input_stride = normed_stride_;
    linear.rows = rows;
    return linear;
  }

  void before_attention(const CbgenDecoderLayer& layer, int64_t first, int64_t last,
                        const Place& place) {
    float* rows = heads_ + first * heads_stride_;
    multiply(layer.query_key_value, place.normed, normed_stride_, last - first, rows, heads_stride_,
             place);
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
    for_rows(last - first, 2 * d_.heads_width, place,
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
    run_attention(a, shared_of(layer.group, a), threads_);
    clock_.ends(CBGEN_ATTENTION);
  }

  // What the requests of a group share, found for the first of its layers.
  const SharedSegments& shared_of(int64_t group, const CbgenAttention& a) {
    if (group >= static_cast<int64_t>(shared_.size())) shared_.resize(group + 1);
    if (!shared_[group]) shared_[group].emplace(a);
    return *shared_[group];
  }

  void after_attention(const CbgenDecoderLayer& layer, int64_t first, int64_t last,
                       const Place& place) {
    const int64_t rows = last - first;
    float* addend = addend_ + first * normed_stride_;
    multiply(layer.output, attended_ + first * attended_size_, attended_size_, rows, addend,
             normed_stride_, place);
    norm(layer.mlp_norm, true, first, last, place);
    run_gated(of_normed(layer.gate, rows, place), of_normed(layer.up, rows, place), place.gated,
              gated_stride_, place.threads);
    multiply(layer.down, place.gated, gated_stride_, rows, addend, normed_stride_, place);
  }

  const CbgenDecoder& d_;
  CbgenStep s_;
  const int64_t threads_;
  Clock clock_;
  std::vector<float> wanted_hidden_;
  std::vector<int64_t> query_starts_;  // of the rows that are wanted
  std::vector<std::optional<SharedSegments>> shared_;  // of each group
  bool is_apart_ = false;  // whether the hidden states are those of the rows that are wanted
  int64_t tasks_;              // that many rows are cut into
  Place together_;             // of all threads, for few rows
  std::vector<Place> places_;  // of each thread
  int64_t normed_stride_, heads_stride_, attended_size_, gated_stride_;
  float *addend_, *heads_, *attended_;
};

}  // namespace

CBGEN_API int32_t cbgen_decoder_layer_bytes() { return sizeof(CbgenDecoderLayer); }
CBGEN_API int32_t cbgen_decoder_bytes() { return sizeof(CbgenDecoder); }
CBGEN_API int32_t cbgen_step_bytes() { return sizeof(CbgenStep); }

CBGEN_API void cbgen_decode(const CbgenDecoder* decoder, const CbgenStep* step, int64_t threads) {
  if (step->tokens == 0) return;
  Team::run(threads, [&] { Step(*decoder, *step, threads).run(); });
}
