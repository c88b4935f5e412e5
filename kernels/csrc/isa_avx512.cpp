// AVX-512F: 28 of 32 registers hold the tile.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 14
#define SIGMOID_RL_PAIRS false
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels avx512_kernels = SIGMOID_RL_KERNELS;
}
