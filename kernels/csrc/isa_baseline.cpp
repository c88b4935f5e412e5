// Any machine: 16-byte vectors (SSE2, NEON).
#define SIGMOID_RL_LANES 4
#define SIGMOID_RL_MR 6
#define SIGMOID_RL_PAIRS false
#include "isa_define.hpp"

namespace sigmoid_rl {
const Kernels baseline_kernels = SIGMOID_RL_KERNELS;
}
