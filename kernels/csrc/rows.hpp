// Row kernels: statistics of one row over one tile of the vocabulary, and the logits' gradient in place.
#pragma once
#include "simd.hpp"

namespace sigmoid_rl {
namespace {

// The next vector of a row with n elements left, padded with zeros.
INLINE Vec load_upto(const float* p, int64_t n) {
    if (n >= LANES) return load(p);
    float part[LANES] = {};
    std::memcpy(part, p, sizeof(float) * n);
    return load(part);
}

// Asks for the cache line that a loop over a row reaches 16 lines later: the loops below outrun the hardware.
INLINE void prefetch_ahead(const float* p) { __builtin_prefetch(p + 256); }

template <bool CAPPED>
INLINE Vec tempered(Vec z, float inverse_temperature, float cap) {
    if constexpr (CAPPED) z = tanh(z / cap).value * cap;
    return z * inverse_temperature;
}

INLINE double sum(const Vec (&acc)[4]) {
    double total = 0;
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < LANES; ++lane) total += acc[i][lane];
    return total;
}

template <bool CAPPED>
Partial stats_of(const float* z, int64_t width, int64_t target, float it, float cap, float* u_target) {
    alignas(sizeof(Vec)) float u[TILE];
    constexpr int64_t STEP = 4 * LANES;
    const float floor = -__builtin_inff();
    const int64_t padded = (width + STEP - 1) / STEP * STEP;
    Vec top[4] = {all(floor), all(floor), all(floor), all(floor)};
    int64_t j = 0;
    for (; j + STEP <= width; j += STEP)
        for (int i = 0; i < 4; ++i) {
            prefetch_ahead(z + j + i * LANES);
            Vec x = tempered<CAPPED>(load(z + j + i * LANES), it, cap);
            store(u + j + i * LANES, x);
            top[i] = max(x, top[i]);
        }
    for (; j < width; j += LANES) store(u + j, tempered<CAPPED>(load_upto(z + j, width - j), it, cap));
    for (j = width; j < padded; ++j) u[j] = floor;
    for (j = width / STEP * STEP; j < padded; j += LANES) top[0] = max(load(u + j), top[0]);
    Vec tops = max(max(top[0], top[1]), max(top[2], top[3]));
    float anchor = floor;
    for (int lane = 0; lane < LANES; ++lane) anchor = tops[lane] > anchor ? tops[lane] : anchor;
    if (target >= 0 && target < width) {
        *u_target = u[target];
        u[target] = floor;
    }
    const float origin = anchor == floor ? 0.0f : anchor;  // a tile in which all logits are −inf adds nothing
    Vec others[4] = {}, dot[4] = {};
    for (j = 0; j < padded; j += STEP)
        for (int i = 0; i < 4; ++i) {
            Vec v = load(u + j + i * LANES) - origin, e = exp(v);
            others[i] += e;
            dot[i] += e * (v < -200.0f ? all(-200.0f) : v);  // 0 · −inf is not 0
        }
    return {anchor, float(sum(others)), float(sum(dot))};
}

Partial row_stats(const float* z, int64_t width, int64_t target, float it, float cap, float* u_target) {
    return cap ? stats_of<true>(z, width, target, it, cap, u_target)
               : stats_of<false>(z, width, target, it, cap, u_target);
}

template <bool CAPPED, bool ENTROPY>
INLINE Vec gradient(Vec z, float it, float cap, float anchor, float a, float b, float k) {
    Vec slope = all(1.0f), x = z;
    if constexpr (CAPPED) {
        Tanh t = tanh(z / cap);
        x = t.value * cap;
        slope = t.slope;
    }
    Vec v = x * it - anchor, g = exp(v);
    if constexpr (ENTROPY)
        g = g * (((v < -200.0f ? all(-200.0f) : v) + k) * b + a);
    else
        g = g * a;
    return CAPPED ? g * slope : g;
}

template <bool CAPPED, bool ENTROPY, bool BF16>
void grads_of(float* z, int64_t width, int64_t i, const Rows& rows, const Coefficients& c) {
    const float it = rows.inverse_temperature[i], cap = rows.cap, anchor = c.anchor[i], a = c.a[i];
    const float b = ENTROPY ? c.b[i] : 0, k = ENTROPY ? c.k[i] : 0;
    const int64_t y = rows.targets[i];
    uint16_t* half = reinterpret_cast<uint16_t*>(z);  // the bf16 results overwrite only logits that were already read
    float at_target = c.target[i];
    if (CAPPED && y >= 0 && y < width) at_target *= tanh(all(z[y]) / cap).slope[0];
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        prefetch_ahead(z + j);
        Vec g = gradient<CAPPED, ENTROPY>(load(z + j), it, cap, anchor, a, b, k);
        if constexpr (BF16) {
            Half g16 = to_bf16(g);
            std::memcpy(half + j, &g16, sizeof g16);
        } else {
            store(z + j, g);
        }
    }
    if (j < width) {
        Vec g = gradient<CAPPED, ENTROPY>(load_upto(z + j, width - j), it, cap, anchor, a, b, k);
        Half g16 = to_bf16(g);
        if (BF16)
            std::memcpy(half + j, &g16, 2 * (width - j));
        else
            std::memcpy(z + j, &g, 4 * (width - j));
    }
    if (y >= 0 && y < width) {
        if (BF16)
            half[y] = to_bf16(at_target);
        else
            z[y] = at_target;
    }
}

template <bool CAPPED, bool ENTROPY>
void grads_to(float* z, int64_t width, int64_t i, const Rows& rows, const Coefficients& c, bool bf16) {
    bf16 ? grads_of<CAPPED, ENTROPY, true>(z, width, i, rows, c)
         : grads_of<CAPPED, ENTROPY, false>(z, width, i, rows, c);
}

void row_grads(float* z, int64_t width, int64_t i, const Rows& rows, const Coefficients& c, bool bf16) {
    if (rows.cap)
        c.b ? grads_to<true, true>(z, width, i, rows, c, bf16) : grads_to<true, false>(z, width, i, rows, c, bf16);
    else
        c.b ? grads_to<false, true>(z, width, i, rows, c, bf16)
            : grads_to<false, false>(z, width, i, rows, c, bf16);
}

}  // namespace
}  // namespace sigmoid_rl
