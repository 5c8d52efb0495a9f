// Causal attention over paged K and V, read where they are.
//
// The keys of a row are taken in blocks of BLOCK positions that begin at multiples of BLOCK. Each block has its own
// maximum, sum and weighted values, and the blocks are put together in order. So a query's answer does not depend on the
// batch, on chunks, or on how many threads share a long row: prefill and decode are one and the same computation.
// Query heads that share a KV head are worked on together: K and V are read once for all of them.
//
// Ideas: FlashAttention (Dao et al., 2022), paged KV (Kwon et al., 2023), split KV (FlashDecoding, 2023).
#pragma once
#include "linear.h"

constexpr long BLOCK = 64;
constexpr long QUERIES = 48;  // query vectors that are worked on together

struct Batch {
    const int64_t* starts;   // [rows]
    const int64_t* counts;   // [rows]
    const int64_t* firsts;   // [rows]: the row's first token in the batch
    const int64_t* offsets;  // [rows]: where the row's page table begins in `pages`
    const int32_t* pages;
    int64_t rows, page_size;
};
struct Shape {
    int64_t heads, kv_heads, k_dim, v_dim;
};

static inline long up_to(long n, long step) { return (n + step - 1) / step * step; }

// One row's queries first .. last (of its own), for one KV head.
struct Unit {
    long row, kv_head, first, last, blocks;
    long parts;         // how many tasks share its blocks
    long scratch;       // where in the scratch its blocks' results lie, if several do
};

static inline void store_transposed(const float* const* rows, long count, long dim, float* out) {
    // rows[j][d] -> panels: out[j / LANES][d][j % LANES], zero for j from count on
    for (long j = 0; j < up_to(count, LANES); j += W) {
        float* to = out + j / LANES * dim * LANES + j % LANES;
        long d = 0;
#if defined(__AVX__) && !defined(__AVX512F__)
        if (j + W <= count)
            for (; d + W <= dim; d += W) {
                __m256 r[8], s[8];
                for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[j + i] + d);
                for (int i = 0; i < 8; i += 2) {
                    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
                }
                for (int i = 0; i < 8; i += 4) {
                    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
                    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
                    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
                    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
                }
                for (int i = 0; i < 4; i++) {
                    _mm256_storeu_ps(to + (d + i) * LANES, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                    _mm256_storeu_ps(to + (d + i + 4) * LANES, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
                }
            }
#endif
        for (; d < dim; d++)
            for (int i = 0; i < W; i++) to[d * LANES + i] = j + i < count ? rows[j + i][d] : 0.0f;
    }
}

// Scores of R queries with one panel of keys.
template <int R> static inline void scores_of(const float* q, long ldq, const float* panel, long dim, float* s) {
    vf acc[R][2];
    multiply<R>(q, ldq, panel, dim, acc);
    for (int r = 0; r < R; r++) store(s + r * BLOCK, acc[r][0]), store(s + r * BLOCK + W, acc[r][1]);
}

// Values of R queries: sum over keys of p[r][j] * values[j][0 .. width).
template <int R> static inline void values_of(const float* p, const float* const* values, long count, long at, long width, float* o, long ldo) {
    if (width == LANES) {
        vf acc[R][2];
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vf{};
        for (long j = 0; j < count; j++) {
            vf b0 = load(values[j] + at), b1 = load(values[j] + at + W);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                vf a = splat(p[r * BLOCK + j]);
                acc[r][0] += a * b0;
                acc[r][1] += a * b1;
            }
        }
        for (int r = 0; r < R; r++) store(o + r * ldo + at, acc[r][0]), store(o + r * ldo + at + W, acc[r][1]);
    } else
        for (int r = 0; r < R; r++)
            for (long i = at; i < at + width; i++) {
                float total = 0;
                for (long j = 0; j < count; j++) total = std::fma(p[r * BLOCK + j], values[j][i], total);
                o[r * ldo + i] = total;
            }
}

