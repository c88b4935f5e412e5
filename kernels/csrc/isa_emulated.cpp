// The AVX-512 code compiled without AVX-512, for tests: slow, but the same sums in the same order.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 14
#define SIGMOID_RL_PAIRS true
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels emulated_kernels = SIGMOID_RL_KERNELS;
}
