// The largest number of a row and where it stands first.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

// Floats whose maximum is found before their places are looked at.
constexpr int64_t LARGEST_CHUNK = 1024;

struct Largest {
  float value;
  bool has_nan;
};

inline Largest largest_of_chunk(const float* x, int64_t size) {
  Largest found{x[0], false};
  int64_t i = 0;
  if (size >= 4 * W) {
    vf most[4];
    vi nan[4] = {};
    for (int v = 0; v < 4; v++) most[v] = load(x + v * W);
    for (; i + 4 * W <= size; i += 4 * W) {
      for (int v = 0; v < 4; v++) {
        const vf value = load(x + i + v * W);
        most[v] = maximum(most[v], value);
        nan[v] |= value != value;
      }
    }
    found.value = largest_of(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
    const vi any = (nan[0] | nan[1]) | (nan[2] | nan[3]);
    for (int lane = 0; lane < W; lane++) found.has_nan |= any[lane] != 0;
  }
  for (; i < size; i++) {
    found.has_nan |= x[i] != x[i];
    if (x[i] > found.value) found.value = x[i];
  }
  return found;
}

// Returns the first place of the largest number, or of what is not a number, if there is any.
int64_t largest(const float* row, int64_t size) {
  float most = 0;
  int64_t chunk = -1;
  for (int64_t begin = 0; begin < size; begin += LARGEST_CHUNK) {
    const int64_t count = size - begin < LARGEST_CHUNK ? size - begin : LARGEST_CHUNK;
    const Largest found = largest_of_chunk(row + begin, count);
    if (found.has_nan) {
      int64_t i = begin;
      while (row[i] == row[i]) i++;
      return i;
    }
    if (chunk < 0 || found.value > most) {
      most = found.value;
      chunk = begin;
    }
  }
  int64_t i = chunk;
  while (row[i] != most) i++;
  return i;
}

}  // namespace
