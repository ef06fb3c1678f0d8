// Linear layers of every kind by one description, and what follows attention in a transformer layer as one call: for
// a single row, so many calls from Python take as long as the work.
#include <omp.h>

#include "kernels.h"
#include "panel_product.h"

namespace {

constexpr int64_t INT8 = -1, W8A8 = -2, FLOAT32 = 0;  // kinds; above 0: GGUF's number of a type, gguf_blocks.cpp
constexpr int64_t MIN_BLOCK_ROWS = 256;  // what lies between two products stays in the cache

// These structures are mirrored in native/layers.py.
struct Part {
    int64_t kind;
    const void* panels;
    const float* scales;  // of int8 weights
    int64_t num_columns;
};

// Its parts' columns side by side. A kind with scales has a single part.
struct Layer {
    const Part* parts;
    int64_t num_parts, num_columns, depth;
};

struct LayerTail {
    Layer out_proj, gate_up_proj, down_proj;
    const float* post_attention_norm;  // null: no norm
    const float* pre_mlp_norm;
    const float* post_mlp_norm;  // null: no norm
    const float* following_norm;
    float eps;
    int64_t is_silu;  // else gelu_tanh
};

// x [num_rows][depth] -> out [num_rows][num_columns]
void multiply(const Layer& layer, const float* x, int64_t num_rows, float* out) {
    const int64_t depth = layer.depth, step = layer.num_columns;
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
}

}  // namespace

// x [num_rows][depth] -> out [num_rows][num_columns]. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_layer_linear(const Layer* layer, const float* x, int64_t num_rows, float* out) {
    multiply(*layer, x, num_rows, out);
}

// attended [num_rows][out_proj.depth] is taken into x [num_rows][width], then the MLP's result;
// normed [num_rows][width] = following_norm(x). num_rows is 1 or more.
LAMELLA_EXPORT void lamella_finish_layer(const LayerTail* tail, float* x, const float* attended, int64_t num_rows,
                                         float* normed) {
    const int64_t width = tail->out_proj.num_columns, mlp_width = tail->down_proj.depth;
    const int64_t block_rows = std::max<int64_t>(MIN_BLOCK_ROWS, 128 * omp_get_max_threads());
    const int64_t num_blocks = ceil_div(num_rows, block_rows), most_rows = ceil_div(num_rows, num_blocks);
    const Scratch scratch = make_scratch(most_rows * (width + 3 * mlp_width));
    float* const y = scratch.get();
    float* const gate_up = y + most_rows * width;
    float* const gated = gate_up + most_rows * 2 * mlp_width;
    const auto activate = tail->is_silu ? lamella_gated_silu : lamella_gated_gelu_tanh;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t begin = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - begin;
        float* const sum = x + begin * width;
        float* const norm = normed + begin * width;
        multiply(tail->out_proj, attended + begin * tail->out_proj.depth, rows, y);
        lamella_add_norm(sum, width, y, width, tail->post_attention_norm, tail->pre_mlp_norm, tail->eps, rows, width,
                         norm);
        multiply(tail->gate_up_proj, norm, rows, gate_up);
        activate(gate_up, 2 * mlp_width, rows, mlp_width, gated);
        multiply(tail->down_proj, gated, rows, y);
        lamella_add_norm(sum, width, y, width, tail->post_mlp_norm, tail->following_norm, tail->eps, rows, width,
                         norm);
    }
}
