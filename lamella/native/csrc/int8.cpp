// Linear layers with int8 weights and float activations: y[m][n] = scale[n] * sum_k x[m][k] q[n][k] (+ bias[n]).
//
// Few rows: weights are converted in registers on their way from memory, whose rate is the limit. More rows: a block
// of a panel is converted once into the L1 cache, and all rows pass over it. Both continue the same chains.
#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "int8_panels.h"

namespace {

constexpr int64_t DIRECT_ROWS = 4;                        // most rows that convert weights in registers
constexpr int64_t TILE_ROWS = PANEL_VECS == 1 ? 12 : 6;   // sums in registers that hide the latency of an FMA
constexpr int64_t BLOCK_STEPS = 256;                      // x 16 columns = 16 KiB of floats, half of an L1 cache
constexpr int64_t BLOCK_ROWS = 192;                       // rows that pass over a converted block

struct Linear {
    const float* x;         // [num_rows][depth]
    const int8_t* panels;   // [num_panels][ceil(depth / 4)][16][4]
    const float* scales;    // [num_panels * 16]
    const float* bias;      // [num_columns] or null
    float* out;             // [num_rows][num_columns]
    int64_t num_rows, num_columns, depth;

    int64_t num_panels() const { return (num_columns + PANEL - 1) / PANEL; }

    const int8_t* panel_at(int64_t panel) const { return panels + panel * lines_of(depth) * LINE_BYTES; }

    // The one place where a sum becomes an output, so that it is rounded the same way on every path.
    void finish(int64_t row, int64_t panel, const Vec* sums) const {
        const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, num_columns - column);
        float values[PANEL], addends[PANEL] = {};
        float* to = width == PANEL ? out + row * num_columns + column : values;
        if (bias) std::memcpy(addends, bias + column, width * sizeof(float));
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            const Vec scale = load(scales + column + vec * VEC_LANES);
            const Vec value = bias ? fma(sums[vec], scale, load(addends + vec * VEC_LANES)) : sums[vec] * scale;
            store(to + vec * VEC_LANES, value);
        }
        if (to == values) std::memcpy(out + row * num_columns + column, values, width * sizeof(float));
    }
};

template <int ROWS, int PANELS>
void multiply_direct(const Linear& linear, int64_t panel) {
    const auto tile = multiply_bytes<ROWS, PANELS>(linear.x, linear.depth, linear.panel_at(panel), linear.depth);
    for (int row = 0; row < ROWS; row++)
        for (int index = 0; index < PANELS; index++) linear.finish(row, panel + index, tile.sums[row][index]);
}

template <int ROWS, int PANELS>
void run_direct(const Linear& linear) {
    const int64_t num_panels = linear.num_panels(), num_groups = num_panels / PANELS;
    const int64_t chunk = std::max<int64_t>(1, num_groups / (8 * omp_get_max_threads()));
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t group = 0; group < num_groups; group++) multiply_direct<ROWS, PANELS>(linear, group * PANELS);
#pragma omp for schedule(dynamic, 1)
        for (int64_t panel = num_groups * PANELS; panel < num_panels; panel++)
            multiply_direct<ROWS, 1>(linear, panel);
    }
}

// sums[ROWS][16] += x (packed, [steps][ROWS]) times block [steps][16].
template <int ROWS>
void add_tile(const float* x, const float* block, int64_t steps, float* sums) {
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
void add_rest(int64_t rows, const float* x, const float* block, int64_t steps, float* sums) {
    if (rows == ROWS) return add_tile<ROWS>(x, block, steps, sums);
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(rows, x, block, steps, sums);
}

// Rows of a tile such that the last is about as full as the others: 8 rows are 4 and 4, not 6 and 2.
int64_t even_tile(int64_t num_rows) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    return (num_rows + num_tiles - 1) / num_tiles;
}

// Rows of one tile, [depth][rows]: a step reads its rows' values side by side.
void pack_rows(const float* x, int64_t depth, int64_t rows, float* packed) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < depth; k++) packed[k * rows + row] = x[row * depth + k];
}

