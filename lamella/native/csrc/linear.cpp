// Linear layers in fp32 on packed weights: y = x W^T + bias.
#include <omp.h>

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "panel_product.h"

namespace {

constexpr int64_t MIN_THREAD_ROWS = 48;  // with so many rows for each thread, threads divide the rows, else the panels
constexpr int64_t ITEMS_PER_THREAD = 4;  // several, so that a thread that is held up does not hold up the others

// How the result is cut into items: row blocks by ranges of panels. Never in depth.
struct Division {
    int64_t num_row_blocks, range_panels, num_ranges;

    Division(int64_t num_rows, int64_t num_panels, int num_threads) {
        num_row_blocks = ceil_div(num_rows, MAX_BLOCK_ROWS);
        if (num_rows >= MIN_THREAD_ROWS * num_threads) {
            num_row_blocks = ceil_div(num_row_blocks, num_threads) * num_threads;
            range_panels = num_panels;
        } else {
            const int64_t wanted = ceil_div(ITEMS_PER_THREAD * num_threads, num_row_blocks);
            range_panels = std::min<int64_t>(ceil_div(ceil_div(num_panels, wanted), 4) * 4, 8 * GROUP_PANELS);
        }
        num_ranges = ceil_div(num_panels, range_panels);
    }

    int64_t num_items() const { return num_row_blocks * num_ranges; }
};

struct Output {
    float* to;
    int64_t row_step;
};

// Multiplies with a range of panels, a group at a time. A group is finished in `tile` and then copied: rows of a wide
// `out` lie at the same places of the cache and would push each other out, and its last panel may be cut short.
void multiply_range(const RowBlock& block, int64_t num_rows, Panels weight, const float* bias, int64_t first_panel,
                    int64_t stop_panel, Output out, float* tile) {
    for (int64_t panel = first_panel; panel < stop_panel; panel += GROUP_PANELS) {
        const ColumnGroup columns = block.multiply_group(weight, panel, stop_panel, bias, tile);
        for (int64_t row = 0; row < num_rows; row++)
            std::memcpy(out.to + row * out.row_step + columns.first, tile + row * GROUP_COLUMNS,
                        size_t(columns.count) * sizeof(float));
    }
}

}  // namespace

// weight [num_columns, depth] -> panels [ceil(num_columns / 16)][depth][16], zeros in columns that are not there.
LAMELLA_EXPORT void lamella_pack_weight(const float* weight, int64_t num_columns, int64_t depth, float* panels) {
    const int64_t num_panels = ceil_div(num_columns, PANEL);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        float* to = panels + panel * depth * PANEL;
        const float* from = weight + panel * PANEL * depth;
        const int64_t width = std::min<int64_t>(PANEL, num_columns - panel * PANEL);
        for (int64_t k = 0; k < depth; k++)
            for (int64_t column = 0; column < PANEL; column++)
                to[k * PANEL + column] = column < width ? from[column * depth + k] : 0.0f;
    }
}

// out[i] = weight[ids[i]] * scale. Returns -1, or the place of the first id that is negative or not below num_columns:
// then out is as it was.
LAMELLA_EXPORT int64_t lamella_gather_rows(const float* panels, int64_t num_columns, int64_t depth, const int64_t* ids,
                                           int64_t num_ids, float scale, float* out) {
    const int64_t wrong = find_wrong_id(ids, num_ids, num_columns);
    if (wrong >= 0) return wrong;
#pragma omp parallel for schedule(static) if (num_ids > 8)
    for (int64_t index = 0; index < num_ids; index++) {
        const float* from = panels + ids[index] / PANEL * depth * PANEL + ids[index] % PANEL;
        for (int64_t k = 0; k < depth; k++) out[index * depth + k] = from[k * PANEL] * scale;
    }
    return -1;
}

// out[num_rows, num_columns] = x[num_rows, depth] W^T + bias (may be null). num_rows is 1 or more.
LAMELLA_EXPORT void lamella_linear(const float* x, int64_t x_step, int64_t num_rows, const float* panels,
                                   int64_t num_columns, int64_t depth, const float* bias, float* out,
                                   int64_t out_step) {
    const Panels weight = {panels, depth, num_columns};
    std::atomic<int64_t> next_item{0};
#pragma omp parallel
    {
        const Division division(num_rows, weight.count(), omp_get_num_threads());
        const int64_t most_rows = ceil_div(num_rows, division.num_row_blocks);
        const Scratch packed = make_scratch(RowBlock::scratch_floats(most_rows, depth));
        const Scratch tile = make_scratch(most_rows * GROUP_COLUMNS);
        int64_t item = next_item++;
        while (item < division.num_items()) {
            const int64_t index = item / division.num_ranges;
            const int64_t begin = num_rows * index / division.num_row_blocks;
            const int64_t block_rows = num_rows * (index + 1) / division.num_row_blocks - begin;
            const RowBlock block({x + begin * x_step, block_rows, x_step}, depth, packed.get());
            const Output to = {out + begin * out_step, out_step};
            for (; item / division.num_ranges == index; item = next_item++) {
                const int64_t first = item % division.num_ranges * division.range_panels;
                const int64_t stop = std::min(first + division.range_panels, weight.count());
                multiply_range(block, block_rows, weight, bias, first, stop, to, tile.get());
            }
        }
    }
}
