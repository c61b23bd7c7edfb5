// A float32 vector of the instruction set that this file is compiled for, and what the kernels do
// with it. Comparisons, arithmetic and selection are the compiler's own on vector types.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef float vf_anywhere __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu_anywhere __attribute__((vector_size(4 * W), aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_anywhere*>(p) = x; }

// Four floats, which every instruction set has.
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_anywhere __attribute__((vector_size(16), aligned(4), may_alias));

inline v4 load4(const float* p) { return *reinterpret_cast<const v4_anywhere*>(p); }

#if defined(__AVX512F__)

inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand if either is NaN.
inline vf maximum(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf load_float16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#elif defined(__AVX2__)

inline vf splat(float x) { return _mm256_set1_ps(x); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf maximum(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf load_float16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#else

inline vf splat(float x) { return vf{x, x, x, x}; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf maximum(vf a, vf b) { return a > b ? a : b; }
inline vf load_float16(const uint16_t* p) {
  // Exponent and mantissa are moved into place; the product mends the exponent's bias and, being
  // exact, denormals too. Infinities and NaN have the largest exponent and keep it.
  const vu half = vu{p[0], p[1], p[2], p[3]};
  const vu magnitude = half & 0x7fff;
  const vf scaled = reinterpret_cast<vf>(magnitude << 13) * 0x1p112f;
  const vu finite = reinterpret_cast<vu>(scaled);
  const vu value = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000u : finite;
  return reinterpret_cast<vf>(value | (half & 0x8000) << 16);
}

#endif

// 32-bit lanes that hold two bfloat16 each -> the low ones and the high ones.
inline void widen_pairs(const uint16_t* p, vf& low, vf& high) {
  const vu pairs = *reinterpret_cast<const vu_anywhere*>(p);
  low = reinterpret_cast<vf>(pairs << 16);
  high = reinterpret_cast<vf>(pairs & 0xffff0000u);
}

inline float largest_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float lanes[W];
  store(lanes, x);
  v4 most = load4(lanes);
  for (int i = 4; i < W; i += 4) {
    const v4 other = load4(lanes + i);
    most = other > most ? other : most;
  }
  const float a = most[0] > most[2] ? most[0] : most[2], b = most[1] > most[3] ? most[1] : most[3];
  return a > b ? a : b;
#endif
}

// Sum of a vector's lanes, neighbours of half the distance each time.
inline float sum_of(vf x) {
  float lanes[W];
  store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// A minimax fit of 2^f on [-0.5, 0.5] with value 1 at 0, so that 2^0 is exactly 1.
inline vf exp2_of_fraction(vf f) {
  vf p = splat(1.5353362e-4f);
  p = fma(p, f, splat(1.3398875e-3f));
  p = fma(p, f, splat(9.618437e-3f));
  p = fma(p, f, splat(5.5503324e-2f));
  p = fma(p, f, splat(2.4022648e-1f));
  p = fma(p, f, splat(6.931472e-1f));
  return fma(p, f, splat(1.0f));
}

// 2^x to about one unit in the last place; 0 below -126, NaN for NaN.
inline vf exp2(vf x) {
#if defined(__AVX512F__)
  const __mmask16 is_kept = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(is_kept, exp2_of_fraction(x - whole), whole);
#else
  const vf clamped = maximum(splat(-127.0f), x);
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf shifted = clamped + shift;
  const vf whole = shifted - shift;
  const vf power = reinterpret_cast<vf>((reinterpret_cast<vi>(shifted) + 127) << 23);
  const vf result = exp2_of_fraction(clamped - whole) * power;
  return x < -126.0f ? splat(0.0f) : result;
#endif
}

}  // namespace
