/* fp32, bf16 and fp16. */

#include "kernels.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

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
