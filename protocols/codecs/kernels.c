/* The inner loops of floats, int8, int4 and sketches: one pass each, where torch takes up to ten.
 *
 * protocols/codecs/kernels.py compiles this file where there is a compiler; formats.py says what
 * the bytes mean, and does the same in torch where there is none. Both must give the same bits, on
 * every processor, so each operation stands for itself: every product is rounded before it is
 * added (-ffp-contract=off), nothing is reordered (no -ffast-math), rounding is to nearest, ties
 * to even. Magnitudes are compared as integers, in which order floats of one sign are as well.
 *
 * All lengths are checked by the caller. Functions return 0, or 1 for what must be refused; a
 * decoder that refuses has written nothing.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define MAGNITUDE 0x7fffffff
#define TOO_LARGE 0x7f000000 /* 2^127: what block codecs treat as infinite */
#define TINY_BITS(levels_log2) (0x03800000 + ((levels_log2) << 23)) /* 2^-120 * 2^n */

enum { INT4_BLOCK = 64, INT8_BLOCK = 256 };

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits = (uint32_t)bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t half) { return float_of((int32_t)((uint32_t)half << 16)); }

static inline uint16_t load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void store16(uint8_t *at, uint16_t value) { memcpy(at, &value, sizeof value); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Whether one of `number` scales is none that an encoder writes, NaN and infinity among them. */
int atoll_scales_refused(const uint8_t *data, int64_t number, double limit) {
    int32_t largest = 0;
    for (int64_t i = 0; i < number; i++) {
        int32_t magnitude = (int32_t)(load16(data + 2 * i) & 0x7fff) << 16;
        largest = magnitude > largest ? magnitude : largest;
    }
    return !((double)float_of(largest) <= limit);
}

/* --- int4 ----------------------------------------------------------------------------------- */

/* The scale of one block, and what its values are multiplied with; 1 if it has none. */
static int int4_scale(const float *values, uint16_t *scale, float *inverse) {
    int32_t largest = 0, highest = INT32_MIN;
    for (int j = 0; j < INT4_BLOCK; j++) {
        int32_t bits = bits_of(values[j]), magnitude = bits & MAGNITUDE;
        largest = magnitude > largest ? magnitude : largest;
        highest = bits > highest ? bits : highest;
    }
    if (largest >= TOO_LARGE) return 1;
    float extreme = highest == largest ? float_of(largest) : -float_of(largest);
    if (largest < TINY_BITS(3)) extreme = 0.0f;
    *scale = to_bf16(extreme * -0.125f);
    *inverse = largest < TINY_BITS(3) ? 0.0f : 1.0f / from_bf16(*scale);
    return 0;
}

/* Block `index` of [count] values: where it lies, or in `room`, filled up with zeros. */
static const float *int4_block(const float *values, int64_t count, int64_t index, float *room) {
    int64_t left = count - index * INT4_BLOCK;
    if (left >= INT4_BLOCK) return values + index * INT4_BLOCK;
    memset(room, 0, INT4_BLOCK * sizeof *room);
    if (left > 0) memcpy(room, values + index * INT4_BLOCK, (size_t)left * sizeof *room);
    return room;
}

int atoll_int4_encode(const float *values, int64_t count, uint8_t *out) {
    int64_t number = ceil_div(count, INT4_BLOCK), pairs = ceil_div(number, 2);
    uint8_t *codes = out + 2 * number;
    float low_room[INT4_BLOCK], high_room[INT4_BLOCK];
    for (int64_t i = 0; i < pairs; i++) {
        const float *low = int4_block(values, count, i, low_room);
        const float *high = int4_block(values, count, pairs + i, high_room);
        uint16_t low_scale, high_scale;
        float low_by, high_by;
        if (int4_scale(low, &low_scale, &low_by)) return 1;
        if (int4_scale(high, &high_scale, &high_by)) return 1;
        store16(out + 2 * i, low_scale);
        if (pairs + i < number) store16(out + 2 * (pairs + i), high_scale);
        for (int j = 0; j < INT4_BLOCK; j++) {
            float a = rintf(low[j] * low_by), b = rintf(high[j] * high_by);
            int32_t first = (int32_t)(a > 7.0f ? 7.0f : a), second = (int32_t)(b > 7.0f ? 7.0f : b);
            codes[INT4_BLOCK * i + j] = (uint8_t)(first + 16 * second + 136);
        }
    }
    return 0;
}

/* One block of levels times its scale, written to `out` or added to what is there. */
static inline void int4_levels(
    const uint8_t *codes, int shift, float by, float *restrict out, int64_t count, int add
) {
    if (count > INT4_BLOCK) count = INT4_BLOCK;
    if (add)
        for (int64_t j = 0; j < count; j++)
            out[j] = out[j] + (float)((codes[j] >> shift & 15) - 8) * by;
    else
        for (int64_t j = 0; j < count; j++) out[j] = (float)((codes[j] >> shift & 15) - 8) * by;
}

int atoll_int4_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add
) {
    int64_t number = ceil_div(count, INT4_BLOCK), pairs = ceil_div(number, 2);
    if (atoll_scales_refused(data, number, limit)) return 1;
    const uint8_t *codes = data + 2 * number;
    for (int64_t i = 0; i < number; i++) {
        float by = from_bf16(load16(data + 2 * i)) * weight;
        const uint8_t *pair = codes + INT4_BLOCK * (i < pairs ? i : i - pairs);
        float *target = out + INT4_BLOCK * i;
        int64_t left = count - INT4_BLOCK * i;
        if (left >= INT4_BLOCK) /* a constant length makes the loop straight */
            int4_levels(pair, i < pairs ? 0 : 4, by, target, INT4_BLOCK, add);
        else
            int4_levels(pair, i < pairs ? 0 : 4, by, target, left, add);
    }
    return 0;
}

