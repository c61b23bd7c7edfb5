// Cuts the attention of a step into tasks that keep all threads busy, and runs them.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace {

// A task larger than this share of what a thread has to do is split over its keys.
constexpr int64_t SPLITS_PER_THREAD = 4;
constexpr int64_t TASKS_PER_THREAD = 8;
// Memory of a tile's keys (and of its values) that a task reads side by side: neighbouring heads lie
// in one piece, but the next tile must have room in the second-level cache.
constexpr int64_t TILE_BYTES = 128 * 1024;

class Tasks {
 public:
  Tasks(const CbgenAttention& attention, int64_t threads) : a_(attention) {
    const int64_t tokens = std::max<int64_t>(1, CBGEN_ATTENTION_ROWS / group_);
    const int64_t tile = CBGEN_TILE * std::max(a_.key_dim, a_.value_dim) *
                         (a_.format == CBGEN_FLOAT32 ? 4 : 2);
    most_heads_ = a_.requests < threads * TASKS_PER_THREAD ? 1 : std::max<int64_t>(1, TILE_BYTES / tile);
    for (int64_t request = 0; request < a_.requests; request++) {
      for (int64_t token = a_.query_starts[request]; token < a_.query_starts[request + 1];
           token += tokens) {
        add(request, token, std::min(tokens, a_.query_starts[request + 1] - token));
      }
    }
  }

  // Replaces large tasks of several segments by one task a segment.
  void split(int64_t threads) {
    const int64_t limit = total_ / (threads * SPLITS_PER_THREAD);
    if (threads == 1 || largest_ <= limit) return;
    std::vector<CbgenAttentionTask> whole;
    whole.swap(tasks);
    for (const CbgenAttentionTask& task : whole) {
      if (task.num_segments == 1 || task.cost <= limit) {
        tasks.push_back(task);
      } else {
        split_tasks.push_back(task);
      }
    }
    const int64_t state = (a_.value_dim + 15) / 16 * 16 + 2;
    const auto floats = [&](const CbgenAttentionTask& task) {
      return task.num_heads * task.num_tokens * group_ * state;
    };
    int64_t needed = 0;
    for (const CbgenAttentionTask& task : split_tasks) needed += floats(task) * task.num_segments;
    thread_local std::vector<float> memory;
    float* partial = reserve(memory, needed);
    for (CbgenAttentionTask& task : split_tasks) {
      task.partial = partial;
      for (int64_t i = 0; i < task.num_segments; i++, partial += floats(task)) {
        CbgenAttentionTask part = task;
        part.first_segment += i;
        part.num_segments = 1;
        part.partial = partial;
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
  std::vector<CbgenAttentionTask> split_tasks;  // whole ones, whose parts are among `tasks`

 private:
  void add(int64_t request, int64_t token, int64_t num_tokens) {
    const int64_t position = a_.key_lens[request] - a_.query_starts[request + 1] + token;
    int64_t first_key = 0;
    if (a_.window) {
      first_key = std::max<int64_t>(0, position - a_.window + 1);
    } else if (a_.chunk) {
      first_key = position / a_.chunk * a_.chunk;
    }
    const int64_t end_key = position + num_tokens;
    CbgenAttentionTask task{};
    task.request = request;
    task.first_token = token;
    task.num_tokens = num_tokens;
    task.first_segment = first_key / CBGEN_SEGMENT;
    task.num_segments = (end_key - 1) / CBGEN_SEGMENT + 1 - task.first_segment;
    const int64_t rows = num_tokens * group_;
    const int64_t heads =
        std::clamp(CBGEN_ATTENTION_ROWS / rows, int64_t{1}, std::min(most_heads_, a_.kv_heads));
    for (int64_t head = 0; head < a_.kv_heads; head += heads) {
      task.first_head = head;
      task.num_heads = std::min(heads, a_.kv_heads - head);
      // Transposing the keys costs about as much as two more rows.
      task.cost = task.num_heads * (rows + 2) * (end_key - first_key);
      total_ += task.cost;
      largest_ = std::max(largest_, task.cost);
      tasks.push_back(task);
    }
  }

  const CbgenAttention& a_;
  const int64_t group_ = a_.heads / a_.kv_heads;
  int64_t most_heads_ = 1;
  int64_t total_ = 0;
  int64_t largest_ = 0;
};

}  // namespace

void run_attention(const CbgenAttention& attention, int64_t threads) {
  const CbgenKernels& kernels = current_kernels();
  Tasks work(attention, threads);
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
  for_each(work.split_tasks.size(), threads, [&](int64_t i, int64_t thread) {
    kernels.merge(attention, work.split_tasks[i], scratch + thread * scratch_size);
  });
}

CBGEN_API void cbgen_attention(const CbgenAttention* attention, int64_t threads) {
  run_attention(*attention, threads);
}
