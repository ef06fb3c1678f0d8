// Attention over pages: one kernel for decode, prefill and batches of both.
//
// A work item is a tile of consecutive queries of one request, with all query heads of one KV head: its rows. It walks
// the keys that it sees in blocks of BLOCK tokens at absolute positions, with a running maximum and sum for each row
// (online softmax: Milakov and Gimelshein, arXiv 1805.02867). A row's arithmetic depends on its own keys and their
// positions alone. Each chain runs over the keys in order. A block of which a row sees nothing does nothing to the row.
// In other blocks, a key that it does not see is either not touched or adds an exact zero to a sum that can't be -0.
// So neither the chunk, the page size, the batch nor the threads change a bit.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>

#include <omp.h>

#include "pages.h"
#include "tile.h"

namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// One group's ragged batch; mirrored by `Batch` in native/attention.py.
struct Batch {
    const int64_t* block_tables;  // [requests][table_stride]
    int64_t table_stride;
    const int64_t* query_start;   // [requests + 1]
    const int64_t* seq_lens;      // [requests]
    const int64_t* first_blocks;  // [requests]
    const int64_t* first_keys;    // [requests]
    const int64_t* tiles;         // [num_tiles][2]: request, the tile's first query; tiles that cost most come first
    int64_t num_tiles;
    int64_t tile_queries;         // most queries of a tile
    int64_t first_row;            // the row of the batch that row 0 of query and out belongs to
};

struct Layer {
    int64_t num_heads;
    int64_t window_tokens;  // 0: no window
    int64_t chunk_tokens;   // 0: no chunks
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [num_heads] or null

    int64_t first_visible(int64_t position) const {
        if (window_tokens) return std::max<int64_t>(0, position - window_tokens + 1);
        return chunk_tokens ? position / chunk_tokens * chunk_tokens : 0;
    }
};

// Keys [first, stop). in_block: those of them that are in a block, counted from its first token.
struct Range {
    int64_t first, stop;

    Range in_block(int64_t block) const {
        return {std::clamp<int64_t>(first - block, 0, BLOCK), std::clamp<int64_t>(stop - block, 0, BLOCK)};
    }
    bool is_empty() const { return first >= stop; }
    int64_t first_panel() const { return first / PANEL; }
    int64_t stop_panel() const { return (stop + PANEL - 1) / PANEL; }
};

// At most ROW_TILE rows, with the keys that some of them see and the keys that all of them see.
struct RowGroup {
    int64_t first_row;
    int64_t num_rows;
    Range some;
    Range all;
    Range some_here;  // in the block that is worked on
    Range all_here;

    void enter(int64_t block) {
        some_here = some.in_block(block);
        all_here = all.in_block(block);
        if (all_here.is_empty()) all_here = {some_here.stop, some_here.stop};
    }
    bool is_ragged() const { return some_here.first != all_here.first || some_here.stop != all_here.stop; }
};

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The memory that a thread works in, for tiles of at most max_rows rows.
struct Scratch {
    float* queries;  // [row groups][k_dim][ROW_TILE], scaled
    float* scores;   // [rows][BLOCK]
    float* sums;     // [rows][v_dim]
    float* maxima;   // [rows]
    float* totals;   // [rows]
    Range* seen;     // [rows]
    RowGroup* groups;

    static int64_t row_bytes(const Pages& pages) {
        return (pages.k_dim + BLOCK + pages.v_dim + 2) * int64_t(sizeof(float)) + sizeof(Range) + sizeof(RowGroup);
    }

    // Rounded up, so that row groups are whole and every array takes whole cache lines.
    static int64_t allotted_rows(int64_t max_rows) { return round_up(max_rows, 4 * 12); }

    static int64_t bytes(const Pages& pages, int64_t max_rows) {
        return round_up(allotted_rows(max_rows) * row_bytes(pages), 4096);
    }

    Scratch(char* memory, const Pages& pages, int64_t max_rows) {
        const int64_t rows = allotted_rows(max_rows);
        auto take = [&](int64_t bytes_per_row) {
            char* taken = memory;
            memory += rows * bytes_per_row;
            return taken;
        };
        scores = reinterpret_cast<float*>(take(BLOCK * sizeof(float)));
        queries = reinterpret_cast<float*>(take(pages.k_dim * sizeof(float)));
        sums = reinterpret_cast<float*>(take(pages.v_dim * sizeof(float)));
        maxima = reinterpret_cast<float*>(take(sizeof(float)));
        totals = reinterpret_cast<float*>(take(sizeof(float)));
        seen = reinterpret_cast<Range*>(take(sizeof(Range)));
        groups = reinterpret_cast<RowGroup*>(take(sizeof(RowGroup)));
    }
};

