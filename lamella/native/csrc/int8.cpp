// Linear layers with int8 weights and float activations: y[m][n] = scale[n] * sum_k x[m][k] q[n][k] (+ bias[n]).
//
// For few rows, weights are converted in registers on their way from memory, whose rate is the limit. For more rows, a
// block of a panel is converted once into the L1 cache, and all rows pass over it. Both continue the same chains.
#include "int8_blocks.h"
#include "int8_panels.h"
#include "kernels.h"

namespace {

constexpr int64_t DIRECT_ROWS = 4;  // with up to so many rows, weights are converted in registers

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

void run_blocks(const Linear& linear) {
    const int64_t panel_bytes = lines_of(linear.depth) * LINE_BYTES;
    multiply_in_blocks(
        linear.x, linear.num_rows, linear.depth, linear.num_panels(),
        [&](int64_t panel, int64_t begin, int64_t steps, float* block) {
            convert_block(linear.panel_at(panel) + begin * PANEL, panel_bytes, steps, block);
        },
        [&](int64_t row, int64_t panel, const float* sums_at) {
            Vec sums[PANEL_VECS];
            std::memcpy(sums, sums_at, sizeof sums);
            linear.finish(row, panel, sums);
        });
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

// out[row] = the weights of output `ids[row]`, dequantised, times `factor`: an embedding that is tied to the output layer.
// Returns -1, or the place of the first id that is negative or not below num_columns: then out is as it was.
LAMELLA_EXPORT int64_t lamella_int8_gather_rows(const int8_t* panels, const float* scales, int64_t num_columns,
                                                int64_t depth, const int64_t* ids, int64_t num_ids, float factor,
                                                float* out) {
    const int64_t wrong = find_wrong_id(ids, num_ids, num_columns);
    if (wrong >= 0) return wrong;
#pragma omp parallel for schedule(static) if (num_ids > 16)
    for (int64_t row = 0; row < num_ids; row++) {
        const int64_t id = ids[row];
        const int8_t* column = panels + id / PANEL * lines_of(depth) * LINE_BYTES + id % PANEL * LINE_STEPS;
        for (int64_t k = 0; k < depth; k++) {
            const float weight = float(column[k / LINE_STEPS * LINE_BYTES + k % LINE_STEPS]) * scales[id];
            out[row * depth + k] = weight * factor;
        }
    }
    return -1;
}
