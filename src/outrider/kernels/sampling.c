/* The choice of a token where it is drawn: sampling.py, in one pass over a row. Included by native.c.
 *
 * A token's score is its scaled logit plus noise; the best score wins. Noise is a hash of (seed, position, id), so a
 * token that cannot win need not have its noise worked out: -log(-log(1 - u)) is at most -log(u), so it loses unless
 * u < exp(logit - best score so far). Few pass, and of those the score is worked out to the last bit.
 *
 * top_k, top_p and min_p keep the first tokens of a row in the order (logit, then id): all above some value, and some
 * of those that have it. The value is found by bisection over the numbers that a float can be, among the few tokens
 * that are near the best, or, where those do not suffice, among all. Nothing is sorted. */

#define GOLDEN 0x9E3779B97F4A7C15u
#define NEAR 16.0f /* below the best logit, where tokens are looked at first */
#define MOST_NOISE 22.9f /* that 32 random bits can bring */
#define STRETCH 1024 /* tokens */

typedef struct {
    const float *logits;
    const int64_t *rows, *positions, *ids; /* a row's slot and place; which ids the columns are about, NULL: all */
    const float *temperature; /* this and the next ones by slot */
    const int64_t *seed, *top_k; /* top_k, top_p and min_p are NULL where nobody filters */
    const float *top_p, *min_p;
    int64_t *out;
    long num_rows, width, num_threads;
    double least, sharpness;
} draw_work;

typedef struct {
    float *values, *weights; /* scaled logits, and exp of how far each is from the best */
    int32_t *columns;
    long count;
} token_set;

typedef struct {
    uint64_t key;
    const int64_t *ids;
    float score;
    int64_t column;
} race;

INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

INLINE uint32_t random_bits(const race *race, long column) {
    uint64_t id = (uint64_t)(race->ids ? race->ids[column] : column);
    return (uint32_t)(mix(race->key + (id + 1) * GOLDEN) >> 32);
}

/* Centred in its cell: never 0 or 1. */
INLINE float uniform(uint32_t bits) { return ((float)bits + 0.5f) * 0x1p-32f; }

static void enter(race *race, long column, float logit, uint32_t bits) {
    float u = uniform(bits), most = 1.0f - 0x1p-24f;
    float score = logit - logf(-log1pf(-(u < most ? u : most)));
    if (score > race->score || (score == race->score && column < race->column))
        race->score = score, race->column = column;
}

/* Whoever is so far behind, or further, cannot win: what rounding may bring is allowed for. */
INLINE float behind(const race *race) { return race->score - 1e-4f - 3e-7f * fabsf(race->score); }

INLINE void hash_lanes(const race *race, long first, long count, uint32_t *bits) {
    if (race->ids)
        for (long lane = 0; lane < count; lane++) bits[lane] = random_bits(race, first + lane);
    else
        for (int lane = 0; lane < LANES; lane++)
            bits[lane] = (uint32_t)(mix(race->key + (uint64_t)(first + lane + 1) * GOLDEN) >> 32);
}

static void run_all(race *race, const float *logits, long width, float temperature, float sharpness) {
    vector divisor = spread(temperature), factor = spread(sharpness);
    float limit = behind(race);
    for (long first = 0; first < width; first += LANES) {
        long count = smaller(LANES, width - first);
        vector logit = load_up_to(logits + first, count) / divisor * factor;
        logit = choose(logit == logit, logit, spread(-INFINITY)); /* NaN would hide what is beside it */
        if (fold_greatest(logit) < limit - MOST_NOISE) continue;
        vector chance = exp_vector(logit - limit);
        uint32_t bits[LANES];
        hash_lanes(race, first, count, bits);
        for (int lane = 0; lane < count; lane++)
            if (uniform(bits[lane]) < chance[lane]) {
                enter(race, first + lane, logit[lane], bits[lane]);
                limit = behind(race);
            }
    }
}

static void gather(token_set *set, const float *logits, long width, float temperature, float best, float lowest) {
    vector divisor = spread(temperature), bound = spread(lowest);
    set->count = 0;
    for (long first = 0; first < width; first += LANES) {
        long count = smaller(LANES, width - first);
        vector value = load_up_to(logits + first, count) / divisor;
        integers kept = value > bound;
        if (fold_greatest(choose(kept, spread(1.0f), (vector){0})) == 0.0f) continue;
        vector weight = exp_vector(value - best);
        for (int lane = 0; lane < count; lane++)
            if (kept[lane]) {
                set->values[set->count] = value[lane], set->weights[set->count] = weight[lane];
                set->columns[set->count++] = (int32_t)(first + lane);
            }
    }
    for (long i = set->count; i < set->count + LANES; i++) set->values[i] = -INFINITY, set->weights[i] = 0;
}

