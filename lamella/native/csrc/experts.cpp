// Experts: rows are sorted by the expert that they go to, and each expert's weights are passed over once, by the same
// products as those of dense layers (layer_linear.h). A row's result does not depend on who else takes an expert: its
// products are chains of its own, and what its experts give is added up in the order of their numbers.
#include "experts.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t MAX_ROWS = 1024;  // of an expert at once; with more, what lies between its products leaves the caches

// Which rows go to which expert. Those of expert e are rows[begin[e]] to rows[begin[e + 1] - 1], ascending; weights has
// their weights in the same places.
struct Assignment {
    std::vector<int64_t> begin, rows;
    std::vector<float> weights;

    Assignment(const std::vector<int64_t>& ids, const std::vector<float>& weights_of, int64_t num_experts,
               int64_t top_k)
        : begin(num_experts + 1), rows(ids.size()), weights(ids.size()) {
        for (const int64_t id : ids) begin[id + 1]++;
        for (int64_t expert = 0; expert < num_experts; expert++) begin[expert + 1] += begin[expert];
        std::vector<int64_t> next(begin.begin(), begin.end() - 1);
        for (size_t index = 0; index < ids.size(); index++) {
            const int64_t at = next[ids[index]]++;
            rows[at] = int64_t(index) / top_k;
            weights[at] = weights_of[index];
        }
    }
};

Assignment assign(const Experts& experts, const float* x, int64_t num_rows) {
    const Routing& routing = experts.routing;
    const int64_t count = routing.num_experts, top_k = routing.top_k;
    const Scratch logits = make_scratch(num_rows * count);
    multiply(experts.router, x, num_rows, logits.get());
    std::vector<int64_t> ids(num_rows * top_k);
    std::vector<float> weights(num_rows * top_k);
#pragma omp parallel if (num_rows * count > PARALLEL_FLOATS)
    {
        std::vector<float> scratch(2 * count + routing.num_groups);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++)
            route_row(routing, logits.get() + row * count, scratch.data(), ids.data() + row * top_k,
                      weights.data() + row * top_k);
    }
    return {ids, weights, count, top_k};
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Fills out with what every token gets: the shared expert's output, or zeros where there is none.
void start_output(const Experts& experts, const float* x, int64_t num_rows, int64_t width, float* out) {
    if (!experts.shared) {
        std::memset(out, 0, size_t(num_rows * width) * sizeof(float));
        return;
    }
    const Mlp& mlp = *experts.shared;
    const int64_t mlp_width = mlp.down_proj.depth, most_rows = std::min(num_rows, MAX_ROWS);
    const Scratch scratch = make_scratch(most_rows * (3 * mlp_width + 1));
    float* const gate_up = scratch.get();
    float* const gated = gate_up + most_rows * 2 * mlp_width;
    float* const factors = gated + most_rows * mlp_width;
    for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
        const int64_t rows = std::min(most_rows, num_rows - begin);
        const float* const from = x + begin * width;
        float* const to = out + begin * width;
        multiply(mlp.gate_up_proj, from, rows, gate_up);
        apply_gate(mlp.gate, gate_up, rows, mlp_width, gated);
        multiply(mlp.down_proj, gated, rows, to);
        if (!experts.shared_gate) continue;
        multiply(*experts.shared_gate, from, rows, factors);
        for (int64_t row = 0; row < rows; row++) {
            const float factor = sigmoid(factors[row]);
            for (int64_t column = 0; column < width; column++) to[row * width + column] *= factor;
        }
    }
}

}  // namespace

void run_experts(const Experts& experts, const float* x, const float* routed, int64_t num_rows, float* out) {
    const int64_t count = experts.routing.num_experts;
    const int64_t width = experts.down_projs[0].num_columns, expert_width = experts.down_projs[0].depth;
    const Assignment assigned = assign(experts, routed, num_rows);
    start_output(experts, x, num_rows, width, out);
    int64_t most_rows = 0;
    for (int64_t expert = 0; expert < count; expert++)
        most_rows = std::max(most_rows, assigned.begin[expert + 1] - assigned.begin[expert]);
    most_rows = std::min(most_rows, MAX_ROWS);
    const Scratch scratch = make_scratch(most_rows * (2 * width + 3 * expert_width));
    float* const taken = scratch.get();
    float* const given = taken + most_rows * width;
    float* const gate_up = given + most_rows * width;
    float* const gated = gate_up + most_rows * 2 * expert_width;
    for (int64_t expert = 0; expert < count; expert++) {
        const int64_t stop = assigned.begin[expert + 1];
        for (int64_t begin = assigned.begin[expert]; begin < stop; begin += most_rows) {
            const int64_t rows = std::min(most_rows, stop - begin);
            const int64_t* const of = assigned.rows.data() + begin;
            const float* const weights = assigned.weights.data() + begin;
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_FLOATS)
            for (int64_t row = 0; row < rows; row++) {
                const float* const from = x + of[row] * width;
                float* const to = taken + row * width;
                const float factor = experts.scales_input ? weights[row] : 1.0f;
                for (int64_t column = 0; column < width; column++) to[column] = from[column] * factor;
            }
            multiply(experts.gate_up_projs[expert], taken, rows, gate_up);
            apply_gate(experts.gate, gate_up, rows, expert_width, gated);
            multiply(experts.down_projs[expert], gated, rows, given);
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_FLOATS)
            for (int64_t row = 0; row < rows; row++) {
                const float* const from = given + row * width;
                float* const to = out + of[row] * width;
                const float factor = experts.scales_input ? 1.0f : weights[row];
                for (int64_t column = 0; column < width; column++) to[column] += from[column] * factor;
            }
        }
    }
}

// x and routed [num_rows][width] -> out [num_rows][width]; num_rows is 1 or more.
LAMELLA_EXPORT void lamella_experts(const Experts* experts, const float* x, const float* routed, int64_t num_rows,
                                    float* out) {
    run_experts(*experts, x, routed, num_rows, out);
}

// logits [num_rows][num_experts], which change, -> ids and weights [num_rows][top_k].
LAMELLA_EXPORT void lamella_route(const Routing* routing, float* logits, int64_t num_rows, int64_t* ids,
                                  float* weights) {
    std::vector<float> scratch(2 * routing->num_experts + routing->num_groups);
    for (int64_t row = 0; row < num_rows; row++)
        route_row(*routing, logits + row * routing->num_experts, scratch.data(), ids + row * routing->top_k,
                  weights + row * routing->top_k);
}
