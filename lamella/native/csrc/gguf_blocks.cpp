// Linear layers straight from GGUF blocks, repacked into panels of 16 outputs with (nearly) the same bytes.
//
// A weight is unpacked to the very float that the format defines, and every output is the chain
// sum = fma(x[k], w[k], sum), k ascending: results equal those of the float kernel on dequantised weights bit for bit.
// For few rows, weights are unpacked in registers on their way from memory. For more rows, a block of a panel is
// unpacked once, into the L1 cache.
#include "float_blocks.h"
#include "gguf_product.h"
#include "kernels.h"
#include "mxfp4_sums.h"

namespace {

constexpr int64_t DIRECT_ROWS = 4;  // with up to so many rows, weights are unpacked in registers

// Calls visit(step, vec, weights) for the 32 inputs of a group and each register of the 16 outputs.
template <class Format, class Visit>
LAMELLA_INLINE void visit_group(const int32_t* block, int group, Visit visit) {
    typename Format::Scale scales[PANEL_VECS];
    for (int vec = 0; vec < PANEL_VECS; vec++) scales[vec] = Format::scale(block + vec * VEC_LANES, group);
    for (int part = 0; part < GROUP_STEPS / CHUNK_STEPS; part++) {
        typename Format::Chunk chunks[PANEL_VECS];
#pragma GCC unroll 4
        for (int vec = 0; vec < PANEL_VECS; vec++)
            chunks[vec] = Format::chunk(block + vec * VEC_LANES, group, part, scales[vec]);
#pragma GCC unroll 8
        for (int step = 0; step < CHUNK_STEPS; step++)
#pragma GCC unroll 4
            for (int vec = 0; vec < PANEL_VECS; vec++)
                visit(part * CHUNK_STEPS + step, vec, Format::Chunk::of(chunks[vec], step));
    }
}

// Fetches a block of the next panel ahead: a panel is too short for the processor to notice the stream.
template <class Format>
LAMELLA_INLINE void prefetch_block(const int32_t* block) {
    for (int word = 0; word < Format::WORDS; word++) __builtin_prefetch(block + word * PANEL, 0, 2);
}

// ROWS rows with one panel. A second panel would hide latencies, but its fields no longer fit into 16 registers.
template <class Format, int ROWS>
void multiply(const GgufProduct& linear, int64_t panel) {
    Vec sums[ROWS][PANEL_VECS] = {};
    const float* x = linear.x;
    for (int64_t begin = 0; begin < linear.num_groups(); begin += Format::GROUPS) {
        const int32_t* block = block_at<Format>(linear, panel, begin);
        prefetch_block<Format>(block + panel_words<Format>(linear));
        const int groups = int(std::min<int64_t>(Format::GROUPS, linear.num_groups() - begin));
        for (int group = 0; group < groups; group++, x += GROUP_STEPS)
            visit_group<Format>(block, group, [&](int step, int vec, Vec weights) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++)
                    sums[row][vec] = fma(broadcast(x[row * linear.depth + step]), weights, sums[row][vec]);
            });
    }
    for (int row = 0; row < ROWS; row++) linear.finish(row, panel, reinterpret_cast<const float*>(sums[row]));
}

template <class Format, int ROWS>
void run_direct(const GgufProduct& linear) {
    const int64_t num_panels = linear.num_panels();
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic, chunk)
    for (int64_t panel = 0; panel < num_panels; panel++) multiply<Format, ROWS>(linear, panel);
}

// Unpacks inputs [begin, begin + steps) of a panel to floats [steps][16]. `begin` and BLOCK_STEPS are multiples of a
// block's inputs.
template <class Format>
void convert(const GgufProduct& linear, int64_t panel, int64_t begin, int64_t steps, float* to) {
    static_assert(BLOCK_STEPS % (Format::GROUPS * GROUP_STEPS) == 0);
    for (int64_t first = begin / GROUP_STEPS; first < (begin + steps) / GROUP_STEPS; first += Format::GROUPS) {
        const int32_t* block = block_at<Format>(linear, panel, first);
        prefetch_block<Format>(block + panel_words<Format>(linear));
        const int groups = int(std::min<int64_t>(Format::GROUPS, (begin + steps) / GROUP_STEPS - first));
        for (int group = 0; group < groups; group++, to += GROUP_STEPS * PANEL)
            visit_group<Format>(block, group, [&](int step, int vec, Vec weights) __attribute__((always_inline)) {
                store(to + step * PANEL + vec * VEC_LANES, weights);
            });
    }
}

