/* Dot products in whole numbers: rows of the input are rounded to 8 bits with a scale for each unit of a tile (32 or 256
 * numbers, the largest of them becomes 127), multiplied by a tile's numbers, and each unit's sum is scaled. Whole sums are
 * exact in any order; the scaled ones are added unit after unit, whatever rows and columns are computed together. Included
 * by native.c. */

typedef int32_t ints16 __attribute__((vector_size(64)));
typedef float floats16 __attribute__((vector_size(64)));
typedef uint8_t bytes64 __attribute__((vector_size(64)));
typedef uint16_t words32 __attribute__((vector_size(64)));
typedef uint8_t loose_bytes64 __attribute__((vector_size(64), aligned(1), may_alias));
typedef float loose_floats16 __attribute__((vector_size(64), aligned(1), may_alias));

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE_DOTS 1 /* of numbers without sign by such with: eight bits with sign are moved up by 128 */
enum { MOVED_UP = 128 };
#else
enum { MOVED_UP = 0 };
#endif

/* Hold a loaded vector in its register: left alone, compilers load it again for every instruction that takes it. */
#if defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) (void)0
#endif

INLINE bytes64 load64(const uint8_t *from) { return *(const loose_bytes64 *)from; }
INLINE ints16 spread_int(int32_t value) { return value - (ints16){0}; }
INLINE floats16 spread_float(float value) { return value - (floats16){0}; }

INLINE floats16 to_floats(ints16 whole) {
#if defined(__AVX512F__)
    return (floats16)_mm512_cvtepi32_ps((__m512i)whole);
#else
    return __builtin_convertvector(whole, floats16);
#endif
}

INLINE floats16 fma16(floats16 a, floats16 b, floats16 c) {
#if LANES == 16
    return (floats16)fma_vector((vector)a, (vector)b, (vector)c);
#else
    vector x[16 / LANES], y[16 / LANES], z[16 / LANES];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    UNROLL for (int i = 0; i < 16 / LANES; i++) z[i] = fma_vector(x[i], y[i], z[i]);
    memcpy(&c, z, 64);
    return c;
#endif
}

INLINE floats16 load_halves(const uint8_t *from) {
#if defined(__AVX512F__)
    return (floats16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    floats16 value;
    UNROLL for (int i = 0; i < 16; i++) value[i] = half_at(from + i * 2);
    return value;
#endif
}

/* Sixteen bytes as whole numbers. */
INLINE ints16 widen(const uint8_t *from, int with_sign) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (ints16)(with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    ints16 value;
    UNROLL for (int i = 0; i < 16; i++) value[i] = with_sign ? (int8_t)from[i] : from[i];
    return value;
#endif
}

/* sums[i] += the four numbers 4 i ... of `levels` by the four of x. They have a sign (`with_sign`), or are below 64. */
INLINE ints16 dot_fours(ints16 sums, bytes64 levels, const int8_t *x, int with_sign) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(WIDE_DOTS)
    (void)with_sign;
    return (ints16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)levels, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i w[2], s[2], spread = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    memcpy(w, &levels, 64), memcpy(s, &sums, 64);
    UNROLL for (int i = 0; i < 2; i++) { /* pairs of products stay below 2^15 */
        __m256i size = with_sign ? _mm256_sign_epi8(w[i], w[i]) : w[i];
        __m256i pairs = _mm256_maddubs_epi16(size, with_sign ? _mm256_sign_epi8(spread, w[i]) : spread);
        s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(pairs, ones));
    }
    memcpy(&sums, s, 64);
    return sums;
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t w[4], spread = vreinterpretq_s8_s32(vdupq_n_s32(four));
    int32x4_t s[4];
    memcpy(w, &levels, 64), memcpy(s, &sums, 64);
    UNROLL for (int i = 0; i < 4; i++) s[i] = vdotq_s32(s[i], w[i], spread);
    memcpy(&sums, s, 64);
    return sums;
#else
    for (int i = 0; i < 64; i++) sums[i / 4] += (int8_t)levels[i] * x[i % 4];
    return sums;
#endif
}

