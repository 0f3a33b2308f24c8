/* The blocks of GGUF files as floats, for the loader: one function for every type of block, the same bits as the
 * reference in the gguf package. Rows are shared out among the threads. Included by native.c. */

enum { /* the numbers that GGUF files give these types */
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
};

typedef struct {
    const uint8_t *from; /* blocks, row after row */
    float *to; /* [num_rows, row_len], densely */
    long type, num_rows, row_len;
    long block_len, block_bytes; /* floats of a block, and bytes that it takes in the file */
    long num_heads; /* whose rows lie in interleaved pairs, and are to lie in halves; 0: rows stay where they are */
    long num_threads;
} dequantise_work;

/* A half-precision number, which may lie at an odd address. */
static float half_at(const uint8_t *from) {
    uint32_t half = (uint32_t)from[0] | (uint32_t)from[1] << 8;
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff, bits;
    float value;
    if (exponent == 0) { /* a subnormal number: fraction times 2^-24, exactly */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Sixteen levels without sign, times scale plus offset; or with sign, times scale. */
INLINE void spread_levels(const uint8_t *levels, float scale, float offset, float *to, int with_sign) {
#if defined(__AVX2__)
    expand16(_mm_loadu_si128((const __m128i *)levels), scale, offset, to, with_sign);
#else
    for (long i = 0; i < 16; i++) {
        float level = with_sign ? (float)(int8_t)levels[i] : (float)levels[i];
        to[i] = with_sign ? level * scale : level * scale + offset;
    }
#endif
}

INLINE void spread_32(const uint8_t *levels, float scale, float offset, float *to, int with_sign) {
    spread_levels(levels, scale, offset, to, with_sign);
    spread_levels(levels + 16, scale, offset, to + 16, with_sign);
}

/* Blocks of 32: a scale, perhaps an offset, perhaps a fifth bit for each weight, then their low four bits: weight i in
 * the low half of byte i, weight i + 16 in its high half. Without an offset, the middle level stands for zero. */
INLINE void dequantise_small(const uint8_t *from, float *to, int has_offset, int num_bits) {
    float scale = half_at(from), offset = has_offset ? half_at(from + 2) : 0.0f;
    const uint8_t *high = from + (has_offset ? 4 : 2), *low = high + (num_bits == 5 ? 4 : 0);
    uint8_t levels[32];
    for (long i = 0; i < 16; i++) levels[i] = low[i] & 15, levels[i + 16] = low[i] >> 4;
    if (num_bits == 5)
        for (long i = 0; i < 32; i++) levels[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
    if (!has_offset)
        for (long i = 0; i < 32; i++) levels[i] = (uint8_t)(levels[i] - (1 << (num_bits - 1)));
    spread_32(levels, scale, offset, to, !has_offset);
}

/* Blocks of 256 with a scale and an offset for every 32, six bits each, in units of the block's own: Q4_K, Q5_K. */
INLINE void dequantise_k(const uint8_t *from, float *to, int has_fifth_bit) {
    float unit = half_at(from), offset_unit = half_at(from + 2);
    const uint8_t *packed = from + 4, *fifth = from + 16, *low = fifth + (has_fifth_bit ? 32 : 0);
    for (long part = 0; part < 8; part++) {
        const uint8_t *bytes = low + part / 2 * 32;
        uint8_t scale = packed[part % 4], offset = packed[4 + part % 4], both = packed[8 + part % 4], levels[32];
        scale = part < 4 ? scale & 63 : (both & 15) | (scale >> 2 & 48);
        offset = part < 4 ? offset & 63 : both >> 4 | (offset >> 2 & 48);
        if (part % 2) for (long i = 0; i < 32; i++) levels[i] = bytes[i] >> 4;
        else for (long i = 0; i < 32; i++) levels[i] = bytes[i] & 15;
        if (has_fifth_bit)
            for (long i = 0; i < 32; i++) levels[i] |= (uint8_t)((fifth[i] >> part & 1) << 4);
        spread_32(levels, unit * (float)scale, -(offset_unit * (float)offset), to + part * 32, 0);
    }
}

/* Blocks of 256: the low four bits of all, the high two of all, a scale for every 16 in units of the block's own. */
static void dequantise_6k(const uint8_t *from, float *to) {
    const int8_t *scales = (const int8_t *)from + 192;
    float unit = half_at(from + 208);
    for (long part = 0; part < 8; part++) {
        const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *high = from + 128 + part / 4 * 32;
        uint8_t levels[32];
        for (long i = 0; i < 32; i++) {
            uint8_t four = part % 4 < 2 ? low[i] & 15 : low[i] >> 4, two = high[i] >> part % 4 * 2 & 3;
            levels[i] = (uint8_t)((four | two << 4) - 32);
        }
        for (long half = 0; half < 2; half++)
            spread_levels(levels + half * 16, unit * (float)scales[part * 2 + half], 0.0f, to + part * 32 + half * 16, 1);
    }
}

static void dequantise_block(long type, const uint8_t *from, float *to) {
    switch (type) {
    case Q4_0: dequantise_small(from, to, 0, 4); break;
    case Q4_1: dequantise_small(from, to, 1, 4); break;
    case Q5_0: dequantise_small(from, to, 0, 5); break;
    case Q5_1: dequantise_small(from, to, 1, 5); break;
    case Q8_0: spread_32(from + 2, half_at(from), 0.0f, to, 1); break;
    case Q4_K: dequantise_k(from, to, 0); break;
    case Q5_K: dequantise_k(from, to, 1); break;
    case Q6_K: dequantise_6k(from, to); break;
    }
}

/* Where a row of the file belongs: dim 2i of a head comes to i, dim 2i + 1 to i + half. */
static long row_in_halves(long row, long head_dim) {
    long head = row / head_dim, dim = row % head_dim;
    return head * head_dim + dim % 2 * (head_dim / 2) + dim / 2;
}

EXPORT void outrider_dequantise(const dequantise_work *work) {
    long num_blocks = work->row_len / work->block_len;
#pragma omp parallel for num_threads((int)work->num_threads) schedule(static) if (work->num_threads > 1)
    for (long row = 0; row < work->num_rows; row++) {
        long place = work->num_heads ? row_in_halves(row, work->num_rows / work->num_heads) : row;
        const uint8_t *from = work->from + row * num_blocks * work->block_bytes;
        float *to = work->to + place * work->row_len;
        for (long block = 0; block < num_blocks; block++, from += work->block_bytes, to += work->block_len)
            dequantise_block(work->type, from, to);
    }
}
