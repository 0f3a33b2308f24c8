/* Paged attention: partial softmaxes over fixed blocks of keys, merged in ascending order. Included by native.c. */

typedef struct {
    const float *query, *sinks;
    const int32_t *page_table, *query_start;
    const int64_t *indices, *last_key;
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
        tile.upper[r] = (work->last_key ? work->last_key[tile.row + r] : index) + 1;
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

INLINE void fetch(const void *p, long num_bytes) {
    for (long i = 0; i < num_bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* Where the keys (or values) of a tile's head lie, for keys from begin to end of a block. */
static void find_rows(const attention_work *work, const query_tile *tile, const page_view *view, long block, long begin,
                      long end, const void **rows) {
    const int32_t *table = work->page_table + tile->request * work->table_width;
    long stride = page_bytes(view, view->row_stride), first = page_bytes(view, tile->key_head * view->head_dim);
    for (long i = begin; i < end;) {
        long key = block * KEY_BLOCK + i, offset = key % view->page_size;
        long page_end = smaller(end, i + view->page_size - offset);
        const char *row = (const char *)page_row(view, table[key / view->page_size], offset) + first;
        for (; i < page_end; i++, row += stride) rows[i] = row;
    }
}

/* Up to LANES numbers of a row of a page. */
INLINE vector load_page(const void *row, long at, long left, int halves) {
    if (!halves) return load_up_to((const float *)row + at, left);
    const uint8_t *from = (const uint8_t *)row + at * 2;
    return left >= LANES ? load_float16(from) : load_last_weights(FLOAT16, (weight_row){from, NULL}, left);
}

/* The keys of a block and their values, of one head, from begin to end. */
typedef struct {
    const void *keys[KEY_BLOCK], *values[KEY_BLOCK];
    long begin, end;
} head_rows;

/* flat[dim][key] = keys[key][dim]; meanwhile the values of these keys are on their way. */
INLINE void transpose_some(const head_rows *rows, const page_view *view, long value_bytes, float *flat,
                           int halves) {
    long begin = rows->begin, end = rows->end, dim = view->head_dim;
    for (long group = begin / LANES * LANES; group < end; group += LANES) {
        for (long d = 0; d < dim; d += LANES) {
            long from = group + d * LANES / dim, to = group + (d + LANES) * LANES / dim;
            for (long i = larger(begin, from); i < smaller(end, to); i++) fetch(rows->values[i], value_bytes);
            vector square[LANES];
            for (long i = 0; i < LANES; i++) /* outside, any key will do: its score is never looked at */
                square[i] = load_page(rows->keys[larger(begin, smaller(end - 1, group + i))], d, dim - d, halves);
            transpose(square);
            for (long i = 0; i < smaller(LANES, dim - d); i++) store(flat + (d + i) * KEY_BLOCK + group, square[i]);
        }
    }
}

static void transpose_keys(const attention_work *work, const head_rows *rows, float *flat) {
    long value_bytes = page_bytes(&work->values, work->values.head_dim);
    if (work->keys.halves) transpose_some(rows, &work->keys, value_bytes, flat, 1);
    else transpose_some(rows, &work->keys, value_bytes, flat, 0);
}

/* Where values lie as floats: where they are, or, of half precision, in `wide`. */
static void widen_values(const attention_work *work, const head_rows *rows, float *wide, const float **values) {
    long dim = work->values.head_dim;
    for (long i = rows->begin; i < rows->end; i++) {
        values[i] = work->values.halves ? wide + i * dim : rows->values[i];
        for (long d = 0; work->values.halves && d < dim; d += LANES)
            store_up_to(wide + i * dim + d, load_page(rows->values[i], d, dim - d, 1), dim - d);
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
    const void *keys[KEY_BLOCK];
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
    long key_bytes = page_bytes(&work->keys, dim);
    ALIGNED float scores[QUERY_TILE * KEY_BLOCK], flat[dim * KEY_BLOCK];
    ALIGNED float wide[work->values.halves ? KEY_BLOCK * work->values.head_dim : 1];
    const float *values[KEY_BLOCK], *flat_rows[dim];
    key_ranges ranges = find_ranges(tile, block);
    memset(parts, 0, (size_t)(num_pairs * width) * sizeof(float));
    head_rows rows = {.begin = ranges.any_begin, .end = ranges.any_end};
    if (rows.begin < rows.end) {
        long start = rows.begin / LANES * LANES;
        long num_lanes = ceil_div(rows.end - start, LANES) * LANES;
        find_rows(work, tile, &work->keys, block, rows.begin, rows.end, rows.keys);
        find_rows(work, tile, &work->values, block, rows.begin, rows.end, rows.values);
        transpose_keys(work, &rows, flat);
        for (long d = 0; d < dim; d++) flat_rows[d] = flat + d * KEY_BLOCK + start;
        memset(scores, 0, (size_t)(num_pairs * KEY_BLOCK) * sizeof(float));
        blend b = {query, dim, flat_rows, 0, dim, scores + start, KEY_BLOCK, num_lanes};
        blend_pairs(&b, num_pairs);
    }
    for (long pair = 0; pair < num_pairs; pair++) {
        partial soft = {-INFINITY, 0.0f};
        long begin = ranges.begin[pair / tile->num_heads], end = ranges.end[pair / tile->num_heads];
        for (long key = next->begin + pair; key < next->end; key += num_pairs) fetch(next->keys[key], key_bytes);
        if (begin < end) soft = soften(scores + pair * KEY_BLOCK, begin, end, (float)work->softcap);
        memcpy(parts + pair * width, &soft, sizeof soft);
    }
    widen_values(work, &rows, wide, values);
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
