// The k best outputs of a float linear layer, exactly, from a quarter of its bytes.
//
// All columns are scored with int8 weights. A bound on the difference to the float score says which columns can be
// among the k best; those few are scored again with the float weights, by the chain of the float kernel:
// sum = fma(x[k], w[k], sum), k ascending. So ids and values are those of the float layer, bit for bit.
//
// The bound. Let w be a column, q its levels, s its scale, e = w - s q, u = 2^-24, g = (K + 8) u / (1 - (K + 8) u).
//   float chain:   |F - sum x w| <= g sum |x||w|       (K roundings)
//   int8 chain:    |S - s sum x q| <= g sum |x| |s q|, s |q| <= |w| + |e|       (K roundings, one for the scale)
//   quantisation:  |s sum x q - sum x w| <= sum |x||e|
// together |S - F| <= (1 + 2g) sum |x||e| + 2g sum |x||w|, where g has room for the rounding of S + bound. Both sums
// are at most |x|_1 times the largest of the column, and at most |x|_2 times its norm: the caller gives
//   largest_slope = (1 + 2g) max |e| + 2g max |w|,  norm_slope = (1 + 2g) |e|_2 + 2g |w|_2,
// a little enlarged for the rounding of their products here, and `floor`, what underflow can do.
// With lower = S - bound <= F <= S + bound = upper: the k-th best F is at least the k-th best lower, so every column of
// the k best, and all that tie with the last of them, have an upper of at least that. Those with the largest upper are
// scored first: a column whose upper is below the k-th best score found cannot be one of the k best either.
#include "head_scan.h"
#include "int8_blocks.h"

namespace {

constexpr int64_t DIRECT_ROWS = 4;  // as in int8.cpp
constexpr int64_t FLOAT_GROUP = 4;  // panels of float weights at once: chains enough to hide their latency

template <int ROWS, int PANELS>
void scan_tile(const Head& head, int64_t panel, const float* x, const Norms* norms, Scan* scans) {
    const int8_t* bytes = head.panels + panel * lines_of(head.depth) * LINE_BYTES;
    const auto tile = multiply_bytes<ROWS, PANELS>(x, head.depth, bytes, head.depth);
    for (int row = 0; row < ROWS; row++)
        for (int index = 0; index < PANELS; index++)
            scan_panel<false>(head, panel + index, tile.sums[row][index], norms[row], scans[row]);
}

template <int ROWS, int PANELS>
void scan_panels(const Head& head, int64_t begin, int64_t end, const float* x, const Norms* norms, Scan* scans) {
    int64_t panel = begin;
    for (; panel + PANELS <= end; panel += PANELS) scan_tile<ROWS, PANELS>(head, panel, x, norms, scans);
    for (; panel < end; panel++) scan_tile<ROWS, 1>(head, panel, x, norms, scans);
}

// Scans panels [begin, end). Up to DIRECT_ROWS rows lie one after another in `x`; more are packed as float_blocks.h
// wants them.
void scan_rows(const Head& head, int64_t begin, int64_t end, const float* x, int64_t num_rows, const Norms* norms,
               Scan* scans, FloatBlocks& blocks) {
    if (num_rows == 1) return scan_panels<1, 4>(head, begin, end, x, norms, scans);
    if (num_rows == 2) return scan_panels<2, 2>(head, begin, end, x, norms, scans);
    if (num_rows == 3) return scan_panels<3, 2>(head, begin, end, x, norms, scans);
    if (num_rows == DIRECT_ROWS) return scan_panels<DIRECT_ROWS, 1>(head, begin, end, x, norms, scans);
    const int64_t panel_bytes = lines_of(head.depth) * LINE_BYTES;
    for (int64_t panel = begin; panel < end; panel++) {
        const auto convert = [&](int64_t first, int64_t steps, float* block) {
            convert_block(head.panels + panel * panel_bytes + first * PANEL, panel_bytes, steps, block);
        };
        blocks.multiply(convert, head.depth, x, num_rows);
        for (int64_t row = 0; row < num_rows; row++) {
            Vec sums[PANEL_VECS];
            std::memcpy(sums, blocks.sums + row * PANEL, sizeof sums);
            scan_panel<false>(head, panel, sums, norms[row], scans[row]);
        }
    }
}

// Scores every column by the float weights. Returns the best of each thread, among which are the best of all.
std::vector<Candidate> score_all(const Head& head, const float* x) {
    std::vector<Candidate> best;
    const int64_t num_groups = (head.num_panels() + FLOAT_GROUP - 1) / FLOAT_GROUP;
#pragma omp parallel
    {
        std::vector<Candidate> mine;  // sorted
#pragma omp for schedule(static)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t panel = group * FLOAT_GROUP, panels = std::min(FLOAT_GROUP, head.num_panels() - panel);
            float values[FLOAT_GROUP * PANEL];
            if (panels == FLOAT_GROUP)
                multiply_floats<FLOAT_GROUP>(head, x, panel, values);
            else
                for (int64_t index = 0; index < panels; index++)
                    multiply_floats<1>(head, x, panel + index, values + index * PANEL);
            const int64_t first = panel * PANEL, end = std::min(head.num_columns, first + panels * PANEL);
            for (int64_t column = first; column < end; column++) {
                const Candidate one{column, values[column - first]};
                if (int64_t(mine.size()) == head.num_best) {
                    if (!is_better(one, mine.back())) continue;
                    mine.pop_back();
                }
                mine.insert(std::upper_bound(mine.begin(), mine.end(), one, is_better), one);
            }
        }
#pragma omp critical(lamella_int8_head)
        best.insert(best.end(), mine.begin(), mine.end());
    }
    return best;
}

}  // namespace

