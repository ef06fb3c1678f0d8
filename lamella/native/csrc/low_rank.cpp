// Low-rank updates of linear layers, of some of their rows.
#include "low_rank.h"

#include <omp.h>

#include <cstring>

void add_low_rank(const LowRank& update, const int64_t* rows, int64_t num_rows, int64_t first_row, const float* x,
                  int64_t x_step, int64_t first_column, int64_t stop_column, float* y, int64_t y_step) {
    if (!num_rows) return;
    int64_t most_columns = 0;
    for (int64_t index = 0; index < update.num_parts; index++)
        most_columns = std::max(most_columns, update.parts[index].num_columns);
    const bool adjacent = rows[num_rows - 1] - rows[0] == num_rows - 1;
    const Scratch scratch = make_scratch(num_rows * ((adjacent ? 0 : update.depth) + update.rank + most_columns));
    float* const low = scratch.get();
    float* const added = low + num_rows * update.rank;
    const float* taken = x + (rows[0] - first_row) * x_step;
    int64_t step = x_step;
    if (!adjacent) {
        float* const gathered = added + num_rows * most_columns;
        for (int64_t index = 0; index < num_rows; index++)
            std::memcpy(gathered + index * update.depth, x + (rows[index] - first_row) * x_step,
                        size_t(update.depth) * sizeof(float));
        taken = gathered;
        step = update.depth;
    }
    lamella_linear(taken, step, num_rows, update.down, update.rank, update.depth, nullptr, low, update.rank);
    for (int64_t index = 0; index < update.num_parts; index++) {
        const UpPart& part = update.parts[index];
        if (part.first_column < first_column || part.first_column + part.num_columns > stop_column) continue;
        lamella_linear(low + part.first_rank, update.rank, num_rows, part.panels, part.num_columns, part.rank, nullptr,
                       added, part.num_columns);
        float* const columns = y + part.first_column - first_column;
#pragma omp parallel for schedule(static) if (num_rows * part.num_columns > PARALLEL_FLOATS)
        for (int64_t row = 0; row < num_rows; row++) {
            float* const to = columns + (rows[row] - first_row) * y_step;
            const float* const from = added + row * part.num_columns;
            for (int64_t column = 0; column < part.num_columns; column++) to[column] += from[column];
        }
    }
}

// One update alone; see add_low_rank. x begins with row 0.
LAMELLA_EXPORT void lamella_add_low_rank(const LowRank* update, const int64_t* rows, int64_t num_rows, const float* x,
                                         int64_t x_step, int64_t first_column, int64_t stop_column, float* y,
                                         int64_t y_step) {
    add_low_rank(*update, rows, num_rows, 0, x, x_step, first_column, stop_column, y, y_step);
}