// s -> c tanh(s / c), as c - 2 c / (e^(2 s / c) + 1).
LAMELLA_INLINE Vec capped(Vec score, float cap) {
    const Vec power = exponential(score * broadcast(2.0f / cap));
    return broadcast(cap) - broadcast(2.0f * cap) / (power + broadcast(1.0f));
}

// Turns the scores of one row in a block into weights relative to the row's new maximum, 0 where it does not see the
// key, and adds them to the row's total. Reads and writes all columns of the panels that `computed` touches. Returns
// the factor for what was summed before. Never inlined: one piece of machine code for every row.
__attribute__((noinline)) float weigh_row(
    float* scores, Range computed, Range seen, float softcap, float* maximum_score, float* total) {
    const int64_t first = computed.first_panel() * PANEL, stop = computed.stop_panel() * PANEL;
    if (softcap)
        for (int64_t token = first; token < stop; token += VEC_LANES)
            store(scores + token, capped(load(scores + token), softcap));
    for (int64_t token = first; token < seen.first; token++) scores[token] = MINUS_INFINITY;
    for (int64_t token = seen.stop; token < stop; token++) scores[token] = MINUS_INFINITY;

    Vec largest = broadcast(MINUS_INFINITY);
    for (int64_t token = first; token < stop; token += VEC_LANES) largest = maximum(largest, load(scores + token));
    const float new_maximum = std::max(*maximum_score, max_lanes(largest));
    Vec sums[PANEL_VECS] = {};
    for (int64_t token = first; token < stop; token += PANEL)
        for (int vec = 0; vec < PANEL_VECS; vec++) {
            float* score = scores + token + vec * VEC_LANES;
            const Vec weight = exponential(load(score) - broadcast(new_maximum));
            store(score, weight);
            sums[vec] += weight;
        }
    float block_total = 0;
    for (int vec = 0; vec < PANEL_VECS; vec++) block_total += sum_lanes(sums[vec]);

    float factor = 1.0f;
    if (new_maximum != *maximum_score) {
        float lanes[VEC_LANES];
        store(lanes, exponential(broadcast(*maximum_score - new_maximum)));
        factor = lanes[0];
    }
    *maximum_score = new_maximum;
    *total = std::fma(*total, factor, block_total);
    return factor;
}

__attribute__((noinline)) void scale_row(const float* from, float* to, int64_t size, float factor) {
    for (int64_t index = 0; index < size; index += VEC_LANES)
        store(to + index, load(from + index) * broadcast(factor));
}

class Tile {
public:
    Tile(const Pages& pages, const Batch& batch, const Layer& layer, const Scratch& scratch, const int64_t* tile,
         int64_t head)
        : pages_(pages), layer_(layer), scratch_(scratch), request_(tile[0]), head_(head),
          heads_per_kv_head_(layer.num_heads / pages.num_kv_heads) {
        const int64_t start = batch.query_start[request_];
        const int64_t num_new = batch.query_start[request_ + 1] - start;
        first_row_ = start - batch.first_row + tile[1];
        num_queries_ = std::min(batch.tile_queries, num_new - tile[1]);
        num_rows_ = num_queries_ * heads_per_kv_head_;
        first_position_ = batch.seq_lens[request_] - num_new + tile[1];
        first_key_ = batch.first_keys[request_];
        // Indexed by absolute block.
        table_ = batch.block_tables + request_ * batch.table_stride - batch.first_blocks[request_];
        keys_seen_ = {seen_by(0).first, first_position_ + num_queries_};
    }

    void run(const float* query, float* out) {
        begin(query);
        for (int64_t block = keys_seen_.first / BLOCK * BLOCK; block < keys_seen_.stop; block += BLOCK) {
            find_panels(block);
            for (int64_t group = 0; group < num_groups_; group++) scratch_.groups[group].enter(block);
            score(block);
            weigh(block);
            if (num_queries_ == 1)
                add_by_sub_page(block);
            else
                add_by_column(block);
        }
        finish(out);
    }

private:
    Range seen_by(int64_t row) const {
        const int64_t position = first_position_ + row / heads_per_kv_head_;
        return {std::max(layer_.first_visible(position), first_key_), position + 1};
    }

    int64_t head_of(int64_t row) const { return head_ * heads_per_kv_head_ + row % heads_per_kv_head_; }

    // Index in an array [rows of the batch][num_heads] of one of the tile's rows.
    int64_t batch_index(int64_t row) const {
        return (first_row_ + row / heads_per_kv_head_) * layer_.num_heads + head_of(row);
    }

