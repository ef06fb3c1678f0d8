// Which experts a token takes, and with what weights, as model_executor/layers/routing.py computes it in torch. A row
// is computed by itself, in float32 and in one order.
#pragma once

#include <cmath>

#include "vec.h"

constexpr int64_t SOFTMAX = 0, SIGMOID = 1, SPARSE_MIXER = 2;  // scorings

// Mirrored in native/experts.py.
struct Routing {
    int64_t scoring;
    int64_t num_experts, top_k;
    int64_t num_groups, num_chosen_groups;
    const float* correction;    // [num_experts], added to scores for the choice alone; null: none
    const float* expert_scale;  // [num_experts]; null: none
    float logit_cap;            // 0: none
    int64_t is_renormalised;
    float renormalised_floor;
    float scale;
    float jitter;
};

constexpr float NO_CHOICE = -__builtin_inff();

static inline int64_t best_of(const float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t index = 1; index < count; index++)
        if (values[index] > values[best]) best = index;
    return best;
}

// Leaves only the experts of the best groups in `choice`. A group is as good as its two best experts together: that sum
// is written to votes [num_groups].
static inline void keep_best_groups(const Routing& routing, float* choice, float* votes) {
    const int64_t size = routing.num_experts / routing.num_groups;
    for (int64_t group = 0; group < routing.num_groups; group++) {
        float first = NO_CHOICE, second = NO_CHOICE;
        for (int64_t index = 0; index < size; index++) {
            const float value = choice[group * size + index];
            if (value > first) {
                second = first;
                first = value;
            } else if (value > second) {
                second = value;
            }
        }
        votes[group] = first + second;
    }
    for (int64_t left_out = routing.num_groups - routing.num_chosen_groups; left_out; left_out--) {
        int64_t worst = -1;  // the last one among equals, so that the first ones stay
        for (int64_t group = 0; group < routing.num_groups; group++)
            if (!std::isnan(votes[group]) && (worst < 0 || votes[group] <= votes[worst])) worst = group;
        if (worst < 0) return;
        votes[worst] = __builtin_nanf("");
        for (int64_t index = 0; index < size; index++) choice[worst * size + index] = NO_CHOICE;
    }
}

// Picks experts one after another: the best that is left, weighted by a softmax over those left whose logits are near
// its own.
static inline void mix_sparsely(const Routing& routing, const float* logits, float* left, int64_t* ids,
                                float* weights) {
    for (int64_t expert = 0; expert < routing.num_experts; expert++) left[expert] = logits[expert];
    for (int64_t pick = 0; pick < routing.top_k; pick++) {
        const int64_t id = best_of(left, routing.num_experts);
        const float best = left[id];
        float sum = 0.0f;
        for (int64_t expert = 0; expert < routing.num_experts; expert++) {
            const float factor = std::max(std::fabs(logits[expert]), best);
            const bool is_far = (best - logits[expert]) / factor > 2 * routing.jitter;
            if (!is_far) sum += std::exp(left[expert] - best);
        }
        ids[pick] = id;
        weights[pick] = 1.0f / sum;
        left[id] = NO_CHOICE;
    }
}

// logits [num_experts], which change, -> ids and weights [top_k], best first; the lowest id among equals.
// scratch: 2 * num_experts + num_groups floats.
static inline void route_row(const Routing& routing, float* logits, float* scratch, int64_t* ids, float* weights) {
    const int64_t count = routing.num_experts;
    float* const scores = scratch;
    float* choice = scratch + count;
    if (routing.logit_cap > 0.0f)
        for (int64_t expert = 0; expert < count; expert++)
            logits[expert] = routing.logit_cap * std::tanh(logits[expert] / routing.logit_cap);
    if (routing.scoring == SPARSE_MIXER) return mix_sparsely(routing, logits, choice, ids, weights);
    if (routing.scoring == SIGMOID) {
        for (int64_t expert = 0; expert < count; expert++) scores[expert] = 1.0f / (1.0f + std::exp(-logits[expert]));
    } else {
        const float most = logits[best_of(logits, count)];
        float sum = 0.0f;
        for (int64_t expert = 0; expert < count; expert++) sum += scores[expert] = std::exp(logits[expert] - most);
        for (int64_t expert = 0; expert < count; expert++) scores[expert] /= sum;
    }
    if (routing.correction || routing.num_groups > 1) {
        for (int64_t expert = 0; expert < count; expert++)
            choice[expert] = scores[expert] + (routing.correction ? routing.correction[expert] : 0.0f);
        if (routing.num_groups > 1) keep_best_groups(routing, choice, scratch + 2 * count);
    } else {
        choice = logits;  // the same order, and no ties where scores come near 0 or 1
    }
    float sum = 0.0f;
    for (int64_t pick = 0; pick < routing.top_k; pick++) {
        const int64_t id = best_of(choice, count);
        ids[pick] = id;
        weights[pick] = scores[id];
        sum += scores[id];
        choice[id] = NO_CHOICE;
    }
    for (int64_t pick = 0; pick < routing.top_k; pick++) {
        if (routing.is_renormalised) weights[pick] /= sum + routing.renormalised_floor;
        weights[pick] *= routing.scale;
        if (routing.expert_scale) weights[pick] *= routing.expert_scale[ids[pick]];
    }
}
