/* Log-probabilities: logprobs.py, of a few tokens a row instead of all. Included by native.c. */

typedef struct {
    const float *logits;
    const int64_t *rows, *chosen; /* [R] */
    float *own, *values;  /* [R] of the chosen tokens, [R, most] of the best ones */
    int64_t *ranks, *ids; /* the same */
    long num_rows, width, most, num_threads;
} logprob_work;

INLINE float highest_lane(vector v, long count) {
    return fold_greatest(choose(lane_numbers() < (int32_t)smaller(count, LANES), v, spread(-INFINITY)));
}

/* Keeps values in descending order, the first of equals first, and forgets the last. */
static void insert(float *values, int64_t *ids, long count, float value, int64_t id) {
    long place = count - 1;
    for (; place > 0 && value > values[place - 1]; place--) values[place] = values[place - 1], ids[place] = ids[place - 1];
    values[place] = value, ids[place] = id;
}

static void find_best(const float *logits, long width, long most, float *values, int64_t *ids) {
    for (long i = 0; i < most; i++) insert(values, ids, i + 1, logits[i], i);
    for (long first = most; most > 0 && first < width; first += LANES) {
        vector some = load_up_to(logits + first, width - first);
        if (!(highest_lane(some, width - first) > values[most - 1])) continue;
        for (long i = first; i < smaller(first + LANES, width); i++)
            if (logits[i] > values[most - 1]) insert(values, ids, most, logits[i], i);
    }
}

/* 1, and one for every token that is more likely. */
static int64_t rank_among(const float *logits, long width, float best, float share, float own) {
    integers found = {0};
    for (long first = 0; first < width; first += LANES) {
        vector each = (load_up_to(logits + first, width - first) - best) - share;
        integers counted = lane_numbers() < (int32_t)smaller(width - first, LANES);
        found -= (each > own) & counted;
    }
    int64_t rank = 1;
    for (int lane = 0; lane < LANES; lane++) rank += found[lane];
    return rank;
}

static void logprob_rows(const void *opaque, long first, long end) {
    const logprob_work *work = opaque;
    for (long row = first; row < end; row++) {
        const float *logits = work->logits + work->rows[row] * work->width;
        float *values = work->values + row * work->most, best = maximum(logits, work->width);
        float share = (float)log(mass_of(logits, work->width, 1.0f, best)); /* of all others beside the best */
        float own = (logits[work->chosen[row]] - best) - share;
        find_best(logits, work->width, work->most, values, work->ids + row * work->most);
        for (long i = 0; i < work->most; i++) values[i] = (values[i] - best) - share;
        work->own[row] = own;
        work->ranks[row] = rank_among(logits, work->width, best, share, own);
    }
}

EXPORT void outrider_logprobs(const logprob_work *work) {
    for_rows(logprob_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}
