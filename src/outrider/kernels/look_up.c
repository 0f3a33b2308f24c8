/* Rows of a matrix as floats, whatever form it is kept in. Included by native.c. */

/* The same matrix from this row on; of anything but BLOCKS and TILES. */
INLINE matrix from_row(matrix source, long depth, long row) {
    weight_row first = row_of(&source, depth, row, 0);
    if (source.kind == PLAIN) source.weight = (const float *)first.at;
    else source.packed = first.at;
    source.scales = first.scales;
    return source;
}

INLINE void widen_part(const matrix *source, long kind, long depth, long row, long k, long length, float *to) {
    weight_row from = row_of(source, depth, row, k);
    const float *scales = from.scales;
    long step = step_of(kind), block = k / WEIGHT_BLOCK;
    for (; length >= step; length -= step, block++, to += step, from.at += bytes_of(kind, step)) {
        if (has_scales(kind)) from.scales = scales + scale_at(source, block);
        UNROLL for (int place = 0; place < step; place += LANES) store(to + place, load_weights(kind, from, place));
    }
    if (!has_scales(kind) && length > 0) store_part(to, load_last_weights(kind, from, length), length);
}

/* Numbers k .. k + length of a row; k, and of BLOCKS length too, is a multiple of 32. Of anything but TILES. */
static void widen_row(const matrix *source, long depth, long row, long k, long length, float *to) {
    switch (source->kind) {
    case PLAIN: memcpy(to, source->weight + row * depth + k, (size_t)length * sizeof *to); break;
    case BFLOAT16: widen_part(source, BFLOAT16, depth, row, k, length, to); break;
    case FLOAT16: widen_part(source, FLOAT16, depth, row, k, length, to); break;
    case AFFINE4: widen_part(source, AFFINE4, depth, row, k, length, to); break;
    case SCALED8: widen_part(source, SCALED8, depth, row, k, length, to); break;
    case SCALED_FP8: widen_part(source, SCALED_FP8, depth, row, k, length, to); break;
    default: unpack_blocks(source->packed, depth, row, k, length, to);
    }
}

static void look_up_row(const matrix *source, long depth, long row, float *to) {
    if (source->kind == TILES) untile_row(source->packed, row, depth, to);
    else widen_row(source, depth, row, 0, depth, to);
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
