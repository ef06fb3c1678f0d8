// The product of a few or many rows with panels of a GGUF type.
#pragma once

#include <algorithm>

#include "gguf_formats.h"

// A layer of a quantised type and what it is to be multiplied with.
struct GgufProduct {
    const float* x;         // [num_rows][depth]
    const int32_t* panels;  // [num_panels][blocks][words][16]
    float* out;             // [num_rows][num_columns], rows out_step apart
    int64_t out_step, num_rows, num_columns, depth;

    int64_t num_panels() const { return (num_columns + PANEL - 1) / PANEL; }
    int64_t num_groups() const { return depth / GROUP_STEPS; }

    void finish(int64_t row, int64_t panel, const float* sums) const {
        const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, num_columns - column);
        float* const to = out + row * out_step + column;
        if (width == PANEL)
            std::memcpy(to, sums, PANEL * sizeof(float));
        else
            std::memcpy(to, sums, width * sizeof(float));
    }
};

template <class Format>
static inline int64_t panel_words(const GgufProduct& linear) {
    return (linear.num_groups() + Format::GROUPS - 1) / Format::GROUPS * Format::WORDS * PANEL;
}

// The block of a panel that `group` is in.
template <class Format>
static inline const int32_t* block_at(const GgufProduct& linear, int64_t panel, int64_t group) {
    return linear.panels + panel * panel_words<Format>(linear) + group / Format::GROUPS * Format::WORDS * PANEL;
}
