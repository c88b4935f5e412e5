// The three GEMMs of a language-model head, built from a register tile of MR rows by NR columns (BLIS's scheme). A
// panel of B, NR wide and one block deep, is packed just before its use and stays in L1 for all of A's tiles.
#pragma once
#include "pack.hpp"

namespace sigmoid_rl {
namespace {

constexpr int MR = SIGMOID_RL_MR, NR = 2 * LANES;
constexpr bool AMX = SIGMOID_RL_UNIT > 1;     // A is packed by rows, and only pairs are multiplied
constexpr int64_t UNIT = SIGMOID_RL_UNIT;      // words of the inner dimension at a time
// Sums of longer blocks err more, except that AMX sums 32 products from zero before it adds them to the others.
constexpr int64_t BLOCK = AMX ? 640 : 256;
constexpr int64_t PART = 192;  // rows of A at a time, if A is packed block by block
typedef Vec Tile[MR][2];

INLINE void multiply_pairs(Vec& sum, uint32_t a, Vec b);  // sum += both products of each pair
INLINE void multiply_amx(int64_t n, const float* a, const float* b, Tile& c);
struct TileRegisters {  // configured for the lifetime of this object, in its thread
    TileRegisters();
    ~TileRegisters();
};

// c = Σ_k a[k] b[k] over n packed words
template <bool PAIRS>
INLINE void multiply(int64_t n, const float* __restrict a, const float* __restrict b, Tile& c) {
    if constexpr (AMX) return multiply_amx(n, a, b, c);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) c[i][0] = c[i][1] = Vec{};
    for (int64_t k = 0; k < n; ++k, a += MR, b += NR) {
        const Vec b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            if constexpr (PAIRS) {
                multiply_pairs(c[i][0], bits<uint32_t>(a[i]), b0);
                multiply_pairs(c[i][1], bits<uint32_t>(a[i]), b1);
            } else {
                c[i][0] += b0 * a[i];
                c[i][1] += b1 * a[i];
            }
        }
    }
}

// Asks for a tile of the output, which lies in as many pages as it has rows, before the product is complete.
INLINE void prefetch_tile(const float* out, int64_t stride, int64_t m) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < NR; j += 16) __builtin_prefetch(out + i * stride + j, 1);
}
// Writes or adds the first m rows and n columns of a tile.
template <bool ADD>
INLINE void put(const Tile& c, float* out, int64_t stride, int64_t m, int64_t n) {
    if (m == MR && n == NR) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            float* p = out + i * stride;
            store(p, ADD ? load(p) + c[i][0] : c[i][0]);
            store(p + LANES, ADD ? load(p + LANES) + c[i][1] : c[i][1]);
        }
        return;
    }
    float part[MR][NR];
    std::memcpy(part, c, sizeof part);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) out[i * stride + j] = ADD ? out[i * stride + j] + part[i][j] : part[i][j];
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t packed_words(int64_t width, bool pairs) { return tiles(words(width, pairs), UNIT) * UNIT; }

// A: MR rows of x, whose inner dimension is contiguous, in the order in which `multiply` reads them.
INLINE void pack_a_inner(const Matrix& x, bool pairs, int64_t row, int64_t rows, int64_t from, int64_t width,
                         float* out) {
    if constexpr (AMX)
        pack_inner_by_rows<MR, UNIT>(x, row, rows, from, width, out);
    else
        pack_inner<MR>(x, pairs, row, rows, from, width, out);
}
// A: MR columns of x, whose rows are the inner dimension, in the same order.
INLINE void pack_a_outer(const Matrix& x, bool pairs, int64_t column, int64_t columns, int64_t from, int64_t width,
                         float* out) {
    if constexpr (AMX)
        pack_outer_by_rows<MR, UNIT>(x, column, columns, from, width, out);
    else
        pack_outer<MR>(x, pairs, column, columns, from, width, out);
}
// Zeros after the packed words of a panel of B, up to a multiple of UNIT.
INLINE void pad_b(bool pairs, int64_t width, float* out) {
    const int64_t n = words(width, pairs);
    if constexpr (AMX) std::memset(out + n * NR, 0, sizeof(float) * NR * (packed_words(width, pairs) - n));
}

