// Experts: rows are sorted by the expert that they go to, and each expert's weights are passed over once, by the same
// products as those of dense layers (layer_linear.h). A row's result does not depend on who else takes an expert: its
// products are chains of its own, and what its experts give is added up in the order of their numbers.
#include "experts.h"

#include <omp.h>
#include <time.h>

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t FEW_ROWS = 64;  // of all experts: with up to so many, threads take whole experts
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

// Rows of one expert that go through its products together, and the memory that they do it in.
struct Share {
    int64_t expert, num_rows;
    const int64_t* rows;   // [num_rows], of x
    const float* weights;  // [num_rows]
    float *taken, *given;  // [num_rows][width]
    float* gate_up;        // [num_rows][2 * expert width]
    float* gated;          // [num_rows][expert width]
};

// Floats that a row of a share needs.
int64_t row_floats(const Experts& experts) {
    return 2 * experts.down_projs[0].num_columns + 3 * experts.down_projs[0].depth;
}

Share make_share(const Experts& experts, const Assignment& assigned, int64_t expert, int64_t begin, int64_t num_rows,
                 float* scratch) {
    const int64_t width = experts.down_projs[0].num_columns, expert_width = experts.down_projs[0].depth;
    float* const given = scratch + num_rows * width;
    float* const gate_up = given + num_rows * width;
    return {expert, num_rows, assigned.rows.data() + begin, assigned.weights.data() + begin, scratch, given, gate_up,
            gate_up + num_rows * 2 * expert_width};
}

void compute(const Experts& experts, const float* x, const Share& share) {
    const int64_t width = experts.down_projs[0].num_columns, rows = share.num_rows;
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < rows; row++) {
        const float* const from = x + share.rows[row] * width;
        float* const to = share.taken + row * width;
        const float factor = experts.scales_input ? share.weights[row] : 1.0f;
        for (int64_t column = 0; column < width; column++) to[column] = from[column] * factor;
    }
    multiply(experts.gate_up_projs[share.expert], share.taken, rows, share.gate_up);
    apply_gate(experts.gate, share.gate_up, rows, experts.down_projs[0].depth, share.gated);
    multiply(experts.down_projs[share.expert], share.gated, rows, share.given);
}

void add_given(const Experts& experts, const Share& share, float* out) {
    const int64_t width = experts.down_projs[0].num_columns, rows = share.num_rows;
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < rows; row++) {
        const float* const from = share.given + row * width;
        float* const to = out + share.rows[row] * width;
        const float factor = experts.scales_input ? 1.0f : share.weights[row];
        for (int64_t column = 0; column < width; column++) to[column] += from[column] * factor;
    }
}

// Whether whole experts, `num_taken` of them, divide evenly among the threads. Products that are divided themselves
// have the threads wait for each other twice an expert, which for a row or two takes as long as some of the reading.
bool divides_evenly(int64_t num_taken) {
    const int64_t num_threads = omp_get_max_threads();
    return 10 * num_taken >= 9 * num_threads * ceil_div(num_taken, num_threads);
}

// Every thread takes whole experts; products inside of a parallel region are a thread's own.
void run_whole_experts(const Experts& experts, const Assignment& assigned, const std::vector<int64_t>& taken,
                       const float* x, float* out) {
    const int64_t floats = row_floats(experts);
    const Scratch scratch = make_scratch(int64_t(assigned.rows.size()) * floats);
    std::vector<Share> shares;
    for (const int64_t expert : taken) {
        const int64_t begin = assigned.begin[expert], num_rows = assigned.begin[expert + 1] - begin;
        shares.push_back(make_share(experts, assigned, expert, begin, num_rows, scratch.get() + begin * floats));
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t index = 0; index < shares.size(); index++) compute(experts, x, shares[index]);
    for (const Share& share : shares) add_given(experts, share, out);
}

// Threads share the products of one expert after the other.
void run_in_turns(const Experts& experts, const Assignment& assigned, const std::vector<int64_t>& taken, const float* x,
                  float* out) {
    int64_t most_rows = 0;
    for (const int64_t expert : taken)
        most_rows = std::max(most_rows, assigned.begin[expert + 1] - assigned.begin[expert]);
    most_rows = std::min(most_rows, MAX_ROWS);
    const Scratch scratch = make_scratch(most_rows * row_floats(experts));
    for (const int64_t expert : taken) {
        const int64_t stop = assigned.begin[expert + 1];
        for (int64_t begin = assigned.begin[expert]; begin < stop; begin += most_rows) {
            const int64_t num_rows = std::min(most_rows, stop - begin);
            const Share share = make_share(experts, assigned, expert, begin, num_rows, scratch.get());
            compute(experts, x, share);
            add_given(experts, share, out);
        }
    }
}

void run(const Experts& experts, const float* x, const float* routed, int64_t num_rows, float* out) {
    const Assignment assigned = assign(experts, routed, num_rows);
    std::vector<int64_t> taken;  // the experts that have rows
    for (int64_t expert = 0; expert < experts.routing.num_experts; expert++)
        if (assigned.begin[expert] < assigned.begin[expert + 1]) taken.push_back(expert);
    if (experts.meter)
        for (const int64_t expert : taken) experts.meter[Meter::PASSES + expert]++;
    start_output(experts, x, num_rows, experts.down_projs[0].num_columns, out);
    if (int64_t(assigned.rows.size()) <= FEW_ROWS && divides_evenly(int64_t(taken.size())))
        run_whole_experts(experts, assigned, taken, x, out);
    else
        run_in_turns(experts, assigned, taken, x, out);
}

int64_t nanoseconds(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void run_experts(const Experts& experts, const float* x, const float* routed, int64_t num_rows, float* out) {
    if (!experts.meter) return run(experts, x, routed, num_rows, out);
    const int64_t wall = nanoseconds(CLOCK_MONOTONIC), processor = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    run(experts, x, routed, num_rows, out);
    experts.meter[Meter::WALL] += nanoseconds(CLOCK_MONOTONIC) - wall;
    experts.meter[Meter::PROCESSOR] += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - processor;
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
