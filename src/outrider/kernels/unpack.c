/* Weights in a smaller form that gives back the very same floats: 16 bits of either kind, 4 bits with a scale and an offset,
 * 8 bits (whole numbers or e4m3) with a scale. They are widened as they are loaded, so that less memory is read. Included
 * by native.c. */

enum { PLAIN = 0, BFLOAT16 = 1, AFFINE4 = 2, SCALED8 = 3, BLOCKS = 4, TILES = 5, FLOAT16 = 6, SCALED_FP8 = 7, WEIGHT_BLOCK = 32 };

typedef struct {
    const float *weight; /* [num_outputs, depth] where it is PLAIN, else NULL */
    const void *packed; /* the smaller form; of BLOCKS a list of block_rows, of TILES one of tile_rows */
    const float *scales; /* of every row's groups of blocks: scale and offset (AFFINE4), or scale */
    long kind;
    long shift; /* 2^shift blocks of 32 are a group; more than a row has: all of it */
} matrix;

/* Where numbers of a row lie, and what they are scaled by. */
typedef struct {
    const uint8_t *at;
    const float *scales;
} weight_row;

INLINE int has_scales(long kind) { return kind == AFFINE4 || kind == SCALED8 || kind == SCALED_FP8; }

/* Numbers that are taken at a time: a block of those that share a scale. */
INLINE long step_of(long kind) { return has_scales(kind) ? WEIGHT_BLOCK : LANES; }

INLINE long bytes_of(long kind, long count) {
    if (kind == AFFINE4) return count / 2;
    if (kind == SCALED8 || kind == SCALED_FP8) return count;
    return kind == PLAIN ? count * 4 : count * 2;
}

/* Where the scales of a row's block are, from the row's first; and of how many a row has. */
INLINE long scale_at(const matrix *source, long block) { return (block >> source->shift) * (source->kind == AFFINE4 ? 2 : 1); }
INLINE long scales_of_row(const matrix *source, long depth) {
    return larger(1, depth / WEIGHT_BLOCK >> source->shift) * (source->kind == AFFINE4 ? 2 : 1);
}

INLINE vector load_bfloat16(const uint8_t *from) {
#if LANES == 16
    return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    uint16_t bits[LANES];
    integers wide;
    memcpy(bits, from, sizeof bits);
    UNROLL for (int i = 0; i < LANES; i++) wide[i] = (int32_t)((uint32_t)bits[i] << 16);
    return (vector)wide;
#endif
}

/* A half-precision number's bits, moved to where a float has them, stand for 2 ** -112 times as much. */
INLINE vector load_float16(const uint8_t *from) {
#if LANES == 16
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && defined(__F16C__)
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    uint16_t bits[LANES];
    integers wide, sign;
    memcpy(bits, from, sizeof bits);
    UNROLL for (int i = 0; i < LANES; i++) wide[i] = bits[i];
    sign = (wide & 0x8000) << 16;
    return (vector)((integers)((vector)((wide & 0x7fff) << 13) * 0x1p112f) | sign);
#endif
}

/* LANES bytes as whole numbers. */
INLINE integers load_wide(const uint8_t *from, int with_sign) {
#if LANES == 16
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (integers)(with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif LANES == 8
    __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (integers)(with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    integers wide;
    UNROLL for (int i = 0; i < LANES; i++) wide[i] = with_sign ? (int8_t)from[i] : from[i];
    return wide;
#endif
}

INLINE vector whole_floats(integers whole) {
#if LANES == 16
    return (vector)_mm512_cvtepi32_ps((__m512i)whole);
#elif LANES == 8
    return (vector)_mm256_cvtepi32_ps((__m256i)whole);
#else
    return __builtin_convertvector(whole, vector);
#endif
}

/* Numbers `place` ... of a block. Byte i holds number i in its low half and number i + 16 in its high half. scale * q is
 * exact, so the sum is rounded once, as it was when the float was made. With sixteen lanes the sixteen floats that there
 * can be are made once, and looked up by what is low in each lane. */
INLINE vector load_affine4(weight_row w, int place) {
    int is_high = place >= WEIGHT_BLOCK / 2;
    integers wide = load_wide(w.at + place % (WEIGHT_BLOCK / 2), 0);
    if (is_high) wide = (integers)((unsigned_integers)wide >> 4);
#if LANES == 16
    const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 floats = _mm512_fmadd_ps(levels, _mm512_set1_ps(w.scales[0]), _mm512_set1_ps(w.scales[1]));
    return (vector)_mm512_permutexvar_ps((__m512i)wide, floats);
#else
    return fma_vector(whole_floats(is_high ? wide : wide & 15), spread(w.scales[0]), spread(w.scales[1]));
#endif
}

/* Of four bits of exponent and three of mantissa: bits moved to where another kind has them stand for 2 ** -8 (halves) or
 * 2 ** -120 (floats) times as much. */
INLINE vector load_fp8(weight_row w, int place) {
#if LANES == 16
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w.at + place))), 7);
    __m512 value = _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)));
    return (vector)value * 0x1p8f * w.scales[0];
#else
    integers wide = load_wide(w.at + place, 0);
    vector size = (vector)((wide & 0x7f) << 20) * 0x1p120f;
    return (vector)((integers)size | (wide & 0x80) << 24) * w.scales[0];
#endif
}

/* LANES numbers, `place` of a step on. */
INLINE vector load_weights(long kind, weight_row w, int place) {
    if (kind == PLAIN) return load((const float *)w.at + place);
    if (kind == BFLOAT16) return load_bfloat16(w.at + place * 2);
    if (kind == FLOAT16) return load_float16(w.at + place * 2);
    if (kind == AFFINE4) return load_affine4(w, place);
    if (kind == SCALED_FP8) return load_fp8(w, place);
    return whole_floats(load_wide(w.at + place, 1)) * w.scales[0];
}

/* The same of a row's end, where less than a vector is left; of those without scales. */
INLINE vector load_last_weights(long kind, weight_row w, long count) {
    if (kind == PLAIN) return load_part((const float *)w.at, count);
    uint16_t padded[LANES] = {0};
    memcpy(padded, w.at, (size_t)count * sizeof *padded);
    return load_weights(kind, (weight_row){(const uint8_t *)padded, NULL}, 0);
}

/* A row from its number k on; of anything but BLOCKS and TILES. */
INLINE weight_row row_of(const matrix *source, long depth, long row, long k) {
    const void *base = source->kind == PLAIN ? source->weight : source->packed;
    const float *scales = source->scales ? source->scales + row * scales_of_row(source, depth) : NULL;
    return (weight_row){(const uint8_t *)base + bytes_of(source->kind, row * depth + k), scales};
}