void pack_rows(const Matrix& x, bool pairs, int64_t first, int64_t last, float* packed) {
    const Blocks blocks(x.columns, BLOCK);
    const int64_t height = tiles(x.rows, MR) * MR;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t n = packed_words(blocks.width(b), pairs);
        float* to = packed + height * b * blocks.words(pairs, UNIT);
        for (int64_t i = first; i < last; i += MR)
            pack_a_inner(x, pairs, i, least(MR, last - i), blocks.at(b), blocks.width(b), to + i * n);
    }
}

void pack_columns(const Matrix& x, bool pairs, int64_t first, int64_t last, float* packed) {
    const Blocks blocks(x.rows, BLOCK);
    const int64_t height = tiles(x.columns, NR) * NR;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t n = packed_words(blocks.width(b), pairs);
        float* to = packed + height * b * blocks.words(pairs, UNIT);
        for (int64_t j = first; j < last; j += NR) {
            pack_outer<NR>(x, pairs, j, least(NR, last - j), blocks.at(b), blocks.width(b), to + j * n);
            pad_b(pairs, blocks.width(b), to + j * n);
        }
    }
}

template <bool PAIRS>
void logits_of(const float* h, int64_t rows, const Matrix& w, int64_t first, int64_t last, float* out,
               int64_t stride, float* scratch) {
    const TileRegisters registers;
    const Blocks blocks(w.columns, BLOCK);
    const int64_t height = tiles(rows, MR) * MR, depth = blocks.words(PAIRS, UNIT);
    const int64_t panel = NR * blocks.all_words(PAIRS, UNIT);  // words of NR rows of W
    const int64_t group = PANEL_WORDS > panel ? PANEL_WORDS / panel * NR : NR;
    float *sums = scratch, *panels = scratch + MR * NR;  // sums of the blocks so far
    for (int64_t start = first; start < last; start += group) {
        const int64_t end = least(last, start + group);
        for (int64_t j = start; j < end; j += NR)
            for (int64_t b = 0; b < blocks.count; ++b) {
                float* to = panels + (j - start) / NR * panel + b * depth * NR;
                pack_inner<NR>(w, PAIRS, j, least(NR, end - j), blocks.at(b), blocks.width(b), to);
                pad_b(PAIRS, blocks.width(b), to);
            }
        for (int64_t i = 0; i < rows; i += MR)
            for (int64_t j = start; j < end; j += NR) {  // along the output's rows, which are pages apart
                float* to = out + i * stride + j - first;
                prefetch_tile(to, stride, least(MR, rows - i));
                for (int64_t b = 0; b < blocks.count; ++b) {
                    const int64_t n = packed_words(blocks.width(b), PAIRS), last_block = b + 1 == blocks.count;
                    const float* from = panels + (j - start) / NR * panel + b * depth * NR;
                    Tile c;
                    multiply<PAIRS>(n, h + height * b * depth + i * n, from, c);
#pragma GCC unroll 16
                    for (int r = 0; r < MR; ++r)
                        for (int v = 0; v < 2; ++v) {
                            float* s = sums + r * NR + v * LANES;
                            if (b > 0) c[r][v] += load(s);
                            if (!last_block) store(s, c[r][v]);
                        }
                    if (last_block) put<false>(c, to, stride, least(MR, rows - i), least(NR, end - j));
                }
            }
    }
}

// The height of even parts of n rows, small enough that a block of A fits L2.
INLINE int64_t part_of(int64_t n) { return tiles(tiles(n, MR), tiles(n, PART)) * MR; }

