/* The inner loops of codecs and sketches: one pass each, where torch takes up to ten.
 *
 * protocols/codecs/kernels.py compiles kernels_*.c where there is a compiler; formats.py and
 * lowbit.py say what the bytes mean, and do the same in torch where there is none. Both must give
 * the same bits, on every processor, so each operation stands for itself: every product is rounded
 * before it is added (-ffp-contract=off), nothing is reordered (no -ffast-math), rounding is to
 * nearest, ties to even. Magnitudes are compared as integers, in which order floats of one sign
 * are as well.
 *
 * All lengths are checked by the caller. Functions return 0, or 1 for what must be refused; a
 * decoder that refuses has written nothing.
 */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAGNITUDE 0x7fffffff

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
static inline int scales_refused(const uint8_t *data, int64_t number, double limit) {
    int32_t largest = 0;
    for (int64_t i = 0; i < number; i++) {
        int32_t magnitude = (int32_t)(load16(data + 2 * i) & 0x7fff) << 16;
        largest = magnitude > largest ? magnitude : largest;
    }
    return !((double)float_of(largest) <= limit);
}

/* Block `index` of [count] values: where it lies, or in `room`, filled up with zeros. */
static inline const float *block_of(
    const float *values, int64_t count, int64_t index, int64_t length, float *room
) {
    int64_t left = count - index * length;
    if (left >= length) return values + index * length;
    memset(room, 0, (size_t)length * sizeof *room);
    if (left > 0) memcpy(room, values + index * length, (size_t)left * sizeof *room);
    return room;
}
