/* Weights in a smaller form that gives back the very same floats: bfloat16, 4 bits with a scale and an offset for
 * every 32, 8 bits with a scale, or the blocks of a GGUF file. They are unpacked a panel at a time, which stays in the
 * cache, so that less memory is read; but for bfloat16, which is widened as it is loaded. Included by native.c. */

enum { PLAIN = 0, BFLOAT16 = 1, AFFINE4 = 2, SCALED8 = 3, BLOCKS = 4, TILES = 5, WEIGHT_BLOCK = 32 };

typedef struct {
    const float *weight; /* [num_outputs, depth]; NULL where there are only BLOCKS or TILES */
    const void *packed; /* the same in a smaller form, or NULL; of BLOCKS a list of block_rows, of TILES one of tile_rows */
    const float *scales; /* of every block: scale and offset (AFFINE4), scale (SCALED8) */
    long kind;
} matrix;

/* Byte i of a block holds weight i in its low half and weight i + 16 in its high half. scale * q is exact, so the sum
 * is rounded once, as it was when the float was made. */
static void unpack_affine4(const uint8_t *from, const float *scales, float *to, long length) {
    for (long i = 0; i < length; i += WEIGHT_BLOCK, from += 16, scales += 2) {
#if defined(__AVX2__)
        __m128i both = _mm_loadu_si128((const __m128i *)from), mask = _mm_set1_epi8(15);
        expand16(_mm_and_si128(both, mask), scales[0], scales[1], to + i, 0);
        expand16(_mm_and_si128(_mm_srli_epi16(both, 4), mask), scales[0], scales[1], to + i + 16, 0);
#else
        for (long j = 0; j < 16; j++) {
            to[i + j] = (float)(from[j] & 15) * scales[0] + scales[1];
            to[i + 16 + j] = (float)(from[j] >> 4) * scales[0] + scales[1];
        }
#endif
    }
}

static void unpack_scaled8(const int8_t *from, const float *scales, float *to, long length) {
    for (long i = 0; i < length; i += 16) {
        float scale = scales[i / WEIGHT_BLOCK];
#if defined(__AVX2__)
        expand16(_mm_loadu_si128((const __m128i *)(from + i)), scale, 0.0f, to + i, 1);
#else
        for (long j = i; j < i + 16; j++) to[j] = (float)from[j] * scale;
#endif
    }
}

INLINE vector load_bfloat16(const uint16_t *from) {
#if LANES == 16
    return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    integers wide;
    UNROLL for (int i = 0; i < LANES; i++) wide[i] = (int32_t)((uint32_t)from[i] << 16);
    return (vector)wide;
#endif
}

/* Columns column .. column + num_columns of a matrix of this depth, k .. k + length of each, into panel. Of anything but
 * bfloat16. */
static void unpack(const matrix *source, long depth, long column, long num_columns, long k, long length, float *panel) {
    for (long c = 0; c < num_columns; c++, panel += length) {
        long at = (column + c) * depth + k;
        if (source->kind == BLOCKS) unpack_blocks(source->packed, depth, column + c, k, length, panel);
        else if (source->kind == SCALED8)
            unpack_scaled8((const int8_t *)source->packed + at, source->scales + at / WEIGHT_BLOCK, panel, length);
        else unpack_affine4((const uint8_t *)source->packed + at / 2, source->scales + at / 16, panel, length);
    }
}
