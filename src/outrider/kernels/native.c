/* CPU kernels in fp32 for native.py: linear, norms, activations, rotary cache writes, paged attention, argmax.
 * One rule everywhere: the bits of an output row depend on that row's inputs alone, never on batch or thread count.
 *
 * How the rule is kept: every output element is summed in one fixed order, whichever tile computes it. A dot
 * product is LANES running sums over k = lane, lane + LANES, ... (a short tail is padded with zeros), folded by
 * one fixed tree; fused multiply-adds are written out and the compiler is forbidden to form or reorder any. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define ROW_TILE 8
#define VALUE_ROWS 6
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define ROW_TILE 4 /* sixteen registers hold twelve accumulators */
#define VALUE_ROWS 3
#else
#define LANES 4
#define ROW_TILE 8
#define VALUE_ROWS 6
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef float loose_vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

enum {
    COLUMN_BLOCK = 24, /* a multiple of every tile's column count */
    DEPTH_BLOCK = 1024, /* of k: a tile's rows and columns together stay in the first-level cache */
    SMALL_WORK = 50000, /* multiply-adds below which waking threads costs more than it saves */
    KEY_BLOCK = 128, /* keys of one partial softmax; its bounds are absolute, so that they are every row's */
    QUERY_TILE = 32, /* (row, head) pairs that share one pass over a block of keys */
};

/* ---- vectors ---- */

