// Linear layers with int8 weights and activations: y[m][n] = scale[n] * sum_g s[m][g] * (sum_{k in g} a[m][k] q[n][k]).
//
// Activations are quantised here, a scale s for each row and group of 128 inputs, so that an outlier costs its group
// and not its row. Inner sums are exact integers below 2^24, thus exact as floats; the outer one is a chain of fused
// multiply-adds over the groups. Nothing depends on the number of rows, their order or the threads.
#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "int8_dot.h"
#include "kernels.h"

namespace {

constexpr int64_t TILE_ROWS = PANEL_VECS == 1 ? 12 : 6;
constexpr int64_t BLOCK_ROWS = 192;

struct Linear {
    const float* x;        // [num_rows][depth]
    const int8_t* panels;  // int8_panels.h
    const float* scales;   // [num_panels * 16]
    float* out;            // [num_rows][num_columns]
    int64_t num_rows, num_columns, depth;

    int64_t num_panels() const { return (num_columns + PANEL - 1) / PANEL; }
    int64_t num_groups() const { return (depth + GROUP_STEPS - 1) / GROUP_STEPS; }
};

// Rows of a tile such that the last is about as full as the others.
int64_t even_tile(int64_t num_rows) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    return (num_rows + num_tiles - 1) / num_tiles;
}

// The quantised rows of a block: words of a tile are [group][pair][rows of the tile], scales are [group][rows of it].
struct Activations {
    int32_t* words;
    float* scales;
};

void quantize_tile(const Linear& linear, int64_t first_row, int64_t rows, int32_t* words, float* scales) {
    for (int64_t group = 0; group < linear.num_groups(); group++)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t begin = group * GROUP_STEPS, steps = std::min(GROUP_STEPS, linear.depth - begin);
            scales[group * rows + row] =
                quantize_group(linear.x + (first_row + row) * linear.depth + begin, steps,
                               words + group * GROUP_PAIRS * rows + row, rows);
        }
}

// sums[ROWS][16] += scale of the row * exact integer sums of one group.
template <int ROWS>
void add_tile(const int32_t* words, const float* scales, const int32_t* block, int64_t num_pairs, float* sums) {
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
void add_rest(int64_t rows, const int32_t* words, const float* scales, const int32_t* block, int64_t num_pairs,
              float* sums) {
    if (rows == ROWS) return add_tile<ROWS>(words, scales, block, num_pairs, sums);
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(rows, words, scales, block, num_pairs, sums);
}

// A thread's scratch.
struct Scratch {
    alignas(64) int32_t block[GROUP_PAIRS * PANEL];
    alignas(64) float sums[BLOCK_ROWS * PANEL];
};

// Lines of a group as pairs; asks for the same lines of the next panel.
void unpack(const int8_t* line, int64_t num_lines, int64_t panel_bytes, int32_t* block) {
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

void multiply_panel(const Linear& linear, int64_t panel, int64_t first_row, int64_t num_rows, Activations activations,
                    Scratch& scratch) {
    const int64_t num_groups = linear.num_groups(), tile_rows = even_tile(num_rows);
    const int64_t num_lines = lines_of(linear.depth), panel_bytes = num_lines * LINE_BYTES;
    constexpr int64_t GROUP_LINES = GROUP_STEPS / LINE_STEPS;
    std::memset(scratch.sums, 0, num_rows * PANEL * sizeof(float));
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t begin = group * GROUP_LINES, lines = std::min(GROUP_LINES, num_lines - begin);
        unpack(linear.panels + panel * panel_bytes + begin * LINE_BYTES, lines, panel_bytes, scratch.block);
        for (int64_t row = 0; row < num_rows; row += tile_rows) {
            const int64_t rows = std::min(tile_rows, num_rows - row);
            add_rest<TILE_ROWS>(rows, activations.words + (row * num_groups + group * rows) * GROUP_PAIRS,
                                activations.scales + row * num_groups + group * rows, scratch.block, 2 * lines,
                                scratch.sums + row * PANEL);
        }
    }
    const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, linear.num_columns - column);
    for (int64_t row = 0; row < num_rows; row++) {
        float values[PANEL];
        for (int64_t lane = 0; lane < PANEL; lane += VEC_LANES)
            store(values + lane, load(scratch.sums + row * PANEL + lane) * load(linear.scales + column + lane));
        std::memcpy(linear.out + (first_row + row) * linear.num_columns + column, values, width * sizeof(float));
    }
}

}  // namespace

LAMELLA_EXPORT void lamella_w8a8_linear(const float* x, const int8_t* panels, const float* scales, float* out,
                                        int64_t num_rows, int64_t num_columns, int64_t depth) {
    const Linear linear{x, panels, scales, out, num_rows, num_columns, depth};
    const int64_t num_panels = linear.num_panels(), num_groups = linear.num_groups();
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
    const int64_t block_rows = std::min(BLOCK_ROWS, num_rows);
    const int64_t word_bytes = block_rows * num_groups * GROUP_PAIRS * sizeof(int32_t);
    const int64_t scale_bytes = block_rows * num_groups * sizeof(float);
    void* memory = std::aligned_alloc(LINE_BYTES, (word_bytes + scale_bytes + LINE_BYTES) & -LINE_BYTES);
    const Activations activations{static_cast<int32_t*>(memory),
                                  reinterpret_cast<float*>(static_cast<char*>(memory) + word_bytes)};
#pragma omp parallel
    {
        Scratch scratch;
        for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
            const int64_t rows_here = std::min(BLOCK_ROWS, num_rows - first), tile_rows = even_tile(rows_here);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows_here; row += tile_rows)
                quantize_tile(linear, first + row, std::min(tile_rows, rows_here - row),
                              activations.words + row * num_groups * GROUP_PAIRS,
                              activations.scales + row * num_groups);
#pragma omp for schedule(dynamic, chunk)
            for (int64_t panel = 0; panel < num_panels; panel++)
                multiply_panel(linear, panel, first, rows_here, activations, scratch);
        }
    }
    std::free(memory);
}
