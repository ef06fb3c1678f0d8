// Rows of activations times panels of a packed weight [num_panels][depth][16].
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "microkernel.h"

constexpr int64_t MAX_BLOCK_ROWS = 96;  // rows that are packed together: a depth block of them stays in L2
constexpr int64_t DEPTH_BLOCK = 256;  // 16 KiB of a panel, which stay in L1 while the rows pass over them
constexpr int64_t SHALLOW_ROWS = 24;  // with up to so many rows, a panel is passed over few times and not cut in depth
constexpr int64_t GROUP_PANELS = 16;  // columns of C that are finished together: they stay in L2
constexpr int64_t GROUP_COLUMNS = GROUP_PANELS * PANEL;
constexpr int64_t STREAM_ROWS = 3;  // with up to so many rows, reading the weights from memory is all that counts
constexpr int64_t STREAM_AHEAD = 512;  // how far ahead a panel is fetched, in floats

struct FreeScratch {
    void operator()(float* at) const { ::operator delete(at, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<float[], FreeScratch>;

static inline Scratch make_scratch(int64_t num_floats) {
    return Scratch(static_cast<float*>(::operator new(size_t(num_floats) * sizeof(float), std::align_val_t(64))));
}

static inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

struct Matrix {
    const float* from;
    int64_t num_rows, row_step;
};

struct Panels {
    const float* from;
    int64_t depth, num_columns;

    int64_t count() const { return ceil_div(num_columns, PANEL); }
    int64_t step() const { return depth * PANEL; }
};

// Columns of the product that are finished together; `num_padded` includes those that fill the last panel.
struct ColumnGroup {
    int64_t first, count, num_padded;
};

// A block of rows, ready to be multiplied with any panel. Tiles have nearly the same number of rows: two of 4 run
// faster than one of 6 and one of 2.
class RowBlock {
  public:
    static int64_t scratch_floats(int64_t num_rows, int64_t depth) { return streams(num_rows) ? 1 : num_rows * depth; }

    // `scratch` has room for scratch_floats(...) floats and belongs to the block as long as the block is used.
    RowBlock(Matrix rows, int64_t depth, float* scratch)
        : rows_(rows), depth_(depth), packed_(scratch), num_tiles_(ceil_div(rows.num_rows, TILE_ROWS)),
          depth_block_(rows.num_rows <= SHALLOW_ROWS ? depth : DEPTH_BLOCK) {
        if (!streams(rows.num_rows)) pack();
    }

    // Multiplies with the panels from `first_panel` to `stop_panel`, at most GROUP_PANELS of them, and adds bias (may
    // be null) -> tile [num_rows, GROUP_COLUMNS].
    ColumnGroup multiply_group(Panels weight, int64_t first_panel, int64_t stop_panel, const float* bias,
                               float* tile) const {
        const int64_t num_panels = std::min(GROUP_PANELS, stop_panel - first_panel);
        const float* b = weight.from + first_panel * weight.step();
        if (streams(rows_.num_rows))
            stream_rows(b, num_panels, tile);
        else
            multiply_tiles(b, num_panels, tile);
        const int64_t first = first_panel * PANEL, num_padded = num_panels * PANEL;
        const int64_t count = std::min(num_padded, weight.num_columns - first);
        if (bias)
            for (int64_t row = 0; row < rows_.num_rows; row++)
                for (int64_t column = 0; column < count; column++)
                    tile[row * GROUP_COLUMNS + column] += bias[first + column];
        return {first, count, num_padded};
    }

  private:
    static bool streams(int64_t num_rows) { return num_rows <= STREAM_ROWS; }

    int64_t tile_begin(int64_t tile) const { return rows_.num_rows * tile / num_tiles_; }

    // [depth block][tile][k][row of the tile]
    void pack() {
        float* to = packed_;
        for (int64_t start = 0; start < depth_; start += depth_block_) {
            const int64_t depth = std::min(depth_block_, depth_ - start);
            for (int64_t tile = 0; tile < num_tiles_; tile++) {
                const int64_t begin = tile_begin(tile), num_rows = tile_begin(tile + 1) - begin;
                pack_rows(int(num_rows), rows_.from + begin * rows_.row_step + start, depth, to);
                to += num_rows * depth;
            }
        }
    }

    template <int ROWS = TILE_ROWS>
    void pack_rows(int num_rows, const float* from, int64_t depth, float* to) const {
        if constexpr (ROWS > 1)
            if (num_rows < ROWS) return pack_rows<ROWS - 1>(num_rows, from, depth, to);
        const int64_t step = rows_.row_step;
        for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) to[k * ROWS + row] = from[row * step + k];
    }

    void multiply_tiles(const float* weight, int64_t num_panels, float* c) const {
        const int64_t panel_step = depth_ * PANEL;
        const int64_t ahead_step = std::max<int64_t>(PANEL / num_tiles_, 1);
        for (int64_t start = 0; start < depth_; start += depth_block_) {
            const int64_t depth = std::min(depth_block_, depth_ - start);
            for (int64_t panel = 0; panel < num_panels; panel++) {
                const float* a = packed_ + start * rows_.num_rows;
                const float* b = weight + panel * panel_step + start * PANEL;
                for (int64_t tile = 0; tile < num_tiles_; tile++) {
                    const int64_t begin = tile_begin(tile), num_rows = tile_begin(tile + 1) - begin;
                    // Each tile fetches its share of the panel that comes next; a single tile fetches just ahead of
                    // what it reads.
                    const Ahead share = {b + panel_step + tile * depth * ahead_step, ahead_step};
                    const Ahead ahead = num_tiles_ == 1 ? Ahead{b + STREAM_AHEAD, PANEL} : share;
                    multiply_packed(int(num_rows), a, b, depth, c + begin * GROUP_COLUMNS + panel * PANEL,
                                    GROUP_COLUMNS, start > 0, ahead);
                    a += num_rows * depth;
                }
            }
        }
    }

    void stream_rows(const float* b, int64_t num_panels, float* c) const {
        if (rows_.num_rows == 1) return stream<1>(b, num_panels, c);
        if (rows_.num_rows == 2) return stream<2>(b, num_panels, c);
        stream<3>(b, num_panels, c);
    }

    // Several panels at once, so that there are more sums than an addition takes cycles, and several streams from
    // memory.
    template <int ROWS>
    __attribute__((noinline)) void stream(const float* b, int64_t num_panels, float* c) const {
        constexpr int TOGETHER = ROWS == 1 ? 4 : 2;
        const TileRows a = {rows_.from, rows_.row_step, 1};
        const int64_t panel_step = depth_ * PANEL;
        int64_t panel = 0;
        for (; panel + TOGETHER <= num_panels; panel += TOGETHER)
            multiply_tile<ROWS, TOGETHER, false>(a, b + panel * panel_step, panel_step, depth_, c + panel * PANEL,
                                                 GROUP_COLUMNS, false, {nullptr, STREAM_AHEAD});
        for (; panel < num_panels; panel++)
            multiply_tile<ROWS, 1, false>(a, b + panel * panel_step, panel_step, depth_, c + panel * PANEL,
                                          GROUP_COLUMNS, false, {b + panel * panel_step, PANEL});
    }

    Matrix rows_;
    int64_t depth_;
    float* packed_;
    int64_t num_tiles_, depth_block_;
};