template <bool PAIRS>
void d_hidden_of(const Matrix& dz, const Matrix& w, int64_t row0, int64_t row1, int64_t column0, int64_t column1,
                 float* out, int64_t stride, float* scratch) {
    const TileRegisters registers;
    const Blocks blocks(w.rows, BLOCK);
    const int64_t part = part_of(row1 - row0);
    float *a = scratch, *panels = scratch + BLOCK * part;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t from = blocks.at(b), width = blocks.width(b), n = packed_words(width, PAIRS);
        for (int64_t k = 0; k < width; k += 8)
            for (int64_t j = column0; j < column1; j += NR)
                pack_outer<NR>(w, PAIRS, j, least(NR, column1 - j), from + k, least(8, width - k),
                               panels + (j - column0) * n + words(k, PAIRS) * NR);
        for (int64_t j = column0; j < column1; j += NR) pad_b(PAIRS, width, panels + (j - column0) * n);
        for (int64_t first = row0; first < row1; first += part) {
            const int64_t last = least(row1, first + part);
            for (int64_t i = first; i < last; i += MR)
                pack_a_inner(dz, PAIRS, i, least(MR, last - i), from, width, a + (i - first) * n);
            for (int64_t j = column0; j < column1; j += NR) {
                const int64_t columns = least(NR, column1 - j);
                for (int64_t i = first; i < last; i += MR) {
                    Tile c;
                    float* to = out + i * stride + j;
                    multiply<PAIRS>(n, a + (i - first) * n, panels + (j - column0) * n, c);
                    if (b == 0)
                        put<false>(c, to, stride, least(MR, last - i), columns);
                    else
                        put<true>(c, to, stride, least(MR, last - i), columns);
                }
            }
        }
    }
}

template <bool PAIRS>
void add_d_weight_of(const Matrix& dz, const float* h, int64_t columns, int64_t first, int64_t last, bool add,
                     float* out, int64_t stride, float* a) {
    constexpr int64_t DEPTH = AMX ? 2 * UNIT : 4;  // few rows at a time: their lines may map to one L1 set
    const TileRegisters registers;
    const Blocks blocks(dz.rows, BLOCK);
    const int64_t height = tiles(columns, NR) * NR;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t from = blocks.at(b), width = blocks.width(b), n = packed_words(width, PAIRS);
        const float* panels = h + height * b * blocks.words(PAIRS, UNIT);
        for (int64_t k = 0; k < width; k += DEPTH)
            for (int64_t i = first; i < last; i += MR)
                pack_a_outer(dz, PAIRS, i, least(MR, last - i), from + k, least(DEPTH, width - k),
                             a + (i - first) * n + words(k, PAIRS) * MR);
        for (int64_t i = first; i < last; i += MR)
            for (int64_t j = 0; j < columns; j += NR) {
                Tile c;
                multiply<PAIRS>(n, a + (i - first) * n, panels + j * n, c);
                float* to = out + i * stride + j;
                if (add || b > 0)
                    put<true>(c, to, stride, least(MR, last - i), least(NR, columns - j));
                else
                    put<false>(c, to, stride, least(MR, last - i), least(NR, columns - j));
            }
    }
}

void logits(const float* h, int64_t rows, const Matrix& w, bool pairs, int64_t first, int64_t last, float* out,
            int64_t stride, float* scratch) {
    (pairs ? logits_of<true> : logits_of<false>)(h, rows, w, first, last, out, stride, scratch);
}

void d_hidden(const Matrix& dz, const Matrix& w, bool pairs, int64_t row0, int64_t row1, int64_t column0,
              int64_t column1, float* out, int64_t stride, float* scratch) {
    (pairs ? d_hidden_of<true> : d_hidden_of<false>)(dz, w, row0, row1, column0, column1, out, stride, scratch);
}

void add_d_weight(const Matrix& dz, const float* h, int64_t columns, bool pairs, int64_t first, int64_t last,
                  bool add, float* out, int64_t stride, float* scratch) {
    (pairs ? add_d_weight_of<true> : add_d_weight_of<false>)(dz, h, columns, first, last, add, out, stride, scratch);
}

}  // namespace
}  // namespace sigmoid_rl
