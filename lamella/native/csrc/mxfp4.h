// MXFP4 (OCP Microscaling Formats 1.0) in panels of 16 outputs, as gguf_formats.h has it: 32 inputs of an output are
// numbers of 4 bits, 0, 0.5, 1, 1.5, 2, 3, 4, 6 or negative ones of these, times a power of two that they share.
#pragma once

#include "gguf_formats.h"
#include "int8_panels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// The codes of 8 inputs in a lane: those of the even inputs in its lower half, those of the odd ones in its upper half.
// `at` gives the level of one of them as a float: twice the number, an integer from -12 to 12. A negative zero is 0.
#if defined(__AVX512BW__) && LAMELLA_VECTOR_BYTES == 64

struct Levels {
    IntVec codes;

    LAMELLA_INLINE Levels of(IntVec codes) { return {codes}; }

    // A table's index is looked for in the lowest 4 bits of a lane, or in the lowest 5 of a half: so one shift serves
    // two inputs. What stands above is another input's and is ignored; for the fifth bit the table is there twice.
    // A level as a float has bits in the upper half alone.
    LAMELLA_INLINE Vec at(const Levels& levels, int step) {
        const __m512i index = (__m512i)(levels.codes >> (4 * (step / 2)));
        if (step % 2 == 0) return (Vec)_mm512_maskz_permutexvar_ps(0xffff, index, _mm512_load_ps(LEVELS));
        return (Vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, index, _mm512_load_si512(UPPER_HALVES));
    }

  private:
    alignas(64) static constexpr float LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    alignas(64) static constexpr uint16_t UPPER_HALVES[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x0000, 0xbf80, 0xc000,
        0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0,
        0x4100, 0x4140, 0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
};

#else

struct Levels {
    IntVec first, second;  // bytes: levels of inputs 0, 4, 1, 5, and of 2, 6, 3, 7

    LAMELLA_INLINE Levels of(IntVec codes) { return {look_up(codes & NIBBLES), look_up((codes >> 4) & NIBBLES)}; }

    LAMELLA_INLINE Vec at(const Levels& levels, int step) {
        return take_byte(step / 2 % 2 ? levels.second : levels.first, step % 2 * 2 + step / 4);
    }

  private:
    static constexpr int32_t NIBBLES = 0x0f0f0f0f;
    alignas(16) static constexpr int8_t LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

    LAMELLA_INLINE IntVec look_up(IntVec codes) {
#if defined(__AVX2__) && LAMELLA_VECTOR_BYTES == 32
        const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(LEVELS));
        return (IntVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#elif defined(__aarch64__) && LAMELLA_VECTOR_BYTES == 16
        return (IntVec)vqtbl1q_s8(vld1q_s8(LEVELS), (uint8x16_t)codes);
#else
        int8_t bytes[sizeof codes];
        std::memcpy(bytes, &codes, sizeof bytes);
        for (int8_t& each : bytes) each = LEVELS[each];
        std::memcpy(&codes, bytes, sizeof bytes);
        return codes;
#endif
    }
};

#endif

// Block of four groups: a word with their powers as bytes, then 4 words of codes for each group. A power is
// 2^(byte - 127).
struct MXFP4 {
    static constexpr int GROUPS = 4, WORDS = 17, POWER_BIAS = 127;
    typedef Vec Scale;  // half of the power, for levels
    struct Chunk {
        Levels levels;
        Vec scale;
        LAMELLA_INLINE Vec of(const Chunk& chunk, int step) { return Levels::at(chunk.levels, step) * chunk.scale; }
    };
    LAMELLA_INLINE IntVec power(const int32_t* words, int group) {  // biased
        return (load_word(words, 0) >> (8 * group)) & 255;
    }
    LAMELLA_INLINE Scale scale(const int32_t* words, int group) {
        const IntVec biased = power(words, group);
        // 2^-128 and 2^-127 are below a float's least exponent.
        const IntVec bits = biased < 2 ? 0x200000 + (biased << 21) : (biased - 1) << 23;
        Vec scale;
        std::memcpy(&scale, &bits, sizeof scale);
        return scale;
    }
    LAMELLA_INLINE Chunk chunk(const int32_t* words, int group, int index, Scale scale) {
        return {Levels::of(load_word(words, 1 + 4 * group + index)), scale};
    }
};
