// Cuts the attention of a step into tasks that keep all threads busy, and runs them.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "shared_segments.h"

namespace {

// A task larger than this share of what a thread has to do is split over its keys.
constexpr int64_t SPLITS_PER_THREAD = 4;
constexpr int64_t TASKS_PER_THREAD = 8;
// Memory of a tile's keys (and of its values) that a task reads side by side: neighbouring heads lie
// in one piece, but the next tile must have room in the second-level cache.
constexpr int64_t TILE_BYTES = 128 * 1024;

class Tasks {
 public:
  Tasks(const CbgenAttention& attention, const SharedSegments& shared, int64_t threads)
      : a_(attention), shared_(shared) {
    const int64_t tile = CBGEN_TILE * std::max(a_.key_dim, a_.value_dim) *
                         (a_.format == CBGEN_FLOAT32 ? 4 : 2);
    most_heads_ = a_.requests < threads * TASKS_PER_THREAD ? 1 : std::max<int64_t>(1, TILE_BYTES / tile);
    std::vector<float*> partials = reserve_partials();
    for (int64_t request = 0; request < a_.requests; request++) {
      if (partials[request] != nullptr) {
        add_rest(request, partials[request]);
        continue;
      }
      const int64_t end = a_.query_starts[request + 1];
      for (int64_t token = a_.query_starts[request]; token < end; token += most_tokens_) {
        add_heads(make(request, token, std::min(most_tokens_, end - token)));
      }
    }
    add_shared(partials);
  }

  // Replaces large tasks of several segments by one task a segment.
  void split(int64_t threads) {
    const int64_t limit = total_ / (threads * SPLITS_PER_THREAD);
    if (threads == 1 || largest_ <= limit) return;
    std::vector<CbgenAttentionTask> whole;
    whole.swap(tasks);
    const auto is_small = [&](const auto& task) {
      return task.num_segments == 1 || task.cost <= limit;
    };
    int64_t needed = 0;
    for (CbgenAttentionTask& task : whole) {
      if (is_small(task) || task.partial != nullptr) continue;
      task.segment_stride = task.num_heads * task.num_tokens * group_ * state_;
      needed += task.segment_stride * task.num_segments;
    }
    thread_local std::vector<float> memory;
    float* partial = reserve(memory, needed);
    for (CbgenAttentionTask& task : whole) {
      if (is_small(task)) {
        tasks.push_back(task);
        continue;
      }
      if (task.partial == nullptr) {
        task.partial = partial;
        partial += task.segment_stride * task.num_segments;
        to_merge.push_back(task);
      }
      for (int64_t i = 0; i < task.num_segments; i++) {
        CbgenAttentionTask part = task;
        part.first_segment += i;
        part.num_segments = 1;
        part.partial += i * task.segment_stride;
        part.cost /= task.num_segments;
        tasks.push_back(part);
      }
    }
  }

