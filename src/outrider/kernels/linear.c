/* Linear layers: tiles of rows and columns, every element summed in the same order. Included by native.c. */

typedef struct {
    const float *x, *bias;
    float *out;
    long num_rows, num_outputs, depth, num_threads;
    matrix matrix;
} linear_work;

typedef struct {
    long column_block, num_column_blocks, num_row_groups, depth_block;
} linear_plan;

/* Some rows and columns of the output, over a stretch of k. */
typedef struct {
    const linear_work *work;
    weight_row weights; /* of its first column, from k on */
    long stride, scale_stride; /* bytes, and scales, between two columns */
    long row, num_rows, column, num_columns, k, length;
    long ahead; /* bytes to the weights that come next, to be fetched meanwhile */
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

/* LANES numbers along k, `place` of a step on; `part`: less than that are left. The longer side streams through one
 * register, the shorter one stays in several. */
INLINE void dot_step(int rows, int columns, long kind, const float *const *x, const weight_row *w, vector *sums, int place,
                     long part) {
    vector held[8];
    int across = rows > columns, num_held = across ? columns : rows, num_streamed = across ? rows : columns;
    UNROLL for (int i = 0; i < num_held; i++) {
        if (across) held[i] = part ? load_last_weights(kind, w[i], part) : load_weights(kind, w[i], place);
        else held[i] = part ? load_part(x[i], part) : load(x[i] + place);
        HOLD(held[i]);
    }
    UNROLL for (int j = 0; j < num_streamed; j++) {
        vector streamed;
        if (across) streamed = part ? load_part(x[j], part) : load(x[j] + place);
        else streamed = part ? load_last_weights(kind, w[j], part) : load_weights(kind, w[j], place);
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

INLINE void dot_tile(const linear_patch *patch, int rows, int columns, long kind, long row, long column,
                     fetch_turns *turns) {
    const linear_work *work = patch->work;
    const float *x[ROW_TILE], *scales[8];
    weight_row w[8];
    long ahead[8];
    vector sums[ROW_TILE * 8];
    float folded[32];
    UNROLL for (int r = 0; r < rows; r++) x[r] = work->x + (row + r) * work->depth + patch->k;
    UNROLL for (int c = 0; c < columns; c++) {
        long at = column + c - patch->column;
        w[c].at = patch->weights.at + at * patch->stride;
        scales[c] = has_scales(kind) ? patch->weights.scales + at * patch->scale_stride : NULL;
    }
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = (vector){0};
    UNROLL for (int c = 0; c < columns; c++) {
        ahead[c] = turns->turn == 0 ? patch->ahead : 0;
        turns->turn = turns->turn == 0 ? turns->num_passes - 1 : turns->turn - 1;
    }
    const long step = step_of(kind);
    long left = patch->length, block = patch->k / WEIGHT_BLOCK;
    for (; left >= step; left -= step, block++) {
        UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(w[c].at + ahead[c], 0, 2);
        if (has_scales(kind)) {
            long at = scale_at(&work->matrix, block);
            UNROLL for (int c = 0; c < columns; c++) w[c].scales = scales[c] + at;
        }
        UNROLL for (int place = 0; place < step; place += LANES) dot_step(rows, columns, kind, x, w, sums, place, 0);
        UNROLL for (int r = 0; r < rows; r++) x[r] += step;
        UNROLL for (int c = 0; c < columns; c++) w[c].at += bytes_of(kind, step);
    }
    if (!has_scales(kind) && left > 0) dot_step(rows, columns, kind, x, w, sums, 0, left);
    fold_all(sums, rows * columns, folded);
    __asm__ volatile("" : : "r"(folded) : "memory"); /* picking lanes out of memory beats shuffling them out */
    UNROLL for (int r = 0; r < rows; r++) {
        float *out = work->out + (row + r) * work->num_outputs + column;
        UNROLL for (int c = 0; c < columns; c++)
            out[c] = patch->k > 0 ? out[c] + folded[r * columns + c] : folded[r * columns + c];
    }
}

INLINE void dot_pass(const linear_patch *patch, long kind, int rows, int columns, long row, fetch_turns turns) {
    long column = patch->column, end = patch->column + patch->num_columns;
    for (; column + columns <= end; column += columns) dot_tile(patch, rows, columns, kind, row, column, &turns);
    for (; column < end; column++) dot_tile(patch, rows, 1, kind, row, column, &turns);
}

INLINE void dot_rows(const linear_patch *patch, long kind) {
    long num_passes = ceil_div(patch->num_rows, ROW_TILE);
    for (long pass = 0; pass < num_passes; pass++) {
        long first = pass * patch->num_rows / num_passes, end = (pass + 1) * patch->num_rows / num_passes;
        long row = patch->row + first;
        fetch_turns turns = {pass, num_passes};
        switch (end - first) {
        case 1: dot_pass(patch, kind, 1, 8, row, turns); break;
#if ROW_TILE == 4
        case 2: dot_pass(patch, kind, 2, 6, row, turns); break;
        case 3: dot_pass(patch, kind, 3, 4, row, turns); break;
        case 4: dot_pass(patch, kind, 4, 3, row, turns); break;
#else
        case 2: dot_pass(patch, kind, 2, 8, row, turns); break;
        case 3: dot_pass(patch, kind, 3, 8, row, turns); break;
        case 4: dot_pass(patch, kind, 4, 6, row, turns); break;
        case 5: dot_pass(patch, kind, 5, 4, row, turns); break;
        case 6: dot_pass(patch, kind, 6, 4, row, turns); break;
        case 7: dot_pass(patch, kind, 7, 3, row, turns); break;
        case 8: dot_pass(patch, kind, 8, 3, row, turns); break;
#endif
        }
    }
}

static void dot_plain(const linear_patch *patch) { dot_rows(patch, PLAIN); }
static void dot_bfloat16(const linear_patch *patch) { dot_rows(patch, BFLOAT16); }
static void dot_float16(const linear_patch *patch) { dot_rows(patch, FLOAT16); }
static void dot_affine4(const linear_patch *patch) { dot_rows(patch, AFFINE4); }
static void dot_scaled8(const linear_patch *patch) { dot_rows(patch, SCALED8); }
static void dot_fp8(const linear_patch *patch) { dot_rows(patch, SCALED_FP8); }

/* A patch of weights that are slow to widen, or have many rows to be multiplied by, a few columns at a time: as floats they
 * stay in the first-level cache until all rows are done with them. How many is a multiple of the columns of the tiles that
 * will run; more rows repay a wider panel. */
static void widen_and_dot(linear_patch patch) {
    ALIGNED float panel[COLUMN_BLOCK * DEPTH_BLOCK];
    const linear_work *work = patch.work;
    long end = patch.column + patch.num_columns, length = patch.length;
    long step = patch.num_rows <= 3 ? 8 : patch.num_rows <= ROW_TILE ? 12 : COLUMN_BLOCK;
    patch.weights = (weight_row){(const uint8_t *)panel, NULL}, patch.stride = bytes_of(PLAIN, length), patch.ahead = 0;
    for (; patch.column < end; patch.column += step) {
        patch.num_columns = smaller(step, end - patch.column);
        for (long c = 0; c < patch.num_columns; c++)
            widen_row(&work->matrix, work->depth, patch.column + c, patch.k, length, panel + c * length);
        dot_plain(&patch);
    }
}

static linear_plan plan_linear(const linear_work *work) {
    linear_plan plan = {.num_row_groups = 1};
    long depth_blocks = larger(1, ceil_div(work->depth, DEPTH_BLOCK)); /* from the depth alone: it orders the sums */
    plan.depth_block = larger(1, ceil_div(ceil_div(work->depth, depth_blocks), WEIGHT_BLOCK)) * WEIGHT_BLOCK;
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
        long length = smaller(plan->depth_block, work->depth - k);
        linear_patch patch = {.work = work, .row = row, .num_rows = row_end - row, .column = column,
                              .num_columns = num_columns, .k = k, .length = length};
        if (work->matrix.kind == BLOCKS || (has_scales(work->matrix.kind) && row_end - row > 2 * ROW_TILE)) {
            widen_and_dot(patch);
            continue;
        }
        patch.weights = row_of(&work->matrix, work->depth, column, k);
        patch.stride = bytes_of(work->matrix.kind, work->depth);
        patch.scale_stride = scales_of_row(&work->matrix, work->depth);
        patch.ahead = (next_column - column) * patch.stride;
        switch (work->matrix.kind) {
        case PLAIN: dot_plain(&patch); break;
        case BFLOAT16: dot_bfloat16(&patch); break;
        case FLOAT16: dot_float16(&patch); break;
        case AFFINE4: dot_affine4(&patch); break;
        case SCALED8: dot_scaled8(&patch); break;
        case SCALED_FP8: dot_fp8(&patch); break;
        }
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

static void tiled_linear(const linear_work *work);

EXPORT void outrider_linear(const linear_work *work) {
    if (work->matrix.kind == TILES) {
        tiled_linear(work);
        return;
    }
    linear_plan plan = plan_linear(work);
    long counter = 0, amount = work->num_rows * work->num_outputs * work->depth;
    if (amount < SMALL_WORK || work->num_threads == 1) {
        linear_tasks(work, &plan, &counter);
        return;
    }
#pragma omp parallel num_threads((int)work->num_threads)
    linear_tasks(work, &plan, &counter);
}