// The `num_best` (1 to 64) best columns of each row, best first: ids and values [num_rows][num_best]. num_rescored
// [num_rows]: columns that were scored by float weights. Rows whose sums could overflow or that are not finite, and
// rows with too many candidates, are scored by the float weights throughout. `largest` is the largest |weight|.
LAMELLA_EXPORT void lamella_int8_head(const float* x, const int8_t* panels, const float* scales,
                                      const float* largest_slopes, const float* norm_slopes, const float* float_panels,
                                      int64_t* ids, float* values, int64_t* num_rescored, int64_t num_rows,
                                      int64_t num_columns, int64_t depth, int64_t num_best, float floor,
                                      float largest) {
    const Head head{panels, scales, largest_slopes, norm_slopes, nullptr, float_panels, num_columns, depth, num_best, floor};
    std::vector<int64_t> scanned;  // rows
    std::vector<Norms> norms;
    std::vector<float> gathered;  // [scanned rows][depth]
    for (int64_t row = 0; row < num_rows; row++) {
        const Norms measured = measure(x + row * depth, depth);
        if (!(measured.sum * std::max(127.0f, largest) <= SAFE_SUM)) continue;
        scanned.push_back(row);
        norms.push_back(measured);
        gathered.insert(gathered.end(), x + row * depth, x + (row + 1) * depth);
    }
    const int64_t num_scanned = int64_t(scanned.size()), num_panels = head.num_panels();
    std::vector<std::vector<Scan>> scans(omp_get_max_threads(), std::vector<Scan>(num_scanned));
    for (int64_t first = 0; first < num_scanned; first += BLOCK_ROWS) {
        const int64_t rows = std::min(BLOCK_ROWS, num_scanned - first);
        const int64_t span = std::max<int64_t>(4, num_panels / (16 * omp_get_max_threads()) / 4 * 4);
        const float* batch = gathered.data() + first * depth;
        std::vector<float> packed;
        if (rows > DIRECT_ROWS) {
            packed.resize(rows * depth);
            const int64_t tile_rows = even_tile(rows);
            for (int64_t row = 0; row < rows; row += tile_rows)
                pack_tile(batch + row * depth, depth, std::min(tile_rows, rows - row), packed.data() + row * depth);
            batch = packed.data();
        }
#pragma omp parallel
        {
            FloatBlocks blocks;
#pragma omp for schedule(dynamic, 1)
            for (int64_t begin = 0; begin < num_panels; begin += span)
                scan_rows(head, begin, std::min(begin + span, num_panels), batch, rows, norms.data() + first,
                          scans[omp_get_thread_num()].data() + first, blocks);
        }
    }
    size_t next = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        std::vector<Candidate> best;
        bool complete = false;
        if (next < scanned.size() && scanned[next] == row) {
            complete = true;
            for (const auto& of_thread : scans) complete &= !of_thread[next].overflowed;
            if (complete) best = join(head, scans, next);
            complete &= int64_t(best.size()) >= num_best;  // fewer only where NaN is in the copy of the weights
            next++;
        }
        if (complete)
            score_again(head, x + row * depth, best);
        else
            best = score_all(head, x + row * depth);
        num_rescored[row] = complete ? int64_t(best.size()) : num_columns;
        std::partial_sort(best.begin(), best.begin() + num_best, best.end(), is_better);
        for (int64_t index = 0; index < num_best; index++) {
            ids[row * num_best + index] = best[index].column;
            values[row * num_best + index] = best[index].score;
        }
    }
}
