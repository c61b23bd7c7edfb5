// Threads for the tasks of a kernel: those of the OpenMP runtime that torch uses.
//
// The library is neither compiled nor linked with OpenMP, so that it never brings a second runtime
// into a process, nor takes the wrong one of several: it is told where torch's GOMP_parallel is. That
// function is part of the binary interface of libgomp, and LLVM's and Intel's runtimes have it too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "shared_segments.h"

#define CBGEN_API extern "C" __attribute__((visibility("default")))

// Runs function(data) on so many threads and waits for all of them.
using RunParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// Null until it is set: then everything runs on the calling thread.
extern std::atomic<RunParallel> run_parallel;

// The kernels of the instruction set in use.
const CbgenKernels& current_kernels();

// Run one kernel on so many threads.
void run_linear(const CbgenLinear& linear, int64_t threads);
// output[r][n] = silu(gate[r][n]) * up[r][n], of two products of the same rows and columns.
void run_gated(const CbgenLinear& gate, const CbgenLinear& up, float* output, int64_t output_stride,
               int64_t threads);
void run_attention(const CbgenAttention& attention, const SharedSegments& shared, int64_t threads);

// Some tasks, of which each thread takes the next one when it is done.
struct SharedTasks {
  void (*call)(const void* task, int64_t i, int64_t thread);
  const void* task;
  int64_t count;
  std::atomic<int64_t> next{0};

  void take(int64_t thread) {
    int64_t i;
    while ((i = next.fetch_add(1, std::memory_order_relaxed)) < count) call(task, i, thread);
  }
};

// Threads that stay together over many calls of for_each: they watch for the next tasks instead of
// being woken, which takes longer than most of the tasks of a decoding step.
class Team {
 public:
  // Calls function() on this thread, whose for_each then run on all threads of the team.
  template <class Function>
  static void run(int64_t threads, const Function& function) {
    if (threads <= 1 || run_parallel.load(std::memory_order_relaxed) == nullptr) return function();
    const auto call = [](const void* f) { (*static_cast<const Function*>(f))(); };
    Team(call, &function).run_on(threads);
  }

  // The team that this thread leads, or null.
  static Team* current();

  // Runs the tasks on all threads of the team that are there; the leader alone calls it.
  void share(SharedTasks& tasks);

 private:
  using Call = void (*)(const void* function);

  Team(Call call, const void* function) : call_(call), function_(function) {}

  void run_on(int64_t threads);
  void lead();
  void follow();

  static constexpr size_t LINE = 64;  // of a cache: what threads wait for lies apart

  const Call call_;
  const void* const function_;
  const void* leader_ = nullptr;  // what only the leader's thread has at this address
  alignas(LINE) std::atomic<int64_t> next_thread_{1};
  // Counts the tasks that were shared; negative at the end.
  alignas(LINE) std::atomic<int64_t> round_{0};
  // Those of the round; null as soon as the leader finds none left.
  alignas(LINE) std::atomic<SharedTasks*> tasks_{nullptr};
  alignas(LINE) std::atomic<int64_t> busy_{0};  // followers that may use `tasks_`
};

// Runs task(i, thread) for every i below `count` on at most `threads` threads; `thread` counts them.
template <class Task>
void for_each(int64_t count, int64_t threads, const Task& task) {
  const RunParallel run = run_parallel.load(std::memory_order_relaxed);
  if (std::min(threads, count) <= 1 || run == nullptr) {
    for (int64_t i = 0; i < count; i++) task(i, int64_t{0});
    return;
  }
  const auto call = [](const void* t, int64_t i, int64_t thread) {
    (*static_cast<const Task*>(t))(i, thread);
  };
  SharedTasks tasks{call, &task, count};
  if (Team* team = Team::current()) return team->share(tasks);
  struct Shared {
    SharedTasks& tasks;
    std::atomic<int64_t> next_thread{0};
  } shared{tasks};
  const auto take = [](void* data) {
    Shared& s = *static_cast<Shared*>(data);
    s.tasks.take(s.next_thread.fetch_add(1, std::memory_order_relaxed));
  };
  run(take, &shared, static_cast<unsigned>(std::min(threads, count)), 0);
}
