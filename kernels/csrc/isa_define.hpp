// The table of one instruction set, included by its isa_*.cpp, which sets SIGMOID_RL_LANES, SIGMOID_RL_MR and
// SIGMOID_RL_PAIRS. The compiler flags are in CMakeLists.txt.
#pragma once
#include "gemm.hpp"
#include "rows.hpp"

#define SIGMOID_RL_KERNELS                                                                                       \
    {MR, NR, SIGMOID_RL_PAIRS, pack_rows, pack_columns, logits, d_hidden, add_d_weight, row_stats, row_grads}

#if SIGMOID_RL_PAIRS && defined(__AVX512BF16__)
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

}  // namespace
}  // namespace sigmoid_rl
