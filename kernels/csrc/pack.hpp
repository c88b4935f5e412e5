// Packing: rows or columns of a matrix, R at a time, in the order in which a register tile reads them, which is R
// consecutive words for each inner index (or pair of them). FP32 is copied, bf16 widened exactly or kept as pairs.
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

typedef uint32_t QuadWord __attribute__((vector_size(16)));
INLINE QuadWord widen_four(const uint16_t* p) {
    typedef uint16_t QuadHalf __attribute__((vector_size(8)));
    QuadHalf h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, QuadWord);
}

INLINE UInt widen_lanes(const uint16_t* p) {
    Half h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, UInt);
}

// How words are read. A word holds STEP elements along the inner dimension. `four` and `word` with a length read
// along the inner dimension; with `next` (the next element of the inner dimension, or null) they read across it.
struct Fp32 {
    static constexpr int STEP = 1;
    typedef float Element;
    INLINE Quad four(const float* p) {
        Quad q;
        std::memcpy(&q, p, sizeof q);
        return q;
    }
    INLINE Quad four(const float* p, const float*) { return four(p); }
    INLINE float word(const float* p, int64_t) { return *p; }
    INLINE float word(const float* p, const float*) { return *p; }
};
struct Bf16 {
    static constexpr int STEP = 1;
    typedef uint16_t Element;
    INLINE Quad four(const uint16_t* p) { return bits<Quad>(widen_four(p) << 16); }
    INLINE Quad four(const uint16_t* p, const uint16_t*) { return four(p); }
    INLINE float word(const uint16_t* p, int64_t) { return widen(*p); }
    INLINE float word(const uint16_t* p, const uint16_t*) { return widen(*p); }
};
struct Bf16Pairs {
    static constexpr int STEP = 2;
    typedef uint16_t Element;
    INLINE Quad four(const uint16_t* p) {
        Quad q;
        std::memcpy(&q, p, sizeof q);
        return q;
    }
    INLINE Quad four(const uint16_t* p, const uint16_t* next) {
        return bits<Quad>(next ? widen_four(p) | widen_four(next) << 16 : widen_four(p));
    }
    INLINE Vec lanes(const uint16_t* p, const uint16_t* next) {
        return bits<Vec>(next ? widen_lanes(p) | widen_lanes(next) << 16 : widen_lanes(p));
    }
    INLINE float word(const uint16_t* p, int64_t left) {  // the last of an odd number is paired with zero
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

// Words [from, to), a multiple of 4 apart, of rows G to G + 3 of the R rows; `rows` of these four exist.
template <int R, int G, class Source>
INLINE void pack_four(const typename Source::Element* base, int64_t stride, int64_t rows, int64_t from, int64_t to,
                      float* out) {
    constexpr int SIZE = 4 * (R - G < 4 ? R - G : 4);
    for (int64_t k = from; k < to; k += 4) {
        Quad q[4] = {};
        for (int i = 0; i < 4; ++i)
            if (i < rows) q[i] = Source::four(base + (G + i) * stride + k * Source::STEP);
        transpose(q);
        for (int i = 0; i < 4; ++i) std::memcpy(out + (k + i) * R + G, &q[i], SIZE);
    }
}
template <int R, int G, class Source>
INLINE void pack_fours(const typename Source::Element* base, int64_t stride, int64_t rows, int64_t from, int64_t to,
                       float* out) {
    if (rows >= G + 4 || (rows == R && R - G < 4))
        pack_four<R, G, Source>(base, stride, R - G < 4 ? R - G : 4, from, to, out);
    else
        pack_four<R, G, Source>(base, stride, rows - G, from, to, out);
    if constexpr (G + 4 < R) pack_fours<R, G + 4, Source>(base, stride, rows, from, to, out);
}

// `rows` <= R rows of x, whose inner dimension is contiguous, from their element `from` on; the other rows of
// the R are zero.
template <int R, class Source>
void pack_inner(const Matrix& x, int64_t row, int64_t rows, int64_t from, int64_t width, float* out) {
    constexpr int64_t LINE = 64 / sizeof(typename Source::Element) / Source::STEP;  // words in a cache line
    const auto* base = static_cast<const typename Source::Element*>(x.data) + row * x.stride + from;
    const int64_t n = words(width, Source::STEP == 2), quads = width / Source::STEP / 4 * 4;
    // 4 rows at a time, one cache line of each: rows a power of two apart map to the same few L1 sets
    int64_t k = 0;
    for (; k + LINE <= quads; k += LINE) pack_fours<R, 0, Source>(base, x.stride, rows, k, k + LINE, out);
    pack_fours<R, 0, Source>(base, x.stride, rows, k, quads, out);
    for (k = quads; k < n; ++k)
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
        const auto* next = k * Source::STEP + 1 < width ? p + x.stride : nullptr;
        float* to = out + k * R;
        int r = 0;
        if constexpr (Source::STEP == 2)
            if (columns == R)
                for (; r + LANES <= R; r += LANES) store(to + r, Source::lanes(p + r, next ? next + r : next));
        if (columns == R)
            for (; r + 4 <= R; r += 4) {
                Quad q = Source::four(p + r, next ? next + r : next);
                std::memcpy(to + r, &q, sizeof q);
            }
        for (; r < R; ++r) to[r] = r < columns ? Source::word(p + r, next ? next + r : next) : 0.0f;
    }
}

// As pack_inner for pairs, in the order in which AMX reads A: blocks of R rows by UNIT words, row by row. The words
// beyond the last are zero.
template <int R, int64_t UNIT>
void pack_inner_by_rows(const Matrix& x, int64_t row, int64_t rows, int64_t from, int64_t width, float* out) {
    const auto* base = static_cast<const uint16_t*>(x.data) + row * x.stride + from;
    for (int r = 0; r < R; ++r) {
        const auto* from_row = base + r * x.stride;
        float* to = out + r * UNIT;
        int64_t k = 0;
        if (r < rows)
            for (; k + 2 * UNIT <= width; k += 2 * UNIT, to += R * UNIT) std::memcpy(to, from_row + k, 4 * UNIT);
        for (; k < width; k += 2 * UNIT, to += R * UNIT) {
            std::memset(to, 0, 4 * UNIT);
            if (r < rows) std::memcpy(to, from_row + k, 2 * (width - k));
        }
    }
}

// As pack_outer for up to UNIT pairs, in the same order.
template <int R, int64_t UNIT>
void pack_outer_by_rows(const Matrix& x, int64_t column, int64_t columns, int64_t from, int64_t width, float* out) {
    alignas(64) float across[UNIT * R] = {};
    pack_outer<R, Bf16Pairs>(x, column, columns, from, width, across);
    for (int64_t k = 0; k < UNIT; k += 4)
        for (int64_t r = 0; r < R; r += 4) {
            Quad q[4];
            for (int i = 0; i < 4; ++i) std::memcpy(&q[i], across + (k + i) * R + r, sizeof q[i]);
            transpose(q);
            for (int i = 0; i < 4; ++i) std::memcpy(out + (r + i) * UNIT + k, &q[i], sizeof q[i]);
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
