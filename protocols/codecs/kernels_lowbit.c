/* int2 and int1: codes of one or two bits times the scale of a block that fits it best. */

#include "kernels.h"

enum { BLOCK = 64, LANES = 16 };

#define TINY 0x1p-120f /* smaller scales are zero */
#define LARGEST 0x1p121 /* magnitude: the sum over a block must stay finite */
#define STEP (0.9957 / 0.7979) /* of four levels, by the mean magnitude of Gaussian values */

typedef float sixteen __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

/* The sum of a block in the order that lowbit.py adds in: 16 lanes first, then halves of these. */
static inline float sum_of(const float *terms) {
    sixteen rows[BLOCK / LANES];
    memcpy(rows, terms, sizeof rows);
    sixteen lanes = ((rows[0] + rows[1]) + rows[2]) + rows[3];
    eight low, high;
    memcpy(&low, &lanes, sizeof low);
    memcpy(&high, (const char *)&lanes + sizeof low, sizeof high);
    low = low + high;
    four left, right;
    memcpy(&left, &low, sizeof left);
    memcpy(&right, (const char *)&low + sizeof left, sizeof right);
    left = left + right;
    return (left[0] + left[2]) + (left[1] + left[3]);
}

static inline float magnitudes_of(const float *block) {
    float room[BLOCK];
    for (int j = 0; j < BLOCK; j++) room[j] = float_of(bits_of(block[j]) & MAGNITUDE);
    return sum_of(room);
}

/* How many of the elements of block `index` of [count] are there. */
static inline int64_t length_of(int64_t count, int64_t index) {
    int64_t left = count - BLOCK * index;
    return left < BLOCK ? left : BLOCK;
}

static inline void store_scale(uint8_t *at, float scale) {
    store16(at, scale < TINY ? 0 : to_bf16(scale));
}

/* --- int2 ----------------------------------------------------------------------------------- */

int atoll_int2_encode(const float *values, int64_t count, uint8_t *out) {
    int64_t number = ceil_div(count, BLOCK);
    uint8_t *packed = out + 2 * number;
    float room[BLOCK], terms[BLOCK];
    uint8_t codes[BLOCK];
    for (int64_t i = 0; i < number; i++) {
        const float *block = block_of(values, count, i, BLOCK, room);
        int64_t length = length_of(count, i);
        float step = magnitudes_of(block) * (float)(STEP / BLOCK);
        step = step * (float)((double)BLOCK / (double)length);
        if (!((double)step < LARGEST * STEP)) return 1;
        float by = step < TINY ? 0.0f : 1.0f / step;
        float squares[BLOCK]; /* of the levels */
        for (int j = 0; j < BLOCK; j++) {
            float scaled = block[j] * by, lower = floorf(scaled);
            lower = lower < -2.0f ? -2.0f : lower;
            lower = lower > 1.0f ? 1.0f : lower;
            float level = lower + 0.5f;
            codes[j] = (uint8_t)(int32_t)(lower + 2.0f);
            squares[j] = level * level;
            terms[j] = scaled * level;
        }
        /* less what fills the block up; all of this is exact */
        float square = sum_of(squares) - 0.25f * (float)(BLOCK - length);
        store_scale(out + 2 * i, sum_of(terms) / square * step);
        uint32_t fours[BLOCK / 4]; /* codes, the first of four in the lowest byte */
        memcpy(fours, codes, sizeof codes);
        uint8_t bytes[BLOCK / 4];
        for (int j = 0; j < BLOCK / 4; j++)
            bytes[j] = (uint8_t)(fours[j] | fours[j] >> 6 | fours[j] >> 12 | fours[j] >> 18);
        memcpy(packed + BLOCK / 4 * i, bytes, (size_t)ceil_div(length, 4));
    }
    return 0;
}

static inline void int2_levels(const uint8_t *packed, uint8_t *codes) {
    uint32_t fours[BLOCK / 4];
    for (int j = 0; j < BLOCK / 4; j++) {
        uint32_t byte = packed[j];
        fours[j] = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
    }
    memcpy(codes, fours, sizeof fours);
}

/* --- int1 ----------------------------------------------------------------------------------- */

int atoll_int1_encode(const float *values, int64_t count, uint8_t *out) {
    int64_t number = ceil_div(count, BLOCK);
    uint8_t *packed = out + 2 * number;
    float room[BLOCK];
    for (int64_t i = 0; i < number; i++) {
        const float *block = block_of(values, count, i, BLOCK, room);
        int64_t length = length_of(count, i);
        float total = magnitudes_of(block);
        if (!((double)total < LARGEST * BLOCK)) return 1;
        total = total / (float)BLOCK * (float)((double)BLOCK / (double)length);
        store_scale(out + 2 * i, total);
        uint8_t negative[BLOCK], bytes[BLOCK / 8];
        for (int j = 0; j < BLOCK; j++) negative[j] = block[j] < 0.0f;
        uint64_t eights[BLOCK / 8];
        memcpy(eights, negative, sizeof negative);
        for (int j = 0; j < BLOCK / 8; j++) /* byte k of eight to bit k */
            bytes[j] = (uint8_t)(eights[j] * 0x0102040810204080u >> 56);
        memcpy(packed + BLOCK / 8 * i, bytes, (size_t)ceil_div(length, 8));
    }
    return 0;
}

static inline void int1_levels(const uint8_t *packed, uint8_t *codes) {
    uint64_t eights[BLOCK / 8];
    for (int j = 0; j < BLOCK / 8; j++) { /* bit k to byte k of eight */
        uint64_t bits = packed[j] * 0x0101010101010101u & 0x8040201008040201u;
        eights[j] = (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    }
    memcpy(codes, eights, sizeof eights);
}

/* --- both ----------------------------------------------------------------------------------- */

/* One block of codes times its scale, written to `out` or added to what is there. */
static inline void scaled_levels(
    const uint8_t *codes, float each, float first, float by, float *restrict out, int64_t count,
    int add
) {
    if (add)
        for (int64_t j = 0; j < count; j++) out[j] = out[j] + (each * (float)codes[j] + first) * by;
    else
        for (int64_t j = 0; j < count; j++) out[j] = (each * (float)codes[j] + first) * by;
}

/* Code c of `width` bits stands for each * c + first, exactly, times the scale. */
static inline int decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add, int width,
    void (*levels)(const uint8_t *, uint8_t *), float each, float first
) {
    int64_t number = ceil_div(count, BLOCK), bytes = BLOCK * width / 8;
    if (scales_refused(data, number, limit)) return 1;
    const uint8_t *packed = data + 2 * number;
    uint8_t codes[BLOCK], room[BLOCK];
    for (int64_t i = 0; i < number; i++) {
        float by = from_bf16(load16(data + 2 * i)) * weight;
        int64_t length = length_of(count, i);
        if (length == BLOCK) { /* a constant length makes the loops straight */
            levels(packed + bytes * i, codes);
            scaled_levels(codes, each, first, by, out + BLOCK * i, BLOCK, add);
        } else {
            memset(room, 0, sizeof room);
            memcpy(room, packed + bytes * i, (size_t)ceil_div(length * width, 8));
            levels(room, codes);
            scaled_levels(codes, each, first, by, out + BLOCK * i, length, add);
        }
    }
    return 0;
}

int atoll_int2_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add
) {
    return decode(data, count, limit, weight, out, add, 2, int2_levels, 1.0f, -1.5f);
}

int atoll_int1_decode(
    const uint8_t *data, int64_t count, double limit, float weight, float *out, int add
) {
    return decode(data, count, limit, weight, out, add, 1, int1_levels, -2.0f, 1.0f);
}
