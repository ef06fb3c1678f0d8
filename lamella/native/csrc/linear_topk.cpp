// The best columns of x W^T of every row, and the log of the sum of all exponentials, without the product: a
// vocabulary of logits for each token would be more memory traffic than the weights.
#include <omp.h>

#include <cmath>

#include "best_columns.h"
#include "panel_product.h"

namespace {

// The exponentials of one group of columns: the largest value, and sum(exp(value - largest)).
struct Exponentials {
    float largest, sum;
};

Exponentials exponentials_of(const float* values, int64_t num_padded) {
    Vec most = broadcast(-INFINITE);
    IntVec nans = {};
    for (int64_t column = 0; column < num_padded; column += VEC_LANES) {
        const Vec value = load(values + column);
        most = maximum(value, most);
        nans |= value != value;
    }
    const float largest = max_lanes(most);
    if (any_lane(nans)) return {largest, std::numeric_limits<float>::quiet_NaN()};
    if (largest == -INFINITE) return {largest, 0.0f};
    if (largest == INFINITE) return {largest, 1.0f};
    Vec sum = {};
    for (int64_t column = 0; column < num_padded; column += VEC_LANES)
        sum += exponential(load(values + column) - broadcast(largest));
    return {largest, sum_lanes(sum)};
}

// Groups are the same columns, and are added up in the same order, whatever the number of rows or threads.
float log_sum_exp(const Exponentials* groups, int64_t num_groups, int64_t step) {
    float largest = -INFINITE;
    for (int64_t group = 0; group < num_groups; group++) largest = std::max(largest, groups[group * step].largest);
    double sum = 0;
    for (int64_t group = 0; group < num_groups; group++) {
        const Exponentials& one = groups[group * step];
        sum += one.largest == largest ? double(one.sum) : one.sum * std::exp(double(one.largest) - largest);
    }
    return float(double(largest) + std::log(sum));
}

}  // namespace

// values, ids [num_rows, k]: the k <= num_columns largest of x W^T + bias, the largest first. logsumexp [num_rows], and
// bias, may be null. num_rows is 1 or more.
LAMELLA_EXPORT void lamella_linear_topk(const float* x, int64_t x_step, int64_t num_rows, const float* panels,
                                        int64_t num_columns, int64_t depth, const float* bias, int64_t k,
                                        float* values, int64_t* ids, float* logsumexp) {
    const Panels weight = {panels, depth, num_columns};
    const int64_t num_groups = ceil_div(weight.count(), GROUP_PANELS);
    const int64_t num_blocks = ceil_div(num_rows, MAX_BLOCK_ROWS);
    for (int64_t index = 0; index < num_blocks; index++) {
        const int64_t begin = num_rows * index / num_blocks;
        const int64_t block_rows = num_rows * (index + 1) / num_blocks - begin;
        const Matrix rows = {x + begin * x_step, block_rows, x_step};
        BestColumns best(block_rows, k);
        std::vector<Exponentials> sums(logsumexp ? size_t(num_groups * block_rows) : 0);
#pragma omp parallel
        {
            const Scratch packed = make_scratch(RowBlock::scratch_floats(block_rows, depth));
            const Scratch tile = make_scratch(block_rows * GROUP_COLUMNS);
            const RowBlock block(rows, depth, packed.get());
            BestColumns mine(block_rows, k);
#pragma omp for schedule(dynamic, 4) nowait
            for (int64_t group = 0; group < num_groups; group++) {
                const ColumnGroup columns =
                    block.multiply_group(weight, group * GROUP_PANELS, weight.count(), bias, tile.get());
                for (int64_t row = 0; row < block_rows; row++) {
                    float* const from = tile.get() + row * GROUP_COLUMNS;
                    mine.visit(row, from, columns.first, columns.count);
                    std::fill(from + columns.count, from + columns.num_padded, -INFINITE);
                    if (logsumexp) sums[group * block_rows + row] = exponentials_of(from, columns.num_padded);
                }
            }
#pragma omp critical(lamella_best_columns)
            best.merge(mine);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t row = 0; row < block_rows; row++) {
                best.write_sorted(row, values + (begin + row) * k, ids + (begin + row) * k);
                if (logsumexp) logsumexp[begin + row] = log_sum_exp(sums.data() + row, num_groups, block_rows);
            }
        }
    }
}