/* --- int8 ----------------------------------------------------------------------------------- */

int atoll_int8_encode(const float *values, int64_t count, uint8_t *out) {
    int64_t number = ceil_div(count, INT8_BLOCK);
    int8_t *codes = (int8_t *)(out + 2 * number);
    for (int64_t i = 0; i < number; i++) {
        const float *block = values + INT8_BLOCK * i;
        int64_t left = count - INT8_BLOCK * i, length = left < INT8_BLOCK ? left : INT8_BLOCK;
        int32_t largest = 0;
        for (int64_t j = 0; j < length; j++) {
            int32_t magnitude = bits_of(block[j]) & MAGNITUDE;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= TOO_LARGE) return 1;
        int tiny = (double)float_of(largest) < 127.0 * 0x1p-120;
        uint16_t scale = tiny ? 0 : to_bf16(float_of(largest) * (float)(1.0 / 127.0));
        float by = tiny ? 0.0f : 1.0f / from_bf16(scale);
        store16(out + 2 * i, scale);
        for (int64_t j = 0; j < length; j++)
            codes[INT8_BLOCK * i + j] = (int8_t)(int32_t)rintf(block[j] * by);
    }
    return 0;
}

int atoll_int8_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *restrict out, int add
) {
    int64_t number = ceil_div(count, INT8_BLOCK);
    if (atoll_scales_refused(data, number, limit)) return 1;
    const int8_t *codes = (const int8_t *)(data + 2 * number);
    for (int64_t i = 0; i < number; i++) {
        int64_t start = INT8_BLOCK * i, stop = start + INT8_BLOCK;
        float by = from_bf16(load16(data + 2 * i)) * weight;
        if (stop > count) stop = count;
        if (add)
            for (int64_t j = start; j < stop; j++) out[j] = out[j] + (float)codes[j] * by;
        else
            for (int64_t j = start; j < stop; j++) out[j] = (float)codes[j] * by;
    }
    return 0;
}

/* --- floats --------------------------------------------------------------------------------- */

enum { PIECE = 512 }; /* elements that are widened at a time: they stay in the nearest cache */

typedef int32_t any_int32 __attribute__((aligned(1), may_alias)); /* encoded floats lie anywhere */
typedef uint16_t any_uint16 __attribute__((aligned(1), may_alias));
typedef float any_float __attribute__((aligned(1), may_alias));

/* Whether one of [count] floats is of a magnitude from `bound` on, NaN among them. */
static int reaches(const void *values, int64_t count, int32_t bound) {
    const any_int32 *bits = values;
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= bound;
}

/* The same of floats of two bytes, whose bits are ordered like those of four. */
static int reaches_short(const uint8_t *data, int64_t count, uint16_t bound) {
    const any_uint16 *bits = (const any_uint16 *)data;
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = bits[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= bound;
}

/* [count] floats times `weight`, written to `out` or added to what is there. */
static inline void scaled(
    const any_float *values, int64_t count, float weight, float *restrict out, int add
) {
    if (add)
        for (int64_t i = 0; i < count; i++) out[i] = out[i] + values[i] * weight;
    else
        for (int64_t i = 0; i < count; i++) out[i] = values[i] * weight;
}

int atoll_fp32_encode(const float *values, int64_t count, uint8_t *out) {
    if (reaches(values, count, 0x7f800000)) return 1;
    memcpy(out, values, 4 * (size_t)count);
    return 0;
}

int atoll_fp32_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add
) {
    (void)limit;
    if (reaches(data, count, 0x7f800000)) return 1;
    scaled((const any_float *)data, count, weight, out, add);
    return 0;
}

