// AMX: products of bf16 pairs in tile registers, 32 x 32 at a time. All else is that of AVX-512.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 32
#define SIGMOID_RL_PAIRS true
#define SIGMOID_RL_UNIT 16
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels amx_kernels = SIGMOID_RL_KERNELS;
}