// Memory of one thread.
struct Desk {
    std::vector<float> q, keys, s, o, total, most, sums, block_most, block_sums;
    const float* k_rows[BLOCK];
    const float* v_rows[BLOCK];
    void fit(const Shape& a) {
        size_t queries = std::max(QUERIES, a.heads / a.kv_heads), values = queries * up_to(a.v_dim, LANES);
        if (q.size() < queries * a.k_dim) q.resize(queries * a.k_dim);
        if (keys.size() < (size_t)BLOCK * a.k_dim) keys.resize(BLOCK * a.k_dim);
        if (s.size() < queries * BLOCK) s.resize(queries * BLOCK);
        if (o.size() < values) o.resize(values), total.resize(values);
        if (most.size() < queries) most.resize(queries), sums.resize(queries), block_most.resize(queries), block_sums.resize(queries);
    }
};

struct Attention {
    const Batch& b;
    const Shape& a;
    const float *query, *k_pages, *v_pages;
    long q_token, q_head;  // strides of the query, in numbers
    float* out;            // [tokens, heads, v_dim]
    float scale;
    long group, chunk;     // query heads of a KV head; tokens of a unit
    std::vector<Unit> units;
    std::vector<std::pair<long, long>> tasks;  // unit, first block
    std::vector<std::atomic<long>> done;
    std::vector<float> scratch;
    long span = 0;  // blocks of a task

    Attention(const Batch& b, const Shape& a, int threads) : b(b), a(a), group(a.heads / a.kv_heads) {
        chunk = std::max<long>(1, QUERIES / group);
        long all = 0;
        for (long row = 0; row < b.rows; row++)
            for (long first = 0; first < b.counts[row]; first += chunk)
                for (long head = 0; head < a.kv_heads; head++) {
                    long last = std::min(b.counts[row], first + chunk);
                    long blocks = (b.starts[row] + last + BLOCK - 1) / BLOCK;
                    units.push_back({row, head, first, last, blocks, 1, 0});
                    all += blocks;
                }
        std::stable_sort(units.begin(), units.end(), [](const Unit& x, const Unit& y) { return x.blocks > y.blocks; });
        // Long units come first; one that would be more than a thread's fair part is shared.
        span = threads == 1 ? all + 1 : std::max<long>(1, all / (threads * 6));
        long used = 0, stride = up_to(a.v_dim, LANES) + 2;
        for (size_t i = 0; i < units.size(); i++) {
            Unit& u = units[i];
            if (u.blocks > 2 * span || (u.blocks > span && units.size() < (size_t)threads * 4)) {
                u.parts = (u.blocks + span - 1) / span;
                u.scratch = used;
                used += u.blocks * (u.last - u.first) * group * stride;
                for (long at = 0; at < u.blocks; at += span) tasks.push_back({(long)i, at});
            } else
                tasks.push_back({(long)i, 0});
        }
        scratch.resize(used);
        done = std::vector<std::atomic<long>>(units.size());
    }

