/* Quantised weights laid out for whole-number dot products: sixteen rows of the matrix side by side, four numbers of each
 * in turn, so that one instruction multiplies four by four for sixteen outputs and nothing is ever summed across. Numbers
 * and scales are those of the GGUF file, none is rounded again. Included by native.c.
 *
 * A tile is a list of units along k. Of 32 numbers a row: planes of 64 bytes (see levels_of), then the half-precision scales
 * of its sixteen rows, then their offsets. Of 256, for Q4_K, Q5_K and Q6_K: eight times the planes of 32, then half-precision
 * units of scales and of offsets (or nothing in their place), then the scales, a byte each, then the offsets, a byte each and
 * in pairs. */

enum { TILE_ROWS = 16, STEP = 32 };

typedef struct {
    int low_bits, high_bits; /* of a number: 4 or 8, and 0, 1 or 2 above them */
    int is_nested; /* units of 256, whose scales are whole numbers themselves */
    int has_offset; /* else the middle level stands for zero */
} tile_format;

INLINE tile_format format_of(long type) {
    tile_format format = {type == Q8_0 ? 8 : 4, 0, type >= Q4_K, type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K};
    if (type == Q5_0 || type == Q5_1 || type == Q5_K) format.high_bits = 1;
    if (type == Q6_K) format.high_bits = 2;
    return format;
}

INLINE long plane_bytes(tile_format format) { return (format.low_bits + format.high_bits) * 64; }
INLINE long unit_len(tile_format format) { return format.is_nested ? 256 : STEP; }

INLINE long unit_bytes(tile_format format) {
    if (!format.is_nested) return plane_bytes(format) + (format.has_offset ? 64 : 32);
    return 8 * plane_bytes(format) + 64 + 256;
}

/* Where the whole scales of a unit of 256 begin: behind the half-precision ones, at a multiple of 64 bytes. */
INLINE long inner_scales(tile_format format) { return 8 * plane_bytes(format) + 64; }

/* ---- from the file's blocks ---- */

/* The whole numbers of a block of the file, from zero up (Q8_0: with sign), and its scales and offsets as they are. */
typedef struct {
    uint8_t levels[256], scales[16], offsets[8], unit[2], offset_unit[2];
} opened_block;

static void open_small(const uint8_t *from, tile_format format, opened_block *block) {
    memcpy(block->unit, from, 2);
    if (format.has_offset) memcpy(block->offset_unit, from + 2, 2);
    from += format.has_offset ? 4 : 2;
    if (format.low_bits == 8) memcpy(block->levels, from, 32);
    const uint8_t *low = from + (format.high_bits ? 4 : 0);
    for (int i = 0; format.low_bits == 4 && i < 32; i++) {
        block->levels[i] = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
        if (format.high_bits) block->levels[i] |= (from[i / 8] >> i % 8 & 1) << 4;
    }
}

static void open_k(const uint8_t *from, tile_format format, opened_block *block) {
    const uint8_t *packed = from + 4, *fifth = from + 16, *low = fifth + (format.high_bits ? 32 : 0);
    memcpy(block->unit, from, 2);
    memcpy(block->offset_unit, from + 2, 2);
    for (int part = 0; part < 8; part++) {
        uint8_t scale = packed[part % 4], offset = packed[4 + part % 4], both = packed[8 + part % 4];
        block->scales[part] = part < 4 ? scale & 63 : (both & 15) | (scale >> 2 & 48);
        block->offsets[part] = part < 4 ? offset & 63 : both >> 4 | (offset >> 2 & 48);
        for (int i = 0; i < 32; i++) {
            uint8_t level = low[part / 2 * 32 + i] >> part % 2 * 4 & 15;
            if (format.high_bits) level |= (fifth[i] >> part & 1) << 4;
            block->levels[part * 32 + i] = level;
        }
    }
}

static void open_6k(const uint8_t *from, opened_block *block) {
    memcpy(block->scales, from + 192, 16);
    memcpy(block->unit, from + 208, 2);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        uint8_t low = from[half * 64 + quarter % 2 * 32 + at] >> quarter / 2 * 4 & 15;
        block->levels[i] = low | (from[128 + half * 32 + at] >> quarter * 2 & 3) << 4;
    }
}

/* Numbers 4 i ... 4 i + 3 of a row are its four bytes of chunk i. Two chunks share a plane of low halves; what is above four
 * bits comes behind, eight or four chunks a plane. */
static void store_levels(const uint8_t *levels, tile_format format, long row, uint8_t *to) {
    uint32_t fours[8], high[2] = {0, 0};
    memcpy(fours, levels, sizeof fours);
    for (int i = 0; i < 8; i++) {
        uint32_t four = format.low_bits == 8 ? fours[i] : fours[i] & 0x0f0f0f0fu;
        if (format.low_bits == 8) memcpy(to + i * 64 + row * 4, &four, 4);
        else if (i % 2) {
            four = (fours[i - 1] & 0x0f0f0f0fu) | four << 4;
            memcpy(to + i / 2 * 64 + row * 4, &four, 4);
        }
        if (format.high_bits == 1) high[0] |= (fours[i] >> 4 & 0x01010101u) << i;
        if (format.high_bits == 2) high[i / 4] |= (fours[i] >> 4 & 0x03030303u) << i % 4 * 2;
    }
    for (int plane = 0; plane < format.high_bits; plane++) memcpy(to + 256 + plane * 64 + row * 4, &high[plane], 4);
}

