// The library's C functions, which kernels/native.py calls: they choose the instruction set and split the work.
#include <algorithm>
#include <cmath>

#ifdef SIGMOID_RL_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa.hpp"
#include "threads.hpp"

using namespace sigmoid_rl;

namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
    const Kernels* for_bf16;  // where both factors are bf16
    bool (*runs_here)();
};

#ifdef SIGMOID_RL_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
bool has_avx512_bf16() {  // the flag -mavx512bf16 lets the compiler use avx512bw too
    return has_avx512() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");
}
#endif
#ifdef SIGMOID_RL_AMX
bool has_amx() {  // Linux gives a process the tile registers when it asks for them
    unsigned a, b, c, d;
    const bool cpu = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24));
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return cpu && has_avx512_bf16() && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// Best first. The emulated ones are for tests and are only used when they are asked for by name.
const Isa ISAS[] = {
#ifdef SIGMOID_RL_X86
#ifdef SIGMOID_RL_AMX
    {"amx", &avx512_bf16_kernels, &amx_kernels, has_amx},
#endif
    {"avx512_bf16", &avx512_bf16_kernels, &avx512_bf16_kernels, has_avx512_bf16},
    {"avx512", &avx512_kernels, &avx512_kernels, has_avx512},
    {"avx2", &avx2_kernels, &avx2_kernels, has_avx2},
    {"baseline", &baseline_kernels, &baseline_kernels, [] { return true; }},
    {"emulated", &emulated_kernels, &emulated_kernels, has_avx2},
    {"emulated_amx", &emulated_kernels, &emulated_amx_kernels, has_avx2},
#else
    {"baseline", &baseline_kernels, &baseline_kernels, [] { return true; }},
    {"emulated", &emulated_kernels, &emulated_kernels, [] { return true; }},
    {"emulated_amx", &emulated_kernels, &emulated_amx_kernels, [] { return true; }},
#endif
};

constexpr int64_t SCORED_ROWS = 384;  // rows scored at a time; each thread holds their logits of one tile

const Isa* chosen = nullptr;

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t round_up(int64_t n, int64_t size) { return ceil_div(n, size) * size; }

// Small problems run on one thread: starting another would cost more than it saves.
int64_t threads_for(double flops, int64_t threads) { return flops < 1e6 || threads < 1 ? 1 : threads; }

// Packs the rows of h for the `logits` kernel.
Buffer pack_hidden(const Kernels& k, const Matrix& h, bool pairs, int64_t threads) {
    Buffer packed = buffer(round_up(h.rows, k.mr) * Blocks(h.columns, k.block).all_words(pairs, k.unit));
    const int64_t step = 8 * k.mr;
    for_each_task(ceil_div(h.rows, step), threads, 0, [&](int64_t task, float*) {
        k.pack_rows(h, pairs, task * step, least(h.rows, (task + 1) * step), packed.get());
    });
    return packed;
}

int64_t logits_scratch(const Kernels& k, const Matrix& w, bool pairs) {
    return k.mr * k.nr + std::max(PANEL_WORDS, k.nr * Blocks(w.columns, k.block).all_words(pairs, k.unit));
}

