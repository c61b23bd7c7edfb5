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
// Depths of a row that are worked on together, at most.
constexpr int64_t MOST_DEPTH = 2048;
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

int64_t most_rows(int64_t row_bytes) {
  return std::max<int64_t>(24, ROW_BLOCK_BYTES / row_bytes / 12 * 12);
}

// Few rows want two panels at once, to have enough chains of sums.
int64_t panels_together(int64_t rows) { return rows <= FEW_ROWS ? 2 : 1; }

// Runs kernel(first row, last row, first panel, last panel, thread) over a whole product.
template <class Kernel>
void run_blocks(const CbgenLinear& linear, int64_t row_bytes, int64_t threads,
                const Kernel& kernel) {
  const int64_t panels = (linear.columns + CBGEN_PANEL - 1) / CBGEN_PANEL;
  const int64_t row_block = most_rows(row_bytes);
  const int64_t row_blocks = (linear.rows + row_block - 1) / row_block;
  const int64_t together = panels_together(linear.rows);
  const int64_t pieces = (panels + together - 1) / together;
  const int64_t wanted = std::max<int64_t>(1, threads * TASKS_PER_THREAD / row_blocks);
  const int64_t step = std::max<int64_t>(1, pieces / wanted);
  const int64_t steps = even_steps((pieces + step - 1) / step, pieces, row_blocks, threads);
  for_each(row_blocks * steps, threads, [&](int64_t i, int64_t thread) {
    const int64_t first_row = i / steps * linear.rows / row_blocks;
    const int64_t last_row = (i / steps + 1) * linear.rows / row_blocks;
    const int64_t first_panel = i % steps * pieces / steps * together;
    const int64_t last_panel = (i % steps + 1) * pieces / steps * together;
    kernel(first_row, last_row, first_panel, std::min(panels, last_panel), thread);
  });
}

// The rows of a product as its kernel wants them: quantized, if its weights are int8.
class Rows {
 public:
  Rows(const CbgenLinear& linear, int64_t threads)
      : kernels_(current_kernels()), is_int8_(linear.format == CBGEN_INT8) {
    if (is_int8_) quantize(linear, threads);
  }

  // Bytes of a row that are worked on together.
  int64_t bytes(const CbgenLinear& linear) const {
    return is_int8_ ? kernels_.int8->row_bytes(linear.depth)
                    : std::min<int64_t>(linear.depth, MOST_DEPTH) * 4;
  }

  // Computes a block of a product of these rows.
  void multiply(const CbgenLinear& linear, int64_t first_row, int64_t last_row, int64_t first_panel,
                int64_t last_panel) const {
    if (is_int8_) {
      kernels_.int8->linear(linear, quantized_, first_row, last_row, first_panel, last_panel);
    } else {
      kernels_.linear(linear, first_row, last_row, first_panel, last_panel);
    }
  }

 private:
  void quantize(const CbgenLinear& linear, int64_t threads) {
    const int64_t row_bytes = bytes(linear), scratch_size = kernels_.int8->scratch(linear.depth);
    thread_local std::vector<float> memory;
    float* scratch = reserve(memory, linear.rows * row_bytes / 4 + threads * scratch_size);
    quantized_ = reinterpret_cast<char*>(scratch + threads * scratch_size);
    const int64_t step = (FLOATS_PER_TASK + linear.depth - 1) / linear.depth;
    for_each((linear.rows + step - 1) / step, threads, [&](int64_t i, int64_t thread) {
      kernels_.int8->quantize(linear, i * step, std::min(linear.rows, (i + 1) * step), quantized_,
                              scratch + thread * scratch_size);
    });
  }

  const CbgenKernels& kernels_;
  const bool is_int8_;
  char* quantized_ = nullptr;
};

}  // namespace

void run_linear(const CbgenLinear& linear, int64_t threads) {
  if (linear.rows == 0) return;
  const Rows rows(linear, threads);
  run_blocks(linear, rows.bytes(linear), threads,
             [&](int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel,
                 int64_t) { rows.multiply(linear, first_row, last_row, first_panel, last_panel); });
}

void run_gated(const CbgenLinear& gate, const CbgenLinear& up, float* output, int64_t output_stride,
               int64_t threads) {
  if (gate.rows == 0) return;
  const Rows rows(gate, threads);
  const int64_t row_bytes = rows.bytes(gate), together = panels_together(gate.rows);
  const int64_t width = together * CBGEN_PANEL;
  const int64_t size = std::min(gate.rows, most_rows(row_bytes)) * width;
  thread_local std::vector<float> memory;
  float* scratch = reserve(memory, threads * 2 * size);
  run_blocks(gate, row_bytes, threads,
             [&](int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel,
                 int64_t thread) {
    float* gates = scratch + thread * 2 * size;
    float* ups = gates + size;
    const auto multiply = [&](CbgenLinear linear, float* products, int64_t panel, int64_t end) {
      linear.output = products - first_row * width - panel * CBGEN_PANEL;
      linear.output_stride = width;
      rows.multiply(linear, first_row, last_row, panel, end);
    };
    for (int64_t panel = first_panel; panel < last_panel; panel += together) {
      const int64_t end = std::min(last_panel, panel + together), column = panel * CBGEN_PANEL;
      multiply(gate, gates, panel, end);
      multiply(up, ups, panel, end);
      CbgenGates g{};
      g.gates = gates;
      g.ups = ups;
      g.stride = width;
      g.rows = last_row - first_row;
      g.columns = std::min(end * CBGEN_PANEL, gate.columns) - column;
      g.output = output + first_row * output_stride + column;
      g.output_stride = output_stride;
      current_kernels().activate(g);
    }
  });
}

CBGEN_API void cbgen_linear(const CbgenLinear* linear, int64_t threads) {
  run_linear(*linear, threads);
}
