// The code of AMX compiled without it, for tests: slow, but from the same packed words.
#define SIGMOID_RL_LANES 16
#define SIGMOID_RL_MR 32
#define SIGMOID_RL_PAIRS true
#define SIGMOID_RL_UNIT 16
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels emulated_amx_kernels = SIGMOID_RL_KERNELS;
}