/* sums[i] += the two bytes 2 i ... by the two of x */
INLINE ints16 dot_twos(ints16 sums, const uint8_t *bytes, const int16_t *x) {
#if defined(WIDE_DOTS)
    int32_t two;
    memcpy(&two, x, 4);
    __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
    return (ints16)_mm512_dpwssd_epi32((__m512i)sums, wide, _mm512_set1_epi32(two));
#else
    for (int i = 0; i < 16; i++) sums[i] += bytes[i * 2] * x[0] + bytes[i * 2 + 1] * x[1];
    return sums;
#endif
}

/* The 32 numbers of sixteen rows: chunk i holds numbers 4 i ... of each. Above the low four bits, bit i of a plane's bytes is
 * chunk i's; or two bits, of four chunks. Shifts of pairs of bytes do, as what crosses over is masked out. */
INLINE void levels_of(const uint8_t *planes, tile_format format, bytes64 *levels) {
    bytes64 low[4], high[2];
    UNROLL for (int i = 0; format.low_bits == 4 && i < 4; i++) {
        low[i] = load64(planes + i * 64);
        KEEP(low[i]);
    }
    UNROLL for (int i = 0; i < format.high_bits; i++) {
        high[i] = load64(planes + 256 + i * 64);
        KEEP(high[i]);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        if (format.low_bits == 8) {
            levels[i] = load64(planes + i * 64) ^ (uint8_t)MOVED_UP;
            continue;
        }
        levels[i] = (i % 2 ? (bytes64)((words32)low[i / 2] >> 4) : low[i / 2]) & 15;
        if (format.high_bits == 0) continue;
        int chunks = 8 / format.high_bits, place = i % chunks * format.high_bits;
        words32 above = (words32)high[i / chunks];
        above = place <= 4 ? above << (4 - place) : above >> (place - 4);
        levels[i] |= (bytes64)above & (uint8_t)(format.high_bits == 1 ? 16 : 48);
    }
}

/* Rows of the input in 8 bits. */
typedef struct {
    int8_t *levels; /* [rows, depth] */
    float *scales; /* [rows, units] */
    int32_t *starts; /* what sums begin with, so that the middle level counts as zero: of 32 numbers, or 16 of Q6_K */
    float *sums; /* of 32 numbers, scaled: what an offset is multiplied by */
    int16_t *whole_sums; /* the same without their scale */
    long depth;
} rounded_rows;

/* What they take, for every 32 numbers. */
enum { ROUNDED_BYTES = 32 + 4 + 8 + 4 + 2 };

INLINE rounded_rows place_rounded(void *memory, long num_rows, long depth) {
    long steps = num_rows * (depth / STEP);
    rounded_rows rows = {.depth = depth, .scales = memory};
    rows.starts = (int32_t *)(rows.scales + steps);
    rows.sums = (float *)(rows.starts + 2 * steps);
    rows.whole_sums = (int16_t *)(rows.sums + steps);
    rows.levels = (int8_t *)(rows.whole_sums + steps);
    return rows;
}

/* 32 numbers, each to the nearest whole one, times a factor; and the sums of both halves. */
INLINE void round_step(const float *x, float factor, int8_t *levels, int32_t *halves) {
#if defined(WIDE_DOTS)
    __m512 spread = _mm512_set1_ps(factor);
    __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), spread));
    __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), spread));
    __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first));
    _mm256_storeu_si256((__m256i *)levels, bytes);
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes); /* of four */
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    halves[0] = _mm256_extract_epi32(sums, 0), halves[1] = _mm256_extract_epi32(sums, 4);
#else
    const vector magic = spread(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest whole number */
    halves[0] = halves[1] = 0;
    for (long i = 0; i < STEP; i += LANES) {
        integers whole = (integers)(load(x + i) * factor + magic) - (integers)magic;
        for (long j = 0; j < LANES; j++) {
            levels[i + j] = (int8_t)whole[j];
            halves[(i + j) / 16] += (int8_t)whole[j];
        }
    }
#endif
}

