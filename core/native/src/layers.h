// All layers of a decoder in one call: between them nobody has to come back to Python, for which memory would wait.
#pragma once
#include "attention.h"
#include "decoder.h"

struct Layers {
    const Layer* layers;
    const float* scales;  // of each layer's scores
    float* const* pages;  // K and then V of each layer
    int64_t count;
};
// Memory for what is in between; hidden [rows, gate.n], scratch [rows, width], the others [rows, heads, dim] of theirs.
struct Rooms {
    float *q, *k, *v, *attended, *scratch, *hidden;
};

// The rows of x [.., width] that `keep` names, in its order, to the front.
static void take_rows(float* x, long width, const int64_t* keep, long kept) {
    std::vector<float> taken(kept * width);
    for (long i = 0; i < kept; i++) std::memcpy(&taken[i * width], x + keep[i] * width, width * sizeof(float));
    std::memcpy(x, taken.data(), taken.size() * sizeof(float));
}

// x [rows, width] through all layers; K and V are written to their pages. After the last layer's attention only the kept
// rows are computed: they are the first of x afterwards, in the order of `keep`.
static void all_layers(const Layers& all, const Batch& b, const int64_t* keep, long kept, float* x, long rows,
                       const float* cosine, const float* sine, const Rooms& room, int threads) {
    for (long i = 0; i < all.count; i++) {
        const Layer& l = all.layers[i];
        float *k_pages = all.pages[2 * i], *v_pages = all.pages[2 * i + 1];
        Shape shape = {l.heads, l.kv_heads, l.dim, l.v.n / l.kv_heads};
        long qs = l.heads * l.dim, ks = l.kv_heads * l.dim, vs = l.v.n;
        before_attention(l, x, rows, cosine, sine, room.q, room.k, room.v, room.scratch, threads);
        write_pages(b, shape, room.k, ks, l.dim, room.v, vs, shape.v_dim, k_pages, v_pages, threads);
        attend(b, shape, room.q, qs, l.dim, k_pages, v_pages, all.scales[i], room.attended, threads);
        if (i == all.count - 1) {
            take_rows(room.attended, l.o.k, keep, kept);
            take_rows(x, l.o.n, keep, kept);
            rows = kept;
        }
        after_attention(l, room.attended, rows, x, room.scratch, room.hidden, threads);
    }
}
