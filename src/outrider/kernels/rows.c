/* Row by row: norms, activations, argmax, rotary embedding and cache write. Included by native.c. */

typedef void row_function(const void *work, long first, long end);

static void for_rows(row_function *function, const void *work, long num_rows, long amount, long num_threads) {
    if (amount < SMALL_WORK || num_threads == 1) {
        function(work, 0, num_rows);
        return;
    }
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (long part = 0; part < num_threads; part++)
        function(work, part * num_rows / num_threads, (part + 1) * num_rows / num_threads);
}

typedef struct {
    const float *x, *residual, *weight;
    float *out, *sum;
    long num_rows, width, num_threads;
    double eps, offset;
} norm_work;

/* out = x / rms(x) * (weight + offset), where x takes the residual in first when there is one. */
static void norm_row(const norm_work *work, const float *x, const float *residual, float *sum, float *out) {
    long width = work->width;
    vector a = {0}, b = {0}, c = {0}, d = {0}; /* take turns, as one running sum would wait for itself */
    for (long i = 0; i < width; i += LANES) {
        vector v = load_up_to(x + i, width - i), turn = a;
        if (residual) {
            v += load_up_to(residual + i, width - i);
            store_up_to(sum + i, v, width - i);
        }
        a = b, b = c, c = d, d = fma_vector(v, v, turn);
    }
    float mean = fold((a + b) + (c + d)) / (float)width;
    float scale = 1.0f / sqrtf(mean + (float)work->eps), offset = (float)work->offset;
    const float *source = residual ? sum : x;
    for (long i = 0; i < width; i += LANES) {
        vector gain = load_up_to(work->weight + i, width - i) + offset;
        store_up_to(out + i, load_up_to(source + i, width - i) * scale * gain, width - i);
    }
}

static void norm_rows(const void *opaque, long first, long end) {
    const norm_work *work = opaque;
    for (long at = first * work->width; at < end * work->width; at += work->width)
        if (work->residual) norm_row(work, work->x + at, work->residual + at, work->sum + at, work->out + at);
        else norm_row(work, work->x + at, NULL, NULL, work->out + at);
}

EXPORT void outrider_rms_norm(const norm_work *work) {
    for_rows(norm_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    long num_rows, width, gelu, num_threads;
} gated_work;

/* x * sigmoid(s) where s = x (silu), or s = 2 * sqrt(2/pi) * (x + 0.044715 x^3), which is gelu's tanh form. */
static void gated_rows(const void *opaque, long first, long end) {
    const gated_work *work = opaque;
    long width = work->width;
    for (long row = first; row < end; row++) {
        const float *gate = work->gate_up + row * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            vector x = load_up_to(gate + i, width - i), s = x;
            if (work->gelu) s = 1.5957691216f * fma_vector(0.044715f * x * x, x, x);
            vector y = x / (1.0f + exp_vector(-s)) * load_up_to(up + i, width - i);
            store_up_to(work->out + row * width + i, y, width - i);
        }
    }
}

EXPORT void outrider_gated(const gated_work *work) {
    for_rows(gated_rows, work, work->num_rows, work->num_rows * work->width * 4, work->num_threads);
}

typedef struct {
    const float *x;
    int64_t *out;
    long num_rows, width, num_threads;
} argmax_work;