    void begin(const float* query) {
        num_groups_ = 0;
        for (int64_t row = 0; row < num_rows_; row++) {
            scratch_.seen[row] = seen_by(row);
            // A sink is a score without a value.
            const float sink = layer_.sinks ? layer_.sinks[head_of(row)] : MINUS_INFINITY;
            scratch_.maxima[row] = sink;
            scratch_.totals[row] = sink > MINUS_INFINITY ? 1.0f : 0.0f;
            const int64_t lane = row % ROW_TILE;
            const float* from = query + batch_index(row) * pages_.k_dim;
            float* to = scratch_.queries + (row - lane) * pages_.k_dim + lane;
            for (int64_t dim = 0; dim < pages_.k_dim; dim++) to[dim * ROW_TILE] = from[dim] * layer_.scale;
        }
        std::fill(scratch_.sums, scratch_.sums + num_rows_ * pages_.v_dim, 0.0f);
        for (int64_t row = 0; row < num_rows_; row += ROW_TILE) {
            const int64_t size = std::min<int64_t>(ROW_TILE, num_rows_ - row);
            const Range& low = scratch_.seen[row];
            const Range& high = scratch_.seen[row + size - 1];  // what a later query sees begins and ends later
            scratch_.groups[num_groups_++] = {row, size, {low.first, high.stop}, {high.first, low.stop}, {}, {}};
        }
    }

    // Finds the addresses of the block's panels, and of the one behind them, to fetch it ahead.
    void find_panels(int64_t block) {
        const int64_t sub_pages = pages_.sub_pages();
        const Range seen = keys_seen_.in_block(block);
        for (int64_t panel = seen.first_panel(); panel < seen.stop_panel(); panel++) {
            const int64_t sub_page = block / SUB_PAGE + panel;
            const int64_t page = table_[sub_page / sub_pages];
            keys_[panel] = pages_.key_panel(page, head_, sub_page % sub_pages);
            values_[panel] = pages_.value_panels(page, head_, sub_page % sub_pages);
        }
        upcoming_ = keys_[seen.first_panel()];
        if (block + BLOCK < keys_seen_.stop) {
            const int64_t sub_page = (block + BLOCK) / SUB_PAGE;
            upcoming_ = pages_.key_panel(table_[sub_page / sub_pages], head_, sub_page % sub_pages);
        }
    }

    void score(int64_t block) {
        const Range seen = keys_seen_.in_block(block);
        for (int64_t panel = seen.first_panel(); panel < seen.stop_panel(); panel++) {
            const bool is_last = panel + 1 == seen.stop_panel();
            const float* upcoming = is_last ? values_[seen.first_panel()] : keys_[panel + 1];
            for (int64_t group = 0; group < num_groups_; group++) {
                const RowGroup& rows = scratch_.groups[group];
                const Range some = rows.some_here;
                if (some.is_empty() || panel < some.first_panel() || panel >= some.stop_panel()) continue;
                float* scores = scratch_.scores + rows.first_row * BLOCK + panel * PANEL;
                TILE_KERNELS.score[rows.num_rows - 1](
                    {scratch_.queries + rows.first_row * pages_.k_dim, keys_[panel], pages_.k_dim, scores, upcoming});
                upcoming = values_[panel];
            }
        }
    }

    void weigh(int64_t block) {
        for (int64_t group = 0; group < num_groups_; group++) {
            const RowGroup& rows = scratch_.groups[group];
            const Range computed = rows.some_here;
            for (int64_t row = rows.first_row; row < rows.first_row + rows.num_rows; row++) {
                const Range seen = scratch_.seen[row].in_block(block);
                if (seen.is_empty()) continue;
                const float factor = weigh_row(
                    scratch_.scores + row * BLOCK, computed, seen, layer_.softcap, &scratch_.maxima[row],
                    &scratch_.totals[row]);
                float* sums = scratch_.sums + row * pages_.v_dim;
                if (factor != 1.0f) scale_row(sums, sums, pages_.v_dim, factor);
            }
        }
    }

    void add(int64_t first_row, int64_t num_rows, Range tokens, Range columns, const float* upcoming) {
        if (tokens.is_empty()) return;
        TILE_KERNELS.add[num_rows - 1](
            {values_, tokens.first, tokens.stop, columns.first, columns.stop, scratch_.scores + first_row * BLOCK,
             scratch_.sums + first_row * pages_.v_dim, pages_.v_dim, upcoming});
    }

    // For tiles of one query, all rows of which see the same keys. V is read in the order in which it lies in memory:
    // reading it is what decode takes its time for.
    void add_by_sub_page(int64_t block) {
        const Range seen = keys_seen_.in_block(block);
        for (int64_t panel = seen.first_panel(); panel < seen.stop_panel(); panel++) {
            const float* upcoming = panel + 1 == seen.stop_panel() ? upcoming_ : values_[panel + 1];
            const Range tokens = {std::max(seen.first, panel * PANEL), std::min(seen.stop, (panel + 1) * PANEL)};
            for (int64_t group = 0; group < num_groups_; group++) {
                const RowGroup& rows = scratch_.groups[group];
                add(rows.first_row, rows.num_rows, tokens, {0, pages_.v_dim}, upcoming);
            }
        }
    }

