// One vector type for every instruction set, by the compiler's vector extensions. A translation unit is compiled
// once for each set; LAMELLA_VECTOR_BYTES (32 for AVX2, 64 for AVX-512, 16 for NEON) says how wide a register is.
//
// Everything is laid out in panels of 16 columns whatever the width, so packed weights and KV pages do not depend on
// the processor. A panel row is PANEL_VECS registers.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef LAMELLA_VECTOR_BYTES
#error "compile with -DLAMELLA_VECTOR_BYTES=16, 32 or 64"
#endif

#define LAMELLA_EXPORT extern "C" __attribute__((visibility("default")))
#define LAMELLA_INLINE static inline __attribute__((always_inline))

constexpr int VEC_LANES = LAMELLA_VECTOR_BYTES / 4;
constexpr int PANEL = 16;
constexpr int PANEL_VECS = PANEL / VEC_LANES;

typedef float Vec __attribute__((vector_size(LAMELLA_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(LAMELLA_VECTOR_BYTES)));

LAMELLA_INLINE Vec load(const float* from) {
    Vec vec;
    std::memcpy(&vec, from, sizeof vec);
    return vec;
}

LAMELLA_INLINE void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof vec); }

// The end of a row: `count` values and zeros.
LAMELLA_INLINE Vec load_part(const float* from, int64_t count) {
    Vec vec = {};
    std::memcpy(&vec, from, size_t(count) * sizeof(float));
    return vec;
}

LAMELLA_INLINE void store_part(float* to, Vec vec, int64_t count) {
    std::memcpy(to, &vec, size_t(count) * sizeof(float));
}

LAMELLA_INLINE Vec broadcast(float value) { return value - Vec{}; }

// One rounding: -ffp-contract=fast makes this an FMA instruction on every target that is built.
LAMELLA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

LAMELLA_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
LAMELLA_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

LAMELLA_INLINE float sum_lanes(Vec vec) {
    float lanes[VEC_LANES];
    store(lanes, vec);
    for (int width = VEC_LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

LAMELLA_INLINE float max_lanes(Vec vec) {
    float lanes[VEC_LANES];
    store(lanes, vec);
    float most = lanes[0];
    for (int lane = 1; lane < VEC_LANES; lane++) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

// Whether a comparison holds in any lane.
LAMELLA_INLINE bool any_lane(IntVec mask) {
    int32_t lanes[VEC_LANES], any = 0;
    std::memcpy(lanes, &mask, sizeof mask);
    for (int lane = 0; lane < VEC_LANES; lane++) any |= lanes[lane];
    return any != 0;
}

// e^x to about 2 ulp; 0 below -87.3 (so e^-inf is exactly 0), clamped at 88, NaN for NaN (a comparison with NaN is
// false: hence the order of the operands). x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a
// polynomial whose coefficients are the Taylor series', adjusted to the interval (Cephes, expf).
LAMELLA_INLINE Vec exponential(Vec x) {
    const Vec lowest = broadcast(-87.3f);
    const IntVec is_zero = x <= lowest;
    Vec clamped = minimum(broadcast(88.0f), maximum(lowest, x));
    const Vec to_integer = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    Vec n = fma(clamped, broadcast(1.44269504f), to_integer) - to_integer;
    Vec r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + broadcast(1.0f));
    IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    Vec result = p * scale;
    IntVec bits;
    std::memcpy(&bits, &result, sizeof bits);
    bits &= ~is_zero;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
