/* Mamba-2 between its two projections: a short convolution of every channel, then every head's state, row after row.
 * Going row after row, not in chunks, a row has the same bits whatever is computed with it. Included by native.c.
 *
 * A request starts from one of the states its slot keeps, and leaves the states after some of its rows in places that
 * may include that one: each task reads its share of the state before it writes any. The state after a token that a
 * snapshot is wanted of is left in the snapshots too. */

typedef struct {
    const float *input, *conv_weight, *conv_bias, *step_bias, *rate, *skip;
    const int32_t *query_start;
    const int64_t *slots, *read, *kept_rows;
    float *conv_states, *states, *mixed, *steps, *out;
    const int64_t *indices, *wanted;
    float *conv_snapshots, *snapshots;
    long num_rows, num_requests, num_entries, num_kept, first_entry, num_wanted, num_slots;
    long kernel, num_heads, head_dim, state_size, num_groups, num_threads;
} mamba_work;

INLINE long inner_width(const mamba_work *work) { return work->num_heads * work->head_dim; }
INLINE long conv_width(const mamba_work *work) { return inner_width(work) + 2 * work->num_groups * work->state_size; }
INLINE long input_width(const mamba_work *work) { return inner_width(work) + conv_width(work) + work->num_heads; }

INLINE float *entry_of(const mamba_work *work, float *states, long request, long number, long size) {
    return states + (work->slots[request] * work->num_entries + number) * size;
}

/* The row after which a request's snapshot of this number is wanted, -1: none of this pass. */
INLINE long wanted_row(const mamba_work *work, long request, long number) {
    long begin = work->query_start[request], end = work->query_start[request + 1];
    if (begin == end) return -1;
    long row = begin + work->wanted[number * work->num_slots + work->slots[request]] - 1 - work->indices[begin];
    return row >= begin && row < end ? row : -1;
}

INLINE float *snapshot_of(const mamba_work *work, float *snapshots, long request, long number, long size) {
    return snapshots + work->wanted[(work->num_wanted + number) * work->num_slots + work->slots[request]] * size;
}

/* The convolution's input at a row, for LANES channels. `before` are the last rows of the request's past. */
INLINE vector conv_input(const mamba_work *work, const vector *before, long request, long row, long channel) {
    long behind = row - work->query_start[request];
    if (behind < 0) return before[behind + work->kernel - 1];
    const float *x = work->input + row * input_width(work) + inner_width(work) + channel;
    return load_up_to(x, conv_width(work) - channel);
}

static void convolve(const mamba_work *work, long request, long channel) {
    long width = conv_width(work), count = width - channel, past = work->kernel - 1;
    vector before[past + 1];
    const float *state = entry_of(work, work->conv_states, request, work->read[request], past * width) + channel;
    for (long i = 0; i < past; i++) before[i] = load_up_to(state + i * width, count);
    for (long row = work->query_start[request]; row < work->query_start[request + 1]; row++) {
        vector sum = work->conv_bias ? load_up_to(work->conv_bias + channel, count) : (vector){0};
        for (long i = 0; i <= past; i++) {
            vector weight = load_up_to(work->conv_weight + i * width + channel, count);
            sum = fma_vector(weight, conv_input(work, before, request, row - past + i, channel), sum);
        }
        store_up_to(work->mixed + row * width + channel, sum / (1.0f + exp_vector(-sum)), count);
    }
    for (long number = 0; number < work->num_wanted; number++) {
        long row = wanted_row(work, request, number);
        if (row < 0) continue;
        float *out = snapshot_of(work, work->conv_snapshots, request, number, past * width) + channel;
        for (long i = 0; i < past; i++)
            store_up_to(out + i * width, conv_input(work, before, request, row - past + 1 + i, channel), count);
    }
    for (long kept = 0; kept < work->num_kept; kept++) {
        long row = work->kept_rows[request * work->num_kept + kept];
        float *out = entry_of(work, work->conv_states, request, work->first_entry + kept, past * width) + channel;
        for (long i = 0; i < past; i++)
            store_up_to(out + i * width, conv_input(work, before, request, row - past + 1 + i, channel), count);
    }
}

