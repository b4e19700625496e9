/* int8 and int4: levels times the scale of a block, which follows from its largest magnitude. */

#include "kernels.h"

#define TOO_LARGE 0x7f000000 /* 2^127: what block codecs treat as infinite */
#define TINY_BITS(levels_log2) (0x03800000 + ((levels_log2) << 23)) /* 2^-120 * 2^n */

enum { INT4_BLOCK = 64, INT8_BLOCK = 256 };

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

int atoll_int4_encode(const float *values, int64_t count, uint8_t *out) {
    int64_t number = ceil_div(count, INT4_BLOCK), pairs = ceil_div(number, 2);
    uint8_t *codes = out + 2 * number;
    float low_room[INT4_BLOCK], high_room[INT4_BLOCK];
    for (int64_t i = 0; i < pairs; i++) {
        const float *low = block_of(values, count, i, INT4_BLOCK, low_room);
        const float *high = block_of(values, count, pairs + i, INT4_BLOCK, high_room);
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
    if (scales_refused(data, number, limit)) return 1;
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
    if (scales_refused(data, number, limit)) return 1;
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