INLINE vector load(const float *p) { return *(const loose_vector *)p; }
INLINE void store(float *p, vector v) { *(loose_vector *)p = v; }
INLINE vector spread(float s) { return s - (vector){0}; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

INLINE vector fma_vector(vector a, vector b, vector c) {
#if LANES == 16
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE vector load_part(const float *p, long count) {
#if LANES == 16
    return (vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
    vector v = {0};
    for (long i = 0; i < count; i++) v[i] = p[i];
    return v;
#endif
}

INLINE void store_part(float *p, vector v, long count) {
    for (long i = 0; i < count; i++) p[i] = v[i];
}

INLINE vector load_up_to(const float *p, long count) { return count >= LANES ? load(p) : load_part(p, count); }

INLINE void store_up_to(float *p, vector v, long count) {
    if (count >= LANES) store(p, v);
    else store_part(p, v, count);
}

INLINE vector choose(integers mask, vector yes, vector no) {
    return (vector)(((integers)yes & mask) | ((integers)no & ~mask));
}

INLINE integers lane_numbers(void) {
    integers numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

/* Both vectors hold segments of 2 * half lanes; fold each segment in two and line the results up. */
INLINE vector fold_pair(vector a, vector b, int half) {
#if LANES == 16
    if (half == 8)
        return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if (half == 4)
        return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    if (half == 2)
        return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif LANES == 8
    if (half == 4) return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    if (half == 2) return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    if (half == 2) return SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
    return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7);
#endif
}

/* sums[i] = the sum of all lanes of v[i]; count is a constant after inlining. Always the same tree per vector. */
INLINE void fold_all(const vector *v, int count, float *sums) {
#pragma GCC unroll 32
    for (int base = 0; base < count; base += LANES) {
        vector level[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) level[i] = base + i < count ? v[base + i] : (vector){0};
#pragma GCC unroll 4
        for (int half = LANES / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < half; i++) level[i] = fold_pair(level[2 * i], level[2 * i + 1], half);
        store(sums + base, level[0]);
    }
}

INLINE float fold(vector v) {
    float sums[LANES];
    fold_all(&v, 1, sums);
    return sums[0];
}

/* exp to about one unit in the last place: 2^n * e^r with |r| <= ln(2)/2, e^r - 1 - r a minimax polynomial. */
INLINE vector exp_vector(vector x) {
    x = choose(x > 89.0f, spread(89.0f), x);
    x = choose(x < -104.0f, spread(-104.0f), x);
    const vector magic = spread(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    vector shifted = fma_vector(x, spread(1.44269504f), magic);
    vector n = shifted - magic;
    vector r = fma_vector(n, spread(-0.693359375f), x);
    r = fma_vector(n, spread(2.12194440e-4f), r);
    vector tail = spread(1.381454017e-3f);
    tail = fma_vector(tail, r, spread(8.368745117e-3f));
    tail = fma_vector(tail, r, spread(4.166839078e-2f));
    tail = fma_vector(tail, r, spread(1.666652040e-1f));
    tail = fma_vector(tail, r, spread(4.999999343e-1f));
    vector power = fma_vector(tail, r * r, r) + 1.0f;
    /* two factors, as 2^n alone would leave the range of exponents at both ends */
    integers whole = (integers)shifted - (integers)magic, first = whole >> 1, second = whole - first;
    return power * (vector)((first + 127) << 23) * (vector)((second + 127) << 23);
}

INLINE float exp_scalar(float x) { return exp_vector(spread(x))[0]; }

INLINE vector tanh_vector(vector x) {
    vector square = x * x, near = spread(-5.528633621e-3f);
    near = fma_vector(near, square, spread(2.048331607e-2f));
    near = fma_vector(near, square, spread(-5.369296803e-2f));
    near = fma_vector(near, square, spread(1.333089976e-1f));
    near = fma_vector(near, square, spread(-3.333326288e-1f));
    near = fma_vector(near * square, x, x);
    vector far = 1.0f - 2.0f / (exp_vector(x + x) + 1.0f);
    return choose((x > -0.64f) & (x < 0.64f), near, far);
}

/* ---- dot products of rows with columns: the heart of linear and of attention scores ---- */

typedef struct {
    const float *rows; /* [num_rows, length] with row_stride */
    long row_stride, num_rows;
    const float *const *columns; /* one pointer for each column */
    long num_columns, length;
    float *out; /* [num_rows, num_columns] with out_stride */
    long out_stride;
    int add; /* add to what out holds */
    long ahead; /* distance of the weights that come next, to be fetched meanwhile; 0 for none */
} dots;

INLINE void dot_tile(const dots *d, int rows, int columns, long row, long column, long ahead) {
    const float *x[ROW_TILE], *w[8];
    vector sums[ROW_TILE * 8];
    for (int r = 0; r < rows; r++) x[r] = d->rows + (row + r) * d->row_stride;
    for (int c = 0; c < columns; c++) w[c] = d->columns[column + c];
    for (int i = 0; i < rows * columns; i++) sums[i] = (vector){0};
    long k = 0;
    for (; k + LANES <= d->length; k += LANES) {
        vector a[8];
        if (rows > columns) {
            for (int c = 0; c < columns; c++) a[c] = load(w[c] + k);
            for (int c = 0; c < columns; c++) __builtin_prefetch(w[c] + k + ahead, 0, 2);
            for (int r = 0; r < rows; r++) {
                vector b = load(x[r] + k);
                for (int c = 0; c < columns; c++) sums[r * columns + c] = fma_vector(a[c], b, sums[r * columns + c]);
            }
        } else {
            for (int r = 0; r < rows; r++) a[r] = load(x[r] + k);
            for (int c = 0; c < columns; c++) {
                vector b = load(w[c] + k);
                __builtin_prefetch(w[c] + k + ahead, 0, 2);
                for (int r = 0; r < rows; r++) sums[r * columns + c] = fma_vector(b, a[r], sums[r * columns + c]);
            }
        }
    }
    if (k < d->length)
        for (int r = 0; r < rows; r++) {
            vector b = load_part(x[r] + k, d->length - k);
            for (int c = 0; c < columns; c++)
                sums[r * columns + c] = fma_vector(load_part(w[c] + k, d->length - k), b, sums[r * columns + c]);
        }
    float folded[32];
    fold_all(sums, rows * columns, folded);
    for (int r = 0; r < rows; r++) {
        float *out = d->out + (row + r) * d->out_stride + column;
        for (int c = 0; c < columns; c++) out[c] = d->add ? out[c] + folded[r * columns + c] : folded[r * columns + c];
    }
}

/* Row tiles each pass over all columns. A pass fetches its share of the next columns, to keep the memory busy. */
INLINE void dot_pass(const dots *d, int rows, int columns, long row, long pass, long num_passes) {
    long column = 0;
    for (long panel = 0; column + columns <= d->num_columns; panel++, column += columns)
        dot_tile(d, rows, columns, row, column, panel % num_passes == pass ? d->ahead : 0);
    for (; column < d->num_columns; column++) dot_tile(d, rows, 1, row, column, d->ahead);
}

static void dot_all(const dots *d) {
    long num_passes = ceil_div(d->num_rows, ROW_TILE);
    for (long pass = 0; pass < num_passes; pass++) {
        long row = pass * d->num_rows / num_passes, rows = (pass + 1) * d->num_rows / num_passes - row;
        switch (rows) {
        case 1: dot_pass(d, 1, 8, row, pass, num_passes); break;
#if ROW_TILE == 4
        case 2: dot_pass(d, 2, 6, row, pass, num_passes); break;
        case 3: dot_pass(d, 3, 4, row, pass, num_passes); break;
        case 4: dot_pass(d, 4, 3, row, pass, num_passes); break;
#else
        case 2: dot_pass(d, 2, 8, row, pass, num_passes); break;
        case 3: dot_pass(d, 3, 8, row, pass, num_passes); break;
        case 4: dot_pass(d, 4, 6, row, pass, num_passes); break;
        case 5: dot_pass(d, 5, 4, row, pass, num_passes); break;
        case 6: dot_pass(d, 6, 4, row, pass, num_passes); break;
        case 7: dot_pass(d, 7, 3, row, pass, num_passes); break;
        case 8: dot_pass(d, 8, 3, row, pass, num_passes); break;
#endif
        }
    }
}

/* ---- linear ---- */

typedef struct {
    const float *x, *weight, *bias;
    float *out;
    long num_rows, num_outputs, depth;
    long num_column_blocks, num_row_groups, depth_block;
} linear_work;

static void linear_task(const linear_work *work, long task, long next_task) {
    long first = task % work->num_column_blocks * COLUMN_BLOCK, group = task / work->num_column_blocks;
    long next = next_task % work->num_column_blocks * COLUMN_BLOCK, depth = work->depth;
    long row = group * work->num_rows / work->num_row_groups;
    long row_end = (group + 1) * work->num_rows / work->num_row_groups;
    long count = smaller(COLUMN_BLOCK, work->num_outputs - first);
    float *out = work->out + row * work->num_outputs + first;
    for (long k = 0; k < depth; k += work->depth_block) {
        const float *columns[COLUMN_BLOCK];
        for (long c = 0; c < count; c++) columns[c] = work->weight + (first + c) * depth + k;
        dots d = {work->x + row * depth + k, depth, row_end - row, columns, count,
                  smaller(work->depth_block, depth - k), out, work->num_outputs, k > 0, (next - first) * depth};
        dot_all(&d);
    }
    if (work->bias)
        for (long r = 0; r < row_end - row; r++)
            for (long c = 0; c < count; c++) out[r * work->num_outputs + c] += work->bias[first + c];
}

EXPORT void outrider_linear(const float *x, const float *weight, const float *bias, float *out, long num_rows,
                            long num_outputs, long depth, int num_threads) {
    long depth_blocks = larger(1, ceil_div(depth, DEPTH_BLOCK)); /* from the depth alone: it sets the order of sums */
    linear_work work = {x, weight, bias, out, num_rows, num_outputs, depth, ceil_div(num_outputs, COLUMN_BLOCK), 1,
                        ceil_div(ceil_div(depth, depth_blocks), LANES) * LANES};
    if (num_rows * num_outputs * depth < SMALL_WORK) num_threads = 1;
    if (work.num_column_blocks < 4 * num_threads && num_threads > 1)
        work.num_row_groups = larger(1, smaller(4 * num_threads / work.num_column_blocks, num_rows / ROW_TILE));
    long num_tasks = work.num_column_blocks * work.num_row_groups, counter = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        /* a thread claims its next task before it works on this one, so that it can fetch the weights ahead */
        long task = __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED);
        while (task < num_tasks) {
            long next = __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED);
            linear_task(&work, task, next < num_tasks ? next : task);
            task = next;
        }
    }
}

/* ---- row by row: norms, activations, argmax ---- */

/* out = x / rms(x) * (weight + offset), where x first takes the residual in when there is one. */
static void norm_row(const float *x, const float *weight, float *out, long width, float eps, float offset) {
    vector squares[4] = {{0}};
    for (long i = 0; i < width; i += LANES) {
        vector v = load_up_to(x + i, width - i);
        squares[i / LANES % 4] = fma_vector(v, v, squares[i / LANES % 4]);
    }
    float mean = fold((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)width;
    vector scale = spread(1.0f / sqrtf(mean + eps));
    for (long i = 0; i < width; i += LANES) {
        vector gain = load_up_to(weight + i, width - i) + offset;
        store_up_to(out + i, load_up_to(x + i, width - i) * scale * gain, width - i);
    }
}

EXPORT void outrider_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum,
                              long num_rows, long width, float eps, float offset, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > SMALL_WORK)
    for (long row = 0; row < num_rows; row++) {
        const float *source = x + row * width;
        if (residual) {
            for (long i = 0; i < width; i++) sum[row * width + i] = source[i] + residual[row * width + i];
            source = sum + row * width;
        }
        norm_row(source, weight, out + row * width, width, eps, offset);
    }
}

