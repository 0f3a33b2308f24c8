/* A mixture's experts: rows are gathered by the expert that they chose, each expert answers all of its own at once, and a
 * row's answers are added up in the order of its choices. Included by native.c. */

typedef struct {
    const float *x; /* [num_rows, hidden] */
    const int64_t *ids; /* [num_rows, num_chosen] */
    const float *shares; /* like ids */
    const float *up_bias, *down_bias; /* of every expert, or NULL */
    float *out, *answers; /* like x; [num_rows, num_chosen, hidden] */
    float *scratch; /* num_rows * (2 * hidden + 3 * inner) */
    int64_t *order; /* num_rows * num_chosen + num_experts + 1 */
    long num_rows, num_chosen, num_experts, hidden, inner, gelu, num_threads;
    matrix up, down; /* [num_experts * 2 * inner, hidden], [num_experts * hidden, inner] */
} experts_work;

/* Which choices are of each expert: those of expert e are order[starts[e]] to order[starts[e + 1]]. */
static void sort_choices(const experts_work *work, int64_t *order, int64_t *starts) {
    long count = work->num_rows * work->num_chosen;
    memset(starts, 0, (size_t)(work->num_experts + 1) * sizeof *starts);
    for (long i = 0; i < count; i++) starts[work->ids[i] + 1]++;
    for (long expert = 0; expert < work->num_experts; expert++) starts[expert + 1] += starts[expert];
    for (long i = 0; i < count; i++) order[starts[work->ids[i]]++] = i;
    for (long expert = work->num_experts; expert > 0; expert--) starts[expert] = starts[expert - 1];
    starts[0] = 0;
}

static void ask_expert(const experts_work *work, long expert, const int64_t *choices, long count) {
    long hidden = work->hidden, inner = work->inner, width = 2 * inner;
    float *rows = work->scratch, *wide = rows + count * hidden, *narrow = wide + count * width, *answers = narrow + count * inner;
    for (long i = 0; i < count; i++)
        memcpy(rows + i * hidden, work->x + choices[i] / work->num_chosen * hidden, (size_t)hidden * sizeof *rows);
    matrix up = from_row(work->up, hidden, expert * width), down = from_row(work->down, inner, expert * hidden);
    const float *up_bias = work->up_bias ? work->up_bias + expert * width : NULL;
    const float *down_bias = work->down_bias ? work->down_bias + expert * hidden : NULL;
    linear_work first = {rows, up_bias, wide, count, width, hidden, work->num_threads, up};
    outrider_linear(&first);
    gated_work gated = {wide, narrow, count, inner, work->gelu, work->num_threads};
    outrider_gated(&gated);
    linear_work second = {narrow, down_bias, answers, count, hidden, inner, work->num_threads, down};
    outrider_linear(&second);
    for (long i = 0; i < count; i++)
        memcpy(work->answers + choices[i] * hidden, answers + i * hidden, (size_t)hidden * sizeof *answers);
}

static void add_answers(const void *opaque, long first, long end) {
    const experts_work *work = opaque;
    for (long row = first; row < end; row++)
        for (long place = 0; place < work->num_chosen; place++) {
            long choice = row * work->num_chosen + place;
            const float *answer = work->answers + choice * work->hidden;
            float *out = work->out + row * work->hidden, share = work->shares[choice];
            for (long i = 0; i < work->hidden; i++) out[i] = place ? out[i] + answer[i] * share : answer[i] * share;
        }
}

EXPORT void outrider_experts(const experts_work *work) {
    int64_t *order = work->order, *starts = order + work->num_rows * work->num_chosen;
    sort_choices(work, order, starts);
    for (long expert = 0; expert < work->num_experts; expert++) {
        long count = starts[expert + 1] - starts[expert];
        if (count) ask_expert(work, expert, order + starts[expert], count);
    }
    for_rows(add_answers, work, work->num_rows, work->num_rows * work->num_chosen * work->hidden, work->num_threads);
}
