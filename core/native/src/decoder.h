// The parts of a decoder layer of the Llama family around its attention.
#pragma once
#include "linear.h"

struct Layer {
    float* norm1;  // [width]
    float* norm2;
    float* q_norm;  // [dim], or null
    float* k_norm;
    Linear q, k, v, o, gate, up, down;
    int64_t heads, kv_heads, dim;  // dim: of a head
    float eps, pad;
};

// y = x / rms(x) * weight, for one row.
static inline void normalize(const float* x, const float* weight, float eps, long width, float* y) {
    vf squares = {};
    float rest = 0;
    long i = 0;
    for (; i + W <= width; i += W) squares += load(x + i) * load(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    float factor = 1.0f / std::sqrt((sum(squares) + rest) / width + eps);
    for (i = 0; i + W <= width; i += W) store(y + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * factor * weight[i];
}

constexpr long FEW = 8;  // rows of a task

// A part of a job: f(row) for all rows. Returns how many tasks that was.
template <class F> static long all_rows(Team& team, int part, long rows, F&& f) {
    long tasks = (rows + FEW - 1) / FEW;
    team.each(part, tasks, [&](long task) {
        for (long row = task * FEW; row < std::min(rows, (task + 1) * FEW); row++) f(row);
    });
    return tasks;
}

// Turns a head in place: the second half of its numbers belongs to the first (as transformers stores them).
static inline void rotate(float* x, const float* cosine, const float* sine, long dim) {
    long half = dim / 2, i = 0;
    for (; i + W <= half; i += W) {
        vf c = load(cosine + i), s = load(sine + i), a = load(x + i), b = load(x + half + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float c = cosine[i], s = sine[i], a = x[i], b = x[half + i];
        x[i] = a * c - b * s;
        x[half + i] = b * c + a * s;
    }
}

// Before attention: x [rows, width] -> q [rows, heads, dim], k and v [rows, kv_heads, dim], normed and turned.
// cosine, sine [rows, dim / 2]; scratch [rows, width].
static void before_attention(const Layer& l, const float* x, long rows, const float* cosine, const float* sine,
                             float* q, float* k, float* v, float* scratch, int threads) {
    long width = l.q.k, qs = l.heads * l.dim, ks = l.kv_heads * l.dim, vs = l.v.n;
    Target targets[3] = {{&l.q, q, qs}, {&l.k, k, ks}, {&l.v, v, vs}};
    auto job = [&](Team& team) {
        team.wait(0, all_rows(team, 0, rows, [&](long row) {
            normalize(x + row * width, l.norm1, l.eps, width, scratch + row * width);
        }));
        team.wait(1, linear(team, 1, scratch, width, rows, targets, 3, SET));
        all_rows(team, 2, rows, [&](long row) {
            for (long head = 0; head < l.heads + l.kv_heads; head++) {
                bool query = head < l.heads;
                float* at = query ? q + row * qs + head * l.dim : k + row * ks + (head - l.heads) * l.dim;
                const float* norm = query ? l.q_norm : l.k_norm;
                if (norm) normalize(at, norm, l.eps, l.dim, at);
                rotate(at, cosine + row * (l.dim / 2), sine + row * (l.dim / 2), l.dim);
            }
        });
    };
    parallel(threads, job);
}

// After attention: x += o(attended), x += down(silu(gate(n)) * up(n)) of the normed n. Mutates x [rows, width].
// attended [rows, heads * dim]; scratch [rows, width], hidden [rows, gate.n].
static void after_attention(const Layer& l, const float* attended, long rows, float* x, float* scratch, float* hidden,
                            int threads) {
    long width = l.o.n;
    Target o[1] = {{&l.o, x, width}}, down[1] = {{&l.down, x, width}};
    Target gated[2] = {{&l.gate, hidden, l.gate.n}, {&l.up, hidden, l.gate.n}};
    auto job = [&](Team& team) {
        team.wait(0, linear(team, 0, attended, l.o.k, rows, o, 1, ADD));
        team.wait(1, all_rows(team, 1, rows, [&](long row) {
            normalize(x + row * width, l.norm2, l.eps, width, scratch + row * width);
        }));
        team.wait(2, linear(team, 2, scratch, width, rows, gated, 2, GATED));
        linear(team, 3, hidden, l.gate.n, rows, down, 1, ADD);
    };
    parallel(threads, job);
}

// Where the largest number of each row of x [rows, width] first is; in a row with NaN, where the first of those is.
static void largest(const float* x, long rows, long width, int64_t* where, int threads) {
    auto job = [&](Team& team) {
        team.each(0, rows, [&](long row) {
            const float* at = x + row * width;
            vf most = splat(-INFINITY), odd = {};
            float m = -INFINITY, o = 0;
            long i = 0;
            for (; i + W <= width; i += W) {
                vf v = load(at + i);
                most = larger(v, most);
                odd += v - v;  // NaN for NaN, and for the infinite
            }
            for (; i < width; i++) m = at[i] > m ? at[i] : m, o += at[i] - at[i];
            for (int lane = 0; lane < W; lane++) m = std::max(m, most[lane]), o += odd[lane];
            i = width;
            if (o != o)
                for (i = 0; i < width && at[i] == at[i];) i++;
            if (i == width)
                for (i = 0; i < width && at[i] != m;) i++;
            where[row] = i;
        });
    };
    parallel(threads, job);
}
