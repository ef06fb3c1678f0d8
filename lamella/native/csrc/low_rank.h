// What adapters add to linear layers: of the rows of each adapter, up(down(x)).
#pragma once

#include <algorithm>

#include "kernels.h"
#include "panel_product.h"

// These structures are mirrored in native/low_rank.py.
struct UpPart {
    const float* panels;  // of a weight [num_columns, rank]
    int64_t first_column, num_columns;  // of the layer's
    int64_t first_rank, rank;           // of what `down` gives
};

struct LowRank {
    const float* down;  // panels of a weight [rank, depth]
    int64_t rank, depth;
    const UpPart* parts;
    int64_t num_parts;
};

// What an adapter adds to a layer's projections; null: nothing.
struct AdaptedLayer {
    const LowRank *qkv_proj, *out_proj, *gate_up_proj, *down_proj;
};

// The rows of a step that an adapter is for: ascending.
struct AdapterRows {
    const AdaptedLayer* layers;  // of the whole model
    const int64_t* rows;
    int64_t num_rows;
};

struct StepAdapters {
    const AdapterRows* adapters;
    int64_t num_adapters;
};

// y[row - first_row][first_column...] += up(down(x[row - first_row])) of `rows`, in the columns [first_column,
// stop_column) of the layer, which y has. Parts lie in them or outside. Every sum is one chain, and one addition to y:
// a row's bits do not depend on the others.
void add_low_rank(const LowRank& update, const int64_t* rows, int64_t num_rows, int64_t first_row, const float* x,
                  int64_t x_step, int64_t first_column, int64_t stop_column, float* y, int64_t y_step);

// The same for whichever adapters have something for a projection of the layer, in all its columns. x and y have the
// step's rows [first_row, first_row + num_rows).
static inline void add_adapters(const StepAdapters* step, int64_t layer, const LowRank* AdaptedLayer::*projection,
                                int64_t first_row, int64_t num_rows, const float* x, int64_t x_step, float* y,
                                int64_t num_columns) {
    if (!step) return;
    for (int64_t index = 0; index < step->num_adapters; index++) {
        const AdapterRows& adapter = step->adapters[index];
        const LowRank* const update = adapter.layers[layer].*projection;
        if (!update) continue;
        const int64_t* const stop = adapter.rows + adapter.num_rows;
        const int64_t* const from = std::lower_bound(adapter.rows, stop, first_row);
        const int64_t* const to = std::lower_bound(from, stop, first_row + num_rows);
        add_low_rank(*update, from, to - from, first_row, x, x_step, 0, num_columns, y, num_columns);
    }
}