int atoll_fp32_refused(const uint8_t *data, int64_t count) {
    return reaches(data, count, 0x7f800000);
}

int atoll_bf16_encode(const float *values, int64_t count, uint8_t *out) {
    any_uint16 *codes = (any_uint16 *)out;
    if (reaches(values, count, 0x7f7f8000)) return 1; /* what is rounded up to infinity */
    for (int64_t i = 0; i < count; i++) codes[i] = to_bf16(values[i]);
    return 0;
}

int atoll_bf16_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *restrict out, int add
) {
    const any_uint16 *codes = (const any_uint16 *)data;
    (void)limit;
    if (reaches_short(data, count, 0x7f80)) return 1;
    if (add)
        for (int64_t i = 0; i < count; i++) out[i] = out[i] + from_bf16(codes[i]) * weight;
    else
        for (int64_t i = 0; i < count; i++) out[i] = from_bf16(codes[i]) * weight;
    return 0;
}

int atoll_bf16_refused(const uint8_t *data, int64_t count) {
    return reaches_short(data, count, 0x7f80);
}

/* fp16 only where the processor converts; without, torch's loops are no slower. */
#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)

static void to_halves(const float *values, int64_t count, uint8_t *out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256(
            (__m256i *)(out + 2 * i), _mm512_cvtps_ph(_mm512_loadu_ps(values + i), 8)
        );
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(out + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 8));
#endif
    for (; i < count; i++) {
#if defined(__aarch64__)
        __fp16 half = (__fp16)values[i];
        memcpy(out + 2 * i, &half, sizeof half);
#else
        store16(out + 2 * i, _cvtss_sh(values[i], 8)); /* 8: to nearest, raising no exceptions */
#endif
    }
}

static void from_halves(const uint8_t *data, int64_t count, float *out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(
            out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(data + 2 * i)))
        );
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(
            out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(data + 2 * i)))
        );
#endif
    for (; i < count; i++) {
#if defined(__aarch64__)
        __fp16 half;
        memcpy(&half, data + 2 * i, sizeof half);
        out[i] = (float)half;
#else
        out[i] = _cvtsh_ss(load16(data + 2 * i));
#endif
    }
}

int atoll_fp16_encode(const float *values, int64_t count, uint8_t *out) {
    if (reaches(values, count, 0x477ff000)) return 1; /* 65520, which is rounded to infinity */
    to_halves(values, count, out);
    return 0;
}

int atoll_fp16_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add
) {
    float room[PIECE];
    (void)limit;
    if (reaches_short(data, count, 0x7c00)) return 1;
    for (int64_t i = 0; i < count; i += PIECE) {
        int64_t length = count - i < PIECE ? count - i : PIECE;
        from_halves(data + 2 * i, length, room);
        scaled(room, length, weight, out + i, add);
    }
    return 0;
}

int atoll_fp16_refused(const uint8_t *data, int64_t count) {
    return reaches_short(data, count, 0x7c00);
}

#endif

/* --- sketches (gossip/sketch.py) ------------------------------------------------------------ */

enum { SIGNS = 32, MOST_WORDS = 8192 };

/* Adds up [SIGNS * words] values with the signs of [words] words in [buckets] sums: value
 * b * words + j has bit 31 - b of word j for a sign, and goes to bucket j modulo `buckets`. */
int atoll_sketch(
    const float *values, const uint32_t *signs, int64_t words, int64_t buckets, double *totals
) {
    float sums[MOST_WORDS];
    if (words > MOST_WORDS || words % buckets) return 1;
    memset(sums, 0, (size_t)words * sizeof *sums);
    for (int bit = 0; bit < SIGNS; bit++) {
        const float *row = values + bit * words;
        for (int64_t j = 0; j < words; j++)
            sums[j] += float_of(bits_of(row[j]) ^ (int32_t)(signs[j] << bit & 0x80000000u));
    }
    for (int64_t start = 0; start < words; start += buckets)
        for (int64_t j = 0; j < buckets; j++) totals[j] += (double)sums[start + j];
    return 0;
}
