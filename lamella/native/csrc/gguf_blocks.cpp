// Linear layers straight from GGUF blocks, repacked into panels of 16 outputs with (nearly) the same bytes.
//
// A weight is unpacked in registers to the very float that the format defines, and every output is the chain
// sum = fma(x[k], w[k], sum), k ascending: results equal those of the float kernel on dequantised weights bit for bit.
//
// A panel is [block][word][16 outputs] of int32: a lane holds bit fields of one output, neighbouring inputs from the
// lowest bits up. Inputs come in groups of 32; a chunk is 8 of them.
#include <omp.h>

#include <algorithm>

#include "kernels.h"

namespace {

constexpr int64_t GROUP_STEPS = 32;
constexpr int64_t CHUNK_STEPS = 8;
constexpr int64_t MAX_TILE_ROWS = 4;

LAMELLA_INLINE IntVec load_word(const int32_t* words, int64_t word) {
    IntVec lanes;
    std::memcpy(&lanes, words + word * PANEL, sizeof lanes);
    return lanes;
}

LAMELLA_INLINE Vec to_float(IntVec lanes) { return __builtin_convertvector(lanes, Vec); }

// The lowest 16 bits of each lane as an IEEE half, finite: its exponent and fraction shifted into those of a float,
// times 2^(127 - 15).
LAMELLA_INLINE Vec half_to_float(IntVec lanes) {
    IntVec bits = (lanes & 0x7fff) << 13;
    Vec value;
    std::memcpy(&value, &bits, sizeof value);
    value = value * broadcast(0x1p112f);
    std::memcpy(&bits, &value, sizeof bits);
    bits |= (lanes & 0x8000) << 16;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Each format: words of a block and the groups in it; what a group's chunks share (Scale); the fields of a chunk; and
// the weight of a step of it. `words` points to a block, at the first lane of the register.

// 32 x (int8 * d). Block of two groups: [d | d' << 16], then 8 words of 4 bytes for each group.
struct Q8_0 {
    static constexpr int GROUPS = 2, WORDS = 17;
    typedef Vec Scale;
    struct Chunk {
        IntVec first, second;
        Vec scale;
        LAMELLA_INLINE Vec of(const Chunk& chunk, int step) {
            const IntVec lanes = step < 4 ? chunk.first : chunk.second;
            return to_float((lanes << (24 - 8 * (step % 4))) >> 24) * chunk.scale;
        }
    };
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        return half_to_float(load_word(words, 0) >> (16 * group));
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        const int word = 1 + 8 * group + 2 * index;
        return {load_word(words, word), load_word(words, word + 1), scale};
    }
};

// 32 x ((q - 16) * d), q of 5 bits. Block of two groups: [d | d' << 16], then for each 4 words of nibbles and one of
// the highest bits.
struct Q5_0 {
    static constexpr int GROUPS = 2, WORDS = 11;
    typedef Vec Scale;
    struct Chunk {
        IntVec low, high;
        Vec scale, offset;
        // d * q - 16 d is exact: 11 bits by 5
        LAMELLA_INLINE Vec of(const Chunk& chunk, int step) {
            const IntVec top = step < 4 ? chunk.high << (4 - step) : chunk.high >> (step - 4);
            const IntVec level = ((chunk.low >> (4 * step)) & 15) | (top & 16);
            return fma(to_float(level), chunk.scale, chunk.offset);
        }
    };
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        return half_to_float(load_word(words, 0) >> (16 * group));
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        const int word = 1 + 5 * group;
        return {load_word(words, word + index), load_word(words, word + 4) >> (8 * index), scale,
                scale * broadcast(-16.0f)};
    }
};

