// Threads for the tasks of a kernel: those of the OpenMP runtime that torch uses.
//
// The library is neither compiled nor linked with OpenMP, so that it never brings a second runtime
// into a process, nor takes the wrong one of several: it is told where torch's GOMP_parallel is. That
// function is part of the binary interface of libgomp, and LLVM's and Intel's runtimes have it too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels.h"

#define CBGEN_API extern "C" __attribute__((visibility("default")))

// Runs function(data) on so many threads and waits for all of them.
using RunParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// Null until it is set: then everything runs on the calling thread.
extern std::atomic<RunParallel> run_parallel;

// The kernels of the instruction set in use.
const CbgenKernels& current_kernels();

// Run one kernel on so many threads.
void run_linear(const CbgenLinear& linear, int64_t threads);
void run_attention(const CbgenAttention& attention, int64_t threads);

// Runs task(i, thread) for every i below `count` on at most `threads` threads, each of which takes
// the next one when it is done; `thread` counts them.
template <class Task>
void for_each(int64_t count, int64_t threads, const Task& task) {
  const RunParallel run = run_parallel.load(std::memory_order_relaxed);
  threads = std::min(threads, count);
  if (threads <= 1 || run == nullptr) {
    for (int64_t i = 0; i < count; i++) task(i, int64_t{0});
    return;
  }
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next{0}, next_thread{0};
  } shared{task, count};
  const auto take_tasks = [](void* data) {
    Shared& s = *static_cast<Shared*>(data);
    const int64_t thread = s.next_thread.fetch_add(1, std::memory_order_relaxed);
    int64_t i;
    while ((i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count) s.task(i, thread);
  };
  run(take_tasks, &shared, static_cast<unsigned>(threads), 0);
}