/* x * sigmoid(s) where s = x (silu), or s = 2 * sqrt(2/pi) * (x + 0.044715 x^3), which is gelu's tanh form. */
EXPORT void outrider_gated(const float *gate_up, float *out, long num_rows, long width, int gelu, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > SMALL_WORK / 8)
    for (long row = 0; row < num_rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            vector x = load_up_to(gate + i, width - i), s = x;
            if (gelu) s = 1.5957691216f * fma_vector(0.044715f * x * x, x, x);
            vector y = x / (1.0f + exp_vector(-s)) * load_up_to(up + i, width - i);
            store_up_to(out + row * width + i, y, width - i);
        }
    }
}

static int64_t argmax(const float *x, long width) {
    vector best = spread(-INFINITY);
    long i = 0;
    for (; i + LANES <= width; i += LANES) best = choose(load(x + i) > best, load(x + i), best);
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) top = best[lane] > top ? best[lane] : top;
    for (; i < width; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < width; i++)
        if (x[i] == top) return i;
    return 0; /* nothing but NaN */
}

EXPORT void outrider_row_argmax(const float *x, int64_t *out, long num_rows, long width, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > SMALL_WORK)
    for (long row = 0; row < num_rows; row++) out[row] = argmax(x + row * width, width);
}

/* ---- rotary embedding and cache write ---- */

