// Linear layers of every kind by one description, and transformer layers as one call. For a single row, separate calls
// from Python would take as long as the work: the weights that stream by push the interpreter out of the caches.
#include <omp.h>

#include "kernels.h"
#include "panel_product.h"

namespace {

constexpr int64_t INT8 = -1, W8A8 = -2, FLOAT32 = 0;  // kinds; above 0: GGUF's number of a type, gguf_blocks.cpp
// Fewer, and threads wait for each other more often; more, and what lies between two products leaves the caches.
constexpr int64_t MIN_BLOCK_ROWS = 1024;

// These structures are mirrored in native/layers.py.
struct Part {
    int64_t kind;
    const void* panels;
    const float* scales;  // of int8 weights
    int64_t num_columns;
};

// Its parts' columns side by side. A kind with scales has a single part.
struct Linear {
    const Part* parts;
    int64_t num_parts, num_columns, depth;
    const float* bias;  // [num_columns], over all parts; null: none
};

struct LayerTail {
    Linear out_proj, gate_up_proj, down_proj;
    // Each may be null: no norm.
    const float* post_attention_norm;
    const float* pre_mlp_norm;
    const float* post_mlp_norm;
    const float* following_norm;
    float eps;
    int64_t is_silu;  // else gelu_tanh
};

// What a layer's attention has that does not depend on the step.
struct Attention {
    Linear qkv_proj;  // columns of num_heads query heads, then the KV heads' keys, then their values
    const float* query_norm;  // null: no norm
    const float* key_norm;    // null: no norm
    float eps;
    int64_t num_heads;
    const Pages* pages;
    int64_t window_tokens;  // this and the following as in lamella_attention
    int64_t chunk_tokens;
    float scale;
    float softcap;
    const float* sinks;
};

struct DecoderLayer {
    Attention attention;
    LayerTail tail;
};

// What a step has for a layer; several layers share it.
struct LayerStep {
    const Batch* batch;
    const int64_t* slots;  // [num_rows]
    const float* cos;      // [num_rows][rotary_dim / 2]
    const float* sin;
    int64_t rotary_dim;    // the first dimensions of a head; 0: none are rotated, and there are no tables
};

// out[num_rows][num_columns] += bias. One addition to a finished sum, whatever computed it: a row's bits do not depend
// on the number of rows, which decides how sums are computed.
void add_bias(const float* bias, int64_t num_rows, int64_t num_columns, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * num_columns > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        float* const to = out + row * num_columns;
        for (int64_t column = 0; column < num_columns; column++) to[column] += bias[column];
    }
}

// x [num_rows][depth] -> out [num_rows][num_columns]
void multiply(const Linear& layer, const float* x, int64_t num_rows, float* out) {
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

// attended [num_rows][out_proj.depth] is taken into x [num_rows][width], then the MLP's result;
// normed [num_rows][width] = following_norm(x), or x where that norm is null.
void finish_layer(const LayerTail& tail, float* x, const float* attended, int64_t num_rows, float* normed) {
    const int64_t width = tail.out_proj.num_columns, mlp_width = tail.down_proj.depth;
    const int64_t block_rows = std::max<int64_t>(MIN_BLOCK_ROWS, 128 * omp_get_max_threads());
    const int64_t num_blocks = ceil_div(num_rows, block_rows), most_rows = ceil_div(num_rows, num_blocks);
    const Scratch scratch = make_scratch(most_rows * (width + 3 * mlp_width));
    float* const y = scratch.get();
    float* const gate_up = y + most_rows * width;
    float* const gated = gate_up + most_rows * 2 * mlp_width;
    const auto activate = tail.is_silu ? lamella_gated_silu : lamella_gated_gelu_tanh;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t begin = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - begin;
        float* const sum = x + begin * width;
        float* const norm = normed + begin * width;
        multiply(tail.out_proj, attended + begin * tail.out_proj.depth, rows, y);
        lamella_add_norm(sum, width, y, width, tail.post_attention_norm, tail.pre_mlp_norm, tail.eps, rows, width,
                         norm);
        multiply(tail.gate_up_proj, norm, rows, gate_up);
        activate(gate_up, 2 * mlp_width, rows, mlp_width, gated);
        multiply(tail.down_proj, gated, rows, y);
        lamella_add_norm(sum, width, y, width, tail.post_mlp_norm, tail.following_norm, tail.eps, rows, width,
                         norm);
    }
}

struct AttentionScratch {
    Scratch qkv, query, attended;

    AttentionScratch(const DecoderLayer* const* layers, int64_t num_layers, int64_t num_rows) {
        int64_t most_columns = 0, most_query = 0, most_attended = 0;
        for (int64_t index = 0; index < num_layers; index++) {
            const Attention& attention = layers[index]->attention;
            most_columns = std::max(most_columns, attention.qkv_proj.num_columns);
            most_query = std::max(most_query, attention.num_heads * attention.pages->k_dim);
            most_attended = std::max(most_attended, attention.num_heads * attention.pages->v_dim);
        }
        qkv = make_scratch(num_rows * most_columns);
        query = make_scratch(num_rows * most_query);
        attended = make_scratch(num_rows * most_attended);
    }
};

// normed [num_rows][width] -> scratch.attended. Returns 0, or 1 where memory is lacking.
int64_t attend(const Attention& attention, const LayerStep& step, const float* normed, int64_t num_rows,
               const AttentionScratch& scratch) {
    float* const qkv = scratch.qkv.get();
    float* const query = scratch.query.get();
    multiply(attention.qkv_proj, normed, num_rows, qkv);
    const RopeInput rope = {qkv, attention.qkv_proj.num_columns, num_rows, attention.num_heads, attention.query_norm,
                            attention.key_norm, attention.eps, step.rotary_dim, step.cos, step.sin,
                            step.rotary_dim / 2, nullptr, step.slots};
    lamella_qk_norm_rope_write(attention.pages, &rope, query);
    return lamella_attention(attention.pages, step.batch, query, scratch.attended.get(), attention.num_heads,
                             attention.window_tokens, attention.chunk_tokens, attention.scale, attention.softcap,
                             attention.sinks);
}

}  // namespace

// x [num_rows][depth] -> out [num_rows][num_columns]. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_layer_linear(const Linear* layer, const float* x, int64_t num_rows, float* out) {
    multiply(*layer, x, num_rows, out);
}

// One layer's part after attention; x, attended and normed as in lamella_run_layers. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_finish_layer(const LayerTail* tail, float* x, const float* attended, int64_t num_rows,
                                         float* normed) {
    finish_layer(*tail, x, attended, num_rows, normed);
}

// Runs layers one after the other, all rows through each. x [num_rows][width] is the residual stream. normed
// [num_rows][width] is its norm: before the call the first layer's input, after it the following_norm(x) of the last.
// num_rows is 1 or more. Returns 0, or 1 where memory is lacking.
LAMELLA_EXPORT int64_t lamella_run_layers(const DecoderLayer* const* layers, const LayerStep* const* steps,
                                          int64_t num_layers, float* x, float* normed, int64_t num_rows) {
    const AttentionScratch scratch(layers, num_layers, num_rows);
    for (int64_t index = 0; index < num_layers; index++) {
        if (attend(layers[index]->attention, *steps[index], normed, num_rows, scratch)) return 1;
        finish_layer(layers[index]->tail, x, scratch.attended.get(), num_rows, normed);
    }
    return 0;
}
