// Many rows with panels of packed weights: a block of a panel is converted to floats once, into the L1 cache, and all
// rows pass over it. Each sum is one chain, for k ascending: sum = fma(x[k], w[k], sum).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "vec.h"

constexpr int64_t TILE_ROWS = PANEL_VECS == 1 ? 12 : 6;  // their sums fit into registers and hide the latency of an FMA
constexpr int64_t BLOCK_STEPS = 256;                     // x 16 columns = 16 KiB of floats, half of an L1 cache
constexpr int64_t BLOCK_ROWS = 192;                      // rows that pass over a converted block

// sums[ROWS][16] += x (packed, [steps][ROWS]) times block [steps][16].
template <int ROWS>
static void add_tile(const float* x, const float* block, int64_t steps, float* sums) {
    Vec tile[ROWS][PANEL_VECS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
        for (int vec = 0; vec < PANEL_VECS; vec++) tile[row][vec] = load(sums + row * PANEL + vec * VEC_LANES);
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++, x += ROWS, block += PANEL) {
        Vec weights[PANEL_VECS];
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++) weights[vec] = load(block + vec * VEC_LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            const Vec value = broadcast(x[row]);
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) tile[row][vec] = fma(value, weights[vec], tile[row][vec]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
        for (int vec = 0; vec < PANEL_VECS; vec++) store(sums + row * PANEL + vec * VEC_LANES, tile[row][vec]);
}

template <int ROWS>
static void add_rest(int64_t rows, const float* x, const float* block, int64_t steps, float* sums) {
    if (rows == ROWS) return add_tile<ROWS>(x, block, steps, sums);
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(rows, x, block, steps, sums);
}

// How many rows each tile gets so that the last is about as full as the others: 8 rows are 4 and 4, not 6 and 2.
static inline int64_t even_tile(int64_t num_rows) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    return (num_rows + num_tiles - 1) / num_tiles;
}

// Rows of one tile, [depth][rows]: a step reads its rows' values side by side.
static inline void pack_tile(const float* x, int64_t depth, int64_t rows, float* packed) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < depth; k++) packed[k * rows + row] = x[row * depth + k];
}

// The memory that a thread works in.
struct FloatBlocks {
    alignas(64) float block[BLOCK_STEPS * PANEL];
    alignas(64) float sums[BLOCK_ROWS * PANEL];

    // sums[row][column of the panel], for at most BLOCK_ROWS rows packed in tiles of even_tile(num_rows).
    // convert(begin, steps, block) writes the panel's weights of inputs [begin, begin + steps) as floats [steps][16];
    // it may write on to the end of the block.
    template <class Convert>
    void multiply(Convert convert, int64_t depth, const float* packed, int64_t num_rows) {
        const int64_t tile_rows = even_tile(num_rows);
        std::memset(sums, 0, num_rows * PANEL * sizeof(float));
        for (int64_t begin = 0; begin < depth; begin += BLOCK_STEPS) {
            const int64_t steps = std::min(BLOCK_STEPS, depth - begin);
            convert(begin, steps, block);
            for (int64_t row = 0; row < num_rows; row += tile_rows) {
                const int64_t rows = std::min(tile_rows, num_rows - row);
                add_rest<TILE_ROWS>(rows, packed + row * depth + begin * rows, block, steps, sums + row * PANEL);
            }
        }
    }
};

// Multiplies x [num_rows][depth] with every panel; threads share the panels. convert(panel, begin, steps, block) is as
// above, for one panel; finish(row, panel, sums) gets the 16 sums of each row and panel.
template <class Convert, class Finish>
static void multiply_in_blocks(const float* x, int64_t num_rows, int64_t depth, int64_t num_panels, Convert convert,
                               Finish finish) {
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
    const int64_t packed_bytes = std::min(BLOCK_ROWS, num_rows) * depth * sizeof(float);
    float* packed = static_cast<float*>(std::aligned_alloc(64, (packed_bytes + 64) & -64));
#pragma omp parallel
    {
        FloatBlocks blocks;
        for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
            const int64_t rows_here = std::min(BLOCK_ROWS, num_rows - first), tile_rows = even_tile(rows_here);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows_here; row += tile_rows)
                pack_tile(x + (first + row) * depth, depth, std::min(tile_rows, rows_here - row),
                          packed + row * depth);
#pragma omp for schedule(dynamic, chunk)
            for (int64_t panel = 0; panel < num_panels; panel++) {
                blocks.multiply(
                    [&](int64_t begin, int64_t steps, float* block) { convert(panel, begin, steps, block); }, depth,
                    packed, rows_here);
                for (int64_t row = 0; row < rows_here; row++) finish(first + row, panel, blocks.sums + row * PANEL);
            }
        }
    }
    std::free(packed);
}
