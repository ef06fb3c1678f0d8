// Linear layers of every kind by one description.
#pragma once

#include "kernels.h"
#include "panel_product.h"

constexpr int64_t INT8 = -1, W8A8 = -2, FLOAT32 = 0;  // kinds; above 0: GGUF's number of a type, gguf_blocks.cpp

// These structures are mirrored in native/layer_linear.py.
struct Part {
    int64_t kind;
    const void* panels;
    const float* scales;  // of int8 weights
    int64_t num_columns;
};

// A linear layer: the columns of its parts side by side. One of a kind with scales (INT8, W8A8) has a single part.
struct Linear {
    const Part* parts;
    int64_t num_parts, num_columns, depth;
    const float* bias;  // [num_columns], over all parts; null: none
};

// out[num_rows][num_columns] += bias. One addition to a finished sum, whatever computed it: a row's bits do not depend
// on the number of rows, which decides how sums are computed.
static inline void add_bias(const float* bias, int64_t num_rows, int64_t num_columns, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * num_columns > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        float* const to = out + row * num_columns;
        for (int64_t column = 0; column < num_columns; column++) to[column] += bias[column];
    }
}

// x [num_rows][depth] -> out [num_rows][num_columns]
static inline void multiply(const Linear& layer, const float* x, int64_t num_rows, float* out) {
    const int64_t depth = layer.depth, step = layer.num_columns;
    float* const first = out;
    for (int64_t index = 0; index < layer.num_parts; index++) {
        const Part& part = layer.parts[index];
        const int8_t* bytes = static_cast<const int8_t*>(part.panels);
        switch (part.kind) {
            case FLOAT32:
                lamella_linear(x, depth, num_rows, static_cast<const float*>(part.panels), part.num_columns, depth,
                               nullptr, out, step);
                break;
            case INT8:
                lamella_int8_linear(x, bytes, part.scales, nullptr, out, num_rows, part.num_columns, depth);
                break;
            case W8A8:
                lamella_w8a8_linear(x, bytes, part.scales, out, num_rows, part.num_columns, depth);
                break;
            default:
                lamella_gguf_linear(x, static_cast<const int32_t*>(part.panels), out, step, part.kind, num_rows,
                                    part.num_columns, depth);
        }
        out += part.num_columns;
    }
    if (layer.bias) add_bias(layer.bias, num_rows, step, first);
}