    // One block of keys: maxima, sums and weighted values of all the unit's queries (none seen: maximum -inf).
    void block_of(const Unit& u, long block, Desk& d, float* o, float* most, float* sums) const {
        long base = block * BLOCK, queries = (u.last - u.first) * group, ldo = up_to(a.v_dim, LANES);
        long limit = std::min(BLOCK, b.starts[u.row] + u.last - base);
        const int32_t* table = b.pages + b.offsets[u.row];
        long k_slot = a.kv_heads * a.k_dim, v_slot = a.kv_heads * a.v_dim;
        long page = base / b.page_size, offset = base % b.page_size;
        for (long j = 0; j < limit; page++, offset = 0)
            for (long slot = table[page] * b.page_size + offset; offset < b.page_size && j < limit; offset++, slot++, j++) {
                d.k_rows[j] = k_pages + slot * k_slot + u.kv_head * a.k_dim;
                d.v_rows[j] = v_pages + slot * v_slot + u.kv_head * a.v_dim;
            }
        store_transposed(d.k_rows, limit, a.k_dim, d.keys.data());
        float* s = d.s.data();
        for (long panel = 0; panel * LANES < limit; panel++)
            in_tiles(queries, [&](auto r, long row) {
                scores_of<r()>(d.q.data() + row * a.k_dim, a.k_dim, d.keys.data() + panel * a.k_dim * LANES, a.k_dim,
                             s + row * BLOCK + panel * LANES);
            });
        for (long query = 0; query < queries; query++) {
            long seen = std::min(limit, b.starts[u.row] + u.first + query / group + 1 - base);
            softmax(s + query * BLOCK, seen, up_to(limit, LANES), most[query], sums[query]);
        }
        for (long at = 0; at < a.v_dim; at += LANES)
            in_tiles(queries, [&](auto r, long row) {
                values_of<r()>(s + row * BLOCK, d.v_rows, limit, at, std::min<long>(LANES, a.v_dim - at), o + row * ldo, ldo);
            });
    }

    // Scores -> e^(score - maximum) in place, 0 for keys that are not seen.
    static void softmax(float* s, long seen, long width, float& most, float& total) {
        if (seen <= 0) {
            for (long j = 0; j < width; j++) s[j] = 0;
            most = -INFINITY, total = 0;
            return;
        }
        for (long j = seen; j < width; j++) s[j] = -INFINITY;
        vf top = load(s);
        for (long j = W; j < width; j += W) top = larger(load(s + j), top);
        float m = top[0];
        for (int i = 1; i < W; i++) m = std::max(m, top[i]);
        if (!(m > -INFINITY)) m = 0;  // all are -inf, or NaN: whatever comes out must not hide it
        vf sums = {};
        for (long j = 0; j < width; j += W) {
            vf e = exponential(load(s + j) - splat(m));
            store(s + j, e);
        }
        for (long j = seen; j < width; j++) s[j] = 0;
        for (long j = 0; j < width; j += W) sums += load(s + j);
        most = m, total = sum(sums);
    }

    // Adds a block's result to what the blocks before it gave.
    void merge(long queries, const float* o, const float* most, const float* sums, bool first, Desk& d) const {
        long ldo = up_to(a.v_dim, LANES);
        for (long query = 0; query < queries; query++) {
            float &m = d.most[query], &l = d.sums[query];
            float* total = d.total.data() + query * ldo;
            const float* add = o + query * ldo;
            if (first) {
                m = most[query], l = sums[query];
                std::memcpy(total, add, ldo * sizeof(float));
            } else if (most[query] != -INFINITY) {
                float top = std::max(m, most[query]);
                float old = scalar_exponential(m - top), now = scalar_exponential(most[query] - top);
                l = l * old + sums[query] * now, m = top;
                for (long i = 0; i < ldo; i += W)
                    store(total + i, load(total + i) * splat(old) + load(add + i) * splat(now));
            }
        }
    }
    static float scalar_exponential(float x) { return x == 0 ? 1.0f : x == -INFINITY ? 0.0f : exponential(splat(x))[0]; }

    void answer(const Unit& u, Desk& d) const {
        long ldo = up_to(a.v_dim, LANES), queries = (u.last - u.first) * group;
        for (long query = 0; query < queries; query++) {
            long token = b.firsts[u.row] + u.first + query / group, head = u.kv_head * group + query % group;
            float* to = out + (token * a.heads + head) * a.v_dim;
            for (long i = 0; i < a.v_dim; i++) to[i] = d.total[query * ldo + i] / d.sums[query];
        }
    }

