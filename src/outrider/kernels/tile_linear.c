/* Linear layers over tiles: the input is rounded once for every type of tile, then threads take a few tiles at a time.
 * Included by native.c. */

static __thread void *rounded_memory;
static __thread size_t rounded_size;

/* Kept by each calling thread, as large as it was ever needed. */
static void *rounded_scratch(long num_rows, long depth) {
    size_t size = (size_t)num_rows * (size_t)(depth / STEP) * ROUNDED_BYTES;
    if (size > rounded_size) {
        free(rounded_memory);
        rounded_size = size;
        if (posix_memalign(&rounded_memory, 64, size)) abort();
    }
    return rounded_memory;
}

typedef struct {
    const linear_work *work;
    const tile_rows *part;
    rounded_rows x;
    long first_column, num_tiles, tile_bytes, step; /* tiles of a task */
} tile_job;

static void tile_task(const tile_job *job, long task) {
    const linear_work *work = job->work;
    long end = smaller(job->num_tiles, (task + 1) * job->step), skipped = job->part->skipped;
    for (long tile = task * job->step; tile < end; tile++) {
        long first = larger(tile * TILE_ROWS, skipped);
        long last = smaller((tile + 1) * TILE_ROWS, skipped + job->part->end_row - job->first_column);
        tile_outputs to = {work->out, work->bias, work->num_outputs, job->first_column + first - skipped,
                           first - tile * TILE_ROWS, last - first};
        tile_passes(job->part->tiles + tile * job->tile_bytes, job->part->type, &job->x, 0, work->num_rows, &to);
    }
}

static void round_rows(const linear_work *work, long type, const rounded_rows *rows) {
#pragma omp parallel for num_threads((int)work->num_threads) schedule(static) if (work->num_rows >= 16)
    for (long row = 0; row < work->num_rows; row++) round_row(work->x + row * work->depth, type, rows, row);
}

static void tiled_linear(const linear_work *work) {
    long first = 0, rounded_for = -1;
    rounded_rows x = place_rounded(rounded_scratch(work->num_rows, work->depth), work->num_rows, work->depth);
    for (const tile_rows *part = work->matrix.packed; first < work->num_outputs; first = part->end_row, part++) {
        tile_format format = format_of(part->type);
        if (part->type != rounded_for) round_rows(work, rounded_for = part->type, &x);
        tile_job job = {.work = work, .part = part, .x = x, .first_column = first,
                        .num_tiles = ceil_div(part->skipped + part->end_row - first, TILE_ROWS),
                        .tile_bytes = work->depth / unit_len(format) * unit_bytes(format)};
        job.step = larger(1, job.num_tiles / (work->num_threads * 8));
        long num_tasks = ceil_div(job.num_tiles, job.step), counter = 0;
        if (work->num_threads == 1 || work->num_rows * (part->end_row - first) * work->depth < 8 * SMALL_WORK) {
            for (long task = 0; task < num_tasks; task++) tile_task(&job, task);
            continue;
        }
#pragma omp parallel num_threads((int)work->num_threads)
        for (long task = __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED); task < num_tasks;
             task = __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED))
            tile_task(&job, task);
    }
}