static void store_unit(const opened_block *block, tile_format format, long row, uint8_t *to) {
    int num_steps = format.is_nested ? 8 : 1;
    for (int step = 0; step < num_steps; step++, to += plane_bytes(format))
        store_levels(block->levels + step * STEP, format, row, to);
    memcpy(to + row * 2, block->unit, 2);
    if (format.has_offset) memcpy(to + 32 + row * 2, block->offset_unit, 2);
    if (!format.is_nested) return;
    to += 64;
    for (int i = 0; i < (format.has_offset ? 8 : 16); i++) to[i * 16 + row] = block->scales[i];
    for (int i = 0; format.has_offset && i < 8; i++) to[128 + i / 2 * 32 + row * 2 + i % 2] = block->offsets[i];
}

typedef struct {
    const uint8_t *from; /* blocks, row after row */
    uint8_t *to; /* tiles, all zero so far */
    long type, num_rows, row_len, row_bytes;
    long first_row; /* where the first of them comes to */
    long num_heads; /* as in dequantise_work */
    long num_threads;
} tile_work;

EXPORT void outrider_tile(const tile_work *work) {
    tile_format format = format_of(work->type);
    long num_units = work->row_len / unit_len(format), block_bytes = work->row_bytes / num_units;
    long tile_bytes = num_units * unit_bytes(format);
#pragma omp parallel for num_threads((int)work->num_threads) schedule(static) if (work->num_threads > 1)
    for (long row = 0; row < work->num_rows; row++) {
        long place = work->num_heads ? row_in_halves(row, work->num_rows / work->num_heads) : row;
        place += work->first_row;
        uint8_t *to = work->to + place / TILE_ROWS * tile_bytes;
        const uint8_t *from = work->from + row * work->row_bytes;
        for (long unit = 0; unit < num_units; unit++, from += block_bytes, to += unit_bytes(format)) {
            opened_block block;
            if (!format.is_nested) open_small(from, format, &block);
            else if (work->type == Q6_K) open_6k(from, &block);
            else open_k(from, format, &block);
            store_unit(&block, format, place % TILE_ROWS, to);
        }
    }
}

/* ---- some rows as floats again: the same bits as from the file's blocks ---- */

static void untile_step(const uint8_t *planes, tile_format format, long row, float scale, float offset, long first,
                        long end, float *to) {
    for (long k = first; k < end; k++) {
        long i = k / 4, at = row * 4 + k % 4;
        if (format.low_bits == 8) {
            to[k] = (float)(int8_t)planes[i * 64 + at] * scale;
            continue;
        }
        int level = planes[i / 2 * 64 + at] >> i % 2 * 4 & 15;
        if (format.high_bits == 1) level |= (planes[256 + at] >> i & 1) << 4;
        if (format.high_bits == 2) level |= (planes[256 + i / 4 * 64 + at] >> i % 4 * 2 & 3) << 4;
        int middle = 1 << (3 + format.high_bits);
        to[k] = format.has_offset ? (float)level * scale + offset : (float)(level - middle) * scale;
    }
}

static void untile(const uint8_t *tile, long type, long row, long row_len, float *to) {
    tile_format format = format_of(type);
    for (long k = 0; k < row_len; k += unit_len(format), tile += unit_bytes(format)) {
        const uint8_t *scales = tile + (format.is_nested ? 8 : 1) * plane_bytes(format);
        float unit = half_at(scales + row * 2), offset_unit = format.has_offset ? half_at(scales + 32 + row * 2) : 0.0f;
        if (!format.is_nested) {
            untile_step(tile, format, row, unit, offset_unit, 0, STEP, to + k);
            continue;
        }
        scales = tile + inner_scales(format);
        for (long step = 0; step < 8; step++) {
            const uint8_t *planes = tile + step * plane_bytes(format);
            float *out = to + k + step * STEP;
            if (format.has_offset) {
                float least = -(offset_unit * (float)scales[128 + step / 2 * 32 + row * 2 + step % 2]);
                untile_step(planes, format, row, unit * (float)scales[step * 16 + row], least, 0, STEP, out);
                continue;
            }
            for (long half = 0; half < 2; half++) {
                float scale = unit * (float)(int8_t)scales[(step * 2 + half) * 16 + row];
                untile_step(planes, format, row, scale, 0.0f, half * 16, half * 16 + 16, out);
            }
        }
    }
}

/* Some rows of a matrix that lies in tiles; the next ones may be of another type. */
typedef struct {
    const uint8_t *tiles;
    long end_row; /* of the matrix: the first that is not among them */
    long type;
    long skipped; /* rows of the first tile that do not belong to the matrix */
} tile_rows;

/* A row of the matrix. */
static void untile_row(const tile_rows *part, long row, long row_len, float *to) {
    long first = 0;
    for (; row >= part->end_row; part++) first = part->end_row;
    row += part->skipped - first;
    tile_format format = format_of(part->type);
    long tile_bytes = row_len / unit_len(format) * unit_bytes(format);
    untile(part->tiles + row / TILE_ROWS * tile_bytes, part->type, row % TILE_ROWS, row_len, to);
}
