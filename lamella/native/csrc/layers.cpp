// Linear layers of every kind by one description, and transformer layers as one call. For a single row, separate calls
// from Python would take as long as the work: the weights that stream by push the interpreter out of the caches.
#include <chrono>
#include <omp.h>

#include "experts.h"
#include "low_rank.h"

namespace {

// With smaller blocks threads wait for each other more often; with larger ones, what lies between two products leaves
// the caches.
constexpr int64_t MIN_BLOCK_ROWS = 1024;

// These structures are mirrored in native/layers.py and native/decoder.py.
struct LayerTail {
    Linear out_proj;
    Mlp mlp;                 // used where experts is null
    const Experts* experts;  // what the layer has in place of an MLP; null: it has the MLP
    // Each may be null: no norm.
    const float* post_attention_norm;
    const float* pre_mlp_norm;
    const float* post_mlp_norm;
    const float* following_norm;
    float eps;
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

// The adapters of a step's rows, and which layer of the model runs. adapters: null: no row has one.
struct Adapted {
    const StepAdapters* adapters;
    int64_t layer;
};

// What a step has for a layer; several layers share it.
struct LayerStep {
    const Batch* batch;
    const int64_t* slots;  // [num_rows]
    const float* cos;      // [num_rows][rotary_dim / 2]
    const float* sin;
    int64_t rotary_dim;    // the first dimensions of a head; 0: none are rotated, and there are no tables
};

// Adds what out_proj makes of attended [num_rows][out_proj.depth] to x [num_rows][width], through post_attention_norm;
// then normed [num_rows][width] = pre_mlp_norm(x). y: scratch for num_rows * width floats. All of the step's rows from
// first_row on.
void join_attention(const LayerTail& tail, const Adapted& adapted, int64_t first_row, float* x, const float* attended,
                    int64_t num_rows, float* normed, float* y) {
    const int64_t width = tail.out_proj.num_columns, depth = tail.out_proj.depth;
    multiply(tail.out_proj, attended, num_rows, y);
    add_adapters(adapted.adapters, adapted.layer, &AdaptedLayer::out_proj, first_row, num_rows, attended, depth, y,
                 width);
    lamella_add_norm(x, width, y, width, tail.post_attention_norm, tail.pre_mlp_norm, tail.eps, num_rows, width,
                     normed);
}

// Adds y [num_rows][width], the result of the MLP or the experts, to x, through post_mlp_norm; then
// normed = following_norm(x).
void join_mlp(const LayerTail& tail, float* x, const float* y, int64_t num_rows, float* normed) {
    const int64_t width = tail.out_proj.num_columns;
    lamella_add_norm(x, width, y, width, tail.post_mlp_norm, tail.following_norm, tail.eps, num_rows, width, normed);
}

// A block of rows goes through all that is left of the layer before the next block begins.
void finish_with_mlp(const LayerTail& tail, const Adapted& adapted, float* x, const float* attended, int64_t num_rows,
                     float* normed) {
    const Mlp& mlp = tail.mlp;
    const int64_t width = tail.out_proj.num_columns, mlp_width = mlp.down_proj.depth;
    const int64_t block_rows = std::max<int64_t>(MIN_BLOCK_ROWS, 128 * omp_get_max_threads());
    const int64_t num_blocks = ceil_div(num_rows, block_rows), most_rows = ceil_div(num_rows, num_blocks);
    const Scratch scratch = make_scratch(most_rows * (width + 3 * mlp_width));
    float* const y = scratch.get();
    float* const gate_up = y + most_rows * width;
    float* const gated = gate_up + most_rows * 2 * mlp_width;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t begin = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - begin;
        float* const sum = x + begin * width;
        float* const norm = normed + begin * width;
        join_attention(tail, adapted, begin, sum, attended + begin * tail.out_proj.depth, rows, norm, y);
        multiply(mlp.gate_up_proj, norm, rows, gate_up);
        add_adapters(adapted.adapters, adapted.layer, &AdaptedLayer::gate_up_proj, begin, rows, norm, width, gate_up,
                     2 * mlp_width);
        apply_gate(mlp.gate, gate_up, rows, mlp_width, gated);
        multiply(mlp.down_proj, gated, rows, y);
        add_adapters(adapted.adapters, adapted.layer, &AdaptedLayer::down_proj, begin, rows, gated, mlp_width, y,
                     width);
        join_mlp(tail, sum, y, rows, norm);
    }
}

// All rows at once, so that an expert's weights are passed over once.
void finish_with_experts(const LayerTail& tail, const Adapted& adapted, float* x, const float* attended,
                         int64_t num_rows, float* normed) {
    const Scratch y = make_scratch(num_rows * tail.out_proj.num_columns);
    join_attention(tail, adapted, 0, x, attended, num_rows, normed, y.get());
    run_experts(*tail.experts, normed, normed, num_rows, y.get());
    join_mlp(tail, x, y.get(), num_rows, normed);
}

// Adds to x [num_rows][width] first what out_proj makes of attended [num_rows][out_proj.depth], then what the MLP or
// the experts give; normed [num_rows][width] = following_norm(x), or x where that norm is null.
void finish_layer(const LayerTail& tail, const Adapted& adapted, float* x, const float* attended, int64_t num_rows,
                  float* normed) {
    (tail.experts ? finish_with_experts : finish_with_mlp)(tail, adapted, x, attended, num_rows, normed);
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

// normed [num_rows][width] -> scratch.attended. Returns 0, or 1 where memory is lacking. seconds: null, or what the time
// of what is no product is added to: rotary embedding, writing K and V, and attention.
int64_t attend(const Attention& attention, const LayerStep& step, const Adapted& adapted, const float* normed,
               int64_t num_rows, const AttentionScratch& scratch, double* seconds) {
    float* const qkv = scratch.qkv.get();
    float* const query = scratch.query.get();
    multiply(attention.qkv_proj, normed, num_rows, qkv);
    add_adapters(adapted.adapters, adapted.layer, &AdaptedLayer::qkv_proj, 0, num_rows, normed,
                 attention.qkv_proj.depth, qkv, attention.qkv_proj.num_columns);
    const auto start = seconds ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    const RopeInput rope = {qkv, attention.qkv_proj.num_columns, num_rows, attention.num_heads, attention.query_norm,
                            attention.key_norm, attention.eps, step.rotary_dim, step.cos, step.sin,
                            step.rotary_dim / 2, nullptr, step.slots};
    lamella_qk_norm_rope_write(attention.pages, &rope, query);
    const int64_t failed =
        lamella_attention(attention.pages, step.batch, query, scratch.attended.get(), attention.num_heads,
                          attention.window_tokens, attention.chunk_tokens, attention.scale, attention.softcap,
                          attention.sinks);
    if (seconds) *seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return failed;
}

}  // namespace

// x [num_rows][depth] -> out [num_rows][num_columns]. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_layer_linear(const Linear* layer, const float* x, int64_t num_rows, float* out) {
    multiply(*layer, x, num_rows, out);
}