// 256 x (q * (d * s) - m * (dmin)), q of 4 bits, s and m of 6 bits for each group of 32. Block: [d | dmin << 16],
// 2 words of s, 2 of m (bytes), then 4 words of nibbles for each group.
struct Q4_K {
    static constexpr int GROUPS = 8, WORDS = 37;
    struct Scale {
        Vec scale, offset;
    };
    struct Chunk {
        IntVec low;
        Scale scale;
        // products are exact (17 bits by 4): fused and separate rounding agree
        LAMELLA_INLINE Vec of(const Chunk& chunk, int step) {
            return fma(to_float((chunk.low >> (4 * step)) & 15), chunk.scale.scale, chunk.scale.offset);
        }
    };
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        const IntVec ranges = load_word(words, 0);
        const int shift = 8 * (group % 4);
        const Vec factor = to_float((load_word(words, 1 + group / 4) >> shift) & 255);
        const Vec lowest = to_float((load_word(words, 3 + group / 4) >> shift) & 255);
        return {half_to_float(ranges) * factor, -(half_to_float(ranges >> 16) * lowest)};
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        return {load_word(words, 5 + 4 * group + index), scale};
    }
};

// 256 x ((q - 32) * (d * s)), q of 6 bits, s int8 for each 16. Block: [d], 4 words of s, then for each group 4 words of
// nibbles and 2 of the highest two bits.
struct Q6_K {
    static constexpr int GROUPS = 8, WORDS = 53;
    struct Scale {
        Vec first, second;
    };
    struct Chunk {
        IntVec low, high;
        Vec scale;
        LAMELLA_INLINE Vec of(const Chunk& chunk, int step) {
            const IntVec level = ((chunk.low >> (4 * step)) & 15) | (((chunk.high >> (2 * step)) & 3) << 4);
            return to_float(level - 32) * chunk.scale;
        }
    };
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        const Vec range = half_to_float(load_word(words, 0));
        const IntVec factors = load_word(words, 1 + group / 2);
        const int shift = 16 * (group % 2);
        return {range * to_float((factors << (24 - shift)) >> 24), range * to_float((factors << (16 - shift)) >> 24)};
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, const Scale& scale) {
        const int word = 5 + 6 * group;
        return {load_word(words, word + index), load_word(words, word + 4 + index / 2) >> (16 * (index % 2)),
                index < 2 ? scale.first : scale.second};
    }
};

struct Linear {
    const float* x;         // [num_rows][depth]
    const int32_t* panels;  // [num_panels][blocks][words][16]
    float* out;             // [num_rows][num_columns], rows out_step apart
    int64_t out_step, num_rows, num_columns, depth;

    int64_t num_panels() const { return (num_columns + PANEL - 1) / PANEL; }
    int64_t num_groups() const { return depth / GROUP_STEPS; }
};

template <class Format>
int64_t panel_words(const Linear& linear) {
    return (linear.num_groups() + Format::GROUPS - 1) / Format::GROUPS * Format::WORDS * PANEL;
}

// ROWS rows with one panel. A second panel would hide latencies, but its fields no longer fit into 16 registers.
template <class Format, int ROWS>
void multiply(const Linear& linear, int64_t first_row, int64_t panel) {
    Vec sums[ROWS][PANEL_VECS] = {};
    const int64_t panel_size = panel_words<Format>(linear), num_groups = linear.num_groups();
    const float* x = linear.x + first_row * linear.depth;
    for (int64_t begin = 0; begin < num_groups; begin += Format::GROUPS) {
        const int32_t* block = linear.panels + panel * panel_size + begin / Format::GROUPS * Format::WORDS * PANEL;
        // the next panel: one is too short for the processor to notice the stream
        for (int word = 0; word < Format::WORDS; word++) __builtin_prefetch(block + panel_size + word * PANEL, 0, 2);
        const int groups = int(std::min<int64_t>(Format::GROUPS, num_groups - begin));
        for (int group = 0; group < groups; group++) {
            typename Format::Scale scales[PANEL_VECS];
            for (int vec = 0; vec < PANEL_VECS; vec++) scales[vec] = Format::scale(block + vec * VEC_LANES, group);
            for (int part = 0; part < GROUP_STEPS / CHUNK_STEPS; part++, x += CHUNK_STEPS) {
                typename Format::Chunk chunks[PANEL_VECS];
#pragma GCC unroll 4
                for (int vec = 0; vec < PANEL_VECS; vec++)
                    chunks[vec] = Format::chunk(block + vec * VEC_LANES, group, part, scales[vec]);
#pragma GCC unroll 8
                for (int step = 0; step < CHUNK_STEPS; step++)
#pragma GCC unroll 4
                    for (int vec = 0; vec < PANEL_VECS; vec++) {
                        const Vec weight = Format::Chunk::of(chunks[vec], step);
#pragma GCC unroll 4
                        for (int row = 0; row < ROWS; row++)
                            sums[row][vec] = fma(broadcast(x[row * linear.depth + step]), weight, sums[row][vec]);
                    }
            }
        }
    }
    const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, linear.num_columns - column);
    for (int row = 0; row < ROWS; row++)
        std::memcpy(linear.out + (first_row + row) * linear.out_step + column, sums[row], width * sizeof(float));
}

