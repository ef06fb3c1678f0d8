// The weights of GGUF's quantised types, from panels of 16 outputs with (nearly) the same bytes as the file.
//
// A panel is [block][word][16 outputs] of int32: a lane holds bit fields of one output, neighbouring inputs from the
// lowest bits up. Inputs come in groups of 32; a chunk is 8 of them.
#pragma once

#include "vec.h"

constexpr int64_t GROUP_STEPS = 32;
constexpr int64_t CHUNK_STEPS = 8;

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

// A weight is level * scale + offset.
struct Range {
    Vec scale, offset;
};

// A chunk of 4-bit levels. Products of at most 17 bits by 4 are exact, so fused and separate rounding agree.
struct Nibbles {
    IntVec low;
    Range range;
    LAMELLA_INLINE Vec of(const Nibbles& chunk, int step) {
        return fma(to_float((chunk.low >> (4 * step)) & 15), chunk.range.scale, chunk.range.offset);
    }
};

// A chunk of 5-bit levels, whose highest bits lie apart. Products of at most 17 bits by 5 are exact.
struct FiveBits {
    IntVec low, high;
    Range range;
    LAMELLA_INLINE Vec of(const FiveBits& chunk, int step) {
        const IntVec top = step < 4 ? chunk.high << (4 - step) : chunk.high >> (step - 4);
        const IntVec level = ((chunk.low >> (4 * step)) & 15) | (top & 16);
        return fma(to_float(level), chunk.range.scale, chunk.range.offset);
    }
};

// The range of a group's weights in formats of 256 inputs. Their blocks begin with [d | dmin << 16], then 2 words with
// the 6-bit factors of d as bytes, then 2 words with those of dmin.
LAMELLA_INLINE Range range_of_k(const int32_t* words, int group) {
    const IntVec ranges = load_word(words, 0);
    const int shift = 8 * (group % 4);
    const Vec factor = to_float((load_word(words, 1 + group / 4) >> shift) & 255);
    const Vec lowest = to_float((load_word(words, 3 + group / 4) >> shift) & 255);
    return {half_to_float(ranges) * factor, -(half_to_float(ranges >> 16) * lowest)};
}

// Each format says how many words and groups a block has (WORDS, GROUPS), what a group's chunks share (Scale), which
// fields a chunk has (Chunk), and the weight of a step of it (Chunk::of). `words` points to a block, at the first lane
// of the register.

// 32 x ((q - 8) * d), q of 4 bits. Block of two groups: [d | d' << 16], then 4 words of nibbles for each group.
struct Q4_0 {
    static constexpr int GROUPS = 2, WORDS = 9;
    typedef Range Scale;
    typedef Nibbles Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        const Vec scale = half_to_float(load_word(words, 0) >> (16 * group));
        return {scale, scale * broadcast(-8.0f)};
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        return {load_word(words, 1 + 4 * group + index), scale};
    }
};

// 32 x (q * d + m), q of 4 bits. Block of one group: [d | m << 16], then 4 words of nibbles.
struct Q4_1 {
    static constexpr int GROUPS = 1, WORDS = 5;
    typedef Range Scale;
    typedef Nibbles Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int) {
        const IntVec ranges = load_word(words, 0);
        return {half_to_float(ranges), half_to_float(ranges >> 16)};
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int, int index, Scale scale) {
        return {load_word(words, 1 + index), scale};
    }
};

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

// 32 x ((q - 16) * d), q of 5 bits. Block of two groups: [d | d' << 16], then for each group 4 words of nibbles and one
// of the highest bits.
struct Q5_0 {
    static constexpr int GROUPS = 2, WORDS = 11;
    typedef Vec Scale;
    typedef FiveBits Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        return half_to_float(load_word(words, 0) >> (16 * group));
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        const int word = 1 + 5 * group;
        return {load_word(words, word + index), load_word(words, word + 4) >> (8 * index),
                {scale, scale * broadcast(-16.0f)}};
    }
};

// 32 x (q * d + m), q of 5 bits. Block of one group: [d | m << 16], then 4 words of nibbles and one of the highest bits.
struct Q5_1 {
    static constexpr int GROUPS = 1, WORDS = 6;
    typedef Range Scale;
    typedef FiveBits Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int) {
        const IntVec ranges = load_word(words, 0);
        return {half_to_float(ranges), half_to_float(ranges >> 16)};
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int, int index, Scale scale) {
        return {load_word(words, 1 + index), load_word(words, 5) >> (8 * index), scale};
    }
};

// 256 x (q * (d * s) - m * (dmin)), q of 4 bits, s and m of 6 bits for each group of 32. Block: [d | dmin << 16],
// 2 words of s, 2 of m (bytes), then 4 words of nibbles for each group.
struct Q4_K {
    static constexpr int GROUPS = 8, WORDS = 37;
    typedef Range Scale;
    typedef Nibbles Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) { return range_of_k(words, group); }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        return {load_word(words, 5 + 4 * group + index), scale};
    }
};

// As Q4_K with q of 5 bits: for each group 4 words of nibbles and one of the highest bits.
struct Q5_K {
    static constexpr int GROUPS = 8, WORDS = 45;
    typedef Range Scale;
    typedef FiveBits Chunk;
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) { return range_of_k(words, group); }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        const int word = 5 + 5 * group;
        return {load_word(words, word + index), load_word(words, word + 4) >> (8 * index), scale};
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
