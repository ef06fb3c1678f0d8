// Norms and activations: one pass over rows that are in the cache anyway. A row's sums have one order, whatever the
// number of rows.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace {

// visit(start, count) for each vector of a row; the last may be shorter than VEC_LANES.
template <class Visit>
LAMELLA_INLINE void for_each_vec(int64_t width, Visit visit) {
    int64_t start = 0;
    for (; start + VEC_LANES <= width; start += VEC_LANES) visit(start, VEC_LANES);
    if (start < width) visit(start, int(width - start));
}

LAMELLA_INLINE Vec get(const float* from, int count) {
    return count == VEC_LANES ? load(from) : load_part(from, count);
}

LAMELLA_INLINE void put(float* to, Vec vec, int count) {
    count == VEC_LANES ? store(to, vec) : store_part(to, vec, count);
}

Vec inverse_rms(const float* row, int64_t width, float eps) {
    constexpr int CHAINS = 4;
    Vec sums[CHAINS] = {};
    int64_t start = 0;
    for (; start + CHAINS * VEC_LANES <= width; start += CHAINS * VEC_LANES)
        for (int chain = 0; chain < CHAINS; chain++) {
            const Vec value = load(row + start + chain * VEC_LANES);
            sums[chain] = fma(value, value, sums[chain]);
        }
    for_each_vec(width - start, [&](int64_t rest, int count) {
        const Vec value = get(row + start + rest, count);
        sums[0] = fma(value, value, sums[0]);
    });
    const float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return broadcast(1.0f / std::sqrt(sum / float(width) + eps));
}

Vec sigmoid(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(-x)); }

struct Silu {
    static Vec apply(Vec x) { return x * sigmoid(x); }
};

// 0.5 x (1 + tanh(z)) with z = sqrt(2 / pi) (x + 0.044715 x^3), which is x sigmoid(2 z).
struct GeluTanh {
    static Vec apply(Vec x) {
        const Vec cubed = x * x * x;
        return x * sigmoid(broadcast(1.5957691216f) * fma(broadcast(0.044715f), cubed, x));
    }
};

struct QuickGelu {
    static Vec apply(Vec x) { return x * sigmoid(broadcast(1.702f) * x); }
};

// x times the standard normal distribution's function, lane by lane: few models have it, and the library's erfc loses no
// digits where the result is small.
struct Gelu {
    static Vec apply(Vec x) {
        float lanes[VEC_LANES];
        store(lanes, x);
        for (float& lane : lanes) lane = 0.5f * lane * std::erfc(-0.70710678f * lane);
        return load(lanes);
    }
};

struct Relu {
    static Vec apply(Vec x) { return maximum(Vec{}, x); }
};

struct ReluSquared {
    static Vec apply(Vec x) {
        const Vec positive = Relu::apply(x);
        return positive * positive;
    }
};

// visit(the activation that has the number `kind`).
template <class Visit>
LAMELLA_INLINE void with_activation(int64_t kind, Visit visit) {
    switch (kind) {
        case SILU: return visit(Silu{});
        case GELU_TANH: return visit(GeluTanh{});
        case GELU: return visit(Gelu{});
        case QUICK_GELU: return visit(QuickGelu{});
        case RELU: return visit(Relu{});
        case RELU_SQUARED: return visit(ReluSquared{});
    }
}

// Near 0 by a polynomial (Cephes, tanhf), because 1 - 2 / (e^2x + 1) would lose its digits there.
Vec hyperbolic_tangent(Vec x) {
    const Vec square = x * x;
    Vec p = broadcast(-5.70498872745e-3f);
    p = fma(p, square, broadcast(2.06390887954e-2f));
    p = fma(p, square, broadcast(-5.37397155531e-2f));
    p = fma(p, square, broadcast(1.33314422036e-1f));
    p = fma(p, square, broadcast(-3.33332819422e-1f));
    const Vec near = fma(p * square, x, x);
    const Vec size = maximum(x, -x);
    const Vec rest = broadcast(2.0f) / (exponential(size + size) + broadcast(1.0f));
    const Vec far = x < Vec{} ? rest - broadcast(1.0f) : broadcast(1.0f) - rest;
    return size > broadcast(0.625f) ? far : near;  // NaN is not larger, and stays NaN
}

