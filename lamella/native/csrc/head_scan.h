// What the two scans of an int8 head have in common: scores with bounds, the candidates that these leave, and their
// float scores. int8_head.cpp has the proof of the bounds.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "int8_panels.h"

constexpr int64_t MAX_BEST = 64;
constexpr size_t MAX_CANDIDATES = 16384;  // of a row in a thread; with more, the row has overflowed (Scan)
constexpr int64_t FIRST_SCORED = 8;       // candidates that are scored again before others are compared with them
constexpr float SAFE_SUM = 1e37f;         // partial sums below it cannot overflow

struct Head {
    const int8_t* panels;        // int8_panels.h
    const float* scales;         // [num_panels * 16], like the slopes
    const float* largest_slopes;
    const float* norm_slopes;
    const float* level_slopes;   // null unless rows are rounded as well
    const float* float_panels;   // [num_panels][depth][16]
    int64_t num_columns, depth, num_best;
    float floor;

    int64_t num_panels() const { return (num_columns + PANEL - 1) / PANEL; }
};

struct Candidate {
    int64_t column;
    float score;  // an upper bound, later the value
};

// The order of results: NaN first as torch has it, then the larger value, then the lower column.
static inline bool is_better(const Candidate& a, const Candidate& b) {
    const bool a_nan = std::isnan(a.score), b_nan = std::isnan(b.score);
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.score != b.score) return a.score > b.score;
    return a.column < b.column;
}

// The best `capacity` numbers seen, in falling order; `last` is -inf until there are so many.
struct BestNumbers {
    float values[MAX_BEST];
    int64_t count = 0;
    float last = -std::numeric_limits<float>::infinity();

    void add(float value, int64_t capacity) {
        if (count == capacity && value <= last) return;
        int64_t at = count < capacity ? count++ : capacity - 1;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1];
        values[at] = value;
        if (count == capacity) last = values[capacity - 1];
    }
};

static inline void drop_below(std::vector<Candidate>& candidates, float limit) {
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [limit](const Candidate& one) { return one.score < limit; }),
                     candidates.end());
}

// What one thread knows of one row. overflowed: there were too many candidates, so the bounds decide nothing.
struct Scan {
    BestNumbers lowers;
    std::vector<Candidate> candidates;
    bool overflowed = false;

    void add(int64_t column, float upper) {
        if (candidates.size() == MAX_CANDIDATES) {
            drop_below(candidates, lowers.last);
            if (candidates.size() > MAX_CANDIDATES / 2) {
                overflowed = true;
                candidates.clear();
            }
        }
        if (!overflowed) candidates.push_back({column, upper});
    }
};

struct Norms {
    float sum, length;   // |x|_1 and |x|_2, rounded up
    float rounding = 0;  // |d|_2, where the row is rounded
};

static inline Norms measure(const float* x, int64_t depth) {
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < depth; k++) {
        sum += std::fabs(double(x[k]));
        squares += double(x[k]) * x[k];
    }
    return {float(sum * (1 + 1e-6)), float(std::sqrt(squares) * (1 + 1e-6))};
}

// The scores that the int8 weights give a panel's columns with one row, and how far off they can be.
template <bool ROUNDED>
LAMELLA_INLINE void bound_panel(const Head& head, int64_t panel, const Vec* sums, const Norms& norms, Vec* scores,
                                Vec* bounds) {
    for (int vec = 0; vec < PANEL_VECS; vec++) {
        const int64_t column = panel * PANEL + vec * VEC_LANES;
        scores[vec] = sums[vec] * load(head.scales + column);
        bounds[vec] = minimum(broadcast(norms.sum) * load(head.largest_slopes + column),
                              broadcast(norms.length) * load(head.norm_slopes + column)) +
                      broadcast(head.floor);
        if (ROUNDED) bounds[vec] += broadcast(norms.rounding) * load(head.level_slopes + column);
    }
}

