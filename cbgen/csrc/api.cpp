// The C interface of the kernel library: chooses the instruction set, and packs weights.
//
// The caller checks types, shapes and strides; nothing here can fail but memory running out.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "int8_packing.h"
#include "kernels.h"
#include "packing.h"
#include "parallel.h"

namespace {

// Fewer floats are read before another thread is awake.
constexpr int64_t FLOATS_TO_SHARE = 1 << 16;

bool is_supported(const CbgenKernels* kernels) {
#if defined(__x86_64__)
  if (kernels == &cbgen_avx512vnni) {
    return is_supported(&cbgen_avx512) && __builtin_cpu_supports("avx512vnni");
  }
  if (kernels == &cbgen_avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (kernels == &cbgen_avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return kernels == &cbgen_portable;
}

const CbgenKernels* const ALL[] = {
#if defined(__x86_64__)
    &cbgen_avx512vnni,
    &cbgen_avx512,
    &cbgen_avx2,
#endif
    &cbgen_portable,
};

const CbgenKernels* best() {
  return *std::find_if(std::begin(ALL), std::end(ALL), is_supported);
}

std::atomic<const CbgenKernels*> selected{best()};

}  // namespace

const CbgenKernels& current_kernels() { return *selected.load(std::memory_order_relaxed); }

// Changes with the functions and structures of this interface.
CBGEN_API int32_t cbgen_interface() { return 5; }

// Gives the library its threads: the address of GOMP_parallel in the OpenMP runtime of the process.
CBGEN_API void cbgen_use_threads(RunParallel run) { run_parallel.store(run); }

// Sizes of the structures, by which a test compares them with their description in Python.
CBGEN_API int32_t cbgen_linear_bytes() { return sizeof(CbgenLinear); }
CBGEN_API int32_t cbgen_attention_bytes() { return sizeof(CbgenAttention); }

// Names of the instruction sets that this build and this machine have, best first, with spaces
// between.
CBGEN_API const char* cbgen_instruction_sets() {
  static const std::string names = [] {
    std::string found;
    for (const CbgenKernels* kernels : ALL) {
      if (is_supported(kernels)) found += std::string(found.empty() ? "" : " ") + kernels->name;
    }
    return found;
  }();
  return names.c_str();
}

CBGEN_API const char* cbgen_selected() { return selected.load()->name; }

// Makes all later calls use the instruction set of that name; -1 if this machine lacks it.
CBGEN_API int32_t cbgen_select(const char* name) {
  for (const CbgenKernels* kernels : ALL) {
    if (is_supported(kernels) && std::strcmp(kernels->name, name) == 0) {
      selected.store(kernels);
      return 0;
    }
  }
  return -1;
}

// The format that holds every value of a matrix exactly in the fewest bits, bfloat16 before float16.
CBGEN_API int32_t cbgen_exact_format(const void* data, int32_t format, int64_t rows,
                                     int64_t columns, int64_t row_stride, int64_t column_stride,
                                     int64_t threads) {
  if (format == CBGEN_BFLOAT16) return CBGEN_BFLOAT16;
  const packing::Matrix matrix{data, row_stride, column_stride, format};
  std::atomic<bool> bfloat16{true}, float16{true};
  packing::with_values(format, [&](auto source) {
    for_each(rows, threads, [&](int64_t row, int64_t) {
      if (!bfloat16 && !float16) return;
      bool is_bfloat16, is_float16;
      packing::exact_row<decltype(source)>(matrix, row, columns, is_bfloat16, is_float16);
      if (!is_bfloat16) bfloat16 = false;
      if (!is_float16) float16 = false;
    });
  });
  if (bfloat16) return CBGEN_BFLOAT16;
  return float16 ? CBGEN_FLOAT16 : CBGEN_FLOAT32;
}

// Writes the packed form of a matrix [rows][columns], whose rows become the columns of a product.
CBGEN_API void cbgen_pack(const void* data, int32_t format, int64_t rows, int64_t columns,
                          int64_t row_stride, int64_t column_stride, int32_t packed_format,
                          void* packed, int64_t threads) {
  const packing::Matrix matrix{data, row_stride, column_stride, format};
  const int64_t panel_bytes = columns * CBGEN_PANEL * packing::item_size(packed_format);
  packing::with_values(format, [&](auto source) {
    packing::with_values(packed_format, [&](auto target) {
      for_each((rows + CBGEN_PANEL - 1) / CBGEN_PANEL, threads, [&](int64_t panel, int64_t) {
        const int64_t first = panel * CBGEN_PANEL;
        packing::pack_panel<decltype(source), decltype(target)>(
            matrix, first, std::min(CBGEN_PANEL, rows - first), columns, packed_format,
            static_cast<char*>(packed) + panel * panel_bytes);
      });
    });
  });
}

// Rounds a matrix to int8 and writes its packed form.
CBGEN_API void cbgen_pack_int8(const void* data, int32_t format, int64_t rows, int64_t columns,
                               int64_t row_stride, int64_t column_stride, void* packed,
                               int64_t threads) {
  const packing::Matrix matrix{data, row_stride, column_stride, format};
  const int64_t panel_bytes = packing::int8_panel_bytes(columns);
  packing::with_values(format, [&](auto source) {
    for_each((rows + CBGEN_PANEL - 1) / CBGEN_PANEL, threads, [&](int64_t panel, int64_t) {
      const int64_t first = panel * CBGEN_PANEL;
      packing::pack_int8_panel<decltype(source)>(matrix, first,
                                                 std::min(CBGEN_PANEL, rows - first), columns,
                                                 static_cast<char*>(packed) + panel * panel_bytes);
    });
  });
}

// Reads rows of the matrix back from its packed form: output[i] = matrix[rows[i]].
CBGEN_API void cbgen_unpack_rows(const void* packed, int32_t format, int64_t columns,
                                 const int64_t* rows, int64_t count, float* output,
                                 int64_t threads) {
  if (count * columns < FLOATS_TO_SHARE) threads = 1;
  if (format == CBGEN_INT8) {
    for_each(count, threads, [&](int64_t i, int64_t) {
      packing::unpack_int8_row(packed, rows[i], columns, output + i * columns);
    });
    return;
  }
  packing::with_values(format, [&](auto source) {
    for_each(count, threads, [&](int64_t i, int64_t) {
      packing::unpack_row<decltype(source)>(packed, rows[i], columns, format, output + i * columns);
    });
  });
}

// places[i] = the first place of the largest number of row i, or of what is not a number in it.
CBGEN_API void cbgen_largest(const float* rows, int64_t stride, int64_t count, int64_t size,
                             int64_t* places, int64_t threads) {
  for_each(count, threads, [&](int64_t i, int64_t) {
    places[i] = current_kernels().largest(rows + i * stride, size);
  });
}

// Multiplies and adds in registers on every thread, so many rounds; returns the floating-point
// operations of all of them.
CBGEN_API int64_t cbgen_multiply_add(int64_t rounds, int64_t threads) {
  std::atomic<int64_t> operations{0};
  for_each(threads, threads, [&](int64_t, int64_t) {
    float result = 0.5f;
    operations += rounds * current_kernels().multiply_add(rounds, &result);
  });
  return operations;
}