typedef struct {
    const float *pages;
    long page_stride, page_size, num_heads, head_dim;
} page_view;

INLINE float *page_row(const page_view *view, long page, long offset) {
    return (float *)view->pages + page * view->page_stride + offset * view->num_heads * view->head_dim;
}

typedef struct {
    const float *query, *key, *value, *cosine, *sine;
    const int64_t *write_locations;
    float *query_out;
    long num_rows, query_stride, key_stride, value_stride, num_query_heads, rotary_half, interleaved;
    page_view keys, values;
} rope_work; /* the caller packs it: eight bytes for every field, here and in attention_work */

static void rotate(const rope_work *work, const float *x, float *out, long row, long num_heads) {
    const float *cosine = work->cosine + row * work->rotary_half, *sine = work->sine + row * work->rotary_half;
    long half = work->rotary_half, dim = work->keys.head_dim;
    for (long head = 0; head < num_heads; head++, x += dim, out += dim) {
        if (work->interleaved)
            for (long i = 0; i < half; i++) {
                out[2 * i] = x[2 * i] * cosine[i] - x[2 * i + 1] * sine[i];
                out[2 * i + 1] = x[2 * i + 1] * cosine[i] + x[2 * i] * sine[i];
            }
        else
            for (long i = 0; i < half; i++) {
                out[i] = x[i] * cosine[i] - x[half + i] * sine[i];
                out[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
            }
        for (long i = 2 * half; i < dim; i++) out[i] = x[i];
    }
}

EXPORT void outrider_rope_write(const rope_work *work, int num_threads) {
    long query_width = work->num_query_heads * work->keys.head_dim;
    size_t value_bytes = (size_t)(work->values.num_heads * work->values.head_dim) * sizeof(float);
#pragma omp parallel for num_threads(num_threads) if (work->num_rows * query_width > SMALL_WORK)
    for (long row = 0; row < work->num_rows; row++) {
        rotate(work, work->query + row * work->query_stride, work->query_out + row * query_width, row,
               work->num_query_heads);
        int64_t location = work->write_locations[row];
        if (location < 0) continue;
        long page = location / work->keys.page_size, offset = location % work->keys.page_size;
        rotate(work, work->key + row * work->key_stride, page_row(&work->keys, page, offset), row,
               work->keys.num_heads);
        memcpy(page_row(&work->values, page, offset), work->value + row * work->value_stride, value_bytes);
    }
}

/* ---- paged attention: partial softmaxes over fixed blocks of keys, merged in ascending order ---- */

typedef struct {
    const float *query, *sinks;
    const int32_t *page_table, *query_start;
    const int64_t *indices, *block_end;
    float *out;
    long num_requests, table_width, num_query_heads, first_key, window;
    double scale, softcap;
    page_view keys, values;
} attention_work;

/* Some rows of one request, and some query heads of one key head: pair = row_in_tile * num_heads + head_in_tile. */
typedef struct {
    long request, row, num_rows, key_head, head, num_heads;
    long lower[QUERY_TILE], upper[QUERY_TILE]; /* each row's keys are lower <= key < upper */
    long first_block, end_block;
} query_tile;

/* What a (row, head) pair knows after some keys: their maximum score, the sum of exp(score - maximum), and the
 * values so weighted, Dv of them, which follow in memory. */
typedef struct {
    float maximum, total;
} partial;

INLINE long partial_width(const attention_work *work) { return 2 + work->values.head_dim; }
INLINE long group_size(const attention_work *work) { return work->num_query_heads / work->keys.num_heads; }
INLINE long heads_per_tile(const attention_work *work) { return smaller(group_size(work), QUERY_TILE / 2); }
INLINE long rows_per_tile(const attention_work *work) { return QUERY_TILE / heads_per_tile(work); }
INLINE long tiles_per_row(const attention_work *work) {
    return work->keys.num_heads * ceil_div(group_size(work), heads_per_tile(work));
}

static long count_tiles(const attention_work *work) {
    long count = 0;
    for (long b = 0; b < work->num_requests; b++)
        count += ceil_div(work->query_start[b + 1] - work->query_start[b], rows_per_tile(work));
    return count * tiles_per_row(work);
}

static query_tile find_tile(const attention_work *work, long number) {
    query_tile tile = {0};
    long block = number / tiles_per_row(work), part = number % tiles_per_row(work), rows = rows_per_tile(work);
    for (;; tile.request++) {
        long blocks = ceil_div(work->query_start[tile.request + 1] - work->query_start[tile.request], rows);
        if (block < blocks) break;
        block -= blocks;
    }
    tile.row = work->query_start[tile.request] + block * rows;
    tile.num_rows = smaller(rows, work->query_start[tile.request + 1] - tile.row);
    tile.key_head = part % work->keys.num_heads;
    long first = part / work->keys.num_heads * heads_per_tile(work);
    tile.head = tile.key_head * group_size(work) + first;
    tile.num_heads = smaller(heads_per_tile(work), group_size(work) - first);
    long least = INT64_MAX, most = 0;
    for (long r = 0; r < tile.num_rows; r++) {
        long index = work->indices[tile.row + r];
        tile.lower[r] = larger(work->first_key, work->window > 0 ? larger(0, index - work->window + 1) : 0);
        tile.upper[r] = (work->block_end ? work->block_end[tile.row + r] : index) + 1;
        if (tile.upper[r] <= tile.lower[r]) continue;
        least = smaller(least, tile.lower[r]);
        most = larger(most, tile.upper[r]);
    }
    tile.first_block = most > 0 ? least / KEY_BLOCK : 0;
    tile.end_block = ceil_div(most, KEY_BLOCK);
    return tile;
}

/* scores[0..KEY_BLOCK) become exp(score - maximum) from begin to end, zero elsewhere in the vectors touched. */
static partial soften(float *scores, long begin, long end, float softcap) {
    vector highest = spread(-INFINITY), total = {0};
    long start = begin / LANES * LANES;
    for (long i = start; i < end; i += LANES) {
        integers key = lane_numbers() + (int32_t)i;
        vector s = load(scores + i);
        if (softcap > 0.0f) s = softcap * tanh_vector(s / softcap);
        s = choose((key >= (int32_t)begin) & (key < (int32_t)end), s, spread(-INFINITY));
        highest = choose(s > highest, s, highest);
        store(scores + i, s);
    }
    float maximum = highest[0];
    for (int lane = 1; lane < LANES; lane++) maximum = highest[lane] > maximum ? highest[lane] : maximum;
    for (long i = start; i < end; i += LANES) {
        vector s = load(scores + i);
        vector weight = choose(s == -INFINITY, (vector){0}, exp_vector(s - maximum));
        total += weight;
        store(scores + i, weight);
    }
    return (partial){maximum, fold(total)};
}

/* out[pair] += weights[pair][key] * values[key] for keys from begin to end, in that order. */
INLINE void value_tile(int pairs, int vectors, const float *weights, const float *const *values, long begin, long end,
                       float *out, long out_stride, long part) {
    vector sums[VALUE_ROWS * 4];
    for (int p = 0; p < pairs; p++)
        for (int v = 0; v < vectors; v++)
            sums[p * vectors + v] = part ? load_part(out + p * out_stride, part) : load(out + p * out_stride + v * LANES);
    for (long key = begin; key < end; key++) {
        vector value[4];
        for (int v = 0; v < vectors; v++) value[v] = part ? load_part(values[key], part) : load(values[key] + v * LANES);
        for (int p = 0; p < pairs; p++) {
            vector weight = spread(weights[p * KEY_BLOCK + key]);
            for (int v = 0; v < vectors; v++) sums[p * vectors + v] = fma_vector(weight, value[v], sums[p * vectors + v]);
        }
    }
    for (int p = 0; p < pairs; p++)
        for (int v = 0; v < vectors; v++)
            if (part) store_part(out + p * out_stride, sums[p * vectors + v], part);
            else store(out + p * out_stride + v * LANES, sums[p * vectors + v]);
}

INLINE void value_pass(int pairs, const float *weights, const float *const *values, long begin, long end, float *out,
                       long out_stride, long dim) {
    const float *shifted[KEY_BLOCK];
    long d = 0;
    for (; d < dim; d += d + 4 * LANES <= dim ? 4 * LANES : LANES) {
        for (long key = begin; key < end; key++) shifted[key] = values[key] + d;
        if (d + 4 * LANES <= dim) value_tile(pairs, 4, weights, shifted, begin, end, out + d, out_stride, 0);
        else if (d + LANES <= dim) value_tile(pairs, 1, weights, shifted, begin, end, out + d, out_stride, 0);
        else value_tile(pairs, 1, weights, shifted, begin, end, out + d, out_stride, dim - d);
    }
}

static void add_values(long pairs, const float *weights, const float *const *values, long begin, long end, float *out,
                       long out_stride, long dim) {
    if (begin >= end) return;
    while (pairs > 0) {
        long now = smaller(pairs, VALUE_ROWS);
        switch (now) {
        case 1: value_pass(1, weights, values, begin, end, out, out_stride, dim); break;
        case 2: value_pass(2, weights, values, begin, end, out, out_stride, dim); break;
        case 3: value_pass(3, weights, values, begin, end, out, out_stride, dim); break;
#if VALUE_ROWS == 6
        case 4: value_pass(4, weights, values, begin, end, out, out_stride, dim); break;
        case 5: value_pass(5, weights, values, begin, end, out, out_stride, dim); break;
        case 6: value_pass(6, weights, values, begin, end, out, out_stride, dim); break;
#endif
        }
        pairs -= now, weights += now * KEY_BLOCK, out += now * out_stride;
    }
}

/* The partial softmax of every pair of a tile over one block of keys. */
static void attend_block(const attention_work *work, const query_tile *tile, const float *query, long block,
                         float *parts) {
    float scores[QUERY_TILE * KEY_BLOCK];
    const float *keys[KEY_BLOCK], *values[KEY_BLOCK];
    long begin[QUERY_TILE], end[QUERY_TILE], least = KEY_BLOCK, most = 0, inner_begin = 0, inner_end = KEY_BLOCK;
    long start = block * KEY_BLOCK, heads = tile->num_heads, width = partial_width(work), dim = work->values.head_dim;
    for (long r = 0; r < tile->num_rows; r++) {
        begin[r] = larger(tile->lower[r] - start, 0), end[r] = smaller(tile->upper[r] - start, KEY_BLOCK);
        inner_begin = larger(inner_begin, begin[r]), inner_end = smaller(inner_end, end[r]);
        if (begin[r] >= end[r]) continue;
        least = smaller(least, begin[r]), most = larger(most, end[r]);
    }
    const int32_t *table = work->page_table + tile->request * work->table_width;
    for (long key = least; key < most; key++) {
        long page = table[(start + key) / work->keys.page_size], offset = (start + key) % work->keys.page_size;
        keys[key] = page_row(&work->keys, page, offset) + tile->key_head * work->keys.head_dim;
        values[key] = page_row(&work->values, page, offset) + tile->key_head * dim;
    }
    if (least < most) {
        dots d = {query, work->keys.head_dim, tile->num_rows * heads, keys + least, most - least, work->keys.head_dim,
                  scores + least, KEY_BLOCK, 0, 0};
        dot_all(&d);
    }
    for (long pair = 0; pair < tile->num_rows * heads; pair++) {
        partial soft = {-INFINITY, 0.0f};
        long r = pair / heads;
        if (begin[r] < end[r]) soft = soften(scores + pair * KEY_BLOCK, begin[r], end[r], (float)work->softcap);
        memset(parts + pair * width, 0, (size_t)width * sizeof(float));
        memcpy(parts + pair * width, &soft, sizeof soft);
    }
    /* Keys that all rows see go together; the ragged ends row by row. A key that a row must not see is not even
     * multiplied by zero, as it may hold anything. */
    if (inner_begin >= inner_end) inner_begin = inner_end = KEY_BLOCK;
    for (long r = 0; r < tile->num_rows; r++)
        add_values(heads, scores + r * heads * KEY_BLOCK, values, begin[r], smaller(end[r], inner_begin),
                   parts + r * heads * width + 2, width, dim);
    add_values(tile->num_rows * heads, scores, values, inner_begin, inner_end, parts + 2, width, dim);
    for (long r = 0; r < tile->num_rows; r++)
        add_values(heads, scores + r * heads * KEY_BLOCK, values, inner_end, end[r],
                   parts + r * heads * width + 2, width, dim);
}

/* Take the partial softmaxes of the next block of keys into the running ones. */
static void merge(const attention_work *work, long pairs, const float *next, float *running) {
    long width = partial_width(work), dim = work->values.head_dim;
    for (long pair = 0; pair < pairs; pair++, next += width, running += width) {
        if (next[0] == -INFINITY) continue;
        float maximum = next[0] > running[0] ? next[0] : running[0];
        float keep = running[0] == -INFINITY ? 0.0f : exp_scalar(running[0] - maximum);
        float take = exp_scalar(next[0] - maximum);
        running[0] = maximum;
        running[1] = running[1] * keep + next[1] * take;
        for (long i = 2; i < 2 + dim; i++) running[i] = running[i] * keep + next[i] * take;
    }
}

static void finish(const attention_work *work, const query_tile *tile, const float *running) {
    long width = partial_width(work), dim = work->values.head_dim;
    for (long pair = 0; pair < tile->num_rows * tile->num_heads; pair++, running += width) {
        long row = tile->row + pair / tile->num_heads, head = tile->head + pair % tile->num_heads;
        float total = running[1], scale = 1.0f;
        if (work->sinks && running[0] != -INFINITY) {
            float maximum = work->sinks[head] > running[0] ? work->sinks[head] : running[0];
            scale = exp_scalar(running[0] - maximum);
            total = total * scale + exp_scalar(work->sinks[head] - maximum);
        }
        float *out = work->out + (row * work->num_query_heads + head) * dim;
        scale = total > 0.0f ? scale / total : total; /* no keys: zeros; NaN stays NaN */
        for (long i = 0; i < dim; i++) out[i] = running[2 + i] * scale;
    }
}

static void clear(const attention_work *work, float *running) {
    long width = partial_width(work);
    memset(running, 0, (size_t)(QUERY_TILE * width) * sizeof(float));
    for (long pair = 0; pair < QUERY_TILE; pair++) running[pair * width] = -INFINITY;
}

static void pack_query(const attention_work *work, const query_tile *tile, float *query) {
    long dim = work->keys.head_dim;
    for (long r = 0; r < tile->num_rows; r++) {
        const float *source = work->query + ((tile->row + r) * work->num_query_heads + tile->head) * dim;
        for (long i = 0; i < tile->num_heads * dim; i++) *query++ = source[i] * (float)work->scale;
    }
}

static void attend_tile(const attention_work *work, long number) {
    query_tile tile = find_tile(work, number);
    float query[QUERY_TILE * work->keys.head_dim], parts[QUERY_TILE * partial_width(work)];
    float running[QUERY_TILE * partial_width(work)];
    pack_query(work, &tile, query);
    clear(work, running);
    for (long block = tile.first_block; block < tile.end_block; block++) {
        attend_block(work, &tile, query, block, parts);
        merge(work, tile.num_rows * tile.num_heads, parts, running);
    }
    finish(work, &tile, running);
}

EXPORT void outrider_paged_attention(const attention_work *work, int num_threads) {
    long num_tiles = count_tiles(work);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_tiles > 1)
    for (long number = 0; number < num_tiles; number++) attend_tile(work, number);
}
