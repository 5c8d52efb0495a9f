// Linear layers: y = x W^T + b, W in panels of LANES columns, in floats, bfloat16 or int8 with a scale for each column.
//
// Every number of y is one chain of fused multiply-adds over k, in order, whatever the number of rows, the tile that it
// falls into, or the threads: a row's answer does not depend on its company, bit for bit.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include "pool.h"
#include "simd.h"

enum Format : int32_t { FLOAT = 0, BFLOAT16 = 1, INT8 = 2 };

struct Linear {
    void* w;       // [ceil(n / LANES)][k][LANES]
    float* scale;  // [ceil(n / LANES) * LANES], INT8 only
    float* bias;   // [ceil(n / LANES) * LANES] or null
    int64_t n, k;
    int32_t format, pad;
};

static inline long panels_of(const Linear& l) { return (l.n + LANES - 1) / LANES; }

// f(rows, first) for tiles of nearly the same height; `rows` is an integral constant.
template <int R, class F> static inline void with_rows(long rows, F&& f) {
    if constexpr (R > 0) {
        if (rows == R) f(std::integral_constant<int, R>{});
        else with_rows<R - 1>(rows, f);
    }
}
template <class F> static inline void in_tiles(long rows, F&& f) {
    long row = 0;
    for (long tiles = (rows + ROWS - 1) / ROWS; tiles > 0; tiles--) {
        long now = (rows - row + tiles - 1) / tiles;
        with_rows<ROWS>(now, [&](auto r) { f(r, row); });
        row += now;
    }
}

template <int R, class T>
static inline __attribute__((always_inline)) void multiply(const float* x, long ldx, const T* w, long k, vf (&acc)[R][2]) {
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vf{};
    for (long i = 0; i < k; i++, w += LANES) {
        if (R <= 2) __builtin_prefetch(w + 1024 / sizeof(T) * 4);
        vf b0 = load(w), b1 = load(w + W);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            vf a = splat(x[r * ldx + i]);
            acc[r][0] += a * b0;
            acc[r][1] += a * b1;
        }
    }
}

template <int R> static inline void finish(const Linear& l, long panel, vf (&acc)[R][2]) {
    for (int half = 0; half < 2; half++) {
        long column = panel * LANES + half * W;
        if (l.format == INT8) {
            vf scale = load(l.scale + column);
            for (int r = 0; r < R; r++) acc[r][half] *= scale;
        }
        if (l.bias) {
            vf bias = load(l.bias + column);
            for (int r = 0; r < R; r++) acc[r][half] += bias;
        }
    }
}

template <int R> static inline void tile_of(const Linear& l, long panel, const float* x, long ldx, vf (&acc)[R][2]) {
    long at = panel * l.k * LANES;
    if (l.format == FLOAT) multiply<R>(x, ldx, (const float*)l.w + at, l.k, acc);
    else if (l.format == BFLOAT16) multiply<R>(x, ldx, (const uint16_t*)l.w + at, l.k, acc);
    else multiply<R>(x, ldx, (const int8_t*)l.w + at, l.k, acc);
    finish<R>(l, panel, acc);
}

template <int R> static inline void put(float* y, long ldy, long width, const vf (&acc)[R][2], bool add) {
    for (int r = 0; r < R; r++, y += ldy) {
        if (width == LANES) {
            vf a = acc[r][0], b = acc[r][1];
            if (add) a += load(y), b += load(y + W);
            store(y, a), store(y + W, b);
        } else {
            for (long i = 0; i < width; i++) {
                float v = i < W ? acc[r][0][i] : acc[r][1][i - W];
                y[i] = add ? y[i] + v : v;
            }
        }
    }
}

// What becomes of a product.
struct Target {
    const Linear* linear;
    float* y;
    long ldy;
};
enum Mode { SET, ADD, GATED };  // GATED: targets are gate and up; y of the first = silu(gate) * up