static void round_row(const float *x, long type, const rounded_rows *rows, long row) {
    tile_format format = format_of(type);
    long depth = rows->depth, unit = unit_len(format), steps = depth / STEP;
    int middle = format.has_offset ? 0 : format.low_bits == 8 ? MOVED_UP : 1 << (3 + format.high_bits);
    int8_t *levels = rows->levels + row * depth;
    for (long first = 0; first < depth; first += unit) {
        vector most = {0};
        for (long i = 0; i < unit; i += LANES) most = greatest(size_of(load(x + first + i)), most);
        float largest = fold_greatest(most), scale = largest / 127.0f;
        float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        rows->scales[row * (depth / unit) + first / unit] = scale;
        for (long at = first; at < first + unit; at += STEP) {
            int32_t halves[2];
            round_step(x + at, inverse, levels + at, halves);
            long step = row * steps + at / STEP;
            if (type == Q6_K) rows->starts[2 * step] = -middle * halves[0], rows->starts[2 * step + 1] = -middle * halves[1];
            else rows->starts[step] = -middle * (halves[0] + halves[1]);
            rows->sums[step] = scale * (float)(halves[0] + halves[1]);
            rows->whole_sums[step] = (int16_t)(halves[0] + halves[1]);
        }
    }
}

/* Weights that are wanted soon. While several rows are multiplied with some, a processor does not read far enough ahead by
 * itself: four rows and more took the time of memory and that of arithmetic, one after the other. Of a single row it reads
 * fast enough, unless units are large. */
enum { AHEAD_BYTES = 8192 };

INLINE void fetch_ahead(const uint8_t *weights, long num_bytes, long rows) {
    for (long at = AHEAD_BYTES; at < AHEAD_BYTES + num_bytes; at += 64) {
        if (rows == 1) __builtin_prefetch(weights + at, 0, 3);
        else __builtin_prefetch(weights + at, 0, 2);
    }
}

enum { TILE_PASS = 16 }; /* rows of the input at a time: they share the unpacking of weights */

/* Sixteen outputs of several rows, without bias. */
INLINE void dot_tile_rows(const uint8_t *tile, long type, const rounded_rows *x, long row, long rows, floats16 *out) {
    const tile_format format = format_of(type);
    const long depth = x->depth, num_units = depth / unit_len(format), num_steps = depth / STEP;
    const int8_t *levels = x->levels + row * depth;
    const float *scales = x->scales + row * num_units, *sums = x->sums + row * num_steps;
    const int32_t *starts = x->starts + row * num_steps * (type == Q6_K ? 2 : 1);
    const int16_t *whole_sums = x->whole_sums + row * num_steps;
    for (long r = 0; r < rows; r++) out[r] = (floats16){0};
    for (long unit = 0; unit < num_units; unit++, tile += unit_bytes(format)) {
        bytes64 w[8];
        if (!format.is_nested) {
            if (rows > 1) fetch_ahead(tile, unit_bytes(format), rows);
            levels_of(tile, format, w);
            floats16 scale = load_halves(tile + plane_bytes(format));
            for (long r = 0; r < rows; r++) {
                ints16 dots = format.has_offset ? (ints16){0} : spread_int(starts[r * num_steps + unit]);
                const int8_t *from = levels + r * depth + unit * STEP;
                UNROLL for (int i = 0; i < 8; i++) dots = dot_fours(dots, w[i], from + i * 4, format.low_bits == 8);
                out[r] = fma16(to_floats(dots) * scales[r * num_units + unit], scale, out[r]);
            }
            if (!format.has_offset) continue;
            floats16 offset = load_halves(tile + plane_bytes(format) + 32);
            for (long r = 0; r < rows; r++)
                out[r] = fma16(offset, spread_float(sums[r * num_steps + unit]), out[r]);
            continue;
        }
        const uint8_t *units = tile + 8 * plane_bytes(format), *inner = tile + inner_scales(format);
        ints16 totals[TILE_PASS];
        for (long r = 0; r < rows; r++) totals[r] = (ints16){0};
        for (long step = 0; step < 8; step++) {
            fetch_ahead(tile + step * (unit_bytes(format) / 8), unit_bytes(format) / 8, rows);
            levels_of(tile + step * plane_bytes(format), format, w);
            const int8_t *from = levels + unit * 256 + step * STEP;
            if (format.has_offset) {
                ints16 scale = widen(inner + step * 16, 0);
                for (long r = 0; r < rows; r++) {
                    ints16 dots = {0};
                    UNROLL for (int i = 0; i < 8; i++) dots = dot_fours(dots, w[i], from + r * depth + i * 4, 0);
                    totals[r] += dots * scale;
                }
                continue;
            }
            UNROLL for (int half = 0; half < 2; half++) {
                ints16 scale = widen(inner + (step * 2 + half) * 16, 1);
                for (long r = 0; r < rows; r++) {
                    ints16 dots = spread_int(starts[r * num_steps * 2 + unit * 16 + step * 2 + half]);
                    UNROLL for (int i = half * 4; i < half * 4 + 4; i++)
                        dots = dot_fours(dots, w[i], from + r * depth + i * 4, 0);
                    totals[r] += dots * scale;
                }
            }
        }
        floats16 scale = load_halves(units), offset = format.has_offset ? load_halves(units + 32) : (floats16){0};
        for (long r = 0; r < rows; r++) {
            float own = scales[r * num_units + unit];
            out[r] = fma16(to_floats(totals[r]) * own, scale, out[r]);
            if (!format.has_offset) continue;
            ints16 least = {0};
            UNROLL for (int i = 0; i < 4; i++)
                least = dot_twos(least, inner + 128 + i * 32, whole_sums + r * num_steps + unit * 8 + i * 2);
            out[r] = fma16(to_floats(least) * -own, offset, out[r]);
        }
    }
}