// One layer's part after attention; x, attended, normed and adapters as in lamella_run_layers, layer: its place in the
// model. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_finish_layer(const LayerTail* tail, float* x, const float* attended, int64_t num_rows,
                                         float* normed, const StepAdapters* adapters, int64_t layer) {
    finish_layer(*tail, {adapters, layer}, x, attended, num_rows, normed);
}

// Runs layers one after the other, all rows through each. x [num_rows][width] is the residual stream. normed
// [num_rows][width] is its norm: before the call the first layer's input, after it the following_norm(x) of the last.
// num_rows is 1 or more. adapters: null, or those of the rows; first_layer: which layer of the model is the first.
// attention_seconds: null, or what attention's time is added to. Returns 0, or 1 where memory is lacking.
LAMELLA_EXPORT int64_t lamella_run_layers(const DecoderLayer* const* layers, const LayerStep* const* steps,
                                          int64_t num_layers, float* x, float* normed, int64_t num_rows,
                                          const StepAdapters* adapters, int64_t first_layer,
                                          double* attention_seconds) {
    const AttentionScratch scratch(layers, num_layers, num_rows);
    for (int64_t index = 0; index < num_layers; index++) {
        const Adapted adapted = {adapters, first_layer + index};
        if (attend(layers[index]->attention, *steps[index], adapted, normed, num_rows, scratch, attention_seconds))
            return 1;
        finish_layer(layers[index]->tail, adapted, x, scratch.attended.get(), num_rows, normed);
    }
    return 0;
}