static void convolve_parts(const void *opaque, long first, long end) {
    const mamba_work *work = opaque;
    for (long part = first; part < end; part++)
        convolve(work, part % work->num_requests, part / work->num_requests * LANES);
}

/* Of every row and head: the step, softplus(input + bias), and what it leaves of the state, exp(step * rate). */
static void step_rows(const void *opaque, long first, long end) {
    const mamba_work *work = opaque;
    long width = input_width(work), heads = work->num_heads;
    for (long row = first; row < end; row++)
        for (long head = 0; head < heads; head++) {
            float x = work->input[row * width + width - heads + head] + work->step_bias[head];
            float step = (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x)));
            work->steps[2 * (row * heads + head)] = step;
            work->steps[2 * (row * heads + head) + 1] = expf(step * work->rate[head]);
        }
}

/* LANES channels of one head: state[n] is n's row of the state, state_size rows in all. */
static void scan(const mamba_work *work, long request, long head, long channel) {
    long size = work->state_size, dim = work->head_dim, count = dim - channel;
    long group = head / (work->num_heads / work->num_groups), whole = work->num_heads * size * dim;
    long offset = head * size * dim + channel;
    vector state[size];
    const float *start = entry_of(work, work->states, request, work->read[request], whole) + offset;
    for (long n = 0; n < size; n++) state[n] = load_up_to(start + n * dim, count);
    long wanted[work->num_wanted + 1];
    for (long number = 0; number < work->num_wanted; number++) wanted[number] = wanted_row(work, request, number);
    for (long row = work->query_start[request]; row < work->query_start[request + 1]; row++) {
        const float *mixed = work->mixed + row * conv_width(work), *b = mixed + inner_width(work) + group * size;
        const float *c = b + work->num_groups * size, *step = work->steps + 2 * (row * work->num_heads + head);
        vector x = load_up_to(mixed + head * dim + channel, count), news = x * step[0];
        vector sums[4] = {{0}}; /* take turns, as one running sum would wait for itself */
        for (long n = 0; n < size; n++) {
            state[n] = fma_vector(news, spread(b[n]), state[n] * step[1]);
            vector turn = sums[0];
            sums[0] = sums[1], sums[1] = sums[2], sums[2] = sums[3];
            sums[3] = fma_vector(state[n], spread(c[n]), turn);
        }
        vector y = fma_vector(x, spread(work->skip[head]), (sums[0] + sums[1]) + (sums[2] + sums[3]));
        store_up_to(work->out + row * inner_width(work) + head * dim + channel, y, count);
        for (long kept = 0; kept < work->num_kept; kept++)
            if (work->kept_rows[request * work->num_kept + kept] == row) {
                float *out = entry_of(work, work->states, request, work->first_entry + kept, whole) + offset;
                for (long n = 0; n < size; n++) store_up_to(out + n * dim, state[n], count);
            }
        for (long number = 0; number < work->num_wanted; number++)
            if (wanted[number] == row) {
                float *out = snapshot_of(work, work->snapshots, request, number, whole) + offset;
                for (long n = 0; n < size; n++) store_up_to(out + n * dim, state[n], count);
            }
    }
}

static void scan_heads(const void *opaque, long first, long end) {
    const mamba_work *work = opaque;
    for (long part = first; part < end; part++)
        for (long channel = 0; channel < work->head_dim; channel += LANES)
            scan(work, part % work->num_requests, part / work->num_requests, channel);
}

EXPORT void outrider_mamba(const mamba_work *work) {
    long rows = work->num_rows, parts = ceil_div(conv_width(work), LANES) * work->num_requests;
    for_rows(convolve_parts, work, parts, rows * conv_width(work) * work->kernel, work->num_threads);
    for_rows(step_rows, work, rows, rows * work->num_heads * 30, work->num_threads);
    long amount = (rows + work->num_requests) * inner_width(work) * work->state_size;
    for_rows(scan_heads, work, work->num_requests * work->num_heads, amount, work->num_threads);
}
