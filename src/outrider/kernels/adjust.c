/* What is added to logits before a token is chosen: penalties.py, penalties only where a text has tokens instead of over
 * the whole vocabulary. Included by native.c. */

typedef struct {
    float *logits;
    const float *bias; /* by slot */
    const int64_t *slots;
    long num_rows, width, bias_stride, num_threads;
} bias_work;

static void bias_rows(const void *opaque, long first, long end) {
    const bias_work *work = opaque;
    for (long row = first; row < end; row++) {
        float *logits = work->logits + row * work->width;
        const float *bias = work->bias + work->slots[row] * work->bias_stride;
        for (long i = 0; i < work->width; i++) logits[i] += bias[i];
    }
}

EXPORT void outrider_add_bias(const bias_work *work) {
    for_rows(bias_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}

typedef struct {
    float *logits;
    const int64_t *slots, *last, *texts; /* a row's text is texts[slot], up to its last place */
    const int64_t *prompt_len;           /* this and the next ones by slot */
    const float *repetition, *presence, *frequency;
    long num_rows, width, text_stride, first_id, num_threads; /* the first column's id */
} penalty_work;

INLINE int32_t *mark_of(const penalty_work *work, int32_t *marks, int64_t token) {
    int64_t column = token - work->first_id;
    return column >= 0 && column < work->width ? marks + column : NULL;
}

/* Marks are 0 before and after a row; between, twice how often an answer has a token, and 1 as the text has it. */
static void penalise_row(const penalty_work *work, long row, int32_t *marks) {
    long slot = work->slots[row], end = work->last[row] + 1;
    float repetition = work->repetition[slot], presence = work->presence[slot], frequency = work->frequency[slot];
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
    const int64_t *text = work->texts + slot * work->text_stride;
    float *logits = work->logits + row * work->width;
    for (long i = 0; i < end; i++) {
        int32_t *mark = mark_of(work, marks, text[i]);
        if (mark) *mark = (*mark | 1) + (i >= work->prompt_len[slot] ? 2 : 0);
    }
    for (long i = 0; i < end; i++) {
        int32_t *mark = mark_of(work, marks, text[i]);
        if (!mark || !*mark) continue;
        float *x = logits + (mark - marks), count = (float)(*mark / 2);
        *x = *x > 0.0f ? *x / repetition : *x * repetition;
        *x -= frequency * count;
        if (count > 0.0f) *x -= presence;
        *mark = 0;
    }
}

static void penalise_rows(const void *opaque, long first, long end) {
    const penalty_work *work = opaque;
    int32_t *marks = calloc((size_t)work->width, sizeof *marks);
    for (long row = first; row < end; row++) penalise_row(work, row, marks);
    free(marks);
}

EXPORT void outrider_penalise(const penalty_work *work) {
    for_rows(penalise_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}
