// The best columns of rows of scores that are in memory.
#include <omp.h>

#include "best_columns.h"

namespace {

constexpr int64_t RANGE_COLUMNS = 4096;  // columns that a thread takes at once
constexpr int64_t GROUP_COLUMNS = 256;   // looked at one by one only where one of them is among the best so far

}  // namespace

// scores [num_rows][num_columns] -> values, ids [num_rows][k], the largest first; k <= num_columns. num_rows is 1 or
// more.
LAMELLA_EXPORT void lamella_top_columns(const float* scores, int64_t num_rows, int64_t num_columns, int64_t k,
                                        float* values, int64_t* ids) {
    const int64_t num_ranges = (num_columns + RANGE_COLUMNS - 1) / RANGE_COLUMNS;
    BestColumns best(num_rows, k);
#pragma omp parallel
    {
        BestColumns mine(num_rows, k);
#pragma omp for schedule(static) collapse(2) nowait
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t range = 0; range < num_ranges; range++) {
                const int64_t end = std::min((range + 1) * RANGE_COLUMNS, num_columns);
                for (int64_t column = range * RANGE_COLUMNS; column < end; column += GROUP_COLUMNS)
                    mine.visit(row, scores + row * num_columns + column, column, std::min(GROUP_COLUMNS, end - column));
            }
#pragma omp critical(lamella_top_columns)
        best.merge(mine);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) best.write_sorted(row, values + row * k, ids + row * k);
    }
}
