// AVX2 with FMA: 12 of 16 registers hold the tile.
#define SIGMOID_RL_LANES 8
#define SIGMOID_RL_MR 6
#define SIGMOID_RL_PAIRS false
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels avx2_kernels = SIGMOID_RL_KERNELS;
}