// Asks for huge pages for a large output that is about to be written first: fewer page faults, and fewer TLB misses
// where a kernel runs down its columns.
void use_huge_pages([[maybe_unused]] const float* out, [[maybe_unused]] int64_t words) {
#ifdef __linux__
    constexpr uintptr_t HUGE = 2 << 20;
    const uintptr_t begin = (uintptr_t(out) + HUGE - 1) / HUGE * HUGE, end = uintptr_t(out + words) / HUGE * HUGE;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

const void* rows_from(const Matrix& x, int64_t first) {
    return static_cast<const char*>(x.data) + first * x.stride * (x.bf16 ? 2 : 4);
}

// Statistics of a row from those of its tiles, with the largest anchor. Writes 4 values, `stride` apart.
void merge(const Partial* tiles, int64_t count, float target, float* out, int64_t stride) {
    float anchor = tiles[0].anchor;
    for (int64_t t = 1; t < count; ++t) anchor = tiles[t].anchor > anchor ? tiles[t].anchor : anchor;
    double others = 0, dot = 0;
    for (int64_t t = 0; t < count; ++t) {
        const bool empty = std::isinf(tiles[t].anchor) && tiles[t].anchor < 0;
        const double shift = empty ? 0.0 : double(tiles[t].anchor) - double(anchor), scale = std::exp(shift);
        others += tiles[t].others * scale;
        dot += (tiles[t].dot + (scale > 0 ? tiles[t].others * shift : 0.0)) * scale;
    }
    const float stats[4] = {anchor, float(others), target, float(dot)};
    for (int i = 0; i < 4; ++i) out[i * stride] = stats[i];
}

template <class Work>
int guarded(bool bf16, const Work& work) {
    try {
        work(bf16 ? *chosen->for_bf16 : *chosen->kernels);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Increment when any of these functions changes: kernels/native.py refuses a library with another number.
API int sigmoid_rl_version() { return 2; }

// The name of the i-th instruction set, best first; null after the last.
API const char* sigmoid_rl_isa(int64_t i) {
    return i < int64_t(sizeof ISAS / sizeof *ISAS) ? ISAS[i].name : nullptr;
}

API bool sigmoid_rl_runs_here(int64_t i) { return ISAS[i].runs_here(); }

// Must be called before any of the functions below, with an instruction set that runs on this machine.
API void sigmoid_rl_choose(int64_t i) { chosen = &ISAS[i]; }
API int sigmoid_rl_chosen() { return int(chosen - ISAS); }

// Whether the chosen instruction set has products of bf16 pairs.
API bool sigmoid_rl_has_pairs() { return chosen->for_bf16->pairs; }

// out (C, V) = h Wᵀ
API int sigmoid_rl_logits(const Matrix* h, const Matrix* w, float* out, int64_t stride, int64_t threads) {
    return guarded(h->bf16 && w->bf16, [&](const Kernels& k) {
        const bool pairs = k.pairs && h->bf16 && w->bf16;
        threads = threads_for(2.0 * h->rows * w->rows * h->columns, threads);
        use_huge_pages(out, h->rows * stride);
        Buffer packed = pack_hidden(k, *h, pairs, threads);
        const int64_t step = 8 * k.nr;
        for_each_task(ceil_div(w->rows, step), threads, logits_scratch(k, *w, pairs), [&](int64_t task, float* scratch) {
            const int64_t first = task * step, last = least(w->rows, first + step);
            k.logits(packed.get(), h->rows, *w, pairs, first, last, out + first, stride, scratch);
        });
    });
}

// out (4, C): anchor, others, target, dot of each row of z (C, V)
API int sigmoid_rl_row_stats(const Matrix* z, const Rows* rows, float* out, int64_t threads) {
    return guarded(false, [&](const Kernels& k) {
        const int64_t tiles = ceil_div(z->columns, TILE);
        const int64_t scratch = ceil_div(tiles * sizeof(Partial), sizeof(float));
        threads = threads_for(20.0 * z->rows * z->columns, threads);
        for_each_task(z->rows, threads, scratch, [&](int64_t i, float* s) {
            Partial* partials = reinterpret_cast<Partial*>(s);
            float target = 0;
            for (int64_t t = 0; t < tiles; ++t)
                partials[t] = k.row_stats(static_cast<const float*>(z->data) + i * z->stride + t * TILE,
                                          least(TILE, z->columns - t * TILE), rows->targets[i] - t * TILE,
                                          rows->inverse_temperature[i], rows->cap, &target);
            merge(partials, tiles, target, out + i, z->rows);
        });
    });
}

// The logits' gradient in place of z; bf16: each row's gradient takes the first half of its bytes.
API int sigmoid_rl_row_grads(const Matrix* z, const Rows* rows, const Coefficients* c, bool bf16, int64_t threads) {
    return guarded(false, [&](const Kernels& k) {
        threads = threads_for(20.0 * z->rows * z->columns, threads);
        float* data = static_cast<float*>(const_cast<void*>(z->data));
        for_each_task(z->rows, threads, 0, [&](int64_t i, float*) {
            k.row_grads(data + i * z->stride, z->columns, i, *rows, *c, bf16);
        });
    });
}

// out (C, H) = dz W
API int sigmoid_rl_d_hidden(const Matrix* dz, const Matrix* w, float* out, int64_t stride, int64_t threads) {
    return guarded(dz->bf16 && w->bf16, [&](const Kernels& k) {
        const bool pairs = k.pairs && dz->bf16 && w->bf16;
        threads = threads_for(2.0 * dz->rows * w->rows * w->columns, threads);
        // A grid of about `threads` parts, chosen so that as little as possible is packed twice.
        const int64_t row_tiles = ceil_div(dz->rows, k.mr), column_tiles = ceil_div(w->columns, k.nr);
        int64_t down = 1, least_cost = INT64_MAX;
        for (int64_t d = 1; d <= threads; ++d) {
            const int64_t across = ceil_div(threads, d);
            const int64_t m = ceil_div(row_tiles, d) * k.mr, n = ceil_div(column_tiles, across) * k.nr;
            const int64_t cost = ceil_div(d * across, threads) * (m * n + 12 * (2 * m + n));
            if (cost < least_cost) least_cost = cost, down = d;
        }
        const int64_t across = ceil_div(threads, down);
        const int64_t height = ceil_div(row_tiles, down) * k.mr, width = ceil_div(column_tiles, across) * k.nr;
        const int64_t scratch = k.block * (width + least(height, 256));  // no part is taller than 256
        for_each_task(down * across, threads, scratch, [&](int64_t task, float* s) {
            const int64_t row = task / across * height, column = task % across * width;
            if (row < dz->rows && column < w->columns)
                k.d_hidden(*dz, *w, pairs, row, least(dz->rows, row + height), column,
                           least(w->columns, column + width), out, stride, s);
        });
    });
}

// out (V, H) = dzᵀ h, or += if `add`
API int sigmoid_rl_add_d_weight(const Matrix* dz, const Matrix* h, bool add, float* out, int64_t stride,
                                int64_t threads) {
    return guarded(dz->bf16 && h->bf16, [&](const Kernels& k) {
        const bool pairs = k.pairs && dz->bf16 && h->bf16;
        threads = threads_for(2.0 * dz->rows * dz->columns * h->columns, threads);
        if (!add) use_huge_pages(out, dz->columns * stride);
        Buffer packed = buffer(round_up(h->columns, k.nr) * Blocks(h->rows, k.block).all_words(pairs, k.unit));
        for_each_task(ceil_div(h->columns, k.nr), threads, 0, [&](int64_t task, float*) {
            k.pack_columns(*h, pairs, task * k.nr, least(h->columns, (task + 1) * k.nr), packed.get());
        });
        const int64_t step = 16 * k.mr;
        for_each_task(ceil_div(dz->columns, step), threads, k.block * step, [&](int64_t task, float* s) {
            const int64_t first = task * step, last = least(dz->columns, first + step);
            k.add_d_weight(*dz, packed.get(), h->columns, pairs, first, last, add, out, stride, s);
        });
    });
}

// out (4, N): row_stats of the logits, computed for a block of rows and a tile of the vocabulary at a time
API int sigmoid_rl_score(const Matrix* h, const Matrix* w, const Rows* rows, float* out, int64_t threads) {
    return guarded(h->bf16 && w->bf16, [&](const Kernels& k) {
        const bool pairs = k.pairs && h->bf16 && w->bf16;
        threads = threads_for(2.0 * h->rows * w->rows * h->columns, threads);
        const int64_t height = least(SCORED_ROWS, h->rows), tiles = ceil_div(w->rows, TILE);
        std::vector<Partial> partials(height * tiles);
        std::vector<float> targets(height);
        for (int64_t first = 0; first < h->rows; first += height) {
            const int64_t n = least(height, h->rows - first);
            std::fill(targets.begin(), targets.end(), 0.0f);
            const Matrix part{rows_from(*h, first), n, h->columns, h->stride, h->bf16};
            Buffer packed = pack_hidden(k, part, pairs, threads);
            for_each_task(tiles, threads, n * TILE + logits_scratch(k, *w, pairs), [&](int64_t t, float* z) {
                const int64_t begin = t * TILE, width = least(TILE, w->rows - begin);
                k.logits(packed.get(), n, *w, pairs, begin, begin + width, z, TILE, z + n * TILE);
                for (int64_t i = 0; i < n; ++i)
                    partials[i * tiles + t] =
                        k.row_stats(z + i * TILE, width, rows->targets[first + i] - begin,
                                    rows->inverse_temperature[first + i], rows->cap, &targets[i]);
            });
            for (int64_t i = 0; i < n; ++i) merge(&partials[i * tiles], tiles, targets[i], out + first + i, h->rows);
        }
    });
}
