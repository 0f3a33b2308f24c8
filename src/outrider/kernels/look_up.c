/* Rows of a matrix as floats, whatever form it is kept in. Included by native.c. */

/* The same matrix from this row on; one of 16, 8 or 4 bits, or plain. */
INLINE matrix from_row(matrix source, long depth, long row) {
    long at = row * depth;
    if (source.kind == PLAIN) return (matrix){.weight = source.weight + at};
    if (is_halved(source.kind)) source.packed = (const uint16_t *)source.packed + at;
    else source.packed = (const uint8_t *)source.packed + (source.kind == AFFINE4 ? at / 2 : at);
    if (source.scales) source.scales += at / WEIGHT_BLOCK * (source.kind == AFFINE4 ? 2 : 1);
    return source;
}

static void widen_row(long kind, const uint16_t *from, long depth, float *to) {
    for (; depth >= LANES; depth -= LANES, from += LANES, to += LANES) store(to, load_half(kind, from));
    if (depth > 0) store_part(to, load_half_part(kind, from, depth), depth);
}

static void look_up_row(const matrix *source, long depth, long row, float *to) {
    if (source->kind == PLAIN) memcpy(to, source->weight + row * depth, (size_t)depth * sizeof *to);
    else if (is_halved(source->kind)) widen_row(source->kind, (const uint16_t *)source->packed + row * depth, depth, to);
    else if (source->kind == TILES) untile_row(source->packed, row, depth, to);
    else unpack(source, depth, row, 1, 0, depth, to);
}

typedef struct {
    const int64_t *ids;
    float *to; /* [num_ids, depth] */
    long num_ids, depth, num_threads;
    matrix matrix;
} look_up_work;

EXPORT void outrider_look_up(const look_up_work *work) {
#pragma omp parallel for num_threads((int)work->num_threads) schedule(static) if (work->num_ids > 32)
    for (long i = 0; i < work->num_ids; i++)
        look_up_row(&work->matrix, work->depth, work->ids[i], work->to + i * work->depth);
}