// out = activation(gate) * factor, or activation(gate) where factor is null.
template <class Activation>
void activated(const float* gate, int64_t gate_step, const float* factor, int64_t factor_step, int64_t num_rows,
               int64_t width, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        const float* const from = gate + row * gate_step;
        const float* const by = factor + row * factor_step;
        float* const to = out + row * width;
        for_each_vec(width, [&](int64_t start, int count) {
            const Vec value = Activation::apply(get(from + start, count));
            put(to + start, factor ? value * get(by + start, count) : value, count);
        });
    }
}

// The mean of term(start, count) over a row. As in inverse_rms, the sum has one order, whatever other rows there are.
template <class Term>
float mean(int64_t width, Term term) {
    Vec sum = {};
    for_each_vec(width, [&](int64_t start, int count) { sum = sum + term(start, count); });
    return sum_lanes(sum) / float(width);
}

template <class Activation>
void gated(const float* gate_up, int64_t step, int64_t num_rows, int64_t width, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        const float* gate = gate_up + row * step;
        const float* up = gate + width;
        float* to = out + row * width;
        for_each_vec(width, [&](int64_t start, int count) {
            put(to + start, Activation::apply(get(gate + start, count)) * get(up + start, count), count);
        });
    }
}

// As `gated`, with the bounds of `gate`.
template <class Activate>
void clamped(const Gate& gate, const float* gate_up, int64_t step, int64_t num_rows, int64_t width, float* out,
             Activate activate) {
    const Vec limit = broadcast(gate.limit), offset = broadcast(gate.up_offset);
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        const float* from = gate_up + row * step;
        float* to = out + row * width;
        for_each_vec(width, [&](int64_t start, int count) {
            Vec value = get(from + start, count);
            if (!gate.limits_activated) value = minimum(limit, value);
            value = activate(value);
            if (gate.limits_activated) value = minimum(limit, value);
            const Vec up = maximum(-limit, minimum(limit, get(from + width + start, count)));
            put(to + start, value * (up + offset), count);
        });
    }
}

}  // namespace

// x[num_rows, width] += rms_norm(y) * post_weight; += y where post_weight is null; nothing is added where y is null.
// Then out = rms_norm(x) * next_weight, or x where next_weight is null. Where out is null only x is changed.
LAMELLA_EXPORT void lamella_add_norm(float* x, int64_t x_step, const float* y, int64_t y_step,
                                     const float* post_weight, const float* next_weight, float eps, int64_t num_rows,
                                     int64_t width, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        float* const sum = x + row * x_step;
        const float* const added = y + row * y_step;
        if (y && post_weight) {
            const Vec scale = inverse_rms(added, width, eps);
            for_each_vec(width, [&](int64_t start, int count) {
                const Vec normed = get(added + start, count) * scale;
                put(sum + start, fma(normed, get(post_weight + start, count), get(sum + start, count)), count);
            });
        } else if (y) {
            for_each_vec(width, [&](int64_t start, int count) {
                put(sum + start, get(sum + start, count) + get(added + start, count), count);
            });
        }
        if (!out) continue;
        float* const to = out + row * width;
        if (!next_weight) {
            std::memcpy(to, sum, size_t(width) * sizeof(float));
            continue;
        }
        const Vec scale = inverse_rms(sum, width, eps);
        for_each_vec(width, [&](int64_t start, int count) {
            put(to + start, get(sum + start, count) * scale * get(next_weight + start, count), count);
        });
    }
}

// out[num_rows, width] = activation(gate) * up for rows of gate_up [gate | up].
LAMELLA_EXPORT void lamella_gated(int64_t activation, const float* gate_up, int64_t step, int64_t num_rows,
                                  int64_t width, float* out) {
    with_activation(activation, [&](auto kind) { gated<decltype(kind)>(gate_up, step, num_rows, width, out); });
}

