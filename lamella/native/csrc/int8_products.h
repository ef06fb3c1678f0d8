// Many rows of floats with panels of int8 weights. The rows are rounded to levels a of 16 bits, with a scale s for each
// row and group of 128 inputs, and sum_g s[m][g] * (sum_{k in g} a[m][k] q[n][k]) is computed.
//
// Inner sums are exact integers, each rounded once to a float; the outer one is a chain of fused multiply-adds over the
// groups. Nothing depends on the number of rows, their order or the threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "int8_dot.h"

constexpr int64_t TILE_ROWS = PANEL_VECS == 1 ? 12 : 6;
constexpr int64_t BLOCK_ROWS = 192;  // rows that pass over an unpacked panel

LAMELLA_INLINE int64_t groups_of(int64_t depth) { return (depth + GROUP_STEPS - 1) / GROUP_STEPS; }

// How many rows each tile gets so that the last is about as full as the others.
static inline int64_t even_tile(int64_t num_rows) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    return (num_rows + num_tiles - 1) / num_tiles;
}

// The quantised rows of a block: words of a tile are [group][pair][rows of the tile], scales are [group][rows of it].
class Activations {
public:
    Activations(int64_t most_rows, int64_t depth) : num_groups(groups_of(depth)) {
        const int64_t word_bytes = most_rows * num_groups * GROUP_PAIRS * sizeof(int32_t);
        const int64_t scale_bytes = most_rows * num_groups * sizeof(float);
        memory = std::aligned_alloc(LINE_BYTES, (word_bytes + scale_bytes + LINE_BYTES) & -LINE_BYTES);
        words = static_cast<int32_t*>(memory);
        scales = reinterpret_cast<float*>(static_cast<char*>(memory) + word_bytes);
    }
    ~Activations() { std::free(memory); }
    Activations(const Activations&) = delete;
    Activations& operator=(const Activations&) = delete;

    // Quantises rows [first, first + rows) of the block of rows at `x`: one of its tiles.
    void quantize_tile(const float* x, int64_t depth, int64_t first, int64_t rows) {
        int32_t* to = words + first * num_groups * GROUP_PAIRS;
        for (int64_t group = 0; group < num_groups; group++)
            for (int64_t row = 0; row < rows; row++) {
                const int64_t begin = group * GROUP_STEPS, steps = std::min(GROUP_STEPS, depth - begin);
                scales[first * num_groups + group * rows + row] = quantize_group(
                    x + (first + row) * depth + begin, steps, to + group * GROUP_PAIRS * rows + row, rows);
            }
    }

    int64_t num_groups;
    int32_t* words;
    float* scales;

private:
    void* memory;
};

// sums[ROWS][16] += scale of the row * exact integer sums of one group.
template <int ROWS>
static void add_tile(const int32_t* words, const float* scales, const int32_t* block, int64_t num_pairs, float* sums) {
    IntVec tile[ROWS][PANEL_VECS] = {};
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < num_pairs; pair++, words += ROWS, block += PANEL) {
        IntVec weights[PANEL_VECS];
        std::memcpy(weights, block, sizeof weights);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            const IntVec value = words[row] - IntVec{};
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) tile[row][vec] = add_dot(tile[row][vec], value, weights[vec]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            float* to = sums + row * PANEL + vec * VEC_LANES;
            store(to, fma(__builtin_convertvector(tile[row][vec], Vec), broadcast(scales[row]), load(to)));
        }
}

template <int ROWS>
static void add_rest(int64_t rows, const int32_t* words, const float* scales, const int32_t* block, int64_t num_pairs,
              float* sums) {
    if (rows == ROWS) return add_tile<ROWS>(words, scales, block, num_pairs, sums);
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(rows, words, scales, block, num_pairs, sums);
}

// Unpacks the lines of a group into pairs. Fetches the same lines of the next panel ahead.
static inline void unpack(const int8_t* line, int64_t num_lines, int64_t panel_bytes, int32_t* block) {
    for (int64_t index = 0; index < num_lines; index++, line += LINE_BYTES, block += 2 * PANEL) {
        __builtin_prefetch(line + panel_bytes, 0, 2);
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            const IntVec lanes = load_lanes(line + vec * LAMELLA_VECTOR_BYTES);
            const IntVec even = even_pair(lanes), odd = odd_pair(lanes);
            std::memcpy(block + vec * VEC_LANES, &even, sizeof even);
            std::memcpy(block + PANEL + vec * VEC_LANES, &odd, sizeof odd);
        }
    }
}

// The memory that a thread works in.
struct PanelSums {
    alignas(64) int32_t block[GROUP_PAIRS * PANEL];
    alignas(64) float sums[BLOCK_ROWS * PANEL];

    // sums[row][16] of a block of rows with the panel whose lines begin at `line`. Fetches those of the next ahead.
    void multiply(const int8_t* line, int64_t depth, int64_t num_rows, const Activations& activations) {
        const int64_t num_groups = activations.num_groups, tile_rows = even_tile(num_rows);
        const int64_t num_lines = lines_of(depth);
        constexpr int64_t GROUP_LINES = GROUP_STEPS / LINE_STEPS;
        std::memset(sums, 0, num_rows * PANEL * sizeof(float));
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t begin = group * GROUP_LINES, lines = std::min(GROUP_LINES, num_lines - begin);
            unpack(line + begin * LINE_BYTES, lines, num_lines * LINE_BYTES, block);
            for (int64_t row = 0; row < num_rows; row += tile_rows) {
                const int64_t rows = std::min(tile_rows, num_rows - row);
                add_rest<TILE_ROWS>(rows, activations.words + (row * num_groups + group * rows) * GROUP_PAIRS,
                                    activations.scales + row * num_groups + group * rows, block, 2 * lines,
                                    sums + row * PANEL);
            }
        }
    }
};
