/* What a grammar forbids becomes -inf: masks.py. Included by native.c. */

typedef struct {
    float *logits;
    const float *own; /* may be the same */
    const int32_t *masks, *bits, *judged_start;
    long num_seats, num_places, mask_stride, width, num_words, num_threads; /* words of 32 bits in a mask */
} mask_work;

static void restrict_row(const float *from, float *to, const int32_t *words, long width) {
    for (long first = 0; first < width; first += 32) {
        long count = smaller(32, width - first);
        uint32_t word = (uint32_t)words[first / 32];
        for (long i = 0; i < count; i++) to[first + i] = word >> i & 1 ? from[first + i] : -INFINITY;
    }
}

static void restrict_seats(const void *opaque, long begin, long end) {
    const mask_work *work = opaque;
    for (long i = begin; i < end; i++) {
        long seat = i / work->num_places, place = i % work->num_places;
        long row = work->judged_start[seat] + place, mask = work->masks[seat * work->mask_stride + place];
        if (mask <= 0 || row >= work->judged_start[seat + 1]) continue;
        const int32_t *words = work->bits + (mask - 1) * work->num_words;
        float *logits = work->logits + row * work->width;
        restrict_row(logits, logits, words, work->width);
        if (maximum(logits, work->width) == -INFINITY)
            restrict_row(work->own + row * work->width, logits, words, work->width);
    }
}

EXPORT void outrider_restrict(const mask_work *work) {
    long num_rows = work->num_seats * work->num_places;
    for_rows(restrict_seats, work, num_rows, num_rows * work->width, work->num_threads);
}
