// Memory that stays with the calling thread from step to step.
#pragma once

#include <cstdint>
#include <vector>

// At least so many floats, aligned to a cache line, of any content.
inline float* reserve(std::vector<float>& memory, int64_t floats) {
  constexpr int64_t LINE = 16;  // floats of a cache line
  if (static_cast<int64_t>(memory.size()) < floats + LINE) memory.resize(floats + LINE);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}
