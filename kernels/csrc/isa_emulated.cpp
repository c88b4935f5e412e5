// The AVX-512 code, compiled for less: slow, and the same sums in the same order. Tests run it.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 14
#define SIGMOID_RL_PAIRS true
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels emulated_kernels = SIGMOID_RL_KERNELS;
}
