// The k best outputs of a float linear layer for many rows. It is done as in int8_head.cpp, which has the proof, but
// the rows are rounded to 16 bits, because integer products are faster than fused multiply-adds on floats.
//
// Let x = y + d, where y is the rounded row: levels times scales as in int8_products.h. The scores are sum y s q, with
// no more roundings than the chain of int8_head.cpp has. They differ from its exact sum by |sum d s q| <= |d|_2 |s q|_2
// more. The caller gives level_slope = (1 + 2g) |s q|_2.
#include "head_scan.h"
#include "int8_products.h"

namespace {

constexpr int64_t MIN_SPAN = 8;  // panels that a thread takes at once

// |x - levels * scales|_2, rounded up.
float measure_rounding(const float* x, int64_t depth) {
    double squares = 0;
    for (int64_t begin = 0; begin < depth; begin += GROUP_STEPS) {
        const int64_t steps = std::min(GROUP_STEPS, depth - begin);
        int32_t words[GROUP_PAIRS];
        const double scale = quantize_group(x + begin, steps, words, 1);
        for (int64_t k = 0; k < steps; k++) {
            const int64_t within = k % LINE_STEPS, word = words[k / LINE_STEPS * 2 + within % 2];
            const int16_t level = int16_t(within < 2 ? word : word >> 16);
            const double rounding = double(x[begin + k]) - scale * level;
            squares += rounding * rounding;
        }
    }
    return float(std::sqrt(squares) * (1 + 1e-6));
}

}  // namespace

// As lamella_int8_head; a row that the bound does not decide has num_rescored -1 and no result: rows with too many
// candidates, and those whose sums could overflow or that are not finite.
LAMELLA_EXPORT void lamella_int8_head_many(const float* x, const int8_t* panels, const float* scales,
                                           const float* largest_slopes, const float* norm_slopes,
                                           const float* level_slopes, const float* float_panels, int64_t* ids,
                                           float* values, int64_t* num_rescored, int64_t num_rows, int64_t num_columns,
                                           int64_t depth, int64_t num_best, float floor, float largest) {
    const Head head{panels,      scales, largest_slopes, norm_slopes, level_slopes, float_panels,
                    num_columns, depth,  num_best,       floor};
    const int64_t num_panels = head.num_panels(), panel_bytes = lines_of(depth) * LINE_BYTES;
    const int64_t span = std::max(MIN_SPAN, num_panels / (16 * omp_get_max_threads()));
    Activations activations(std::min(BLOCK_ROWS, num_rows), depth);
    std::vector<Norms> norms(num_rows);
    std::vector<std::vector<Scan>> scans(omp_get_max_threads(), std::vector<Scan>(num_rows));
#pragma omp parallel
    {
        PanelSums product;
        std::vector<Scan>& mine = scans[omp_get_thread_num()];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) {
            norms[row] = measure(x + row * depth, depth);
            norms[row].rounding = measure_rounding(x + row * depth, depth);
        }
        for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
            const int64_t rows = std::min(BLOCK_ROWS, num_rows - first), tile_rows = even_tile(rows);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row += tile_rows)
                activations.quantize_tile(x + first * depth, depth, row, std::min(tile_rows, rows - row));
#pragma omp for schedule(dynamic, span)
            for (int64_t panel = 0; panel < num_panels; panel++) {
                product.multiply(panels + panel * panel_bytes, depth, rows, activations);
                for (int64_t row = 0; row < rows; row++) {
                    Vec sums[PANEL_VECS];
                    std::memcpy(sums, product.sums + row * PANEL, sizeof sums);
                    scan_panel<true>(head, panel, sums, norms[first + row], mine[first + row]);
                }
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < num_rows; row++) {
            num_rescored[row] = -1;
            bool decided = norms[row].sum * std::max(127.0f, largest) <= SAFE_SUM;
            for (const auto& of_thread : scans) decided = decided && !of_thread[row].overflowed;
            if (!decided) continue;
            std::vector<Candidate> best = join(head, scans, row);
            if (int64_t(best.size()) < num_best) continue;  // only where NaN came into the copy of the weights
            score_again(head, x + row * depth, best);
            num_rescored[row] = int64_t(best.size());
            std::partial_sort(best.begin(), best.begin() + num_best, best.end(), is_better);
            for (int64_t index = 0; index < num_best; index++) {
                ids[row * num_best + index] = best[index].column;
                values[row * num_best + index] = best[index].score;
            }
        }
    }
}
