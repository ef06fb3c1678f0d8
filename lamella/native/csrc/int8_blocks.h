// Blocks of int8 panels as floats.
#pragma once

#include "float_blocks.h"
#include "int8_panels.h"

// Converts [steps][16] weights of a panel to floats; whole lines are written. Fetches the same lines of the next panel
// ahead.
static inline void convert_block(const int8_t* line, int64_t panel_bytes, int64_t steps, float* block) {
    for (int64_t k = 0; k < steps; k += LINE_STEPS, line += LINE_BYTES, block += LINE_STEPS * PANEL) {
        __builtin_prefetch(line + panel_bytes, 0, 2);
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            const IntVec lanes = load_lanes(line + vec * LAMELLA_VECTOR_BYTES);
#pragma GCC unroll 4
            for (int step = 0; step < LINE_STEPS; step++)
                store(block + step * PANEL + vec * VEC_LANES, take_byte(lanes, step));
        }
    }
}
