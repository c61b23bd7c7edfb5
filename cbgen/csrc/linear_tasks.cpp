// Cuts a product into tasks that keep all threads busy, and runs them.

#include <algorithm>

#include "kernels.h"
#include "parallel.h"

namespace {

// Rows of a product that are done together, so that they stay in the second-level cache.
constexpr int64_t ROW_BLOCK_BYTES = 256 * 1024;
constexpr int64_t TASKS_PER_THREAD = 8;

}  // namespace

void run_linear(const CbgenLinear& linear, int64_t threads) {
  if (linear.rows == 0) return;
  const CbgenKernels& kernels = current_kernels();
  const int64_t panels = (linear.columns + CBGEN_PANEL - 1) / CBGEN_PANEL;
  const int64_t depth_bytes = std::min<int64_t>(linear.depth, 2048) * 4;
  const int64_t row_block = std::max<int64_t>(24, ROW_BLOCK_BYTES / depth_bytes / 12 * 12);
  const int64_t row_blocks = (linear.rows + row_block - 1) / row_block;
  // Panels go together in pairs, for the kernels that want two of them at once.
  const int64_t pairs = (panels + 1) / 2;
  const int64_t wanted = std::max<int64_t>(1, threads * TASKS_PER_THREAD / row_blocks);
  const int64_t step = 2 * std::max<int64_t>(1, pairs / wanted);
  const int64_t steps = (panels + step - 1) / step;
  for_each(row_blocks * steps, threads, [&](int64_t i, int64_t) {
    const int64_t first_row = i / steps * linear.rows / row_blocks;
    const int64_t last_row = (i / steps + 1) * linear.rows / row_blocks;
    const int64_t panel = i % steps * step;
    kernels.linear(linear, first_row, last_row, panel, std::min(panels, panel + step));
  });
}

CBGEN_API void cbgen_linear(const CbgenLinear* linear, int64_t threads) {
  run_linear(*linear, threads);
}
