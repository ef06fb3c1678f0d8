// The k largest values of each row, found in one pass over the columns.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vec.h"

constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Candidate {
    float value;
    int32_t id;
};

// torch's order: NaN is above all numbers; of equals the lower id is better. It is total, so the best k are the same
// in whatever order columns come.
static inline bool better(Candidate a, Candidate b) {
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan;
    if (a_is_nan || a.value == b.value) return a.id < b.id;
    return a.value > b.value;
}

// The k best columns of each row so far, in heaps with the worst of them on top.
class BestColumns {
  public:
    BestColumns(int64_t num_rows, int64_t k) : k_(size_t(k)), heaps_(size_t(num_rows)), least_(size_t(num_rows)) {
        for (auto& heap : heaps_) heap.reserve(k_);
        std::fill(least_.begin(), least_.end(), -INFINITE);
    }

    // values [num_columns]: those of the columns from first_id on.
    void visit(int64_t row, const float* values, int64_t first_id, int64_t num_columns) {
        const Vec least = broadcast(least_[row]);
        IntVec hits = {};
        int64_t column = 0;
        for (; column + VEC_LANES <= num_columns; column += VEC_LANES) hits |= ~(load(values + column) < least);
        if (column == num_columns && !any_lane(hits)) return;
        for (column = 0; column < num_columns; column++)
            if (!(values[column] < least_[row])) offer(row, {values[column], int32_t(first_id + column)});
    }

    void merge(const BestColumns& other) {
        for (size_t row = 0; row < heaps_.size(); row++)
            for (Candidate candidate : other.heaps_[row]) offer(int64_t(row), candidate);
    }

    void write_sorted(int64_t row, float* values, int64_t* ids) {
        auto& heap = heaps_[row];
        std::sort_heap(heap.begin(), heap.end(), better);
        for (size_t place = 0; place < heap.size(); place++) {
            values[place] = heap[place].value;
            ids[place] = heap[place].id;
        }
    }

  private:
    void offer(int64_t row, Candidate candidate) {
        auto& heap = heaps_[row];
        if (heap.size() == k_) {
            if (!better(candidate, heap.front())) return;
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = candidate;
        } else {
            heap.push_back(candidate);
        }
        std::push_heap(heap.begin(), heap.end(), better);
        if (heap.size() == k_) least_[row] = heap.front().value;
    }

    size_t k_;
    std::vector<std::vector<Candidate>> heaps_;
    std::vector<float> least_;  // a column below this cannot be among the best; NaN where all of these are NaN
};