/* Sums are taken by stretches: beside a sum that is near one, single weights would be rounded away. */
static double mass_of(const float *logits, long width, float temperature, float best) {
    vector divisor = spread(temperature);
    double total = 0;
    for (long start = 0; start < width; start += STRETCH) {
        vector sum = {0};
        for (long first = start, end = smaller(start + STRETCH, width); first < end; first += LANES) {
            vector value = load_up_to(logits + first, width - first) / divisor;
            vector weight = choose(value > -INFINITY, exp_vector(value - best), (vector){0}); /* NaN too has none */
            for (long lane = width - first; lane < LANES; lane++) weight[lane] = 0;
            sum += weight;
        }
        total += fold(sum);
    }
    return total;
}

/* How many tokens are above a value, or their mass. */
static double above(const token_set *set, float value, int counts) {
    vector bound = spread(value);
    double total = 0;
    for (long start = 0; start < set->count; start += STRETCH) {
        vector sum = {0};
        for (long i = start; i < smaller(start + STRETCH, set->count); i += LANES)
            sum += choose(load(set->values + i) > bound, counts ? spread(1.0f) : load(set->weights + i), (vector){0});
        total += fold(sum);
    }
    return total;
}

/* Floats in their order, as whole numbers. */
INLINE uint32_t rank_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float of_rank(uint32_t rank) {
    uint32_t bits = rank >> 31 ? rank & 0x7FFFFFFFu : ~rank;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The smallest value from `low` to `high` above which there is less than `limit`; there is at the highest. */
static float value_at(const token_set *set, double limit, float low, float high, int counts) {
    uint32_t from = rank_of(low), to = rank_of(high);
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        if (above(set, of_rank(middle), counts) < limit) to = middle;
        else from = middle + 1;
    }
    return of_rank(to);
}

static void run_filtered(race *race, const draw_work *work, const float *logits, long slot, float best, token_set *set) {
    float temperature = work->temperature[slot], share = work->top_p[slot], least = work->min_p[slot];
    long width = work->width, most = work->top_k[slot];
    int by_count = most < width, by_mass = share < 1.0f;
    gather(set, logits, width, temperature, best, best - NEAR);
    double total = by_mass && !by_count ? mass_of(logits, width, temperature, best) : 0.0;
    int suffices = by_count ? set->count >= most : !by_mass || above(set, -INFINITY, 0) >= (double)share * total;
    if (!suffices || (least > 0.0f && least < 2e-7f)) gather(set, logits, width, temperature, best, -INFINITY);
    float cut = -INFINITY;
    long num_equal = width; /* of those that are just at the cut, so many stay */
    if (by_count && most < set->count) {
        cut = value_at(set, (double)most, -INFINITY, best, 1);
        num_equal = most - (long)above(set, cut, 1);
    }
    if (by_mass) {
        if (by_count)
            total = above(set, cut, 0) + (cut > -INFINITY ? (double)num_equal * exp_scalar(cut - best) : 0.0);
        double wanted = (double)share * total;
        float value = value_at(set, wanted, cut, best, 0);
        double room = ceil((wanted - above(set, value, 0)) / exp_scalar(value - best));
        long stay = room > 1.0 ? (room < (double)width ? (long)room : width) : 1;
        num_equal = value > cut ? stay : smaller(stay, num_equal);
        cut = value;
    }
    for (long i = 0; i < set->count; i++) {
        float value = set->values[i];
        if (value < cut || (value == cut && num_equal-- <= 0) || set->weights[i] < least) continue;
        enter(race, set->columns[i], value * (float)work->sharpness, random_bits(race, set->columns[i]));
    }
}

INLINE int has_filter(const draw_work *work, long slot) {
    return work->top_k[slot] < work->width || work->top_p[slot] < 1.0f || work->min_p[slot] > 0.0f;
}

static void draw_rows(const void *opaque, long first, long end) {
    const draw_work *work = opaque;
    token_set set = {0};
    if (work->top_k) {
        size_t room = (size_t)(work->width + LANES);
        set.values = malloc(room * 4), set.weights = malloc(room * 4), set.columns = malloc(room * 4);
    }
    for (long row = first; row < end; row++) {
        const float *logits = work->logits + row * work->width;
        long slot = work->rows[row];
        float temperature = work->temperature[slot];
        int64_t column = argmax(logits, work->width);
        if (temperature > (float)work->least) {
            uint64_t key = mix(mix((uint64_t)work->seed[slot] + GOLDEN) + (uint64_t)work->positions[row] * GOLDEN);
            race running = {key, work->ids, -INFINITY, column};
            float best = logits[column] / temperature;
            enter(&running, column, best * (float)work->sharpness, random_bits(&running, column));
            if (work->top_k && has_filter(work, slot)) run_filtered(&running, work, logits, slot, best, &set);
            else run_all(&running, logits, work->width, temperature, (float)work->sharpness);
            column = running.column;
        }
        work->out[row] = work->ids ? work->ids[column] : column;
    }
    free(set.values), free(set.weights), free(set.columns);
}

EXPORT void outrider_draw(const draw_work *work) {
    for_rows(draw_rows, work, work->num_rows, work->num_rows * work->width, work->num_threads);
}
