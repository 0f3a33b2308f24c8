/* CPU kernels in fp32 for native.py: linear, norms, activations, rotary cache writes, paged attention, argmax.
 * One rule everywhere: the bits of an output row depend on that row's inputs alone, never on batch or thread count.
 *
 * How the rule is kept: every output element is summed in one fixed order, whichever tile computes it. A dot
 * product is LANES running sums over k = lane, lane + LANES, ... (a short tail is padded with zeros), folded by
 * one fixed tree; fused multiply-adds are written out and the compiler is forbidden to form or reorder any.
 *
 * Every entry point takes one structure, the *_work of its operation, that the caller packs: eight bytes a field. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
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
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define LANES 4
#define ROW_TILE 8
#define VALUE_ROWS 6
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define EXPORT __attribute__((visibility("default")))

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef float loose_vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

enum {
    COLUMN_BLOCK = 24, /* columns of one task, when rows are few: a multiple of every tile's column count */
    WIDE_COLUMN_BLOCK = 96, /* when rows are many, so that each is read less often */
    MANY_ROWS = 64,
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
#elif defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c; /* two roundings: only a processor without the instruction comes here */
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

/* The larger (smaller) of both; b where either is NaN. */
INLINE vector greatest(vector a, vector b) {
#if LANES == 16
    return (vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vector smallest(vector a, vector b) {
#if LANES == 16
    return (vector)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vector)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE integers lane_numbers(void) {
    integers numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

#if LANES == 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif
#define UNROLL _Pragma("GCC unroll 32")

/* sums[i] = the sum of all lanes of v[i], for a constant count. Neighbouring lanes are added, then neighbouring sums,
 * and so on: the same tree for every vector, whatever its place. */
INLINE void fold_all(const vector *v, int count, float *sums) {
    UNROLL for (int base = 0; base < count; base += LANES) {
        vector level[LANES];
        UNROLL for (int i = 0; i < LANES; i++) level[i] = base + i < count ? v[base + i] : (vector){0};
        UNROLL for (int half = LANES / 2; half >= 1; half /= 2)
            UNROLL for (int i = 0; i < half; i++) {
                vector first = level[2 * i], second = level[2 * i + 1];
                level[i] = SHUFFLE(first, second, EVENS) + SHUFFLE(first, second, ODDS);
            }
        store(sums + base, level[0]);
    }
}

/* Transpose a square. Unzipping pairs of vectors rotates the bits of (vector, lane) by one place. */
INLINE void transpose(vector *v) {
    UNROLL for (int stage = 1; stage < LANES; stage *= 2) {
        vector next[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            next[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVENS);
            next[LANES / 2 + i] = SHUFFLE(v[2 * i], v[2 * i + 1], ODDS);
        }
        UNROLL for (int i = 0; i < LANES; i++) v[i] = next[i];
    }
}

INLINE float fold(vector v) {
    float sums[LANES];
    fold_all(&v, 1, sums);
    return sums[0];
}

INLINE float fold_greatest(vector v) {
    UNROLL for (int count = LANES; count > 1; count /= 2) v = greatest(SHUFFLE(v, v, EVENS), SHUFFLE(v, v, ODDS));
    return v[0];
}

/* exp to about one unit in the last place: 2^n * e^r with |r| <= ln(2)/2, e^r - 1 - r a minimax polynomial. It
 * saturates where the result would leave the normal range, which no caller can tell from the truth. */
INLINE vector exp_vector(vector x) {
    x = smallest(spread(88.3f), greatest(spread(-87.3f), x));
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
    return power * (vector)(((integers)shifted - (integers)magic + 127) << 23);
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

/* ---- linear ---- */

typedef struct {
    const float *x, *weight, *bias;
    float *out;
    long num_rows, num_outputs, depth, num_threads;
} linear_work;

typedef struct {
    long column_block, num_column_blocks, num_row_groups, depth_block;
} linear_plan;

/* Some rows and columns of the output, over a stretch of k. */
typedef struct {
    const linear_work *work;
    long row, num_rows, column, num_columns, k, length;
    long ahead; /* distance of the weights that come next, to be fetched meanwhile */
} linear_patch;

/* Hold a loaded vector in its register: left alone, compilers load it again for every multiply-add that takes it. */
#if LANES == 16
#define HOLD(v) __asm__("" : "+v"(v))
#elif LANES == 8
#define HOLD(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v) (void)0
#endif

/* One step of LANES along k. The longer side streams through one register, the shorter one stays in several. */
INLINE void dot_step(int rows, int columns, const float *const *x, const float *const *w, vector *sums, long part) {
    vector held[8];
    int across = rows > columns, num_held = across ? columns : rows, num_streamed = across ? rows : columns;
    UNROLL for (int i = 0; i < num_held; i++) {
        const float *p = across ? w[i] : x[i];
        held[i] = part ? load_part(p, part) : load(p);
        HOLD(held[i]);
    }
    UNROLL for (int j = 0; j < num_streamed; j++) {
        const float *p = across ? x[j] : w[j];
        vector streamed = part ? load_part(p, part) : load(p);
        HOLD(streamed);
        UNROLL for (int i = 0; i < num_held; i++) {
            int at = across ? j * columns + i : i * columns + j;
            sums[at] = fma_vector(streamed, held[i], sums[at]);
        }
    }
}

/* Row tiles each pass over all columns; every pass fetches its even share of the next ones, to keep the memory busy
 * without crowding out what is needed now. A column is fetched when its turn comes down to zero. */
typedef struct {
    long turn, num_passes;
} fetch_turns;

INLINE void dot_tile(const linear_patch *patch, int rows, int columns, long row, long column, fetch_turns *turns) {
    const linear_work *work = patch->work;
    const float *x[ROW_TILE], *w[8];
    long ahead[8];
    vector sums[ROW_TILE * 8];
    float folded[32];
    UNROLL for (int r = 0; r < rows; r++) x[r] = work->x + (row + r) * work->depth + patch->k;
    UNROLL for (int c = 0; c < columns; c++) w[c] = work->weight + (column + c) * work->depth + patch->k;
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = (vector){0};
    UNROLL for (int c = 0; c < columns; c++) {
        ahead[c] = turns->turn == 0 ? patch->ahead : 0;
        turns->turn = turns->turn == 0 ? turns->num_passes - 1 : turns->turn - 1;
    }
    long left = patch->length;
    for (; left >= LANES; left -= LANES) {
        UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(w[c] + ahead[c], 0, 2);
        dot_step(rows, columns, x, w, sums, 0);
        UNROLL for (int r = 0; r < rows; r++) x[r] += LANES;
        UNROLL for (int c = 0; c < columns; c++) w[c] += LANES;
    }
    if (left > 0) dot_step(rows, columns, x, w, sums, left);
    fold_all(sums, rows * columns, folded);
    __asm__ volatile("" : : "r"(folded) : "memory"); /* picking lanes out of memory beats shuffling them out */
    UNROLL for (int r = 0; r < rows; r++) {
        float *out = work->out + (row + r) * work->num_outputs + column;
        UNROLL for (int c = 0; c < columns; c++)
            out[c] = patch->k > 0 ? out[c] + folded[r * columns + c] : folded[r * columns + c];
    }
}

INLINE void dot_pass(const linear_patch *patch, int rows, int columns, long row, fetch_turns turns) {
    long column = patch->column, end = patch->column + patch->num_columns;
    for (; column + columns <= end; column += columns) dot_tile(patch, rows, columns, row, column, &turns);
    for (; column < end; column++) dot_tile(patch, rows, 1, row, column, &turns);
}

static void dot_patch(const linear_patch *patch) {
    long num_passes = ceil_div(patch->num_rows, ROW_TILE);
    for (long pass = 0; pass < num_passes; pass++) {
        long first = pass * patch->num_rows / num_passes, end = (pass + 1) * patch->num_rows / num_passes;
        long row = patch->row + first;
        fetch_turns turns = {pass, num_passes};
        switch (end - first) {
        case 1: dot_pass(patch, 1, 8, row, turns); break;
#if ROW_TILE == 4
        case 2: dot_pass(patch, 2, 6, row, turns); break;
        case 3: dot_pass(patch, 3, 4, row, turns); break;
        case 4: dot_pass(patch, 4, 3, row, turns); break;
#else
        case 2: dot_pass(patch, 2, 8, row, turns); break;
        case 3: dot_pass(patch, 3, 8, row, turns); break;
        case 4: dot_pass(patch, 4, 6, row, turns); break;
        case 5: dot_pass(patch, 5, 4, row, turns); break;
        case 6: dot_pass(patch, 6, 4, row, turns); break;
        case 7: dot_pass(patch, 7, 3, row, turns); break;
        case 8: dot_pass(patch, 8, 3, row, turns); break;
#endif
        }
    }
}

static linear_plan plan_linear(const linear_work *work) {
    linear_plan plan = {.num_row_groups = 1};
    long depth_blocks = larger(1, ceil_div(work->depth, DEPTH_BLOCK)); /* from the depth alone: it orders the sums */
    plan.depth_block = larger(1, ceil_div(ceil_div(work->depth, depth_blocks), LANES)) * LANES;
    plan.column_block = work->num_rows > MANY_ROWS ? WIDE_COLUMN_BLOCK : COLUMN_BLOCK;
    plan.num_column_blocks = larger(1, ceil_div(work->num_outputs, plan.column_block));
    long wanted = 4 * work->num_threads / plan.num_column_blocks; /* so that each thread finds a few tasks */
    if (work->num_threads > 1) plan.num_row_groups = larger(1, smaller(wanted, work->num_rows / ROW_TILE));
    return plan;
}

static void linear_task(const linear_work *work, const linear_plan *plan, long task, long next_task) {
    long column = task % plan->num_column_blocks * plan->column_block, group = task / plan->num_column_blocks;
    long next_column = next_task % plan->num_column_blocks * plan->column_block;
    long row = group * work->num_rows / plan->num_row_groups;
    long row_end = (group + 1) * work->num_rows / plan->num_row_groups;
    long num_columns = smaller(plan->column_block, work->num_outputs - column);
    for (long k = 0; k == 0 || k < work->depth; k += plan->depth_block) {
        linear_patch patch = {work, row, row_end - row, column, num_columns, k,
                              smaller(plan->depth_block, work->depth - k), (next_column - column) * work->depth};
        dot_patch(&patch);
    }
    for (; work->bias && row < row_end; row++) {
        float *out = work->out + row * work->num_outputs;
        for (long c = column; c < column + num_columns; c++) out[c] += work->bias[c];
    }
}

/* A thread claims its next task before it works on this one, so that it can fetch the weights ahead. */
static void linear_tasks(const linear_work *work, const linear_plan *plan, long *counter) {
    long num_tasks = plan->num_column_blocks * plan->num_row_groups;
    long task = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    while (task < num_tasks) {
        long next = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
        linear_task(work, plan, task, next < num_tasks ? next : task);
        task = next;
    }
}

EXPORT void outrider_linear(const linear_work *work) {
    linear_plan plan = plan_linear(work);
    long counter = 0, amount = work->num_rows * work->num_outputs * work->depth;
    if (amount < SMALL_WORK || work->num_threads == 1) {
        linear_tasks(work, &plan, &counter);
        return;
    }
#pragma omp parallel num_threads((int)work->num_threads)
    linear_tasks(work, &plan, &counter);
}

/* ---- row by row: norms, activations, argmax, rotary embedding and cache write ---- */

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
    long num_rows, query_stride, key_stride, value_stride, num_query_heads, rotary_half, interleaved, num_threads;
    page_view keys, values;
} rope_work;

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

static void rope_rows(const void *opaque, long first, long end) {
    const rope_work *work = opaque;
    long query_width = work->num_query_heads * work->keys.head_dim;
    size_t value_bytes = (size_t)(work->values.num_heads * work->values.head_dim) * sizeof(float);
    for (long row = first; row < end; row++) {
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

EXPORT void outrider_rope_write(const rope_work *work) {
    long amount = work->num_rows * work->num_query_heads * work->keys.head_dim;
    for_rows(rope_rows, work, work->num_rows, amount, work->num_threads);
}

/* ---- paged attention: partial softmaxes over fixed blocks of keys, merged in ascending order ---- */

typedef struct {
    const float *query, *sinks;
    const int32_t *page_table, *query_start;
    const int64_t *indices, *block_end;
    float *out;
    long num_requests, table_width, num_query_heads, first_key, window, num_threads;
    double scale, softcap;
    page_view keys, values;
} attention_work;

/* Some rows of one request, and some query heads of one key head: pair = row_in_tile * num_heads + head_in_tile. */
typedef struct {
    long request, row, num_rows, key_head, head, num_heads;
    long lower[QUERY_TILE], upper[QUERY_TILE]; /* each row's keys are lower <= key < upper */
    long least, most; /* the same for the rows together */
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
    tile.least = INT64_MAX;
    for (long r = 0; r < tile.num_rows; r++) {
        long index = work->indices[tile.row + r];
        tile.lower[r] = larger(work->first_key, work->window > 0 ? larger(0, index - work->window + 1) : 0);
        tile.upper[r] = (work->block_end ? work->block_end[tile.row + r] : index) + 1;
        if (tile.upper[r] <= tile.lower[r]) continue;
        tile.least = smaller(tile.least, tile.lower[r]);
        tile.most = larger(tile.most, tile.upper[r]);
    }
    tile.first_block = tile.most > 0 ? tile.least / KEY_BLOCK : 0;
    tile.end_block = ceil_div(tile.most, KEY_BLOCK);
    return tile;
}

/* scores[begin..end) become exp(score - maximum). Lanes beside them are next to nothing in the total, and not used. */
static partial soften(float *scores, long begin, long end, float softcap) {
    vector highest = spread(-INFINITY), total = {0};
    long start = begin / LANES * LANES;
    for (long i = start; i < end; i += LANES) {
        integers key = lane_numbers() + (int32_t)i;
        vector s = load(scores + i);
        if (softcap > 0.0f) s = softcap * tanh_vector(s / softcap);
        s = choose((key >= (int32_t)begin) & (key < (int32_t)end), s, spread(-INFINITY));
        highest = greatest(s, highest);
        store(scores + i, s);
    }
    float maximum = fold_greatest(highest);
    for (long i = start; i < end; i += LANES) {
        vector weight = exp_vector(load(scores + i) - maximum);
        total += weight;
        store(scores + i, weight);
    }
    return (partial){maximum, fold(total)};
}

/* out[pair][...] += weights[pair][i] * sources[i][...] for i from begin to end, in that order: scores are made so from
 * the query's dims and transposed keys, outputs from the softmax's weights and the values. */
typedef struct {
    const float *weights;
    long weight_stride;
    const float *const *sources;
    long begin, end;
    float *out;
    long out_stride, width;
} blend;

INLINE void blend_tile(const blend *b, int pairs, int vectors, long pair, long at, long part) {
    vector sums[VALUE_ROWS * 4];
    const float *weights = b->weights + pair * b->weight_stride;
    float *out = b->out + pair * b->out_stride + at;
    UNROLL for (int p = 0; p < pairs; p++)
        UNROLL for (int v = 0; v < vectors; v++) {
            const float *from = out + p * b->out_stride + v * LANES;
            sums[p * vectors + v] = part ? load_part(from, part) : load(from);
        }
    for (long i = b->begin; i < b->end; i++) {
        const float *source = b->sources[i] + at;
        vector value[4];
        UNROLL for (int v = 0; v < vectors; v++) {
            value[v] = part ? load_part(source, part) : load(source + v * LANES);
            HOLD(value[v]);
        }
        UNROLL for (int p = 0; p < pairs; p++) {
            vector weight = spread(weights[p * b->weight_stride + i]);
            HOLD(weight);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[p * vectors + v] = fma_vector(weight, value[v], sums[p * vectors + v]);
        }
    }
    UNROLL for (int p = 0; p < pairs; p++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = out + p * b->out_stride + v * LANES;
            if (part) store_part(to, sums[p * vectors + v], part);
            else store(to, sums[p * vectors + v]);
        }
}

INLINE void blend_pass(const blend *b, int pairs, long pair) {
    long at = 0;
    for (; at + 4 * LANES <= b->width; at += 4 * LANES) blend_tile(b, pairs, 4, pair, at, 0);
    for (; at + LANES <= b->width; at += LANES) blend_tile(b, pairs, 1, pair, at, 0);
    if (at < b->width) blend_tile(b, pairs, 1, pair, at, b->width - at);
}

static void blend_pairs(const blend *b, long num_pairs) {
    if (b->begin >= b->end) return;
    long num_passes = ceil_div(num_pairs, VALUE_ROWS);
    for (long pass = 0; pass < num_passes; pass++) {
        long pair = pass * num_pairs / num_passes;
        switch ((pass + 1) * num_pairs / num_passes - pair) {
        case 1: blend_pass(b, 1, pair); break;
        case 2: blend_pass(b, 2, pair); break;
        case 3: blend_pass(b, 3, pair); break;
#if VALUE_ROWS == 6
        case 4: blend_pass(b, 4, pair); break;
        case 5: blend_pass(b, 5, pair); break;
        case 6: blend_pass(b, 6, pair); break;
#endif
        }
    }
}

INLINE void fetch(const float *p, long count) {
    for (long i = 0; i < count; i += 16) __builtin_prefetch(p + i, 0, 2);
}

/* Where the keys (or values) of a tile's head lie, for keys from begin to end of a block. */
static void find_rows(const attention_work *work, const query_tile *tile, const page_view *view, long block, long begin,
                      long end, const float **rows) {
    const int32_t *table = work->page_table + tile->request * work->table_width;
    long stride = view->num_heads * view->head_dim;
    for (long i = begin; i < end;) {
        long key = block * KEY_BLOCK + i, offset = key % view->page_size;
        long page_end = smaller(end, i + view->page_size - offset);
        const float *row = page_row(view, table[key / view->page_size], offset) + tile->key_head * view->head_dim;
        for (; i < page_end; i++, row += stride) rows[i] = row;
    }
}

/* flat[dim][key] = keys[key][dim]; meanwhile the values of these keys are on their way. */
static void transpose_keys(const float *const *keys, const float *const *values, long begin, long end, long dim,
                           long value_dim, float *flat) {
    for (long group = begin / LANES * LANES; group < end; group += LANES) {
        for (long i = larger(begin, group); i < smaller(end, group + LANES); i++) fetch(values[i], value_dim);
        for (long d = 0; d < dim; d += LANES) {
            vector square[LANES];
            for (long i = 0; i < LANES; i++) /* outside, any key will do: its score is never looked at */
                square[i] = load_up_to(keys[larger(begin, smaller(end - 1, group + i))] + d, dim - d);
            transpose(square);
            for (long i = 0; i < smaller(LANES, dim - d); i++) store(flat + (d + i) * KEY_BLOCK + group, square[i]);
        }
    }
}

/* The range of a block's keys that each row of a tile sees, that any of them sees, and that all of them see. */
typedef struct {
    long begin[QUERY_TILE], end[QUERY_TILE], any_begin, any_end, all_begin, all_end;
} key_ranges;

static key_ranges find_ranges(const query_tile *tile, long block) {
    key_ranges ranges = {.any_begin = KEY_BLOCK, .any_end = 0, .all_begin = 0, .all_end = KEY_BLOCK};
    for (long r = 0; r < tile->num_rows; r++) {
        long begin = smaller(larger(tile->lower[r] - block * KEY_BLOCK, 0), KEY_BLOCK);
        long end = larger(smaller(tile->upper[r] - block * KEY_BLOCK, KEY_BLOCK), begin);
        ranges.begin[r] = begin, ranges.end[r] = end;
        ranges.all_begin = larger(ranges.all_begin, begin), ranges.all_end = smaller(ranges.all_end, end);
        if (begin == end) continue;
        ranges.any_begin = smaller(ranges.any_begin, begin), ranges.any_end = larger(ranges.any_end, end);
    }
    if (ranges.all_begin >= ranges.all_end) ranges.all_begin = ranges.all_end = KEY_BLOCK;
    return ranges;
}

/* Keys that all rows see go together; the ragged ends row by row. A key that a row must not see is not even
 * multiplied by zero, as its value may hold anything. */
static void blend_values(const attention_work *work, const query_tile *tile, const key_ranges *ranges,
                         const float *weights, const float *const *values, float *parts) {
    long heads = tile->num_heads, width = partial_width(work);
    blend b = {weights, KEY_BLOCK, values, 0, 0, parts + 2, width, work->values.head_dim};
    for (int after = 0; after < 2; after++) {
        for (long r = 0; r < tile->num_rows; r++) {
            b.weights = weights + r * heads * KEY_BLOCK, b.out = parts + 2 + r * heads * width;
            b.begin = after ? ranges->all_end : ranges->begin[r];
            b.end = after ? ranges->end[r] : smaller(ranges->end[r], ranges->all_begin);
            blend_pairs(&b, heads);
        }
        if (after) return;
        b.weights = weights, b.out = parts + 2, b.begin = ranges->all_begin, b.end = ranges->all_end;
        blend_pairs(&b, tile->num_rows * heads);
    }
}

/* The keys that a thread will need next, fetched a share at a time while it works. */
typedef struct {
    const float *keys[KEY_BLOCK];
    long begin, end;
} upcoming;

static void find_upcoming(const attention_work *work, const query_tile *tile, long block, upcoming *next) {
    next->begin = larger(0, tile->least - block * KEY_BLOCK);
    next->end = smaller(KEY_BLOCK, tile->most - block * KEY_BLOCK);
    find_rows(work, tile, &work->keys, block, next->begin, next->end, next->keys);
}

/* The partial softmax of every pair of a tile over one block of keys. */
static void attend_block(const attention_work *work, const query_tile *tile, const float *query, long block,
                         const upcoming *next, float *parts) {
    long dim = work->keys.head_dim, width = partial_width(work), num_pairs = tile->num_rows * tile->num_heads;
    ALIGNED float scores[QUERY_TILE * KEY_BLOCK], flat[dim * KEY_BLOCK];
    const float *keys[KEY_BLOCK], *values[KEY_BLOCK], *flat_rows[dim];
    key_ranges ranges = find_ranges(tile, block);
    memset(parts, 0, (size_t)(num_pairs * width) * sizeof(float));
    if (ranges.any_begin < ranges.any_end) {
        long start = ranges.any_begin / LANES * LANES;
        long num_lanes = ceil_div(ranges.any_end - start, LANES) * LANES;
        find_rows(work, tile, &work->keys, block, ranges.any_begin, ranges.any_end, keys);
        find_rows(work, tile, &work->values, block, ranges.any_begin, ranges.any_end, values);
        transpose_keys(keys, values, ranges.any_begin, ranges.any_end, dim, work->values.head_dim, flat);
        for (long d = 0; d < dim; d++) flat_rows[d] = flat + d * KEY_BLOCK + start;
        memset(scores, 0, (size_t)(num_pairs * KEY_BLOCK) * sizeof(float));
        blend b = {query, dim, flat_rows, 0, dim, scores + start, KEY_BLOCK, num_lanes};
        blend_pairs(&b, num_pairs);
    }
    for (long pair = 0; pair < num_pairs; pair++) {
        partial soft = {-INFINITY, 0.0f};
        long begin = ranges.begin[pair / tile->num_heads], end = ranges.end[pair / tile->num_heads];
        for (long key = next->begin + pair; key < next->end; key += num_pairs) fetch(next->keys[key], dim);
        if (begin < end) soft = soften(scores + pair * KEY_BLOCK, begin, end, (float)work->softcap);
        memcpy(parts + pair * width, &soft, sizeof soft);
    }
    blend_values(work, tile, &ranges, scores, values, parts);
}

/* Take the partial softmaxes of the next block of keys into the running ones. */
static void merge(const attention_work *work, long pairs, const float *next, float *running) {
    long width = partial_width(work), dim = work->values.head_dim;
    for (long pair = 0; pair < pairs; pair++, next += width, running += width) {
        if (next[1] == 0.0f) continue; /* it saw no keys */
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
        if (work->sinks && total != 0.0f) {
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
        upcoming next = {.end = 0};
        if (block + 1 < tile.end_block) find_upcoming(work, &tile, block + 1, &next);
        attend_block(work, &tile, query, block, &next, parts);
        merge(work, tile.num_rows * tile.num_heads, parts, running);
    }
    finish(work, &tile, running);
}

/* Few tiles and many keys, as when one request decodes: threads share out the units (one block of keys for one tile),
 * then merge them. The sums are those of attend_tile, in the same order. */
typedef struct {
    long num_tiles;
    const query_tile *tiles;
    const long *first_unit; /* of each tile, and one past the last */
    float *parts;
    long unit_width;
} split;

/* The tile of a unit, and which block of keys. */
static const query_tile *find_unit(const split *split, long unit, long *block) {
    long number = 0;
    while (unit >= split->first_unit[number + 1]) number++;
    *block = split->tiles[number].first_block + unit - split->first_unit[number];
    return split->tiles + number;
}

static void attend_unit(const attention_work *work, const split *split, long unit) {
    float query[QUERY_TILE * work->keys.head_dim];
    long block, next_block;
    const query_tile *tile = find_unit(split, unit, &block);
    upcoming next = {.end = 0};
    if (unit + 1 < split->first_unit[split->num_tiles]) {
        const query_tile *next_tile = find_unit(split, unit + 1, &next_block);
        find_upcoming(work, next_tile, next_block, &next);
    }
    pack_query(work, tile, query);
    attend_block(work, tile, query, block, &next, split->parts + unit * split->unit_width);
}

static void merge_units(const attention_work *work, const split *split, long number) {
    float running[QUERY_TILE * partial_width(work)];
    const query_tile *tile = split->tiles + number;
    clear(work, running);
    for (long unit = split->first_unit[number]; unit < split->first_unit[number + 1]; unit++)
        merge(work, tile->num_rows * tile->num_heads, split->parts + unit * split->unit_width, running);
    finish(work, tile, running);
}

/* Split the work if it is worth it; 0 where it is not, and attend_tile has to do it. */
static int attend_split(const attention_work *work, long num_tiles) {
    query_tile tiles[num_tiles];
    long first_unit[num_tiles + 1], num_pairs = 0;
    first_unit[0] = 0;
    for (long number = 0; number < num_tiles; number++) {
        tiles[number] = find_tile(work, number);
        first_unit[number + 1] = first_unit[number] + tiles[number].end_block - tiles[number].first_block;
        num_pairs = larger(num_pairs, tiles[number].num_rows * tiles[number].num_heads);
    }
    long num_units = first_unit[num_tiles], unit_width = num_pairs * partial_width(work);
    float *parts = num_units > num_tiles ? malloc((size_t)(num_units * unit_width) * sizeof(float)) : NULL;
    if (!parts) return 0;
    split split = {num_tiles, tiles, first_unit, parts, unit_width};
#pragma omp parallel num_threads((int)work->num_threads)
    {
#pragma omp for schedule(static)
        for (long unit = 0; unit < num_units; unit++) attend_unit(work, &split, unit);
#pragma omp for schedule(static)
        for (long number = 0; number < num_tiles; number++) merge_units(work, &split, number);
    }
    free(parts);
    return 1;
}

EXPORT void outrider_paged_attention(const attention_work *work) {
    long num_tiles = count_tiles(work), num_threads = work->num_threads;
    if (num_threads > 1 && num_tiles > 0 && num_tiles < 4 * num_threads && attend_split(work, num_tiles)) return;
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic) if (num_threads > 1 && num_tiles > 1)
    for (long number = 0; number < num_tiles; number++) attend_tile(work, number);
}

#include "block.c"
