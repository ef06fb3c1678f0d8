// Panels of int8 weights, [panel][k / 4][16 columns][4 values of k], and their products with rows of floats: what
// int8.cpp, int8_head.cpp and w8a8.cpp share. The four bytes of a column are one int32 lane, so two shifts bring each
// to a lane of its own whatever the width of a register, and four steps of k are one cache line.
//
// The sum of an output element is one chain, for k ascending: sum = fma(x[k], float(q[k]), sum). Each function here
// continues such chains and nothing else, so a result is the same bit for bit whichever of them computed it.
#pragma once

#include "vec.h"

constexpr int64_t LINE_BYTES = 64;
constexpr int64_t LINE_STEPS = 4;

LAMELLA_INLINE int64_t lines_of(int64_t depth) { return (depth + LINE_STEPS - 1) / LINE_STEPS; }

LAMELLA_INLINE IntVec load_lanes(const int8_t* from) {
    IntVec lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Byte `step` of every lane, as a float: exact.
LAMELLA_INLINE Vec take_byte(IntVec lanes, int step) {
    return __builtin_convertvector((lanes << (24 - 8 * step)) >> 24, Vec);
}

template <int ROWS, int PANELS>
struct ByteSums {
    Vec sums[ROWS][PANELS][PANEL_VECS];
};

template <int ROWS, int PANELS>
LAMELLA_INLINE void add_line(ByteSums<ROWS, PANELS>& tile, const float* x, int64_t row_stride, const int8_t* line,
                             int64_t panel_bytes, int steps) {
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; panel++) {
        IntVec lanes[PANEL_VECS];
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++)
            lanes[vec] = load_lanes(line + panel * panel_bytes + vec * LAMELLA_VECTOR_BYTES);
#pragma GCC unroll 4
        for (int step = 0; step < steps; step++) {
            Vec weights[PANEL_VECS];
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) weights[vec] = take_byte(lanes[vec], step);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; row++) {
                const Vec value = broadcast(x[row * row_stride + step]);
#pragma GCC unroll 4
                for (int vec = 0; vec < PANEL_VECS; vec++)
                    tile.sums[row][panel][vec] = fma(value, weights[vec], tile.sums[row][panel][vec]);
            }
        }
    }
}

// Sums of ROWS rows (`row_stride` floats apart) with PANELS neighbouring panels. As the panels are read, those that
// follow them are fetched ahead: a panel is too short for the processor to notice the stream.
template <int ROWS, int PANELS>
LAMELLA_INLINE ByteSums<ROWS, PANELS> multiply_bytes(const float* x, int64_t row_stride, const int8_t* panels,
                                                     int64_t depth) {
    ByteSums<ROWS, PANELS> tile = {};
    const int64_t panel_bytes = lines_of(depth) * LINE_BYTES;
    const int8_t* line = panels;
    const int64_t num_whole = depth / LINE_STEPS;
    for (int64_t index = 0; index < num_whole; index++, line += LINE_BYTES, x += LINE_STEPS) {
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; panel++)
            __builtin_prefetch(line + (PANELS + panel) * panel_bytes, 0, 2);
        add_line<ROWS, PANELS>(tile, x, row_stride, line, panel_bytes, LINE_STEPS);
    }
    const int rest = int(depth % LINE_STEPS);
    if (rest) add_line<ROWS, PANELS>(tile, x, row_stride, line, panel_bytes, rest);
    return tile;
}
