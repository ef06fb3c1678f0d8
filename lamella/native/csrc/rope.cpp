// Between the QKV projection and attention, in one pass: norms of the query and key heads, rotary embedding, and the
// write of K and V into their pages.
#include <cmath>
#include <memory>

#include "kernels.h"

namespace {

// Neither is inlined: one piece of machine code for every row, so that the same products fuse with the same sums.

// x / sqrt(mean(x^2) + eps) * weight; the sum runs in one order whatever the row. size: a multiple of PANEL.
__attribute__((noinline)) void rms_norm(const float* from, const float* weight, float eps, int64_t size, float* to) {
    Vec squares = {};
    for (int64_t index = 0; index < size; index += VEC_LANES) {
        const Vec vec = load(from + index);
        squares = fma(vec, vec, squares);
    }
    const Vec factor = broadcast(1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps));
    for (int64_t index = 0; index < size; index += VEC_LANES)
        store(to + index, load(from + index) * factor * load(weight + index));
}

// Rotates the first half of rotary_dim elements against the second, in place; elements beyond rotary_dim stay
// (RoFormer, arXiv 2104.09864).
__attribute__((noinline)) void rotate(
    float* __restrict head, const float* __restrict cos, const float* __restrict sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    float* __restrict second_half = head + half;
    for (int64_t index = 0; index < half; index++) {
        const float first = head[index], second = second_half[index];
        head[index] = first * cos[index] - second * sin[index];
        second_half[index] = second * cos[index] + first * sin[index];
    }
}

}  // namespace

// Rotated queries into query_out [tokens][num_heads][k_dim], unscaled; K and V into pages.
LAMELLA_EXPORT void lamella_qk_norm_rope_write(const Pages* pages, const RopeInput* input, float* query_out) {
    const int64_t k_dim = pages->k_dim;
#pragma omp parallel if (input->num_tokens > 8)
    {
        const std::unique_ptr<float[]> key(new float[k_dim]);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < input->num_tokens; token++) {
            const int64_t row = (input->positions ? input->positions[token] : token) * input->table_stride;
            const int64_t slot = input->slots[token];
            auto prepare = [&](const float* from, const float* weight, float* to) {
                if (weight)
                    rms_norm(from, weight, input->eps, k_dim, to);
                else
                    std::memcpy(to, from, k_dim * sizeof(float));
                rotate(to, input->cos + row, input->sin + row, input->rotary_dim);
            };
            const float* from = input->qkv + token * input->token_stride;
            float* to = query_out + token * input->num_heads * k_dim;
            for (int64_t head = 0; head < input->num_heads; head++, from += k_dim, to += k_dim)
                prepare(from, input->query_weight, to);
            if (slot < 0) continue;
            for (int64_t head = 0; head < pages->num_kv_heads; head++, from += k_dim) {
                prepare(from, input->key_weight, key.get());
                pages->write_key(slot, head, key.get());
            }
            for (int64_t head = 0; head < pages->num_kv_heads; head++, from += pages->v_dim)
                pages->write_value(slot, head, from);
        }
    }
}
