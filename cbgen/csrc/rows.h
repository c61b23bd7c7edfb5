// Addresses of the rows of a register block.
#pragma once

#include <cstdint>

namespace {

// At most twelve rows that lie `stride` elements apart, at one place of their depth. Four registers
// reach them all, as an address may add one or two strides to a register. Left to itself the compiler
// keeps twelve, which is more than there are for addresses, and moves some of them through vector
// registers in the inner loop: that costs multiply-adds.
template <class T, int ROWS>
class RowAddresses {
 public:
  RowAddresses(const T* first, int64_t stride)
      : a_(first),
        b_(ROWS > 3 ? first + 3 * stride : first),
        c_(ROWS > 6 ? first + 6 * stride : first),
        d_(ROWS > 9 ? first + 9 * stride : first),
        stride_(stride) {
    static_assert(ROWS <= 12, "");
  }

  const T* row(int r) const {
    return (r < 3 ? a_ : r < 6 ? b_ : r < 9 ? c_ : d_) + r % 3 * stride_;
  }

  void advance(int64_t elements) {
    // Hides that the four are related, or the compiler would make twelve of them again.
    asm("" : "+r"(a_), "+r"(b_), "+r"(c_), "+r"(d_));
    a_ += elements;
    b_ += elements;
    c_ += elements;
    d_ += elements;
  }

 private:
  const T *a_, *b_, *c_, *d_;
  const int64_t stride_;
};

}  // namespace
