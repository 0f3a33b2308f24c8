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
    const float *weights; /* of its first column, from k on; the next column is `stride` further */
    const uint16_t *halves; /* instead of them, where they have 16 bits and are widened as they are loaded */
    long stride, row, num_rows, column, num_columns, k, length;
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

/* Where weights lie, in one of two forms; the other is NULL. */
typedef struct {
    const float *floats;
    const uint16_t *halves;
} weight_row;

/* `halved`: 0, or which kind of 16 bits. */
INLINE vector load_weights(weight_row w, int halved, long part) {
    if (!halved) return part ? load_part(w.floats, part) : load(w.floats);
    return part ? load_half_part(halved, w.halves, part) : load_half(halved, w.halves);
}

/* One step of LANES along k. The longer side streams through one register, the shorter one stays in several. */
INLINE void dot_step(int rows, int columns, int halved, const float *const *x, const weight_row *w, vector *sums, long part) {
    vector held[8];
    int across = rows > columns, num_held = across ? columns : rows, num_streamed = across ? rows : columns;
    UNROLL for (int i = 0; i < num_held; i++) {
        if (across) held[i] = load_weights(w[i], halved, part);
        else held[i] = part ? load_part(x[i], part) : load(x[i]);
        HOLD(held[i]);
    }
    UNROLL for (int j = 0; j < num_streamed; j++) {
        vector streamed;
        if (across) streamed = part ? load_part(x[j], part) : load(x[j]);
        else streamed = load_weights(w[j], halved, part);
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

INLINE void dot_tile(const linear_patch *patch, int rows, int columns, int halved, long row, long column,
                     fetch_turns *turns) {
    const linear_work *work = patch->work;
    const float *x[ROW_TILE];
    weight_row w[8];
    long ahead[8];
    vector sums[ROW_TILE * 8];
    float folded[32];
    UNROLL for (int r = 0; r < rows; r++) x[r] = work->x + (row + r) * work->depth + patch->k;
    UNROLL for (int c = 0; c < columns; c++) {
        long at = (column + c - patch->column) * patch->stride;
        w[c] = halved ? (weight_row){NULL, patch->halves + at} : (weight_row){patch->weights + at, NULL};
    }
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = (vector){0};
    UNROLL for (int c = 0; c < columns; c++) {
        ahead[c] = turns->turn == 0 ? patch->ahead : 0;
        turns->turn = turns->turn == 0 ? turns->num_passes - 1 : turns->turn - 1;
    }
    long left = patch->length;
    for (; left >= LANES; left -= LANES) {
        UNROLL for (int c = 0; c < columns; c++)
            __builtin_prefetch(halved ? (const void *)(w[c].halves + ahead[c]) : w[c].floats + ahead[c], 0, 2);
        dot_step(rows, columns, halved, x, w, sums, 0);
        UNROLL for (int r = 0; r < rows; r++) x[r] += LANES;
        UNROLL for (int c = 0; c < columns; c++) {
            if (halved) w[c].halves += LANES;
            else w[c].floats += LANES;
        }
    }
    if (left > 0) dot_step(rows, columns, halved, x, w, sums, left);
    fold_all(sums, rows * columns, folded);
    __asm__ volatile("" : : "r"(folded) : "memory"); /* picking lanes out of memory beats shuffling them out */
    UNROLL for (int r = 0; r < rows; r++) {
        float *out = work->out + (row + r) * work->num_outputs + column;
        UNROLL for (int c = 0; c < columns; c++)
            out[c] = patch->k > 0 ? out[c] + folded[r * columns + c] : folded[r * columns + c];
    }
}

INLINE void dot_pass(const linear_patch *patch, int halved, int rows, int columns, long row, fetch_turns turns) {
    long column = patch->column, end = patch->column + patch->num_columns;
    for (; column + columns <= end; column += columns) dot_tile(patch, rows, columns, halved, row, column, &turns);
    for (; column < end; column++) dot_tile(patch, rows, 1, halved, row, column, &turns);
}

INLINE void dot_rows(const linear_patch *patch, int halved) {
    long num_passes = ceil_div(patch->num_rows, ROW_TILE);
    for (long pass = 0; pass < num_passes; pass++) {
        long first = pass * patch->num_rows / num_passes, end = (pass + 1) * patch->num_rows / num_passes;
        long row = patch->row + first;
        fetch_turns turns = {pass, num_passes};
        switch (end - first) {
        case 1: dot_pass(patch, halved, 1, 8, row, turns); break;
#if ROW_TILE == 4
        case 2: dot_pass(patch, halved, 2, 6, row, turns); break;
        case 3: dot_pass(patch, halved, 3, 4, row, turns); break;
        case 4: dot_pass(patch, halved, 4, 3, row, turns); break;
#else
        case 2: dot_pass(patch, halved, 2, 8, row, turns); break;
        case 3: dot_pass(patch, halved, 3, 8, row, turns); break;
        case 4: dot_pass(patch, halved, 4, 6, row, turns); break;
        case 5: dot_pass(patch, halved, 5, 4, row, turns); break;
        case 6: dot_pass(patch, halved, 6, 4, row, turns); break;
        case 7: dot_pass(patch, halved, 7, 3, row, turns); break;
        case 8: dot_pass(patch, halved, 8, 3, row, turns); break;
#endif
        }
    }
}

static void dot_patch(const linear_patch *patch) { dot_rows(patch, 0); }
static void dot_bfloat16(const linear_patch *patch) { dot_rows(patch, BFLOAT16); }
static void dot_float16(const linear_patch *patch) { dot_rows(patch, FLOAT16); }

/* A patch of packed weights, a few columns at a time: unpacked, they stay in the first-level cache until all rows are
 * done with them. How many is a multiple of the columns of the tiles that will run; more rows repay a wider panel. */
static void unpack_and_dot(linear_patch patch) {
    ALIGNED float panel[COLUMN_BLOCK * DEPTH_BLOCK];
    const linear_work *work = patch.work;
    long end = patch.column + patch.num_columns;
    long step = patch.num_rows <= 3 ? 8 : patch.num_rows <= ROW_TILE ? 12 : COLUMN_BLOCK;
    patch.weights = panel, patch.stride = patch.length, patch.ahead = 0;
    for (; patch.column < end; patch.column += step) {
        patch.num_columns = smaller(step, end - patch.column);
        unpack(&work->matrix, work->depth, patch.column, patch.num_columns, patch.k, patch.length, panel);
        dot_patch(&patch);
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
        const float *weights = work->matrix.weight ? work->matrix.weight + column * work->depth + k : NULL;
        const uint16_t *halves = (const uint16_t *)work->matrix.packed + column * work->depth + k;
        linear_patch patch = {work, weights, is_halved(work->matrix.kind) ? halves : NULL, work->depth, row,
                              row_end - row, column, num_columns, k, length, (next_column - column) * work->depth};
        if (work->matrix.kind == PLAIN) dot_patch(&patch);
        else if (work->matrix.kind == BFLOAT16) dot_bfloat16(&patch);
        else if (work->matrix.kind == FLOAT16) dot_float16(&patch);
        else unpack_and_dot(patch);
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
