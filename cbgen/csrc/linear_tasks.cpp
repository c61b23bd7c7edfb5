// Cuts a product into tasks that keep all threads busy, and runs them.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace {

// Rows of a product that are done together, so that they stay in the second-level cache.
constexpr int64_t ROW_BLOCK_BYTES = 256 * 1024;
constexpr int64_t TASKS_PER_THREAD = 8;
constexpr int64_t FEW_ROWS = 6;
// Fewer floats than this are not worth waking a thread for.
constexpr int64_t FLOATS_PER_TASK = 8192;

// Steps, at least so many, by which the tasks of all row blocks keep the threads evenly busy, if that
// takes few more: the last of 15 tasks is alone on one of two threads.
int64_t even_steps(int64_t least, int64_t most, int64_t row_blocks, int64_t threads) {
  const int64_t end = std::min(most + 1, least + threads);
  for (int64_t steps = least; steps < end; steps++) {
    if (steps * row_blocks % threads == 0) return steps;
  }
  return least;
}

// Runs kernel(first row, last row, first panel, last panel) over a whole product.
template <class Kernel>
void run_blocks(const CbgenLinear& linear, int64_t row_bytes, int64_t threads,
                const Kernel& kernel) {
  const int64_t panels = (linear.columns + CBGEN_PANEL - 1) / CBGEN_PANEL;
  const int64_t row_block = std::max<int64_t>(24, ROW_BLOCK_BYTES / row_bytes / 12 * 12);
  const int64_t row_blocks = (linear.rows + row_block - 1) / row_block;
  // Few rows want two panels at once, to have enough chains of sums.
  const int64_t together = linear.rows <= FEW_ROWS ? 2 : 1;
  const int64_t pieces = (panels + together - 1) / together;
  const int64_t wanted = std::max<int64_t>(1, threads * TASKS_PER_THREAD / row_blocks);
  const int64_t step = std::max<int64_t>(1, pieces / wanted);
  const int64_t steps = even_steps((pieces + step - 1) / step, pieces, row_blocks, threads);
  for_each(row_blocks * steps, threads, [&](int64_t i, int64_t) {
    const int64_t first_row = i / steps * linear.rows / row_blocks;
    const int64_t last_row = (i / steps + 1) * linear.rows / row_blocks;
    const int64_t first_panel = i % steps * pieces / steps * together;
    const int64_t last_panel = (i % steps + 1) * pieces / steps * together;
    kernel(first_row, last_row, first_panel, std::min(panels, last_panel));
  });
}

void run_int8(const CbgenLinear& linear, int64_t threads) {
  const CbgenInt8Kernels& kernels = *current_kernels().int8;
  const int64_t row_bytes = kernels.row_bytes(linear.depth);
  const int64_t scratch_size = kernels.scratch(linear.depth);
  thread_local std::vector<float> memory;
  float* scratch = reserve(memory, linear.rows * row_bytes / 4 + threads * scratch_size);
  char* rows = reinterpret_cast<char*>(scratch + threads * scratch_size);
  const int64_t step = (FLOATS_PER_TASK + linear.depth - 1) / linear.depth;
  for_each((linear.rows + step - 1) / step, threads, [&](int64_t i, int64_t thread) {
    kernels.quantize(linear, i * step, std::min(linear.rows, (i + 1) * step), rows,
                     scratch + thread * scratch_size);
  });
  run_blocks(linear, row_bytes, threads,
             [&](int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
               kernels.linear(linear, rows, first_row, last_row, first_panel, last_panel);
             });
}

}  // namespace

void run_linear(const CbgenLinear& linear, int64_t threads) {
  if (linear.rows == 0) return;
  if (linear.format == CBGEN_INT8) return run_int8(linear, threads);
  const CbgenKernels& kernels = current_kernels();
  run_blocks(linear, std::min<int64_t>(linear.depth, 2048) * 4, threads,
             [&](int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
               kernels.linear(linear, first_row, last_row, first_panel, last_panel);
             });
}

CBGEN_API void cbgen_linear(const CbgenLinear* linear, int64_t threads) {
  run_linear(*linear, threads);
}
