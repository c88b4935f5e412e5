// AVX-512 with products of bf16 pairs.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 14
#define SIGMOID_RL_PAIRS true
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels avx512_bf16_kernels = SIGMOID_RL_KERNELS;
}
