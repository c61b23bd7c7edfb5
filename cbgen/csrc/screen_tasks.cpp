// Finds the largest column of each row of a product, and computes little of it.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace {

// Panels of a task, and rows of it that are scored together: scores, weights and rows stay in the
// second-level cache.
constexpr int64_t PANELS = 8;
constexpr int64_t ROWS = 96;
// Rows whose largest bounds are found together.
constexpr int64_t BEGUN_ROWS = 8;
// Rows of which one panel is computed together.
constexpr int64_t EXACT_ROWS = 12;

// A column and what stands there.
struct Found {
  float value;
  int64_t place;  // negative = nothing was found

  // Whether this one is to be chosen: what is not a number before all else, and the first of equals.
  bool beats(const Found& other) const {
    if (other.place < 0) return place >= 0;
    if (place < 0) return false;
    const bool is_nan = value != value, is_other_nan = other.value != other.value;
    if (is_nan != is_other_nan) return is_nan;
    if (!is_nan && value != other.value) return value > other.value;
    return place < other.place;
  }
};

class Screen {
 public:
  Screen(const CbgenBestColumns& best, int64_t threads)
      : best_(best),
        linear_(best.linear),
        rows_(linear_.rows),
        panels_((linear_.columns + CBGEN_PANEL - 1) / CBGEN_PANEL),
        tasks_((panels_ + PANELS - 1) / PANELS),
        threads_(threads),
        kernels_(current_kernels()),
        row_bytes_(kernels_.int8->row_bytes(linear_.depth)) {
    scratch_size_ = std::max({ROWS * PANELS * CBGEN_PANEL, kernels_.int8->scratch(linear_.depth),
                              EXACT_ROWS * (linear_.depth + CBGEN_PANEL)});
    scratch_size_ = (scratch_size_ + 15) / 16 * 16;
    thread_local std::vector<float> memory;
    quantized_ = reinterpret_cast<char*>(reserve(
        memory, rows_ * row_bytes_ / 4 + threads_ * scratch_size_ + panels_ * rows_));
    scratch_ = reinterpret_cast<float*>(quantized_ + rows_ * row_bytes_);
    bounds_ = scratch_ + threads_ * scratch_size_;
    thread_local std::vector<Found> found;
    found.assign((threads_ + 1) * rows_, Found{0.0f, -1});
    best_of_row_ = found.data();
    found_ = best_of_row_ + rows_;
    thread_local std::vector<int64_t> first_panels;
    first_panels.resize(rows_);
    first_panels_ = first_panels.data();
  }

  void run() {
    for_each(rows_, threads_, [&](int64_t row, int64_t thread) {
      kernels_.int8->quantize(linear_, row, row + 1, quantized_, scratch(thread));
    });
    for_each(tasks_, threads_, [&](int64_t task, int64_t thread) { bound(task, scratch(thread)); });
    for_each((rows_ + BEGUN_ROWS - 1) / BEGUN_ROWS, threads_, [&](int64_t i, int64_t thread) {
      begin(i * BEGUN_ROWS, std::min(rows_, (i + 1) * BEGUN_ROWS), scratch(thread));
    });
    for_each(tasks_, threads_, [&](int64_t task, int64_t thread) {
      const int64_t last = std::min(panels_, (task + 1) * PANELS);
      for (int64_t panel = task * PANELS; panel < last; panel++) check(panel, thread);
    });
    for (int64_t row = 0; row < rows_; row++) {
      for (int64_t thread = 0; thread < threads_; thread++) {
        const Found& other = found_[thread * rows_ + row];
        if (other.beats(best_of_row_[row])) best_of_row_[row] = other;
      }
      best_.places[row] = best_of_row_[row].place;
      best_.values[row] = best_of_row_[row].value;
    }
  }

 private:
  float* scratch(int64_t thread) { return scratch_ + thread * scratch_size_; }

