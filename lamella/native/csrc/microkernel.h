// The product of a few rows with a few 16-column panels, held in registers: what every matrix product here is made of.
//
// An element of the result is one chain of fused multiply-adds over k, first to last. The chain is the same whatever
// the tile's size and wherever a chain is put down and taken up again, so a row's result never depends on the rows
// that are computed with it.
#pragma once

#include "vec.h"

constexpr int NUM_REGISTERS = LAMELLA_VECTOR_BYTES == 32 ? 16 : 32;
// Sums of a tile fill the registers, but for a row of the panel and one value of A.
constexpr int REGISTER_ROWS = (NUM_REGISTERS - PANEL_VECS - 1) / PANEL_VECS;
constexpr int TILE_ROWS = REGISTER_ROWS < 12 ? REGISTER_ROWS : 12;

// Where a tile's rows of A lie: value k of row i at from[i * row_step + k * depth_step].
struct TileRows {
    const float* from;
    int64_t row_step, depth_step;
};

// What to fetch into the cache meanwhile: at every k the line at from + k * step. Where several panels are read at
// once, each is a stream of its own and is fetched `step` floats ahead of itself; `from` is not used then.
struct Ahead {
    const float* from;
    int64_t step;
};

// C[ROWS, PANELS * 16] = A[ROWS, depth] B, or += where `resume`. Panel p of B starts at b + p * panel_step.
// PACKED says that A's values of one k lie together (row_step 1, depth_step ROWS): addresses are then constants.
template <int ROWS, int PANELS, bool PACKED>
LAMELLA_INLINE void multiply_tile(TileRows a, const float* b, int64_t panel_step, int64_t depth, float* c,
                                  int64_t c_step, bool resume, Ahead ahead) {
    constexpr int VECS = PANELS * PANEL_VECS;
    const int64_t row_step = PACKED ? 1 : a.row_step;
    const int64_t depth_step = PACKED ? ROWS : 1;
    Vec sums[ROWS][VECS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int vec = 0; vec < VECS; vec++) sums[row][vec] = resume ? load(c + row * c_step + vec * VEC_LANES) : Vec{};
#pragma GCC unroll 1
    for (int64_t k = 0; k < depth; k++) {
        if (PANELS == 1) __builtin_prefetch(ahead.from + k * ahead.step);
#pragma GCC unroll 16
        for (int panel = 0; panel < PANELS; panel++) {
            const float* from = b + panel * panel_step + k * PANEL;
            if (PANELS > 1) __builtin_prefetch(from + ahead.step);
            Vec columns[PANEL_VECS];
#pragma GCC unroll 16
            for (int vec = 0; vec < PANEL_VECS; vec++) columns[vec] = load(from + vec * VEC_LANES);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const Vec value = broadcast(a.from[row * row_step + k * depth_step]);
#pragma GCC unroll 16
                for (int vec = 0; vec < PANEL_VECS; vec++) {
                    Vec& sum = sums[row][panel * PANEL_VECS + vec];
                    sum = fma(value, columns[vec], sum);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int vec = 0; vec < VECS; vec++) store(c + row * c_step + vec * VEC_LANES, sums[row][vec]);
}

// Not inlined: a compiler that sees only this loop keeps its sums in registers.
template <int ROWS>
__attribute__((noinline)) static void multiply_packed_rows(const float* a, const float* b, int64_t depth, float* c,
                                                           int64_t c_step, bool resume, Ahead ahead) {
    multiply_tile<ROWS, 1, true>({a, 1, ROWS}, b, 0, depth, c, c_step, resume, ahead);
}

// The packed tile of one panel with 1 to TILE_ROWS rows.
template <int ROWS = TILE_ROWS>
static inline void multiply_packed(int num_rows, const float* a, const float* b, int64_t depth, float* c,
                                   int64_t c_step, bool resume, Ahead ahead) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS) return multiply_packed<ROWS - 1>(num_rows, a, b, depth, c, c_step, resume, ahead);
    multiply_packed_rows<ROWS>(a, b, depth, c, c_step, resume, ahead);
}