  // Puts the largest tasks first, so that none of them is begun when the others end.
  void sort() {
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const auto& left, const auto& right) { return left.cost > right.cost; });
  }

  std::vector<CbgenAttentionTask> tasks;
  std::vector<CbgenAttentionTask> to_merge;  // whole ones, whose parts are among `tasks`

 private:
  CbgenAttentionTask make(int64_t request, int64_t token, int64_t num_tokens) const {
    const int64_t position = a_.key_lens[request] - a_.query_starts[request + 1] + token;
    int64_t first_key = 0;
    if (a_.window) {
      first_key = std::max<int64_t>(0, position - a_.window + 1);
    } else if (a_.chunk) {
      first_key = position / a_.chunk * a_.chunk;
    }
    CbgenAttentionTask task{};
    task.request = request;
    task.num_heads = a_.kv_heads;
    task.first_token = token;
    task.num_tokens = num_tokens;
    task.first_segment = first_key / CBGEN_SEGMENT;
    task.num_segments = (position + num_tokens - 1) / CBGEN_SEGMENT + 1 - task.first_segment;
    task.cost = position + num_tokens - first_key;  // of a row
    return task;
  }

  // Adds a task of a row's cost, some key heads at a time.
  void add_heads(CbgenAttentionTask task) {
    const int64_t rows = task.num_tokens * group_, row_cost = task.cost;
    const int64_t heads =
        std::clamp(CBGEN_ATTENTION_ROWS / rows, int64_t{1}, std::min(most_heads_, a_.kv_heads));
    float* const partial = task.partial;
    for (int64_t head = 0; head < a_.kv_heads; head += heads) {
      task.first_head = head;
      task.num_heads = std::min(heads, a_.kv_heads - head);
      if (partial != nullptr) task.partial = partial + head * group_ * state_;
      // Transposing the keys costs about as much as two more rows.
      task.cost = task.num_heads * (rows + 2) * row_cost;
      total_ += task.cost;
      largest_ = std::max(largest_, task.cost);
      tasks.push_back(task);
    }
  }

  // Where the states of requests with shared segments go, [segments][heads][state] each; null for others.
  std::vector<float*> reserve_partials() const {
    std::vector<float*> partials(a_.requests);
    if (shared_.runs().empty()) return partials;
    const auto floats = [&](int64_t request) {
      if (shared_.count(request) == 0) return int64_t{0};
      return (a_.key_lens[request] + CBGEN_SEGMENT - 1) / CBGEN_SEGMENT * a_.heads * state_;
    };
    int64_t needed = 0;
    for (int64_t request : shared_.order()) needed += floats(request);
    thread_local std::vector<float> memory;
    float* next = reserve(memory, needed);
    for (int64_t request : shared_.order()) {
      if (shared_.count(request) > 0) partials[request] = next;
      next += floats(request);
    }
    return partials;
  }

  // Adds what a request does not share, and that its segments are to be merged.
  void add_rest(int64_t request, float* partial) {
    CbgenAttentionTask task = make(request, a_.query_starts[request], 1);
    task.partial = partial;
    task.segment_stride = a_.heads * state_;
    to_merge.push_back(task);
    const int64_t count = shared_.count(request);
    if (count == task.num_segments) return;
    task.first_segment = count;
    task.num_segments -= count;
    task.partial += count * task.segment_stride;
    task.cost -= count * CBGEN_SEGMENT;
    add_heads(task);
  }

  // Adds the shared segments: so many requests to a task as fill its rows.
  void add_shared(const std::vector<float*>& partials) {
    size_t count = 0;
    for (const SharedSegments::Run& run : shared_.runs()) count += run.end - run.begin;
    queries_.reserve(count);  // so that they stay where they are
    for (const SharedSegments::Run& run : shared_.runs()) {
      const int64_t requests = run.end - run.begin;
      const int64_t pieces = (requests + most_tokens_ - 1) / most_tokens_;
      for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = run.begin + requests * i / pieces;
        const int64_t end = run.begin + requests * (i + 1) / pieces;
        const int64_t request = shared_.order()[first];
        CbgenAttentionTask task = make(request, a_.query_starts[request], end - first);
        task.first_segment = run.segment;
        task.num_segments = 1;
        task.shared = queries_.data() + queries_.size();
        task.cost = CBGEN_SEGMENT;
        for (int64_t place = first; place < end; place++) {
          const int64_t other = shared_.order()[place];
          queries_.push_back({a_.query_starts[other],
                              partials[other] + run.segment * a_.heads * state_});
        }
        add_heads(task);
      }
    }
  }

  const CbgenAttention& a_;
  const SharedSegments& shared_;
  std::vector<CbgenSharedQuery> queries_;
  const int64_t group_ = a_.heads / a_.kv_heads;
  const int64_t state_ = (a_.value_dim + 15) / 16 * 16 + 2;  // floats
  // Of a task: one at least, as many as its rows hold.
  const int64_t most_tokens_ = std::max<int64_t>(1, CBGEN_ATTENTION_ROWS / group_);
  int64_t most_heads_ = 1;
  int64_t total_ = 0;
  int64_t largest_ = 0;
};

}  // namespace

void run_attention(const CbgenAttention& attention, const SharedSegments& shared, int64_t threads) {
  const CbgenKernels& kernels = current_kernels();
  Tasks work(attention, shared, threads);
  work.split(threads);
  if (threads > 1) work.sort();
  const int64_t scratch_size = kernels.attention_scratch(attention);
  thread_local std::vector<float> memory;
  float* scratch = reserve(memory, scratch_size * threads);
  for_each(work.tasks.size(), threads, [&](int64_t i, int64_t thread) {
    // The other threads take the tasks between.
    const int64_t next = i + std::min<int64_t>(threads, work.tasks.size());
    const bool is_last = next >= static_cast<int64_t>(work.tasks.size());
    kernels.attend(attention, work.tasks[i], is_last ? nullptr : &work.tasks[next],
                   scratch + thread * scratch_size);
  });
  for_each(work.to_merge.size(), threads, [&](int64_t i, int64_t thread) {
    kernels.merge(attention, work.to_merge[i], scratch + thread * scratch_size);
  });
}

CBGEN_API void cbgen_attention(const CbgenAttention* attention, int64_t threads) {
  run_attention(*attention, SharedSegments(*attention), threads);
}
