/* Weights in a smaller form that gives back the very same floats: 16 bits of either kind, 4 bits with a scale and an offset
 * for every 32, 8 bits (whole numbers or e4m3) with a scale, or the blocks of a GGUF file. They are unpacked a panel at a time, which stays in the
 * cache, so that less memory is read; but for 16 bits, which are widened as they are loaded. Included by native.c. */

enum { PLAIN = 0, BFLOAT16 = 1, AFFINE4 = 2, SCALED8 = 3, BLOCKS = 4, TILES = 5, FLOAT16 = 6, SCALED_FP8 = 7, WEIGHT_BLOCK = 32 };

typedef struct {
    const float *weight; /* [num_outputs, depth] where it is PLAIN, else NULL */
    const void *packed; /* the smaller form; of BLOCKS a list of block_rows, of TILES one of tile_rows */
    const float *scales; /* of every block: scale and offset (AFFINE4), or scale */
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

/* Of a number with four bits of exponent and three of mantissa: bits moved to where a float has them stand for 2 ** -120
 * times as much. */
static void unpack_fp8(const uint8_t *from, const float *scales, float *to, long length) {
    for (long i = 0; i < length; i += LANES) {
        integers wide;
#if LANES == 16
        wide = (integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
#elif LANES == 8
        wide = (integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + i)));
#else
        UNROLL for (int j = 0; j < LANES; j++) wide[j] = from[i + j];
#endif
        vector size = (vector)((wide & 0x7f) << 20) * 0x1p120f;
        store(to + i, (vector)((integers)size | (wide & 0x80) << 24) * scales[i / WEIGHT_BLOCK]);
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

/* A half-precision number's bits, moved to where a float has them, stand for 2 ** -112 times as much. */
INLINE vector load_float16(const uint16_t *from) {
#if LANES == 16
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && defined(__F16C__)
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    integers wide, sign;
    UNROLL for (int i = 0; i < LANES; i++) wide[i] = from[i];
    sign = (wide & 0x8000) << 16;
    return (vector)((integers)((vector)((wide & 0x7fff) << 13) * 0x1p112f) | sign);
#endif
}

INLINE int is_halved(long kind) { return kind == BFLOAT16 || kind == FLOAT16; }

INLINE vector load_half(long kind, const uint16_t *from) {
    return kind == BFLOAT16 ? load_bfloat16(from) : load_float16(from);
}

INLINE vector load_half_part(long kind, const uint16_t *from, long count) {
    uint16_t padded[LANES] = {0};
    memcpy(padded, from, (size_t)count * sizeof *padded);
    return load_half(kind, padded);
}

/* Columns column .. column + num_columns of a matrix of this depth, k .. k + length of each, into panel. Of anything but
 * 16 bits. */
static void unpack(const matrix *source, long depth, long column, long num_columns, long k, long length, float *panel) {
    for (long c = 0; c < num_columns; c++, panel += length) {
        long at = (column + c) * depth + k;
        if (source->kind == BLOCKS) unpack_blocks(source->packed, depth, column + c, k, length, panel);
        else if (source->kind == SCALED8)
            unpack_scaled8((const int8_t *)source->packed + at, source->scales + at / WEIGHT_BLOCK, panel, length);
        else if (source->kind == SCALED_FP8)
            unpack_fp8((const uint8_t *)source->packed + at, source->scales + at / WEIGHT_BLOCK, panel, length);
        else unpack_affine4((const uint8_t *)source->packed + at / 2, source->scales + at / 16, panel, length);
    }
}
