// The feed-forward part of a layer: one MLP, or experts.
#pragma once

#include "layer_linear.h"
#include "routing.h"

struct Mlp {
    Linear gate_up_proj, down_proj;
    Gate gate;
};

// Mirrored in native/experts.py.
struct Experts {
    Linear router;
    Routing routing;
    const Linear* gate_up_projs;  // [num_experts]
    const Linear* down_projs;     // [num_experts]
    Gate gate;
    int64_t scales_input;      // whether a token's weight multiplies what the expert takes, else what it gives
    const Mlp* shared;         // null: none
    const Linear* shared_gate; // one output; null: no gate
    int64_t* meter;            // null, or what `run_experts` adds to: see Meter
};

// Nanoseconds of the wall clock and of the calling thread's processor time in `run_experts`, and for each expert how
// often its weights were passed over.
struct Meter {
    static constexpr int64_t WALL = 0, PROCESSOR = 1, PASSES = 2;
};

// gate_up [num_rows][2 * width], gate first -> out [num_rows][width].
static inline void apply_gate(const Gate& gate, const float* gate_up, int64_t num_rows, int64_t width, float* out) {
    if (gate.limit > 0.0f) return lamella_gated_clamped(&gate, gate_up, 2 * width, num_rows, width, out);
    lamella_gated(gate.activation, gate_up, 2 * width, num_rows, width, out);
}

// x [num_rows][width] -> out [num_rows][width]; num_rows is 1 or more. The router reads `routed`, of x's shape.
void run_experts(const Experts& experts, const float* x, const float* routed, int64_t num_rows, float* out);