  // Bounds the products of all rows with the panels of a task.
  void bound(int64_t task, float* scores) {
    const int64_t first = task * PANELS, last = std::min(panels_, first + PANELS);
    CbgenLinear rounded = linear_;
    rounded.weights = best_.rounded;
    rounded.format = CBGEN_INT8;
    rounded.output_stride = (last - first) * CBGEN_PANEL;
    for (int64_t row = 0; row < rows_; row += ROWS) {
      const int64_t end = std::min(rows_, row + ROWS);
      rounded.output = scores - row * rounded.output_stride - first * CBGEN_PANEL;
      kernels_.int8->linear(rounded, quantized_, row, end, first, last);
      CbgenScores s{};
      s.scores = scores;
      s.rows = end - row;
      s.panels = last - first;
      s.columns = linear_.columns - first * CBGEN_PANEL;
      s.quantized = quantized_ + row * row_bytes_;
      s.row_bytes = row_bytes_;
      s.errors = best_.errors + first * 2 * CBGEN_PANEL;
      s.bounds = bounds_ + first * rows_ + row;
      s.bounds_stride = rows_;
      kernels_.bound_scores(s);
    }
  }

  // Computes the panel of the largest bound of some rows: what is found there rules out most others.
  void begin(int64_t first_row, int64_t last_row, float* output) {
    int64_t* firsts = first_panels_ + first_row;
    float most[BEGUN_ROWS];
    const int64_t count = last_row - first_row;
    for (int64_t r = 0; r < count; r++) {
      most[r] = bounds_[first_row + r];
      firsts[r] = 0;
    }
    for (int64_t panel = 1; panel < panels_; panel++) {
      const float* bounds = bounds_ + panel * rows_ + first_row;
      for (int64_t r = 0; r < count; r++) {
        const bool is_larger = bounds[r] > most[r];
        most[r] = is_larger ? bounds[r] : most[r];
        firsts[r] = is_larger ? panel : firsts[r];
      }
    }
    for (int64_t row = first_row; row < last_row; row++) {
      const int64_t panel = first_panels_[row];
      const float* input = linear_.input + row * linear_.input_stride;
      compute(input, linear_.input_stride, 1, panel, output);
      best_of_row_[row] = largest_of(output, panel);
    }
  }

  // Computes a panel for the rows whose largest column may be there.
  void check(int64_t panel, int64_t thread) {
    float* input = scratch(thread);
    float* output = input + EXACT_ROWS * linear_.depth;
    const float* bounds = bounds_ + panel * rows_;
    int64_t chosen[EXACT_ROWS], count = 0;
    for (int64_t row = 0; row < rows_; row++) {
      // Not the other way round: what is not a number rules out nothing.
      const bool is_out = bounds[row] < best_of_row_[row].value;
      if (!is_out && first_panels_[row] != panel) {
        const float* from = linear_.input + row * linear_.input_stride;
        std::copy(from, from + linear_.depth, input + count * linear_.depth);
        chosen[count++] = row;
      }
      if (count == 0 || (count < EXACT_ROWS && row + 1 < rows_)) continue;
      compute(input, linear_.depth, count, panel, output);
      for (int64_t i = 0; i < count; i++) {
        const Found found = largest_of(output + i * CBGEN_PANEL, panel);
        Found& place = found_[thread * rows_ + chosen[i]];
        if (found.beats(place)) place = found;
      }
      count = 0;
    }
  }

  // Computes the exact products of some rows with one panel: [rows][32].
  void compute(const float* input, int64_t input_stride, int64_t rows, int64_t panel,
               float* output) {
    CbgenLinear exact = linear_;
    exact.input = input;
    exact.input_stride = input_stride;
    exact.rows = rows;
    exact.output = output - panel * CBGEN_PANEL;
    exact.output_stride = CBGEN_PANEL;
    kernels_.linear(exact, 0, rows, panel, panel + 1);
  }

  Found largest_of(const float* values, int64_t panel) {
    const int64_t first = panel * CBGEN_PANEL;
    const int64_t place =
        kernels_.largest(values, std::min(CBGEN_PANEL, linear_.columns - first));
    return {values[place], first + place};
  }

  const CbgenBestColumns& best_;
  const CbgenLinear& linear_;
  const int64_t rows_, panels_, tasks_, threads_;
  const CbgenKernels& kernels_;
  const int64_t row_bytes_;
  int64_t scratch_size_;
  char* quantized_;        // the rows as int8
  float* scratch_;         // of each thread
  float* bounds_;          // [panels][rows]
  Found* best_of_row_;     // [rows]
  Found* found_;           // [threads][rows]
  int64_t* first_panels_;  // [rows] those that were computed first
};

}  // namespace

CBGEN_API void cbgen_best_columns(const CbgenBestColumns* best, int64_t threads) {
  if (best->linear.rows == 0) return;
  Team::run(threads, [&] { Screen(*best, threads).run(); });
}