    void run(long task, Desk& d) {
        auto [index, from] = tasks[task];
        const Unit& u = units[index];
        long queries = (u.last - u.first) * group, ldo = up_to(a.v_dim, LANES);
        for (long query = 0; query < queries; query++) {
            const float* from_q = query_at(u, query);
            for (long i = 0; i < a.k_dim; i++) d.q[query * a.k_dim + i] = from_q[i] * scale;
        }
        if (u.parts == 1) {
            for (long block = 0; block < u.blocks; block++) {
                block_of(u, block, d, d.o.data(), d.block_most.data(), d.block_sums.data());
                merge(queries, d.o.data(), d.block_most.data(), d.block_sums.data(), block == 0, d);
            }
            return answer(u, d);
        }
        long each = queries * (ldo + 2);
        for (long block = from; block < std::min(u.blocks, from + span); block++) {
            float* at = scratch.data() + u.scratch + block * each;
            block_of(u, block, d, at, at + queries * ldo, at + queries * (ldo + 1));
        }
        if (done[index].fetch_add(1, std::memory_order_acq_rel) != u.parts - 1) return;
        for (long block = 0; block < u.blocks; block++) {
            const float* at = scratch.data() + u.scratch + block * each;
            merge(queries, at, at + queries * ldo, at + queries * (ldo + 1), block == 0, d);
        }
        answer(u, d);
    }
    const float* query_at(const Unit& u, long number) const {
        long token = b.firsts[u.row] + u.first + number / group, head = u.kv_head * group + number % group;
        return query + token * q_token + head * q_head;
    }
};

static void attend(const Batch& b, const Shape& a, const float* query, long q_token, long q_head, const float* k_pages,
                   const float* v_pages, float scale, float* out, int threads) {
    Attention work(b, a, threads);
    work.query = query, work.k_pages = k_pages, work.v_pages = v_pages;
    work.q_token = q_token, work.q_head = q_head, work.out = out, work.scale = scale;
    long tasks = (long)work.tasks.size();
    auto job = [&](Team& team) {
        static thread_local Desk desk;
        desk.fit(a);
        team.each(0, tasks, [&](long task) { work.run(task, desk); });
    };
    parallel((int)std::min<long>(threads, tasks), job);
}

// K or V of a batch's tokens [tokens, kv_heads, dim] into their slots: of tokens first .. last of a row.
static void write_tokens(const Batch& b, long row, long first, long last, const float* from, long token_stride,
                         long head_stride, long kv_heads, long dim, float* pages) {
    for (long i = first; i < last; i++) {
        long position = b.starts[row] + i, page = b.pages[b.offsets[row] + position / b.page_size];
        float* to = pages + (page * b.page_size + position % b.page_size) * kv_heads * dim;
        const float* at = from + (b.firsts[row] + i) * token_stride;
        for (long head = 0; head < kv_heads; head++)
            std::memcpy(to + head * dim, at + head * head_stride, dim * sizeof(float));
    }
}

constexpr long WRITTEN = 16;  // tokens of a task

// K and V of a batch's tokens into their slots. Rows that share a page in one step write the same to it.
static void write_pages(const Batch& b, const Shape& a, const float* keys, long k_token, long k_head,
                        const float* values, long v_token, long v_head, float* k_pages, float* v_pages, int threads) {
    long total = b.rows ? b.firsts[b.rows - 1] + b.counts[b.rows - 1] : 0, tasks = (total + WRITTEN - 1) / WRITTEN;
    auto job = [&](Team& team) {
        team.each(0, tasks, [&](long task) {
            long at = task * WRITTEN, end = std::min(total, at + WRITTEN);
            long row = std::upper_bound(b.firsts, b.firsts + b.rows, at) - b.firsts - 1;
            for (; at < end; row++) {
                long first = at - b.firsts[row], last = std::min((long)b.counts[row], end - b.firsts[row]);
                write_tokens(b, row, first, last, keys, k_token, k_head, a.kv_heads, a.k_dim, k_pages);
                write_tokens(b, row, first, last, values, v_token, v_head, a.kv_heads, a.v_dim, v_pages);
                at += last - first;
            }
        });
    };
    parallel(tasks > 2 ? threads : 1, job);
}
