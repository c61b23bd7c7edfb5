// Segments of keys that several requests attend to, each with one query.
//
// Requests that begin with the same tokens share the blocks of those. One task then reads a segment
// for all of them and fills its register blocks with their rows, where each by itself would have few
// (Juravsky et al. 2024, "Hydragen"). What a segment gives a row stays the same, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

class SharedSegments {
 public:
  // Requests order()[begin, end) share a segment.
  struct Run {
    int64_t segment;
    int64_t begin;
    int64_t end;
  };

  // Layers of one group share what is found.
  explicit SharedSegments(const CbgenAttention& a) : counts_(a.requests) {
    // Else a task holds the rows of one request alone.
    if (2 * (a.heads / a.kv_heads) > CBGEN_ATTENTION_ROWS) return;
    for (int64_t request = 0; request < a.requests; request++) {
      const bool is_single = a.query_starts[request + 1] - a.query_starts[request] == 1;
      if (is_single && sees_first_key(a, request)) order_.push_back(request);
    }
    find(a, 0, static_cast<int64_t>(order_.size()), 0);
  }

  const std::vector<Run>& runs() const { return runs_; }
  const std::vector<int64_t>& order() const { return order_; }
  // The first so many segments of a request are shared.
  int64_t count(int64_t request) const { return counts_[request]; }

 private:
  static bool sees_first_key(const CbgenAttention& a, int64_t request) {
    const int64_t keys = a.key_lens[request];
    return (a.window == 0 || keys <= a.window) && (a.chunk == 0 || keys <= a.chunk);
  }

  // Finds who shares this segment and those behind it, among requests that share those before it.
  void find(const CbgenAttention& a, int64_t begin, int64_t end, int64_t segment) {
    const int64_t last_key = (segment + 1) * CBGEN_SEGMENT - 1;
    const auto first = order_.begin() + begin;
    end = std::partition(first, order_.begin() + end,
                         [&](int64_t request) { return last_key < a.key_lens[request]; }) -
          order_.begin();
    if (end - begin < 2) return;
    const int64_t first_block = segment * CBGEN_SEGMENT / a.page_size;
    const int64_t end_block = last_key / a.page_size + 1;
    const auto blocks = [&](int64_t request) {
      return a.block_tables + request * a.block_table_stride;
    };
    std::sort(first, order_.begin() + end, [&](int64_t left, int64_t right) {
      return std::lexicographical_compare(blocks(left) + first_block, blocks(left) + end_block,
                                          blocks(right) + first_block, blocks(right) + end_block);
    });
    for (int64_t run = begin; run < end;) {
      const int64_t* wanted = blocks(order_[run]);
      int64_t stop = run + 1;
      while (stop < end && std::equal(wanted + first_block, wanted + end_block,
                                      blocks(order_[stop]) + first_block)) {
        stop++;
      }
      if (stop - run > 1) {
        runs_.push_back({segment, run, stop});
        for (int64_t i = run; i < stop; i++) counts_[order_[i]] = segment + 1;
        find(a, run, stop, segment + 1);  // changes the order within the run alone
      }
      run = stop;
    }
  }

  std::vector<int64_t> order_;
  std::vector<int64_t> counts_;
  std::vector<Run> runs_;
};