template <int ROWS, int PANELS>
void run_scaled(const GgufProduct& linear) {
    const int64_t num_panels = linear.num_panels(), num_sets = num_panels / PANELS;
    const int64_t chunk = std::max<int64_t>(1, num_sets / (8 * omp_get_max_threads()));
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t set = 0; set < num_sets; set++)
            if (!multiply_scaled<ROWS, PANELS>(linear, set * PANELS))
                for (int64_t panel = set * PANELS; panel < (set + 1) * PANELS; panel++)
                    multiply<MXFP4, ROWS>(linear, panel);
#pragma omp for schedule(dynamic, 1)
        for (int64_t panel = num_sets * PANELS; panel < num_panels; panel++)
            if (!multiply_scaled<ROWS, 1>(linear, panel)) multiply<MXFP4, ROWS>(linear, panel);
    }
}

// As many sums at once as registers allow: an addition takes several cycles, and panels are streams from memory.
constexpr int SCALED_SUMS = PANEL_VECS == 1 ? 4 : 2;

template <class Format, int ROWS>
void run_few(const GgufProduct& linear) {
    if constexpr (std::is_same_v<Format, MXFP4>)
        if (takes_scaled_sums(linear)) return run_scaled<ROWS, std::max(1, SCALED_SUMS / ROWS)>(linear);
    run_direct<Format, ROWS>(linear);
}

template <class Format>
void run(const GgufProduct& linear) {
    switch (linear.num_rows) {
        case 0: return;
        case 1: return run_few<Format, 1>(linear);
        case 2: return run_few<Format, 2>(linear);
        case 3: return run_few<Format, 3>(linear);
        case DIRECT_ROWS: return run_few<Format, DIRECT_ROWS>(linear);
    }
    multiply_in_blocks(
        linear.x, linear.num_rows, linear.depth, linear.num_panels(),
        [&](int64_t panel, int64_t begin, int64_t steps, float* block) {
            convert<Format>(linear, panel, begin, steps, block);
        },
        [&](int64_t row, int64_t panel, const float* sums) { linear.finish(row, panel, sums); });
}

template <class Format>
void gather(const GgufProduct& linear, const int64_t* ids, int64_t num_ids, float factor) {
#pragma omp parallel for schedule(static) if (num_ids > 16)
    for (int64_t row = 0; row < num_ids; row++) {
        const int64_t column = ids[row] % PANEL;
        float* to = linear.out + row * linear.depth;
        for (int64_t group = 0; group < linear.num_groups(); group++, to += GROUP_STEPS)
            visit_group<Format>(block_at<Format>(linear, ids[row] / PANEL, group), int(group % Format::GROUPS),
                                [&](int step, int vec, Vec weights) {
                                    if (vec == column / VEC_LANES) to[step] = weights[column % VEC_LANES] * factor;
                                });
    }
}

}  // namespace

// The formats, by the numbers that GGUF gives them; `depth` is a multiple of the format's block.
#define LAMELLA_FORMATS(CASE) \
    CASE(2, Q4_0)             \
    CASE(3, Q4_1)             \
    CASE(6, Q5_0)             \
    CASE(7, Q5_1)             \
    CASE(8, Q8_0)             \
    CASE(12, Q4_K)            \
    CASE(13, Q5_K)            \
    CASE(14, Q6_K)            \
    CASE(39, MXFP4)

// x [num_rows][depth] times the panels' weights: out [num_rows][num_columns], rows out_step apart.
LAMELLA_EXPORT void lamella_gguf_linear(const float* x, const int32_t* panels, float* out, int64_t out_step,
                                        int64_t format, int64_t num_rows, int64_t num_columns, int64_t depth) {
    const GgufProduct linear{x, panels, out, out_step, num_rows, num_columns, depth};
    switch (format) {
#define CASE(number, Format) \
    case number: return run<Format>(linear);
        LAMELLA_FORMATS(CASE)
#undef CASE
    }
}

// out[row] = the weights of output `ids[row]`, dequantised, times `factor`. Returns -1, or the place of the first id
// that is negative or not below num_columns: then out is as it was.
LAMELLA_EXPORT int64_t lamella_gguf_gather_rows(const int32_t* panels, int64_t format, int64_t num_columns,
                                                int64_t depth, const int64_t* ids, int64_t num_ids, float factor,
                                                float* out) {
    const int64_t wrong = find_wrong_id(ids, num_ids, num_columns);
    if (wrong >= 0) return wrong;
    const GgufProduct linear{nullptr, panels, out, depth, num_ids, num_columns, depth};
    switch (format) {
#define CASE(number, Format) \
    case number: gather<Format>(linear, ids, num_ids, factor); break;
        LAMELLA_FORMATS(CASE)
#undef CASE
    }
    return -1;
}