template <class Format>
void run(const Linear& linear) {
    const int64_t num_panels = linear.num_panels();
    const int64_t num_tiles = (linear.num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic, chunk)
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const int64_t row = linear.num_rows * tile / num_tiles, end = linear.num_rows * (tile + 1) / num_tiles;
            switch (end - row) {
                case 1: multiply<Format, 1>(linear, row, panel); break;
                case 2: multiply<Format, 2>(linear, row, panel); break;
                case 3: multiply<Format, 3>(linear, row, panel); break;
                default: multiply<Format, 4>(linear, row, panel);
            }
        }
}

template <class Format>
void gather(const Linear& linear, const int64_t* ids, int64_t num_ids, float factor) {
#pragma omp parallel for schedule(static) if (num_ids > 16)
    for (int64_t row = 0; row < num_ids; row++) {
        const int64_t first_lane = ids[row] % PANEL / VEC_LANES * VEC_LANES, lane = ids[row] % VEC_LANES;
        for (int64_t group = 0; group < linear.num_groups(); group++) {
            const int32_t* block = linear.panels + ids[row] / PANEL * panel_words<Format>(linear) +
                                   group / Format::GROUPS * Format::WORDS * PANEL + first_lane;
            const int inside = int(group % Format::GROUPS);
            for (int part = 0; part < GROUP_STEPS / CHUNK_STEPS; part++) {
                const auto chunk = Format::chunk(block, inside, part, Format::scale(block, inside));
                for (int step = 0; step < CHUNK_STEPS; step++)
                    linear.out[row * linear.depth + group * GROUP_STEPS + part * CHUNK_STEPS + step] =
                        Format::Chunk::of(chunk, step)[lane] * factor;
            }
        }
    }
}

}  // namespace

// Formats by GGUF's own numbers of them; `depth` is a multiple of the format's block.
#define LAMELLA_FORMATS(CASE) \
    CASE(6, Q5_0)             \
    CASE(8, Q8_0)             \
    CASE(12, Q4_K)            \
    CASE(14, Q6_K)

// x [num_rows][depth] times the panels' weights: out [num_rows][num_columns], rows out_step apart.
LAMELLA_EXPORT void lamella_gguf_linear(const float* x, const int32_t* panels, float* out, int64_t out_step,
                                        int64_t format, int64_t num_rows, int64_t num_columns, int64_t depth) {
    const Linear linear{x, panels, out, out_step, num_rows, num_columns, depth};
    switch (format) {
#define CASE(number, Format) \
    case number: return run<Format>(linear);
        LAMELLA_FORMATS(CASE)
#undef CASE
    }
}

// out[row] = the weights of output `ids[row]`, dequantised, times `factor`. Returns -1, or where an id is not one of
// num_columns its place; out is then as it was.
LAMELLA_EXPORT int64_t lamella_gguf_gather_rows(const int32_t* panels, int64_t format, int64_t num_columns,
                                                int64_t depth, const int64_t* ids, int64_t num_ids, float factor,
                                                float* out) {
    const int64_t wrong = find_wrong_id(ids, num_ids, num_columns);
    if (wrong >= 0) return wrong;
    const Linear linear{nullptr, panels, out, depth, num_ids, num_columns, depth};
    switch (format) {
#define CASE(number, Format) \
    case number: gather<Format>(linear, ids, num_ids, factor); break;
        LAMELLA_FORMATS(CASE)
#undef CASE
    }
    return -1;
}
