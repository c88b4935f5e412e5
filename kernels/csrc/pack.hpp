// Packing: rows or columns of a matrix, R at a time, in the order in which a register tile reads them: for each
// inner index (or pair of them) R consecutive words. FP32 is copied, bf16 widened exactly or kept as pairs.
#pragma once
#include "simd.hpp"

namespace sigmoid_rl {
namespace {

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));

#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, QuadInt{__VA_ARGS__})
#endif

// How four words, or one, are read along the inner dimension; STEP elements make a word.
struct Fp32 {
    static constexpr int STEP = 1;
    typedef float Element;
    INLINE Quad quad(const float* p) {
        Quad q;
        std::memcpy(&q, p, sizeof q);
        return q;
    }
    INLINE float word(const float* p, int64_t) { return *p; }
    INLINE float word(const float* p, const float*) { return *p; }
};
struct Bf16 {
    static constexpr int STEP = 1;
    typedef uint16_t Element;
    INLINE Quad quad(const uint16_t* p) {
        typedef uint16_t Half4 __attribute__((vector_size(8)));
        typedef uint32_t Word4 __attribute__((vector_size(16)));
        Half4 h;
        std::memcpy(&h, p, sizeof h);
        return bits<Quad>(__builtin_convertvector(h, Word4) << 16);
    }
    INLINE float word(const uint16_t* p, int64_t) { return widen(*p); }
    INLINE float word(const uint16_t* p, const uint16_t*) { return widen(*p); }
};
struct Bf16Pairs {
    static constexpr int STEP = 2;
    typedef uint16_t Element;
    INLINE Quad quad(const uint16_t* p) {
        Quad q;
        std::memcpy(&q, p, sizeof q);
        return q;
    }
    INLINE float word(const uint16_t* p, int64_t left) {  // an odd last one is paired with zero
        return bits<float>(uint32_t(p[0]) | (left > 1 ? uint32_t(p[1]) << 16 : 0));
    }
    INLINE float word(const uint16_t* p, const uint16_t* next) {
        return bits<float>(uint32_t(*p) | (next ? uint32_t(*next) << 16 : 0));
    }
};

INLINE int64_t words(int64_t width, bool pairs) { return pairs ? (width + 1) / 2 : width; }
INLINE int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

INLINE void transpose(Quad (&q)[4]) {
    Quad a = SHUFFLE(q[0], q[1], 0, 4, 1, 5), b = SHUFFLE(q[0], q[1], 2, 6, 3, 7);
    Quad c = SHUFFLE(q[2], q[3], 0, 4, 1, 5), d = SHUFFLE(q[2], q[3], 2, 6, 3, 7);
    q[0] = SHUFFLE(a, c, 0, 1, 4, 5);
    q[1] = SHUFFLE(a, c, 2, 3, 6, 7);
    q[2] = SHUFFLE(b, d, 0, 1, 4, 5);
    q[3] = SHUFFLE(b, d, 2, 3, 6, 7);
}

// `rows` <= R rows of x, whose inner dimension is contiguous, from their element `from` on; the other rows of
// the R are zero. Writes up to 3 words beyond the last.
template <int R, class Source>
void pack_inner(const Matrix& x, int64_t row, int64_t rows, int64_t from, int64_t width, float* out) {
    constexpr int GROUPS = (R + 3) / 4;
    const auto* base = static_cast<const typename Source::Element*>(x.data) + row * x.stride + from;
    const int64_t n = words(width, Source::STEP == 2), quads = width / Source::STEP / 4 * 4;
    int64_t k = 0;
    for (; k < quads; k += 4)
        for (int g = 0; g < GROUPS; ++g) {
            Quad q[4] = {};
            for (int i = 0; i < 4; ++i)
                if (4 * g + i < rows) q[i] = Source::quad(base + (4 * g + i) * x.stride + k * Source::STEP);
            transpose(q);
            if (4 * g + 4 <= R)
                for (int i = 0; i < 4; ++i) std::memcpy(out + (k + i) * R + 4 * g, &q[i], sizeof q[i]);
            else
                for (int i = 0; i < 4; ++i) std::memcpy(out + (k + i) * R + 4 * g, &q[i], 4 * (R % 4));
        }
    for (; k < n; ++k)
        for (int r = 0; r < R; ++r)
            out[k * R + r] =
                r < rows ? Source::word(base + r * x.stride + k * Source::STEP, width - k * Source::STEP) : 0.0f;
}

// `columns` <= R columns of x from `column` on, its rows [from, from + width) being the inner dimension; the
// other columns of the R are zero.
template <int R, class Source>
void pack_outer(const Matrix& x, int64_t column, int64_t columns, int64_t from, int64_t width, float* out) {
    const int64_t n = words(width, Source::STEP == 2);
    for (int64_t k = 0; k < n; ++k) {
        const auto* p = static_cast<const typename Source::Element*>(x.data) + (from + k * Source::STEP) * x.stride
                        + column;
        const auto* next = Source::STEP == 2 && k * 2 + 1 < width ? p + x.stride : nullptr;
        float* to = out + k * R;
        if (columns == R && (next || Source::STEP == 1))
            for (int r = 0; r < R; ++r) to[r] = Source::word(p + r, next ? next + r : p);
        else
            for (int r = 0; r < R; ++r) to[r] = r < columns ? Source::word(p + r, next ? next + r : next) : 0.0f;
    }
}

template <int R>
INLINE void pack_inner(const Matrix& x, bool pairs, int64_t row, int64_t rows, int64_t from, int64_t width,
                       float* out) {
    pairs    ? pack_inner<R, Bf16Pairs>(x, row, rows, from, width, out)
    : x.bf16 ? pack_inner<R, Bf16>(x, row, rows, from, width, out)
             : pack_inner<R, Fp32>(x, row, rows, from, width, out);
}

template <int R>
INLINE void pack_outer(const Matrix& x, bool pairs, int64_t column, int64_t columns, int64_t from, int64_t width,
                       float* out) {
    pairs    ? pack_outer<R, Bf16Pairs>(x, column, columns, from, width, out)
    : x.bf16 ? pack_outer<R, Bf16>(x, column, columns, from, width, out)
             : pack_outer<R, Fp32>(x, column, columns, from, width, out);
}

}  // namespace
}  // namespace sigmoid_rl