static float maximum(const float *x, long width) {
    vector best = spread(-INFINITY);
    long i = 0;
    for (; i + LANES <= width; i += LANES) best = greatest(load(x + i), best);
    float top = fold_greatest(best);
    for (; i < width; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static int64_t argmax(const float *x, long width) {
    const long stretch = 1024;
    float top = -INFINITY;
    long found = 0;
    for (long start = 0; start < width; start += stretch) {
        float highest = maximum(x + start, smaller(stretch, width - start));
        if (highest > top) top = highest, found = start;
    }
    for (long i = found; i < width; i++)
        if (x[i] == top) return i;
    return 0; /* nothing but NaN */
}

static void argmax_rows(const void *opaque, long first, long end) {
    const argmax_work *work = opaque;
    for (long row = first; row < end; row++) work->out[row] = argmax(work->x + row * work->width, work->width);
}

EXPORT void outrider_row_argmax(const argmax_work *work) {
    for_rows(argmax_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}

typedef struct {
    const void *pages; /* floats, or (halves) numbers of half precision */
    long page_stride, row_stride, page_size, num_heads, head_dim, halves;
} page_view;

INLINE long page_bytes(const page_view *view, long count) { return count * (view->halves ? 2 : 4); }

INLINE void *page_row(const page_view *view, long page, long offset) {
    return (char *)view->pages + page_bytes(view, page * view->page_stride + offset * view->row_stride);
}

/* The nearest number of half precision; what is too large for any becomes the largest. NaN stays NaN. */
INLINE uint16_t half_of(float x) {
    uint32_t bits, sign;
    x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits < 0x38800000) { /* below the least normal one: adding a half leaves as many bits as it can have */
        float moved;
        memcpy(&moved, &bits, sizeof bits);
        moved += 0.5f;
        memcpy(&bits, &moved, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

static void store_halves(const float *from, long count, uint16_t *to) {
    long i = 0;
#if LANES == 16
    for (; i + LANES <= count; i += LANES) {
        vector x = smallest(spread(65504.0f), greatest(spread(-65504.0f), load(from + i)));
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
    }
#elif LANES == 8 && defined(__F16C__)
    for (; i + LANES <= count; i += LANES) {
        vector x = smallest(spread(65504.0f), greatest(spread(-65504.0f), load(from + i)));
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; i++) to[i] = half_of(from[i]);
}

/* The numbers of all heads of a row, as pages keep them. */
static void write_page_row(const page_view *view, int64_t location, const float *numbers) {
    void *to = page_row(view, location / view->page_size, location % view->page_size);
    long count = view->num_heads * view->head_dim;
    if (view->halves) store_halves(numbers, count, to);
    else memcpy(to, numbers, (size_t)count * sizeof *numbers);
}

typedef struct {
    const float *query, *key, *value, *cosine, *sine;
    const int64_t *write_locations;
    float *query_out;
    long num_rows, query_stride, key_stride, value_stride, num_query_heads, rotary_half, num_threads;
    page_view keys, values;
} rope_work;

static void rotate(const rope_work *work, const float *x, float *out, long row, long num_heads) {
    const float *cosine = work->cosine + row * work->rotary_half, *sine = work->sine + row * work->rotary_half;
    long half = work->rotary_half, dim = work->keys.head_dim;
    for (long head = 0; head < num_heads; head++, x += dim, out += dim) {
        for (long i = 0; i < half; i++) {
            out[i] = x[i] * cosine[i] - x[half + i] * sine[i];
            out[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
        }
        for (long i = 2 * half; i < dim; i++) out[i] = x[i];
    }
}

static void rope_rows(const void *opaque, long first, long end) {
    const rope_work *work = opaque;
    long query_width = work->num_query_heads * work->keys.head_dim;
    float turned[work->keys.num_heads * work->keys.head_dim];
    for (long row = first; row < end; row++) {
        rotate(work, work->query + row * work->query_stride, work->query_out + row * query_width, row,
               work->num_query_heads);
        int64_t location = work->write_locations[row];
        if (location < 0) continue;
        rotate(work, work->key + row * work->key_stride, turned, row, work->keys.num_heads);
        write_page_row(&work->keys, location, turned);
        write_page_row(&work->values, location, work->value + row * work->value_stride);
    }
}

EXPORT void outrider_rope_write(const rope_work *work) {
    long amount = work->num_rows * work->num_query_heads * work->keys.head_dim;
    for_rows(rope_rows, work, work->num_rows, amount, work->num_threads);
}