// [steps][16] floats of a panel; whole lines are written. Asks for the same lines of the next panel.
void convert_block(const int8_t* line, int64_t panel_bytes, int64_t steps, float* block) {
    for (int64_t k = 0; k < steps; k += LINE_STEPS, line += LINE_BYTES, block += LINE_STEPS * PANEL) {
        __builtin_prefetch(line + panel_bytes, 0, 2);
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            const IntVec lanes = load_lanes(line + vec * LAMELLA_VECTOR_BYTES);
#pragma GCC unroll 4
            for (int step = 0; step < LINE_STEPS; step++)
                store(block + step * PANEL + vec * VEC_LANES, take_byte(lanes, step));
        }
    }
}

void multiply_panel(const Linear& linear, int64_t panel, int64_t first_row, int64_t num_rows, const float* packed,
                    float* block, float* sums) {
    const int64_t depth = linear.depth, tile_rows = even_tile(num_rows);
    std::memset(sums, 0, num_rows * PANEL * sizeof(float));
    for (int64_t begin = 0; begin < depth; begin += BLOCK_STEPS) {
        const int64_t steps = std::min(BLOCK_STEPS, depth - begin);
        convert_block(linear.panel_at(panel) + begin * PANEL, lines_of(depth) * LINE_BYTES, steps, block);
        for (int64_t row = 0; row < num_rows; row += tile_rows) {
            const int64_t rows = std::min(tile_rows, num_rows - row);
            add_rest<TILE_ROWS>(rows, packed + row * depth + begin * rows, block, steps, sums + row * PANEL);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        Vec finished[PANEL_VECS];
        std::memcpy(finished, sums + row * PANEL, sizeof finished);
        linear.finish(first_row + row, panel, finished);
    }
}

void run_blocks(const Linear& linear) {
    const int64_t depth = linear.depth, num_panels = linear.num_panels();
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
    const int64_t packed_bytes = std::min(BLOCK_ROWS, linear.num_rows) * depth * sizeof(float);
    float* packed = static_cast<float*>(std::aligned_alloc(LINE_BYTES, (packed_bytes + LINE_BYTES) & -LINE_BYTES));
#pragma omp parallel
    {
        alignas(64) float block[BLOCK_STEPS * PANEL], sums[BLOCK_ROWS * PANEL];
        for (int64_t first = 0; first < linear.num_rows; first += BLOCK_ROWS) {
            const int64_t num_rows = std::min(BLOCK_ROWS, linear.num_rows - first), tile_rows = even_tile(num_rows);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_rows; row += tile_rows)
                pack_rows(linear.x + (first + row) * depth, depth, std::min(tile_rows, num_rows - row),
                          packed + row * depth);
#pragma omp for schedule(dynamic, chunk)
            for (int64_t panel = 0; panel < num_panels; panel++)
                multiply_panel(linear, panel, first, num_rows, packed, block, sums);
        }
    }
    std::free(packed);
}

}  // namespace

// x [num_rows][depth]; panels as in int8_panels.h, ceil(num_columns / 16) of them, with a scale for every column.
LAMELLA_EXPORT void lamella_int8_linear(const float* x, const int8_t* panels, const float* scales, const float* bias,
                                        float* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
    const Linear linear{x, panels, scales, bias, out, num_rows, num_columns, depth};
    switch (num_rows) {
        case 0: return;
        case 1: return run_direct<1, 4>(linear);
        case 2: return run_direct<2, 2>(linear);
        case 3: return run_direct<3, 2>(linear);
        case DIRECT_ROWS: return run_direct<DIRECT_ROWS, 1>(linear);
        default: return run_blocks(linear);
    }
}

// out[row] = the weights of output `ids[row]`, dequantised: an embedding that is tied to the output layer.
LAMELLA_EXPORT void lamella_int8_gather_rows(const int8_t* panels, const float* scales, const int64_t* ids, float* out,
                                             int64_t num_ids, int64_t depth) {
#pragma omp parallel for schedule(static) if (num_ids > 16)
    for (int64_t row = 0; row < num_ids; row++) {
        const int64_t id = ids[row];
        const int8_t* column = panels + id / PANEL * lines_of(depth) * LINE_BYTES + id % PANEL * LINE_STEPS;
        for (int64_t k = 0; k < depth; k++)
            out[row * depth + k] = float(column[k / LINE_STEPS * LINE_BYTES + k % LINE_STEPS]) * scales[id];
    }
}
