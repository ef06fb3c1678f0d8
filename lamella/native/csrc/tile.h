// The two products of attention on a few rows and one panel, in registers.
//
// Every element is one chain of fused multiply-adds in the order of k, whatever the number of rows beside it and
// however the chain is cut into calls: results do not depend on the batch.
#pragma once

#include <utility>

#include "vec.h"

// Rows that are multiplied at once: their sums, a panel's row and one factor fill the registers (16 for AVX2, 32 else).
constexpr int ROW_TILE = VEC_LANES == 16 ? 12 : 6;
constexpr int64_t BLOCK = 128;  // keys whose scores are held at once
constexpr int64_t BLOCK_PANELS = BLOCK / PANEL;

// Memory is fetched this many of a panel's rows before it is multiplied. Farther ahead is no faster: a core has few
// misses in flight, and drops what it is asked to fetch beyond them.
constexpr int64_t ROWS_AHEAD = PANEL;
LAMELLA_INLINE void fetch(const float* row) { __builtin_prefetch(row, 0, 3); }

struct ScoreTile {
    const float* queries;  // [k_dim][ROW_TILE]
    const float* keys;     // [k_dim][PANEL]
    int64_t k_dim;
    float* scores;         // [rows][BLOCK], PANEL columns of each are written
    const float* upcoming; // what is read next
};

template <int ROWS>
void score_rows(const ScoreTile& tile) {
    Vec sums[ROWS][PANEL_VECS] = {};
    const float* queries = tile.queries;
    const float* keys = tile.keys;
    for (int64_t left = tile.k_dim; left; left -= ROWS_AHEAD) {
        const float* const stop = keys + ROWS_AHEAD * PANEL;
        const int64_t ahead = (left > ROWS_AHEAD ? stop : tile.upcoming) - keys;
#pragma GCC unroll 1
        for (; keys != stop; keys += PANEL, queries += ROW_TILE) {
            fetch(keys + ahead);
            Vec key[PANEL_VECS];
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++) key[vec] = load(keys + vec * VEC_LANES);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const Vec query = broadcast(queries[row]);
#pragma GCC unroll 4
                for (int vec = 0; vec < PANEL_VECS; vec++) sums[row][vec] = fma(query, key[vec], sums[row][vec]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++)
            store(tile.scores + row * BLOCK + vec * VEC_LANES, sums[row][vec]);
}

struct ValueTile {
    const float* const* panels; // V of each sub-page of the block, [v_dim / PANEL][PANEL tokens][PANEL]
    int64_t first, stop;        // the tokens of the block to add
    int64_t first_column, stop_column;
    const float* weights;       // [rows][BLOCK]
    float* sums;                // [rows][v_dim]
    int64_t v_dim;
    const float* upcoming;      // what is read next
};

template <int ROWS>
void add_values(const ValueTile& tile) {
    for (int64_t column = tile.first_column; column < tile.stop_column; column += PANEL) {
        float* const column_sums = tile.sums + column;
        Vec sums[ROWS][PANEL_VECS];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                sums[row][vec] = load(column_sums + row * tile.v_dim + vec * VEC_LANES);
        const bool is_last = column + PANEL >= tile.stop_column;
        const float* ahead = is_last ? tile.upcoming : tile.panels[tile.first / PANEL] + (column + PANEL) * PANEL;
        for (int64_t token = tile.first; token < tile.stop;) {
            const float* values = tile.panels[token / PANEL] + (column + token % PANEL) * PANEL;
            const float* weights = tile.weights + token;
            const int64_t panel_stop = (token / PANEL + 1) * PANEL;
            token = panel_stop < tile.stop ? panel_stop : tile.stop;
            const float* const stop = tile.weights + token;
#pragma GCC unroll 1
            for (; weights != stop; weights++, values += PANEL, ahead += PANEL) {
                fetch(ahead);
                Vec value[PANEL_VECS];
#pragma GCC unroll 4
                for (int vec = 0; vec < PANEL_VECS; vec++) value[vec] = load(values + vec * VEC_LANES);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) {
                    const Vec weight = broadcast(weights[row * BLOCK]);
#pragma GCC unroll 4
                    for (int vec = 0; vec < PANEL_VECS; vec++)
                        sums[row][vec] = fma(weight, value[vec], sums[row][vec]);
                }
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                store(column_sums + row * tile.v_dim + vec * VEC_LANES, sums[row][vec]);
    }
}

// The kernels by number of rows, 1 to ROW_TILE, at index rows - 1.
template <int... INDEX>
struct TileKernels {
    void (*score[ROW_TILE])(const ScoreTile&) = {score_rows<INDEX + 1>...};
    void (*add[ROW_TILE])(const ValueTile&) = {add_values<INDEX + 1>...};
};

template <int... INDEX>
constexpr TileKernels<INDEX...> tile_kernels(std::integer_sequence<int, INDEX...>) {
    return {};
}

constexpr auto TILE_KERNELS = tile_kernels(std::make_integer_sequence<int, ROW_TILE>{});
