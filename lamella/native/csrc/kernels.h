// What several files share: exported functions, declared so that a changed signature does not compile, and a check of
// ids.
#pragma once

#include "pages.h"

constexpr int64_t PARALLEL_FLOATS = 16384;  // element-wise work on fewer takes less time than waking a thread

struct Batch;  // attention.cpp

// Activations of an MLP, mirrored by ACTIVATIONS in native/elementwise.py.
enum : int64_t { GELU_TANH, SILU, GELU, QUICK_GELU, RELU, RELU_SQUARED };

// How a gate and up become one, activation(gate) * up, with bounds. Mirrored in native/mlp.py.
struct Gate {
    int64_t activation;        // one of those above
    float limit;               // up lies in [-limit, limit], and the gate is at most that; 0: no bounds
    int64_t limits_activated;  // whether the gate is bounded after its activation, else before
    float slope;               // of silu: g sigmoid(slope g)
    float up_offset;           // added to up after it is bounded
};

// Mirrored by `RopeInput` in native/attention.py.
struct RopeInput {
    const float* qkv;  // [tokens] a stride apart: num_heads query heads, then the KV heads' keys, then their values
    int64_t token_stride;
    int64_t num_tokens;
    int64_t num_heads;
    const float* query_weight;  // [k_dim] or null: no norm
    const float* key_weight;    // [k_dim] or null: no norm
    float eps;
    int64_t rotary_dim;  // the first dimensions of a head; 0: none are rotated, and there are no tables
    const float* cos;    // [rows][rotary_dim / 2], rows a stride apart
    const float* sin;
    int64_t table_stride;
    const int64_t* positions;  // each token's row of the tables; null: row i is token i's
    const int64_t* slots;      // -1: K and V are written nowhere
};

LAMELLA_EXPORT void lamella_linear(const float* x, int64_t x_step, int64_t num_rows, const float* panels,
                                   int64_t num_columns, int64_t depth, const float* bias, float* out,
                                   int64_t out_step);
LAMELLA_EXPORT void lamella_int8_linear(const float* x, const int8_t* panels, const float* scales, const float* bias,
                                        float* out, int64_t num_rows, int64_t num_columns, int64_t depth);
LAMELLA_EXPORT void lamella_w8a8_linear(const float* x, const int8_t* panels, const float* scales, float* out,
                                        int64_t num_rows, int64_t num_columns, int64_t depth);
LAMELLA_EXPORT void lamella_gguf_linear(const float* x, const int32_t* panels, float* out, int64_t out_step,
                                        int64_t format, int64_t num_rows, int64_t num_columns, int64_t depth);
LAMELLA_EXPORT void lamella_add_norm(float* x, int64_t x_step, const float* y, int64_t y_step,
                                     const float* post_weight, const float* next_weight, float eps, int64_t num_rows,
                                     int64_t width, float* out);
LAMELLA_EXPORT void lamella_gated(int64_t activation, const float* gate_up, int64_t step, int64_t num_rows,
                                  int64_t width, float* out);
LAMELLA_EXPORT void lamella_gated_clamped(const Gate* gate, const float* gate_up, int64_t step, int64_t num_rows,
                                          int64_t width, float* out);
// Returns 0, or 1 where memory is lacking.
LAMELLA_EXPORT int64_t lamella_attention(const Pages* pages, const Batch* batch, const float* query, float* out,
                                         int64_t num_heads, int64_t window_tokens, int64_t chunk_tokens, float scale,
                                         float softcap, const float* sinks);
LAMELLA_EXPORT void lamella_qk_norm_rope_write(const Pages* pages, const RopeInput* input, float* query_out);

// The place of the first id that is negative or not below num_columns; -1: there is none.
static inline int64_t find_wrong_id(const int64_t* ids, int64_t num_ids, int64_t num_columns) {
    for (int64_t index = 0; index < num_ids; index++)
        if (ids[index] < 0 || ids[index] >= num_columns) return index;
    return -1;
}