// out[num_rows, width] = activation(gate) * up with the bounds of `gate`, whose limit is positive.
LAMELLA_EXPORT void lamella_gated_clamped(const Gate* gate, const float* gate_up, int64_t step, int64_t num_rows,
                                          int64_t width, float* out) {
    if (gate->activation == SILU)
        return clamped(*gate, gate_up, step, num_rows, width, out, [slope = broadcast(gate->slope)](Vec value) {
            return value * sigmoid(slope * value);
        });
    with_activation(gate->activation, [&](auto kind) {
        clamped(*gate, gate_up, step, num_rows, width, out, [](Vec value) { return decltype(kind)::apply(value); });
    });
}

// out[num_rows, width] = activation(gate) * factor; factor null: activation(gate).
LAMELLA_EXPORT void lamella_activated(int64_t activation, const float* gate, int64_t gate_step, const float* factor,
                                      int64_t factor_step, int64_t num_rows, int64_t width, float* out) {
    with_activation(activation, [&](auto kind) {
        activated<decltype(kind)>(gate, gate_step, factor, factor_step, num_rows, width, out);
    });
}

// out[num_rows, width] = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; bias null: none.
LAMELLA_EXPORT void lamella_layer_norm(const float* x, int64_t x_step, const float* weight, const float* bias,
                                       float eps, int64_t num_rows, int64_t width, float* out) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        const float* const from = x + row * x_step;
        float* const to = out + row * width;
        const float centre = mean(width, [&](int64_t start, int count) { return get(from + start, count); });
        for_each_vec(width, [&](int64_t start, int count) {
            put(to + start, get(from + start, count) - broadcast(centre), count);
        });
        const float variance = mean(width, [&](int64_t start, int count) {
            const Vec value = get(to + start, count);
            return value * value;
        });
        const Vec scale = broadcast(1.0f / std::sqrt(variance + eps));
        for_each_vec(width, [&](int64_t start, int count) {
            const Vec normed = get(to + start, count) * scale * get(weight + start, count);
            put(to + start, bias ? normed + get(bias + start, count) : normed, count);
        });
    }
}

// attended[num_rows][num_gates][dim] *= sigmoid(gate), or softplus(gate) = log(1 + e^gate), gate[num_rows][num_gates].
LAMELLA_EXPORT void lamella_gate_attention(float* attended, const float* gate, int64_t gate_step, int64_t num_rows,
                                           int64_t num_gates, int64_t dim, int64_t is_softplus) {
#pragma omp parallel for schedule(static) if (num_rows * num_gates * dim > PARALLEL_FLOATS)
    for (int64_t row = 0; row < num_rows; row++) {
        const float* const by = gate + row * gate_step;
        float* const to = attended + row * num_gates * dim;
        for (int64_t index = 0; index < num_gates; index++) {
            const float value = by[index];
            // max(x, 0) + log(1 + e^-|x|) neither overflows nor cancels.
            const float opened = is_softplus ? std::max(value, 0.0f) + std::log1p(std::exp(-std::abs(value)))
                                             : 1.0f / (1.0f + std::exp(-value));
            for (int64_t element = 0; element < dim; element++) to[index * dim + element] *= opened;
        }
    }
}

// x = cap * tanh(x / cap)
LAMELLA_EXPORT void lamella_softcap(float* x, int64_t num_floats, float cap) {
    constexpr int64_t BLOCK = 4096;
#pragma omp parallel for schedule(static) if (num_floats > PARALLEL_FLOATS)
    for (int64_t begin = 0; begin < num_floats; begin += BLOCK)
        for_each_vec(std::min(BLOCK, num_floats - begin), [&](int64_t start, int count) {
            float* const at = x + begin + start;
            put(at, broadcast(cap) * hyperbolic_tangent(get(at, count) / broadcast(cap)), count);
        });
}
