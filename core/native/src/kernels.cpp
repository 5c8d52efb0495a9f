// What Python calls. Pointers are to floats that lie row after row unless strides are given; sizes are in numbers.
#include "attention.h"
#include "decoder.h"
#include "layers.h"

extern "C" {

int kernels_lanes() { return LANES; }

void kernels_pack(const float* x, Linear* l) { pack(x, *l); }
void kernels_unpack(const Linear* l, float* x) { unpack(*l, x); }

// y [m, n] = x [m, k] W^T + b
void kernels_linear(const Linear* l, const float* x, int64_t ldx, int64_t m, float* y, int threads) {
    Target target = {l, y, l->n};
    auto job = [&](Team& team) { linear(team, 0, x, ldx, m, &target, 1, SET); };
    parallel(threads, job);
}

void kernels_before(const Layer* l, const float* x, int64_t rows, const float* cosine, const float* sine, float* q,
                    float* k, float* v, float* scratch, int threads) {
    before_attention(*l, x, rows, cosine, sine, q, k, v, scratch, threads);
}
void kernels_after(const Layer* l, const float* attended, int64_t rows, float* x, float* scratch, float* hidden,
                   int threads) {
    after_attention(*l, attended, rows, x, scratch, hidden, threads);
}
void kernels_layers(const Layers* all, const Batch* b, const int64_t* keep, int64_t kept, float* x, int64_t rows,
                    const float* cosine, const float* sine, const Rooms* rooms, int threads) {
    all_layers(*all, *b, keep, kept, x, rows, cosine, sine, *rooms, threads);
}
void kernels_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y) {
    for (long row = 0; row < rows; row++) normalize(x + row * width, weight, eps, width, y + row * width);
}
void kernels_largest(const float* x, int64_t rows, int64_t width, int64_t* where, int threads) {
    largest(x, rows, width, where, threads);
}

void kernels_write(const Batch* b, const float* keys, int64_t k_token, int64_t k_head, const float* values,
                   int64_t v_token, int64_t v_head, const Shape* a, float* k_pages, float* v_pages,
                   int threads) {
    write_pages(*b, *a, keys, k_token, k_head, values, v_token, v_head, k_pages, v_pages, threads);
}
void kernels_attend(const Batch* b, const Shape* a, const float* query, int64_t q_token, int64_t q_head,
                    const float* k_pages, const float* v_pages, float scale, float* out, int threads) {
    attend(*b, *a, query, q_token, q_head, k_pages, v_pages, scale, out, threads);
}
}