    // Adds, row by row, the keys before (or else after) those that all rows of the group see.
    void add_edges(int64_t block, const RowGroup& rows, Range columns, const float* upcoming, bool before) {
        for (int64_t row = rows.first_row; row < rows.first_row + rows.num_rows; row++) {
            Range seen = scratch_.seen[row].in_block(block);
            if (before)
                seen.stop = std::min(seen.stop, rows.all_here.first);
            else
                seen.first = std::max(seen.first, rows.all_here.stop);
            add(row, 1, seen, columns, upcoming);
        }
    }

    // For tiles of many rows: 16 columns of the block's V stay in the first-level cache for all of them. A key that not
    // all rows of a group see is added row by row, before or after the others. It is never multiplied for rows that do
    // not see it, because V may be NaN.
    void add_by_column(int64_t block) {
        for (int64_t column = 0; column < pages_.v_dim; column += PANEL) {
            const Range columns = {column, column + PANEL};
            for (int64_t group = 0; group < num_groups_; group++) {
                const RowGroup& rows = scratch_.groups[group];
                if (rows.some_here.is_empty()) continue;
                const float* here = values_[rows.some_here.first_panel()] + column * SUB_PAGE;
                if (rows.is_ragged()) add_edges(block, rows, columns, here, true);
                add(rows.first_row, rows.num_rows, rows.all_here, columns, here);
                if (rows.is_ragged()) add_edges(block, rows, columns, here, false);
            }
        }
    }

    void finish(float* out) const {
        for (int64_t row = 0; row < num_rows_; row++)
            scale_row(
                scratch_.sums + row * pages_.v_dim, out + batch_index(row) * pages_.v_dim, pages_.v_dim,
                1.0f / scratch_.totals[row]);
    }

    const Pages& pages_;
    const Layer& layer_;
    const Scratch& scratch_;
    int64_t request_, head_, heads_per_kv_head_;
    int64_t first_row_, num_queries_, num_rows_, first_position_, first_key_;
    const int64_t* table_;
    Range keys_seen_;
    int64_t num_groups_ = 0;
    const float* keys_[BLOCK_PANELS];
    const float* values_[BLOCK_PANELS];
    const float* upcoming_ = nullptr;
};

}  // namespace

// query [rows][num_heads][k_dim] -> out [rows][num_heads][v_dim], for the rows of the batch's tiles. Returns 0, or 1
// where memory is lacking.
LAMELLA_EXPORT int64_t lamella_attention(
    const Pages* pages, const Batch* batch, const float* query, float* out, int64_t num_heads, int64_t window_tokens,
    int64_t chunk_tokens, float scale, float softcap, const float* sinks) {
    const Layer layer = {num_heads, window_tokens, chunk_tokens, scale, softcap, sinks};
    const int64_t num_items = batch->num_tiles * pages->num_kv_heads;
    // All threads or one: a smaller team would end the other threads, and the next region would start them anew.
    const int num_threads = num_items > 1 ? omp_get_max_threads() : 1;
    const int64_t max_rows = batch->tile_queries * (num_heads / pages->num_kv_heads);
    const int64_t scratch_bytes = Scratch::bytes(*pages, max_rows);
    char* memory = static_cast<char*>(std::aligned_alloc(4096, scratch_bytes * num_threads));
    if (!memory) return 1;
    std::atomic<int64_t> next_item{0};
#pragma omp parallel num_threads(num_threads)
    {
        const Scratch scratch(memory + omp_get_thread_num() * scratch_bytes, *pages, max_rows);
        for (int64_t item = next_item++; item < num_items; item = next_item++) {
            const int64_t tile = item / pages->num_kv_heads, head = item % pages->num_kv_heads;
            Tile(*pages, *batch, layer, scratch, batch->tiles + tile * 2, head).run(query, out);
        }
    }
    std::free(memory);
    return 0;
}

// Writes key [tokens][num_kv_heads][k_dim] and value [tokens][num_kv_heads][v_dim] to the slots; -1: nowhere. A token's
// heads lie in one piece, and tokens are a stride apart.
LAMELLA_EXPORT void lamella_write_kv(
    const Pages* pages, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
    const int64_t* slots, int64_t num_tokens) {
#pragma omp parallel for schedule(static) if (num_tokens > 8)
    for (int64_t token = 0; token < num_tokens; token++) {
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < pages->num_kv_heads; head++) {
            pages->write_key(slots[token], head, key + token * key_stride + head * pages->k_dim);
            pages->write_value(slots[token], head, value + token * value_stride + head * pages->v_dim);
        }
    }
}
