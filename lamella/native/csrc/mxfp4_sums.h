// Sums of a few rows with MXFP4 weights, in units of powers of two, so that no weight is multiplied with its own.
//
// A sum is kept in units of half of the group's power, and levels themselves are added to it; where a group begins, it
// changes its unit. Each sum is rounded as the chain over the weights is, for a power of two changes no digit, as long
// as nothing becomes too large for a float or so small that it loses digits. That is certain where powers are 2^-36 to
// 2^4, inputs are zero or of magnitude 2^-60 to 2^60, and there are up to 2^20 of them: what sums are made of are
// multiples of 2^(-60 - 23 - 37), which come to less than 2^(20 + 4 + 60 + 3) in all; in units of 2^-37 to 2^3, these
// are multiples of 2^-123 and less than 2^124.
#pragma once

#include "gguf_product.h"
#include "mxfp4.h"

constexpr int64_t MOST_SCALED_DEPTH = int64_t(1) << 20;
constexpr int LEAST_POWER = MXFP4::POWER_BIAS - 36, MOST_POWER = MXFP4::POWER_BIAS + 4;

// Whether inputs are such that sums can be scaled.
static inline bool takes_scaled_sums(const GgufProduct& linear) {
    if (linear.depth > MOST_SCALED_DEPTH) return false;
    IntVec wrong = {};
    for (int64_t index = 0; index < linear.num_rows * linear.depth; index += VEC_LANES) {  // depth: whole groups
        const Vec value = load(linear.x + index), magnitude = maximum(value, -value);
        wrong |= ~((magnitude <= broadcast(0x1p60f)) & ((magnitude >= broadcast(0x1p-60f)) | (value == Vec{})));
    }
    return !any_lane(wrong);
}

typedef uint8_t ByteVec __attribute__((vector_size(LAMELLA_VECTOR_BYTES)));

// The least and the largest power of a panel's groups, in each byte of a word.
struct PowerRange {
    ByteVec least = ByteVec{} + uint8_t(MXFP4::POWER_BIAS), most = least;

    LAMELLA_INLINE void add(PowerRange& range, IntVec powers) {
        const ByteVec bytes = (ByteVec)powers;
        range.least = bytes < range.least ? bytes : range.least;
        range.most = bytes > range.most ? bytes : range.most;
    }

    bool takes_scaled_sums() const {
        return !any_lane((IntVec)((least < uint8_t(LEAST_POWER)) | (most > uint8_t(MOST_POWER))));
    }
};

constexpr int32_t FLOAT_POWER = 1 << 23;  // what a float's bits differ by where it is twice as large

LAMELLA_INLINE Vec float_of(IntVec bits) {
    Vec value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// value * weights + sum. On AVX-512 the value is an operand in memory: compilers would keep it in a register for all
// panels and run out of them, a sixth of the speed.
LAMELLA_INLINE Vec add_product(const float* value, Vec weights, Vec sum) {
#if defined(__AVX512F__) && LAMELLA_VECTOR_BYTES == 64
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*value));
    return sum;
#else
    return fma(broadcast(*value), weights, sum);
#endif
}

template <int ROWS, int PANELS>
struct ScaledSums {
    Vec sums[ROWS][PANELS][PANEL_VECS];
    IntVec powers[PANELS][PANEL_VECS];  // of the group before, as the bits of floats

    // Changes units to those of the powers of `group`.
    LAMELLA_INLINE void rescale(ScaledSums& tile, const int32_t* block, int64_t panel_words, int group) {
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) {
                const IntVec power = MXFP4::power(block + panel * panel_words + vec * VEC_LANES, group) << 23;
                const Vec ratio = float_of(tile.powers[panel][vec] - power + MXFP4::POWER_BIAS * FLOAT_POWER);
                tile.powers[panel][vec] = power;
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++) tile.sums[row][panel][vec] *= ratio;
            }
    }

    // Adds the products of 8 inputs with the codes in a word of each panel. Fetches the word that is `ahead`.
    LAMELLA_INLINE void add_word(ScaledSums& tile, const float* x, int64_t depth, const int32_t* word,
                                 int64_t panel_words, int64_t ahead) {
        Levels levels[PANELS][PANEL_VECS];
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; panel++) {
            __builtin_prefetch(word + panel * panel_words + ahead, 0, 2);
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                levels[panel][vec] = Levels::of(load_word(word + panel * panel_words + vec * VEC_LANES, 0));
        }
#pragma GCC unroll 8
        for (int step = 0; step < CHUNK_STEPS; step++)
#pragma GCC unroll 4
            for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 4
                for (int vec = 0; vec < PANEL_VECS; vec++) {
                    const Vec level = Levels::at(levels[panel][vec], step);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; row++)
                        tile.sums[row][panel][vec] =
                            add_product(x + row * depth + step, level, tile.sums[row][panel][vec]);
                }
    }
};

// ROWS rows with PANELS neighbouring panels. Returns whether their powers are such that sums can be scaled; if not,
// nothing is written.
template <int ROWS, int PANELS>
static bool multiply_scaled(const GgufProduct& linear, int64_t panel) {
    ScaledSums<ROWS, PANELS> tile = {};
#pragma GCC unroll 4
    for (int index = 0; index < PANELS; index++)
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++) tile.powers[index][vec] += MXFP4::POWER_BIAS * FLOAT_POWER;
    PowerRange range;
    const int64_t words = panel_words<MXFP4>(linear), ahead = PANELS * words;
    const int32_t* block = block_at<MXFP4>(linear, panel, 0);
    const float* x = linear.x;
    for (int64_t left = linear.num_groups(); left > 0; left -= MXFP4::GROUPS, block += MXFP4::WORDS * PANEL) {
#pragma GCC unroll 4
        for (int index = 0; index < PANELS; index++) {
            const int32_t* const powers = block + index * words;
            __builtin_prefetch(powers + ahead, 0, 2);
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) PowerRange::add(range, load_word(powers + vec * VEC_LANES, 0));
        }
        const int32_t* word = block + PANEL;
        for (int group = 0; group < std::min<int64_t>(MXFP4::GROUPS, left); group++) {
            ScaledSums<ROWS, PANELS>::rescale(tile, block, words, group);
            for (int part = 0; part < GROUP_STEPS / CHUNK_STEPS; part++, x += CHUNK_STEPS, word += PANEL)
                ScaledSums<ROWS, PANELS>::add_word(tile, x, linear.depth, word, words, ahead);
        }
    }
    if (!range.takes_scaled_sums()) return false;
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int index = 0; index < PANELS; index++) {
            float values[PANEL];
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                store(values + vec * VEC_LANES,
                      tile.sums[row][index][vec] * float_of(tile.powers[index][vec] - FLOAT_POWER));
            linear.finish(row, panel + index, values);
        }
    return true;
}
