// Vectors of LANES floats, and functions on them. Written with the vector extensions of GCC and Clang only, so that
// every instruction set compiles the same source. Everything is static, so that the linker cannot merge two builds.
#pragma once
#include <cstdint>
#include <cstring>

#include "isa.hpp"

namespace sigmoid_rl {
namespace {

constexpr int LANES = SIGMOID_RL_LANES;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t UInt __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
INLINE Vec all(float x) { return x - Vec{}; }

template <class To, class From>
INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

INLINE float widen(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
INLINE Half to_bf16(Vec x) {
    UInt u = bits<UInt>(x);
    UInt rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    UInt nan = UInt{} + 0x7fc0u;
    return __builtin_convertvector(x != x ? nan : rounded, Half);
}
INLINE uint16_t to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    return x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// e^x within 1 ulp for x <= 88.3; 0 below -87.33 (no denormals), NaN for NaN. Polynomial: Cephes' expf.
INLINE Vec exp(Vec x) {
    const Vec low = all(-87.3365f), high = all(89.0f), magic = all(12582912.0f);  // 1.5 · 2^23 rounds to integers
    Vec c = x > high ? high : x;
    Vec t = c * 1.44269504088896341f + magic;
    Vec n = t - magic;
    Vec r = c - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    Vec scale = bits<Vec>((bits<UInt>(t) + 127u) << 23);  // 2^n: the low bits of t are n
    return x < low ? Vec{} : p * scale;
}

struct Tanh {
    Vec value, slope;  // tanh x, and 1 − tanh² x without the cancellation
};
INLINE Tanh tanh(Vec x) {
    const Int sign = bits<Int>(x) & INT32_MIN;
    Vec abs = bits<Vec>(bits<Int>(x) & INT32_MAX);
    Vec e = exp(abs * -2.0f);
    Vec large = (1.0f - e) / (1.0f + e);
    Vec s = x * x;  // Cephes' tanhf below 0.625
    Vec p = s * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    Vec small = (p * s) * x + x;
    Vec d = 1.0f + e;
    return {abs < 0.625f ? small : bits<Vec>(bits<Int>(large) | sign), 4.0f * e / (d * d)};
}

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

}  // namespace
}  // namespace sigmoid_rl