/* Which outputs of the matrix a tile's are. */
typedef struct {
    float *out;
    const float *bias;
    long stride, column, skipped, num_columns;
} tile_outputs;

INLINE void store_tile(const tile_outputs *to, long row, long rows, const floats16 *sums) {
    for (long r = 0; r < rows; r++) {
        float values[16], *out = to->out + (row + r) * to->stride + to->column;
        memcpy(values, &sums[r], 64);
        for (long c = 0; c < to->num_columns; c++)
            out[c] = to->bias ? values[to->skipped + c] + to->bias[to->column + c] : values[to->skipped + c];
    }
}

INLINE void tile_pass(const uint8_t *tile, long type, const rounded_rows *x, long row, long rows, const tile_outputs *to) {
    floats16 sums[TILE_PASS];
    dot_tile_rows(tile, type, x, row, rows, sums);
    store_tile(to, row, rows, sums);
}

#define TILE_PASSES(type)                                                                                                  \
    static void tile_passes_##type(const uint8_t *tile, const rounded_rows *x, long row, long end, const tile_outputs *to) { \
        if (end - row == 1) tile_pass(tile, type, x, row, 1, to); /* without a loop over rows */                            \
        else                                                                                                               \
            for (; row < end; row += TILE_PASS) tile_pass(tile, type, x, row, smaller(TILE_PASS, end - row), to);          \
    }
TILE_PASSES(Q4_0)
TILE_PASSES(Q4_1)
TILE_PASSES(Q5_0)
TILE_PASSES(Q5_1)
TILE_PASSES(Q8_0)
TILE_PASSES(Q4_K)
TILE_PASSES(Q5_K)
TILE_PASSES(Q6_K)

static void tile_passes(const uint8_t *tile, long type, const rounded_rows *x, long row, long end, const tile_outputs *to) {
    switch (type) {
    case Q4_0: tile_passes_Q4_0(tile, x, row, end, to); break;
    case Q4_1: tile_passes_Q4_1(tile, x, row, end, to); break;
    case Q5_0: tile_passes_Q5_0(tile, x, row, end, to); break;
    case Q5_1: tile_passes_Q5_1(tile, x, row, end, to); break;
    case Q8_0: tile_passes_Q8_0(tile, x, row, end, to); break;
    case Q4_K: tile_passes_Q4_K(tile, x, row, end, to); break;
    case Q5_K: tile_passes_Q5_K(tile, x, row, end, to); break;
    case Q6_K: tile_passes_Q6_K(tile, x, row, end, to); break;
    }
}
