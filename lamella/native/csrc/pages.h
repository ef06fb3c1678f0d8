// How a page of KV is laid out on this path: as the panels that the attention kernel multiplies with.
//
// A page of P tokens is P / 16 sub-pages. First K, for each head and sub-page transposed, [k_dim][16 tokens]; then V,
// for each head and sub-page [v_dim / 16][16 tokens][16 columns]. So the K of a head's page lies in one piece in the
// order in which a row of scores is computed, and so does its V.
#pragma once

#include "vec.h"

constexpr int64_t SUB_PAGE = PANEL;  // tokens

// One layer's pages; mirrored by `Pages` in native/attention.py.
struct Pages {
    float* keys;    // K of page 0; page id p lies p * unit_floats further
    float* values;  // V of page 0
    int64_t unit_floats;
    int64_t page_tokens;
    int64_t num_kv_heads;
    int64_t k_dim;
    int64_t v_dim;

    int64_t key_panel_floats() const { return k_dim * SUB_PAGE; }
    int64_t value_panel_floats() const { return v_dim * SUB_PAGE; }
    int64_t sub_pages() const { return page_tokens / SUB_PAGE; }

    float* key_panel(int64_t page, int64_t head, int64_t sub_page) const {
        return keys + page * unit_floats + (head * sub_pages() + sub_page) * key_panel_floats();
    }

    float* value_panels(int64_t page, int64_t head, int64_t sub_page) const {
        return values + page * unit_floats + (head * sub_pages() + sub_page) * value_panel_floats();
    }

    // Slot: page * page_tokens + offset in the page.
    void write_key(int64_t slot, int64_t head, const float* key) const {
        const int64_t offset = slot % page_tokens;
        float* to = key_panel(slot / page_tokens, head, offset / SUB_PAGE) + offset % SUB_PAGE;
        for (int64_t dim = 0; dim < k_dim; dim++) to[dim * SUB_PAGE] = key[dim];
    }

    void write_value(int64_t slot, int64_t head, const float* value) const {
        const int64_t offset = slot % page_tokens;
        float* to = value_panels(slot / page_tokens, head, offset / SUB_PAGE) + offset % SUB_PAGE * PANEL;
        for (int64_t dim = 0; dim < v_dim; dim += PANEL)
            std::memcpy(to + dim * SUB_PAGE, value + dim, PANEL * sizeof(float));
    }
};
