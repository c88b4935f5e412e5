// The table of one instruction set, included by its isa_*.cpp, which sets SIGMOID_RL_LANES, SIGMOID_RL_MR,
// SIGMOID_RL_PAIRS and, for AMX, SIGMOID_RL_UNIT. The compiler flags are in CMakeLists.txt.
#pragma once
#ifndef SIGMOID_RL_UNIT
#define SIGMOID_RL_UNIT 1
#endif
#include "gemm.hpp"
#include "rows.hpp"

#define SIGMOID_RL_KERNELS                                                                                        \
    {MR,     NR,       BLOCK,        UNIT,      SIGMOID_RL_PAIRS, pack_rows, pack_columns,                       \
     logits, d_hidden, add_d_weight, row_stats, row_grads}

#if SIGMOID_RL_PAIRS && (defined(__AVX512BF16__) || defined(__AMX_BF16__))
#include <immintrin.h>
#endif

namespace sigmoid_rl {
namespace {

#if SIGMOID_RL_PAIRS && defined(__AVX512BF16__)
INLINE void multiply_pairs(Vec& sum, uint32_t a, Vec b) {
    sum = _mm512_dpbf16_ps(sum, bits<__m512bh>(_mm512_set1_epi32(int32_t(a))), bits<__m512bh>(b));
}
#else
// The same as _mm512_dpbf16_ps except for denormals: the pair's second product is added first.
INLINE void multiply_pairs(Vec& sum, uint32_t a, Vec b) {
    const UInt pair = bits<UInt>(b);
    sum += bits<Vec>(pair & 0xffff0000u) * bits<float>(a & 0xffff0000u);
    sum += bits<Vec>(pair << 16) * bits<float>(a << 16);
}
#endif

#if SIGMOID_RL_UNIT > 1 && defined(__AMX_BF16__)
// Eight registers of 16 rows by 64 bytes: c in 0 to 3, a in 4 and 5, b in 6 and 7.
TileRegisters::TileRegisters() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsics do not say that they read memory
    _tile_loadconfig(&config);
}
TileRegisters::~TileRegisters() { _tile_release(); }

INLINE void multiply_amx(int64_t n, const float* a, const float* b, Tile& c) {
    asm volatile("" : : : "memory");  // what was packed is written before it is loaded
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < n; k += UNIT, a += MR * UNIT, b += NR * UNIT) {
        _tile_loadd(4, a, 4 * UNIT);
        _tile_loadd(6, b, 4 * NR);
        _tile_loadd(7, b + LANES, 4 * NR);
        _tile_loadd(5, a + MR / 2 * UNIT, 4 * UNIT);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float* out = reinterpret_cast<float*>(c);
    _tile_stored(0, out, 4 * NR);
    _tile_stored(1, out + LANES, 4 * NR);
    _tile_stored(2, out + MR / 2 * NR, 4 * NR);
    _tile_stored(3, out + MR / 2 * NR + LANES, 4 * NR);
    asm volatile("" : : : "memory");
}
#else
TileRegisters::TileRegisters() {}
TileRegisters::~TileRegisters() {}

// The same from the same packed words. AMX sums the first and the second products of the pairs apart.
INLINE void multiply_amx(int64_t n, const float* a, const float* b, Tile& c) {
    for (int i = 0; i < MR; ++i) {
        c[i][0] = c[i][1] = Vec{};
        for (int64_t k = 0; k < n; k += UNIT) {
            Vec sum[2] = {};
            for (int64_t u = 0; u < UNIT; ++u) {
                const auto pair = bits<uint32_t>(a[k * MR + i * UNIT + u]);
                multiply_pairs(sum[0], pair, load(b + (k + u) * NR));
                multiply_pairs(sum[1], pair, load(b + (k + u) * NR + LANES));
            }
            c[i][0] += sum[0];
            c[i][1] += sum[1];
        }
    }
}
#endif

}  // namespace
}  // namespace sigmoid_rl