// Not inlined: all heights in one function would share its registers.
template <int R>
static __attribute__((noinline)) void one_tile(const Target* t, Mode mode, long panel, const float* x, long ldx, long row) {
    const Linear& l = *t->linear;
    long column = panel * LANES, width = std::min<long>(LANES, l.n - column);
    vf acc[R][2];
    tile_of<R>(l, panel, x + row * ldx, ldx, acc);
    if (mode == GATED) {
        vf up[R][2];
        tile_of<R>(*t[1].linear, panel, x + row * ldx, ldx, up);
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++)
                acc[r][half] = acc[r][half] / (splat(1.0f) + exponential(-acc[r][half])) * up[r][half];
    }
    put<R>(t->y + row * t->ldy + column, t->ldy, width, acc, mode == ADD);
}

// A part of a job: x [m, k] through the targets' layers; all have the same k. Returns how many tasks that was.
static long linear(Team& team, int part, const float* x, long ldx, long m, const Target* targets, int count, Mode mode) {
    if (m <= 0) return 0;
    constexpr long L2 = 192 * 1024;  // bytes of x that are worked on at a time
    const int step = mode == GATED ? 2 : 1;
    long panels = 0;
    for (int i = 0; i < count; i += step) panels += panels_of(*targets[i].linear);
    long k = targets[0].linear->k, block = std::max<long>(ROWS, L2 / (k * 4) / ROWS * ROWS);
    long blocks = (m + block - 1) / block;
    block = (m + blocks - 1) / blocks;
    long batch = std::max<long>(1, panels / (team.threads * (blocks > 4 ? 4 : 12)));
    long batches = (panels + batch - 1) / batch;
    team.each(part, batches * blocks, [&](long task) {
        long first = task / batches * block, last = std::min(m, first + block);
        long begin = task % batches * batch, end = std::min(panels, begin + batch);
        const Target* t = targets;
        long base = 0;
        for (long at = begin; at < end; at++) {
            while (at - base >= panels_of(*t->linear)) base += panels_of(*t->linear), t += step;
            in_tiles(last - first, [&](auto rows, long row) { one_tile<rows()>(t, mode, at - base, x, ldx, first + row); });
        }
    });
    return batches * blocks;
}

// x [n, k] -> panels. For INT8 the scale of a column is its largest number / 127.
static void pack(const float* x, Linear& l) {
    long panels = panels_of(l);
    for (long panel = 0; panel < panels; panel++)
        for (int lane = 0; lane < LANES; lane++) {
            long column = panel * LANES + lane, at = panel * l.k * LANES + lane;
            const float* row = column < l.n ? x + column * l.k : nullptr;
            float most = 0;
            if (l.format == INT8) {
                for (long i = 0; row && i < l.k; i++) most = std::max(most, std::fabs(row[i]));
                l.scale[column] = most / 127;
            }
            for (long i = 0; i < l.k; i++, at += LANES) {
                float v = row ? row[i] : 0;
                if (l.format == FLOAT) ((float*)l.w)[at] = v;
                else if (l.format == INT8) ((int8_t*)l.w)[at] = most > 0 ? (int8_t)std::lrintf(v / (most / 127)) : 0;
                else {
                    uint32_t bits;
                    std::memcpy(&bits, &v, 4);
                    if (v == v) bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even; NaN stays
                    ((uint16_t*)l.w)[at] = (uint16_t)(bits >> 16);
                }
            }
        }
}

static void unpack(const Linear& l, float* x) {
    for (long column = 0; column < l.n; column++) {
        long at = column / LANES * l.k * LANES + column % LANES;
        for (long i = 0; i < l.k; i++, at += LANES) {
            float v;
            if (l.format == FLOAT) v = ((float*)l.w)[at];
            else if (l.format == INT8) v = ((int8_t*)l.w)[at] * l.scale[column];
            else {
                uint32_t bits = (uint32_t)((uint16_t*)l.w)[at] << 16;
                std::memcpy(&v, &bits, 4);
            }
            x[column * l.k + i] = v;
        }
    }
}