template <bool ROUNDED>
static void scan_panel(const Head& head, int64_t panel, const Vec* sums, const Norms& norms, Scan& scan) {
    Vec scores[PANEL_VECS], bounds[PANEL_VECS];
    bound_panel<ROUNDED>(head, panel, sums, norms, scores, bounds);
    IntVec reached = {};
    for (int vec = 0; vec < PANEL_VECS; vec++) reached |= scores[vec] + bounds[vec] >= broadcast(scan.lowers.last);
    uint64_t any[LAMELLA_VECTOR_BYTES / 8], all = 0;
    std::memcpy(any, &reached, sizeof any);
    for (uint64_t lanes : any) all |= lanes;
    if (!all || scan.overflowed) return;
    float score_of[PANEL], bound_of[PANEL];
    std::memcpy(score_of, scores, sizeof score_of);
    std::memcpy(bound_of, bounds, sizeof bound_of);
    const int64_t width = std::min<int64_t>(PANEL, head.num_columns - panel * PANEL);
    for (int64_t lane = 0; lane < width; lane++) {
        const float upper = score_of[lane] + bound_of[lane];
        if (upper < scan.lowers.last) continue;
        scan.lowers.add(score_of[lane] - bound_of[lane], head.num_best);
        scan.add(panel * PANEL + lane, upper);
    }
}

// The products of one row with PANELS panels of float weights.
template <int PANELS>
static void multiply_floats(const Head& head, const float* x, int64_t panel, float* out) {
    Vec sums[PANELS][PANEL_VECS] = {};
    const float* weights = head.float_panels + panel * head.depth * PANEL;
    for (int64_t k = 0; k < head.depth; k++)
#pragma GCC unroll 4
        for (int index = 0; index < PANELS; index++)
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                sums[index][vec] = fma(broadcast(x[k]),
                                       load(weights + (index * head.depth + k) * PANEL + vec * VEC_LANES),
                                       sums[index][vec]);
    std::memcpy(out, sums, sizeof sums);
}

// All candidates of one row, from every thread, that reach the k-th best lower bound of them all.
static inline std::vector<Candidate> join(const Head& head, const std::vector<std::vector<Scan>>& scans, size_t row) {
    BestNumbers lowers;
    for (const auto& of_thread : scans)
        for (int64_t index = 0; index < of_thread[row].lowers.count; index++)
            lowers.add(of_thread[row].lowers.values[index], head.num_best);
    std::vector<Candidate> joined;
    for (const auto& of_thread : scans)
        for (const Candidate& one : of_thread[row].candidates)
            if (one.score >= lowers.last) joined.push_back(one);
    std::sort(joined.begin(), joined.end(), [](const Candidate& a, const Candidate& b) { return a.column < b.column; });
    return joined;
}

// Sorts the candidates by column and gives them their float scores.
static inline void score_columns(const Head& head, const float* x, Candidate* candidates, int64_t count) {
    std::sort(candidates, candidates + count,
              [](const Candidate& a, const Candidate& b) { return a.column < b.column; });
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t index = 0; index < count; index++) {
        const int64_t panel = candidates[index].column / PANEL;
        if (index && candidates[index - 1].column / PANEL == panel) continue;  // done with the first of its panel
        float values[PANEL];
        multiply_floats<1>(head, x, panel, values);
        for (int64_t same = index; same < count && candidates[same].column / PANEL == panel; same++)
            candidates[same].score = values[candidates[same].column % PANEL];
    }
}

// NaN counts as infinite.
static inline bool has_larger_score(const Candidate& a, const Candidate& b) {
    if (std::isnan(a.score)) return !std::isnan(b.score);
    return a.score > b.score;
}

// Replaces upper bounds by float scores; candidates that cannot be among the k best are dropped.
static inline void score_again(const Head& head, const float* x, std::vector<Candidate>& candidates) {
    const auto all = candidates.begin(), end = candidates.end();
    BestNumbers found;
    auto begin = all;
    for (int64_t batch = std::max(FIRST_SCORED, head.num_best); begin < end; batch *= 2) {
        auto stop = begin + std::min<int64_t>(batch, end - begin);
        std::partial_sort(begin, stop, end, has_larger_score);
        stop = std::find_if(begin, stop, [&](const Candidate& one) { return one.score < found.last; });
        if (stop == begin) break;
        score_columns(head, x, &*begin, stop - begin);
        for (; begin < stop; ++begin)
            found.add(std::isnan(begin->score) ? std::numeric_limits<float>::infinity() : begin->score, head.num_best);
    }
    candidates.resize(begin - all);
}
