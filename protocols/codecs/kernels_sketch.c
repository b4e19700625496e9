/* Sums with random signs, of which a sketch of a vector consists (gossip/membership/sketch.py). */

#include "kernels.h"

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
