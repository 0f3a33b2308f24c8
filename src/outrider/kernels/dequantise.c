/* The blocks of GGUF files as floats: one function for every type of block, the same bits as the reference in the gguf
 * package. For the loader, and for linear layers whose weights stay as they are in the file. Included by native.c. */

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
    long type, num_rows, row_len, row_bytes;
    long num_heads; /* whose rows lie in interleaved pairs, and are to lie in halves; 0: rows stay where they are */
    long num_threads;
} dequantise_work;

/* A half-precision number, which may lie at an odd address. */
INLINE float half_at(const uint8_t *from) {
    uint32_t half = (uint32_t)from[0] | (uint32_t)from[1] << 8;
#if defined(__F16C__)
    return _cvtsh_ss((unsigned short)half);
#else
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff, bits;
    float value;
    if (exponent == 0) { /* a subnormal number: fraction times 2^-24, exactly */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* Blocks of 32: a scale, perhaps an offset, perhaps a fifth bit for each weight, then their low four bits: weight i in
 * the low half of byte i, weight i + 16 in its high half. Without an offset, the middle level stands for zero. */
INLINE void dequantise_small(const uint8_t *from, float *to, int has_offset, int num_bits) {
    float scale = half_at(from), offset = has_offset ? half_at(from + 2) : 0.0f;
    const uint8_t *high = from + (has_offset ? 4 : 2);
    bytes16 both = load_bytes(high + (num_bits == 5 ? 4 : 0));
    UNROLL for (int half = 0; half < 2; half++) {
        bytes16 levels = half ? both >> 4 : both & 15;
        if (num_bits == 5) levels |= spread_bits(high + half * 2) & 16;
        if (!has_offset) levels -= (uint8_t)(1 << (num_bits - 1));
        spread_levels(levels, scale, offset, to + half * 16, !has_offset);
    }
}

INLINE void dequantise_8(const uint8_t *from, float *to) {
    float scale = half_at(from);
    UNROLL for (int half = 0; half < 2; half++) spread_levels(load_bytes(from + 2 + half * 16), scale, 0.0f, to + half * 16, 1);
}

/* Blocks of 256 with a scale and an offset for every 32, six bits each, in units of the block's own: Q4_K, Q5_K. Parts
 * of 32 from `part` to `end`. */
INLINE void dequantise_k(const uint8_t *from, long part, long end, float *to, int has_fifth_bit) {
    float unit = half_at(from), offset_unit = half_at(from + 2);
    const uint8_t *packed = from + 4, *fifth = from + 16, *low = fifth + (has_fifth_bit ? 32 : 0);
    UNROLL for (; part < end; part++, to += 32) {
        uint8_t scale = packed[part % 4], offset = packed[4 + part % 4], both = packed[8 + part % 4];
        scale = part < 4 ? scale & 63 : (both & 15) | (scale >> 2 & 48);
        offset = part < 4 ? offset & 63 : both >> 4 | (offset >> 2 & 48);
        float step = unit * (float)scale, least = -(offset_unit * (float)offset);
        UNROLL for (int half = 0; half < 2; half++) {
            bytes16 bytes = load_bytes(low + part / 2 * 32 + half * 16), levels = part % 2 ? bytes >> 4 : bytes & 15;
            if (has_fifth_bit) {
                bytes16 bit = (bytes16){0} + (uint8_t)(1 << part);
                levels |= (bytes16)((load_bytes(fifth + half * 16) & bit) == bit) & 16;
            }
            spread_levels(levels, step, least, to + half * 16, 0);
        }
    }
}

/* Blocks of 256: the low four bits of all, the high two of all, a scale for every 16 in units of the block's own. */
static void dequantise_6k(const uint8_t *from, float *to) {
    ALIGNED float scales[16];
    spread_levels(load_bytes(from + 192), half_at(from + 208), 0.0f, scales, 1);
    UNROLL for (int at = 0; at < 4; at++) { /* sixteen each of four parts, which share bytes */
        const uint8_t *low = from + at / 2 * 64 + at % 2 * 16, *high = from + 128 + at * 16;
        float *out = to + at / 2 * 128 + at % 2 * 16, *scale = scales + at / 2 * 8 + at % 2;
        bytes16 first = load_bytes(low), second = load_bytes(low + 32), two = load_bytes(high);
        spread_levels(((first & 15) | (two & 3) << 4) - 32, scale[0], 0.0f, out, 1);
        spread_levels(((second & 15) | (two & 12) << 2) - 32, scale[2], 0.0f, out + 32, 1);
        spread_levels((first >> 4 | (two & 48)) - 32, scale[4], 0.0f, out + 64, 1);
        spread_levels((second >> 4 | (two >> 2 & 48)) - 32, scale[6], 0.0f, out + 96, 1);
    }
}

/* Floats k .. k + length of a row, both multiples of 32. A block may be entered, and left, in its middle. */
static void dequantise_row(long type, const uint8_t *row, long k, long length, float *to) {
    long end = k + length;
    if (type == Q4_K || type == Q5_K || type == Q6_K) {
        while (k < end) {
            long block = k / 256, part = k % 256 / 32, last = smaller(8, (end - block * 256) / 32);
            int whole = part == 0 && last == 8; /* then the compiler knows every part's number */
            if (type == Q4_K && whole) dequantise_k(row + block * 144, 0, 8, to, 0);
            else if (type == Q4_K) dequantise_k(row + block * 144, part, last, to, 0);
            else if (type == Q5_K && whole) dequantise_k(row + block * 176, 0, 8, to, 1);
            else if (type == Q5_K) dequantise_k(row + block * 176, part, last, to, 1);
            else if (whole) dequantise_6k(row + block * 210, to);
            else {
                ALIGNED float floats[256];
                dequantise_6k(row + block * 210, floats);
                memcpy(to, floats + part * 32, (size_t)(last - part) * 32 * sizeof(float));
            }
            to += (last - part) * 32, k += (last - part) * 32;
        }
        return;
    }
    for (; k < end; k += 32, to += 32) {
        switch (type) {
        case Q4_0: dequantise_small(row + k / 32 * 18, to, 0, 4); break;
        case Q4_1: dequantise_small(row + k / 32 * 20, to, 1, 4); break;
        case Q5_0: dequantise_small(row + k / 32 * 22, to, 0, 5); break;
        case Q5_1: dequantise_small(row + k / 32 * 24, to, 1, 5); break;
        case Q8_0: dequantise_8(row + k / 32 * 34, to); break;
        }
    }
}

enum { FETCHED_ROWS = 4 };

/* Some rows of a matrix that lies in blocks; the next ones may be of another type. */
typedef struct {
    const uint8_t *blocks;
    long end_row; /* the first row that is not among them */
    long type, row_bytes;
} block_rows;

/* Meanwhile the same stretch of a row that comes soon is on its way. */
static void unpack_blocks(const block_rows *rows, long depth, long row, long k, long length, float *to) {
    long first = 0;
    for (; row >= rows->end_row; rows++) first = rows->end_row;
    const uint8_t *from = rows->blocks + (row - first) * rows->row_bytes;
    const uint8_t *begin = from + FETCHED_ROWS * rows->row_bytes + k * rows->row_bytes / depth;
    for (long i = 0; i < length * rows->row_bytes / depth; i += 64) __builtin_prefetch(begin + i, 0, 2);
    dequantise_row(rows->type, from, k, length, to);
}

/* Where a row of the file belongs: dim 2i of a head comes to i, dim 2i + 1 to i + half. */
static long row_in_halves(long row, long head_dim) {
    long head = row / head_dim, dim = row % head_dim;
    return head * head_dim + dim % 2 * (head_dim / 2) + dim / 2;
}

EXPORT void outrider_dequantise(const dequantise_work *work) {
#pragma omp parallel for num_threads((int)work->num_threads) schedule(static) if (work->num_threads > 1)
    for (long row = 0; row < work->num_rows; row++) {
        long place = work->num_heads ? row_in_halves(row, work->num_rows / work->num_heads) : row;
        dequantise_row(work->type, work->from + row * work->row_bytes, 0, work->row_len, work->to + place * work->row_len);
    }
}
