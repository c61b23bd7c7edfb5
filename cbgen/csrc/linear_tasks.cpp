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

// Bytes of a row that are worked on together.
int64_t row_bytes_of(const CbgenLinear& linear) {
  if (linear.format == CBGEN_INT8) return current_kernels().int8->row_bytes(linear.depth);
  return std::min<int64_t>(linear.depth, MOST_DEPTH) * 4;
}

int64_t most_rows(const CbgenLinear& linear) {
  return std::max<int64_t>(24, ROW_BLOCK_BYTES / row_bytes_of(linear) / 12 * 12);
}

// Few rows want two panels at once, to have enough chains of sums.
int64_t panels_together(int64_t rows) { return rows <= FEW_ROWS ? 2 : 1; }

// How a product is cut: into blocks of rows, of which each has the same number of steps over panels.
class Cut {
 public:
  Cut(const CbgenLinear& linear, int64_t threads)
      : rows_(linear.rows),
        panels_((linear.columns + CBGEN_PANEL - 1) / CBGEN_PANEL),
        together_(panels_together(linear.rows)),
        pieces_((panels_ + together_ - 1) / together_) {
    const int64_t row_block = most_rows(linear);
    row_blocks_ = (rows_ + row_block - 1) / row_block;
    const int64_t wanted = std::max<int64_t>(1, threads * TASKS_PER_THREAD / row_blocks_);
    const int64_t step = std::max<int64_t>(1, pieces_ / wanted);
    steps_ = even_steps((pieces_ + step - 1) / step, pieces_, row_blocks_, threads);
  }

  int64_t tasks() const { return row_blocks_ * steps_; }
  int64_t first_row(int64_t task) const { return task / steps_ * rows_ / row_blocks_; }
  int64_t last_row(int64_t task) const { return (task / steps_ + 1) * rows_ / row_blocks_; }
  int64_t first_panel(int64_t task) const { return task % steps_ * pieces_ / steps_ * together_; }
  int64_t last_panel(int64_t task) const {
    return std::min(panels_, (task % steps_ + 1) * pieces_ / steps_ * together_);
  }

 private:
  int64_t rows_, panels_, together_, pieces_, row_blocks_, steps_;
};

// Where a panel lies; null for int8, whose kernels fetch nothing ahead.
const void* panel_of(const CbgenLinear& linear, int64_t panel) {
  if (linear.format == CBGEN_INT8) return nullptr;
  const int64_t value = linear.format == CBGEN_FLOAT32 ? 4 : 2;
  return static_cast<const char*>(linear.weights) + panel * linear.depth * CBGEN_PANEL * value;
}

// The rows of a product as its kernel wants them: quantized, if its weights are int8.
class Rows {
 public:
  Rows(const CbgenLinear& linear, int64_t threads)
      : kernels_(current_kernels()), is_int8_(linear.format == CBGEN_INT8) {
    if (is_int8_) quantize(linear, threads);
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
    const int64_t row_bytes = row_bytes_of(linear), scratch_size = kernels_.int8->scratch(linear.depth);
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

// The weights that a thread probably begins with behind a task: the other threads take those between.
// Null behind the last one.
const void* weights_behind(int64_t task, const CbgenLinear& linear, const Cut& cut,
                           int64_t threads) {
  const int64_t next = task + threads;
  return next < cut.tasks() ? panel_of(linear, cut.first_panel(next)) : nullptr;
}

}  // namespace

void run_linear(const CbgenLinear& linear, int64_t threads) {
  if (linear.rows == 0) return;
  const Rows rows(linear, threads);
  const Cut cut(linear, threads);
  for_each(cut.tasks(), threads, [&](int64_t i, int64_t) {
    CbgenLinear part = linear;
    part.next = weights_behind(i, linear, cut, threads);
    rows.multiply(part, cut.first_row(i), cut.last_row(i), cut.first_panel(i), cut.last_panel(i));
  });
}

void run_gated(const CbgenLinear& gate, const CbgenLinear& up, float* output, int64_t output_stride,
               int64_t threads) {
  if (gate.rows == 0) return;
  const Rows rows(gate, threads);
  const Cut cut(gate, threads);
  const int64_t together = panels_together(gate.rows), width = together * CBGEN_PANEL;
  const int64_t size = std::min(gate.rows, most_rows(gate)) * width;
  thread_local std::vector<float> memory;
  float* scratch = reserve(memory, threads * 2 * size);
  for_each(cut.tasks(), threads, [&](int64_t i, int64_t thread) {
    float* gates = scratch + thread * 2 * size;
    float* ups = gates + size;
    const int64_t first_row = cut.first_row(i), last_row = cut.last_row(i);
    const int64_t last_panel = cut.last_panel(i);
    const auto multiply = [&](CbgenLinear linear, float* products, int64_t panel, int64_t end,
                              const void* next) {
      linear.output = products - first_row * width - panel * CBGEN_PANEL;
      linear.output_stride = width;
      linear.next = next;
      rows.multiply(linear, first_row, last_row, panel, end);
    };
    for (int64_t panel = cut.first_panel(i); panel < last_panel; panel += together) {
      const int64_t end = std::min(last_panel, panel + together), column = panel * CBGEN_PANEL;
      multiply(gate, gates, panel, end, panel_of(up, panel));
      multiply(up, ups, panel, end,
               end < last_panel ? panel_of(gate, end) : weights_behind(i, gate, cut, threads));
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
