// Sums of products of int8 weights with activations of 16 bits, exact in int32, and activations quantised for them.
//
// A pair is two int16 in a 32-bit lane. x86 multiplies pairs and adds the products in one instruction, so activations
// of 8 bits would gain nothing over 16. (Its instruction for bytes, maddubs, saturates at 2^15 - 1, so it is of use for
// 7 bits only.)
// Nothing overflows: |a| <= 32767 and |b| <= 127 give |a b + a' b'| < 2^23, and a sum has GROUP_STEPS / 2 of these.
#pragma once

#include <cmath>

#include "int8_panels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int64_t GROUP_STEPS = 128;               // inputs that share a scale of the activations
constexpr int64_t GROUP_PAIRS = GROUP_STEPS / 2;
constexpr float LEVELS = 32767.0f;                 // levels are -LEVELS to LEVELS
constexpr float SMALLEST_RANGE = 1e-30f;           // activations below it count as zero: LEVELS / x stays finite

typedef int16_t ShortVec __attribute__((vector_size(LAMELLA_VECTOR_BYTES)));

// sum + a.low * b.low + a.high * b.high for every 32-bit lane.
LAMELLA_INLINE IntVec add_dot(IntVec sum, IntVec a, IntVec b) {
#if defined(__AVX512BW__) && LAMELLA_VECTOR_BYTES == 64
    return sum + (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LAMELLA_VECTOR_BYTES == 32
    return sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Bytes 0 and 2 of every lane as a pair, and bytes 1 and 3.
LAMELLA_INLINE IntVec even_pair(IntVec lanes) { return (IntVec)(((ShortVec)lanes << 8) >> 8); }
LAMELLA_INLINE IntVec odd_pair(IntVec lanes) { return (IntVec)((ShortVec)lanes >> 8); }

// Quantises one group of a row: `steps` values at `x`, and zeros up to GROUP_STEPS. Writes word `pair` to
// words[pair * stride]: inputs (0, 2), (1, 3), (4, 6), (5, 7)..., the order in which the weights' lines are unpacked.
// Returns the scale: value ~ scale * level. A group with a value that is not finite has levels 0 and scale NaN.
static inline float quantize_group(const float* x, int64_t steps, int32_t* words, int64_t stride) {
    float padded[GROUP_STEPS];
    if (steps < GROUP_STEPS) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, x, steps * sizeof(float));
        x = padded;
    }
    Vec most = {}, zeros = {};
    for (int64_t k = 0; k < GROUP_STEPS; k += VEC_LANES) {
        const Vec value = load(x + k);
        most = maximum(most, maximum(value, -value));
        zeros += value * 0.0f;  // NaN where one is NaN or infinite
    }
    const float range = max_lanes(most);
    const bool finite = sum_lanes(zeros) == 0;
    const float inverse = finite && range >= SMALLEST_RANGE ? LEVELS / range : 0.0f;
    int32_t levels[GROUP_STEPS];
    if (!finite)
        std::memset(levels, 0, sizeof levels);
    else
        for (int64_t k = 0; k < GROUP_STEPS; k += VEC_LANES) {
            const Vec to_integer = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest, ties to even
            const Vec rounded = fma(load(x + k), broadcast(inverse), to_integer) - to_integer;
            const IntVec level = __builtin_convertvector(rounded, IntVec);
            std::memcpy(levels + k, &level, sizeof level);
        }
    for (int64_t pair = 0; pair < GROUP_PAIRS; pair++) {
        const int64_t first = pair / 2 * LINE_STEPS + pair % 2;
        words[pair * stride] = int32_t(uint32_t(levels[first]) & 0xffff) | int32_t(uint32_t(levels[first + 2]) << 16);
    }
    return finite ? (inverse != 0 ? range / LEVELS : 0.0f) : NAN;
}
