// Vectors of floats as wide as the machine's, through the compiler's own vector types: no intrinsics but for transposing.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
constexpr int LANES = 2 * W;  // columns of a panel: two vectors

typedef float vf __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));  // anywhere in memory
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef int8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint16_t vh_any __attribute__((vector_size(W * 2), aligned(2), may_alias));

static inline vf load(const float* p) { return *(const vf_any*)p; }
static inline void store(float* p, vf v) { *(vf_any*)p = v; }
static inline vf splat(float x) {  // not vf{} + x: adding zero is an operation (it turns -0 into 0)
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (vf)_mm256_set1_ps(x);
#else
    return vf{x, x, x, x};
#endif
}
static inline vf as_float(vi v) { vf r; std::memcpy(&r, &v, sizeof r); return r; }

// Weights of any format, as floats.
static inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector((vb)*(const vb_any*)p, vf);
#endif
}
static inline vf load(const uint16_t* p) {  // bfloat16: the upper half of a float
#if defined(__AVX512F__)
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(__AVX2__)
    return (vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
#else
    return as_float(__builtin_convertvector((vh)*(const vh_any*)p, vi) << 16);
#endif
}

static inline float sum(vf v) {  // always in the same order
    float total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}
static inline vf larger(vf a, vf b) { return a > b ? a : b; }

// e^x to about 1 ulp (the polynomial of Cephes); NaN stays NaN, far below zero gives the smallest normal number.
static inline vf exponential(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vf magic = splat(12582912.0f);
    vf n = x * splat(1.44269504088896341f) + magic;
    n = n - magic;
    vf r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    return p * as_float((__builtin_convertvector(n, vi) + 127) << 23);
}
