// The interface of one instruction set's build of the kernels; each isa_*.cpp defines one `Kernels`.
#pragma once
#include <cstdint>

namespace sigmoid_rl {

// A row-major matrix of FP32 or bf16 values whose rows are `stride` elements apart.
struct Matrix {
    const void* data;
    int64_t rows, columns, stride;
    bool bf16;
};

// How a row's logits z are transformed before the softmax: u = cap · tanh(z / cap) · inverse_temperature.
struct Rows {
    const int64_t* targets;            // (C,) columns; outside [0, V): in another shard
    const float* inverse_temperature;  // (C,)
    float cap;                         // 0 for none
};

// Statistics of one row over one tile of the vocabulary; the target's column contributes to the anchor only.
struct Partial {
    float anchor;  // max_j u_j
    float others;  // Σ_{j≠y} e^{u_j − anchor}
    float dot;     // Σ_{j≠y} e^{u_j − anchor} (u_j − anchor)
};

// Coefficients of the logits' gradient, (C,) each: e^v (a + b (v + k)), v = u − anchor, and `target` at the target.
struct Coefficients {
    const float *anchor, *a, *b, *k, *target;  // b and k are both null or both set
};

constexpr int64_t PANEL_WORDS = 1 << 17;  // of W packed at a time in `logits`, or one panel: they stay in L2
constexpr int64_t TILE = 2048;  // columns of the vocabulary per `Partial`

namespace {  // one copy per instruction set: the linker would keep only one of several shared inline functions
// The inner dimension is split into blocks of at most `most`, whose sums are added one after the other in FP32. The
// split depends on the length only, so the order of a sum does not depend on the rest of the batch.
struct Blocks {
    int64_t length, size, count;
    Blocks(int64_t n, int64_t most) : length(n) {
        count = n > most ? (n + most - 1) / most : 1;
        size = ((n + count - 1) / count + 7) / 8 * 8;
        count = n > size ? (n + size - 1) / size : 1;
    }
    int64_t at(int64_t block) const { return block * size; }
    int64_t width(int64_t block) const { return block + 1 < count ? size : length - block * size; }
    // Words of a packed row or column of a whole block, a multiple of `unit`; those of all blocks, for buffers.
    int64_t words(bool pairs, int64_t unit) const { return ((pairs ? (size + 1) / 2 : size) + unit - 1) / unit * unit; }
    int64_t all_words(bool pairs, int64_t unit) const { return count * words(pairs, unit); }
};
}  // namespace

// Buffers are in 32-bit words: an FP32 value, or a pair of bf16 along the inner dimension.
struct Kernels {
    int64_t mr, nr;  // a register tile is mr rows x nr columns
    int64_t block;   // the inner dimension is split into blocks of at most this
    int64_t unit;    // words of the inner dimension are packed in multiples of this, filled up with zeros
    bool pairs;      // has products of bf16 pairs

    // Packs A of `logits`: rows [first, last) of x, first being a multiple of mr, at their offset in `packed`.
    void (*pack_rows)(const Matrix& x, bool pairs, int64_t first, int64_t last, float* packed);
    // Packs B of `add_d_weight`: columns [first, last) of x, first being a multiple of nr.
    void (*pack_columns)(const Matrix& x, bool pairs, int64_t first, int64_t last, float* packed);

    // out[i, j - first] = Σ_k h[i, k] w[j, k] for all rows and j in [first, last)
    void (*logits)(const float* packed_h, int64_t rows, const Matrix& w, bool pairs, int64_t first, int64_t last,
                   float* out, int64_t stride, float* scratch);
    // out[i, j] = Σ_k dz[i, k] w[k, j] for i in [row0, row1) and j in [column0, column1)
    void (*d_hidden)(const Matrix& dz, const Matrix& w, bool pairs, int64_t row0, int64_t row1, int64_t column0,
                     int64_t column1, float* out, int64_t stride, float* scratch);
    // out[i, j] = Σ_k dz[k, i] h[k, j] for i in [first, last), or += if `add`
    void (*add_d_weight)(const Matrix& dz, const float* packed_h, int64_t columns, bool pairs, int64_t first,
                         int64_t last, bool add, float* out, int64_t stride, float* scratch);

    // `width` <= TILE logits of one row; `target` is relative to z; *u_target is set if it is one of them
    Partial (*row_stats)(const float* z, int64_t width, int64_t target, float inverse_temperature, float cap,
                         float* u_target);
    // row i of z, in place; a bf16 gradient takes the first half of the row's bytes
    void (*row_grads)(float* z, int64_t width, int64_t i, const Rows&, const Coefficients&, bool bf16);
};

extern const Kernels baseline_kernels;
#ifdef SIGMOID_RL_X86
extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels;
#endif
#ifdef SIGMOID_RL_AMX
extern const Kernels amx_kernels;  // for products of bf16 pairs only
#endif
// The code of AVX-512 and of AMX compiled for any machine, for tests.
extern const Kernels emulated_kernels, emulated_amx_kernels;

}  // namespace sigmoid_rl
