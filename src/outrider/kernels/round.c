/* What a round does beside its networks, on a CPU: rows are laid out, drafts are judged, the outcome is written down.
 * kernels/round.py says what each of them does. Counts are small, so one thread does it. Included by native.c. */

typedef struct {
    const int64_t *slots, *pending, *allowed, *emits, *tokens, *seen, *computed, *draft_count;
    const int32_t *page_table;
    int32_t *query_start;
    int64_t *input_ids, *indices, *requests, *row_slots, *locations, *starts, *num_rows, *num_drafts;
    uint8_t *emits_out;
    int64_t *judged, *judged_slots, *judged_next;
    int32_t *judged_start, *table;
    long tokens_row, table_row, page_size, num_requests, total, num_judged, null_slot, missed;
} lay_out_work;

EXPORT void outrider_lay_out(const lay_out_work *work) {
    long row = 0, judged = 0;
    for (long request = 0; request < work->num_requests; request++) {
        int64_t slot = work->slots[request];
        int taken = work->pending[request] > 0, says = work->emits[request] > 0;
        int64_t start = taken ? work->seen[slot] : 0;
        int64_t known = work->missed ? work->computed[slot] - start : work->pending[request];
        int64_t waiting = work->draft_count[slot], allowed = work->allowed[request];
        int64_t drafts = !says ? 0 : waiting < allowed ? waiting : allowed;
        int64_t count = taken ? known + drafts : 0;
        const int32_t *pages = work->page_table + slot * work->table_row;
        work->query_start[request] = (int32_t)row;
        work->judged_start[request] = (int32_t)judged;
        work->starts[request] = start;
        work->num_rows[request] = count;
        work->num_drafts[request] = drafts;
        work->emits_out[request] = (uint8_t)says;
        memcpy(work->table + request * work->table_row, pages, work->table_row * sizeof *pages);
        for (int64_t i = 0; i < count && row + i < work->total; i++) {
            int64_t index = start + i, at = row + i;
            work->input_ids[at] = work->tokens[slot * work->tokens_row + index];
            work->indices[at] = index;
            work->requests[at] = request;
            work->row_slots[at] = slot;
            work->locations[at] = pages[index / work->page_size] * (int64_t)work->page_size + index % work->page_size;
        }
        row += count;
        for (int64_t i = 0; says && i <= drafts && judged < work->num_judged; i++, judged++) {
            work->judged[judged] = row - 1 - drafts + i;
            work->judged_slots[judged] = slot;
            work->judged_next[judged] = start + count - drafts + i;
        }
    }
    work->query_start[work->num_requests] = (int32_t)row;
    work->judged_start[work->num_requests] = (int32_t)judged;
    for (long at = row; at < work->total; at++) { /* rows that only fill up */
        work->input_ids[at] = work->indices[at] = work->locations[at] = 0;
        work->requests[at] = work->num_requests - 1;
        work->row_slots[at] = work->null_slot;
    }
    for (; judged < work->num_judged; judged++) {
        work->judged[judged] = 0;
        work->judged_slots[judged] = work->null_slot;
        work->judged_next[judged] = 1;
    }
}

typedef struct {
    const int64_t *choice, *input_ids, *slots;
    const uint8_t *emits;
    const int32_t *query_start, *judged_start;
    const int64_t *num_drafts, *starts;
    int64_t *tokens, *lengths, *computed, *kept_state, *chosen, *count, *kept;
    long tokens_row, width, num_requests;
} judge_work;

EXPORT void outrider_judge(const judge_work *work) {
    for (long request = 0; request < work->num_requests; request++) {
        int64_t slot = work->slots[request], drafts = work->num_drafts[request], accepted = 0;
        int64_t end = work->query_start[request + 1], num_rows = end - work->query_start[request];
        const int64_t *choice = work->choice + work->judged_start[request], *draft = work->input_ids + end - drafts;
        int64_t *chosen = work->chosen + request * work->width, says = work->emits[request];
        for (long i = 0; i < work->width; i++) chosen[i] = says && i <= drafts ? choice[i] : 0;
        while (says && accepted < drafts && choice[accepted] == draft[accepted]) accepted++;
        int64_t count = says ? accepted + 1 : 0, kept = says ? num_rows - drafts + accepted : num_rows;
        int64_t length = work->lengths[slot];
        memcpy(work->tokens + slot * work->tokens_row + length, chosen, count * sizeof *chosen);
        work->lengths[slot] = length + count;
        work->computed[slot] = work->starts[request] + kept;
        work->kept_state[slot] = kept - (num_rows - drafts);
        work->count[request] = count;
        work->kept[request] = kept;
    }
}

typedef struct {
    const int64_t *slots, *lengths, *computed, *judged, *count, *kept;
    const uint8_t *predicted, *forced; /* NULL: none is */
    const int64_t *choice, *draft, *made; /* NULL, NULL: there is no draft */
    int64_t *tokens, *followed, *draft_count, *outcomes;
    long tokens_row, width, depth, follows, num_counts, num_requests;
} outcome_work;

EXPORT void outrider_write_outcome(const outcome_work *work) {
    for (long request = 0; request < work->num_requests; request++) {
        int64_t slot = work->slots[request], made = work->draft ? work->made[request] : 0;
        int64_t *row = work->outcomes + request * (work->num_counts + work->width + work->depth);
        const int64_t *draft = work->draft + request * work->depth;
        row[0] = work->judged[request];
        row[1] = work->draft_count[slot] = made;
        row[2] = work->count[request];
        row[3] = work->kept[request];
        row[4] = work->predicted ? work->predicted[request] : 0;
        row[5] = work->forced ? work->forced[request] : 0;
        memcpy(row + work->num_counts, work->choice + request * work->width, work->width * sizeof *row);
        if (work->draft) {
            memcpy(work->tokens + slot * work->tokens_row + work->lengths[slot], draft, made * sizeof *row);
            memcpy(row + work->num_counts + work->width, draft, work->depth * sizeof *row);
        }
        if (work->follows) work->followed[slot] = work->computed[slot];
    }
}

typedef struct {
    const int64_t *slots, *starts, *num_rows, *lengths, *tokens;
    const int32_t *old_start, *page_table;
    int32_t *new_start;
    int64_t *input_ids, *indices, *requests, *row_slots, *locations, *last;
    long tokens_row, table_row, page_size, num_requests, total, last_index, null_slot, first_key, back, extra;
} extension_work;

EXPORT void outrider_extension_rows(const extension_work *work) {
    long at = 0, more = 1 + work->back + work->extra;
    for (long request = 0; request < work->num_requests; request++) {
        int64_t slot = work->slots[request], start = work->starts[request], count = work->num_rows[request];
        int64_t length = work->lengths[slot], newest = length - 1 - start < count ? length - 1 - start : count;
        const int32_t *pages = work->page_table + request * work->table_row;
        work->new_start[request] = (int32_t)at;
        work->last[request] = at + work->back + newest;
        for (int64_t i = 0; i < count + more; i++, at++) {
            int64_t place = start - work->back + i, index = place < 0 ? 0 : place;
            if (index > work->last_index) index = work->last_index;
            int known = place >= work->first_key && place < length + work->extra;
            int64_t page = known ? pages[index / work->page_size] : 0;
            work->input_ids[at] = work->tokens[slot * work->tokens_row + index];
            work->indices[at] = index;
            work->requests[at] = request;
            work->row_slots[at] = slot;
            work->locations[at] = page * work->page_size + index % work->page_size;
        }
    }
    work->new_start[work->num_requests] = (int32_t)at;
    for (; at < work->total; at++) { /* rows that only fill up */
        work->input_ids[at] = work->tokens[work->null_slot * work->tokens_row];
        work->indices[at] = work->locations[at] = 0;
        work->requests[at] = work->num_requests - 1;
        work->row_slots[at] = work->null_slot;
    }
}

/* Taps of rows: those of a request's pass, and before them those that were carried from the last one. */
typedef struct {
    const float *taps, *carried;
    const int32_t *query_start;
    long size, num_carried; /* floats of a row's taps; rows carried of each request */
} tap_source;

static const float *tap_row(const tap_source *source, long request, int64_t row) {
    if (row < 0) return source->carried + (request * source->num_carried + source->num_carried + row) * source->size;
    return source->taps + (source->query_start[request] + row) * source->size;
}

typedef struct {
    tap_source source;
    const int64_t *slots, *starts, *kept, *indices;
    const int32_t *page_table;
    float *carry, *tails;
    long table_row, page_size, num_tails, num_requests;
} keep_taps_work;

EXPORT void outrider_keep_taps(const keep_taps_work *work) {
    const tap_source *source = &work->source;
    size_t bytes = (size_t)source->size * sizeof(float);
    for (long request = 0; request < work->num_requests; request++) {
        int64_t kept = work->kept[request], first = source->query_start[request];
        float *carry = work->carry + work->slots[request] * source->num_carried * source->size;
        for (long i = 0; i < source->num_carried; i++)
            memcpy(carry + i * source->size, tap_row(source, request, kept - source->num_carried + i), bytes);
        for (int64_t row = 0; row < kept; row++) {
            int64_t index = work->indices[first + row];
            if ((index + 1) % work->page_size) continue;
            int64_t page = work->page_table[request * work->table_row + index / work->page_size];
            for (long i = 0; i < work->num_tails; i++)
                memcpy(work->tails + (page * work->num_tails + i) * source->size,
                       tap_row(source, request, row - work->num_tails + 1 + i), bytes);
        }
    }
}

typedef struct {
    const float *taps;
    const int64_t *slots, *indices; /* of each row */
    float *missed; /* [slots, room, size] */
    long num_rows, size, room;
} keep_missed_work;

EXPORT void outrider_keep_missed(const keep_missed_work *work) {
    for (long row = 0; row < work->num_rows; row++) {
        int64_t place = work->slots[row] * work->room + work->indices[row] % work->room;
        memcpy(work->missed + place * work->size, work->taps + row * work->size, (size_t)work->size * sizeof(float));
    }
}

typedef struct {
    tap_source source;
    const int64_t *num_rows, *request;
    const int32_t *new_start;
    float *out;
    long back, total;
} shift_taps_work;

EXPORT void outrider_shift_taps(const shift_taps_work *work) {
    const tap_source *source = &work->source;
    for (long at = 0; at < work->total; at++) {
        int64_t request = work->request[at], before = at - work->new_start[request] - work->back - 1;
        if (before > work->num_rows[request] - 1) before = work->num_rows[request] - 1;
        memcpy(work->out + at * source->size, tap_row(source, request, before), (size_t)source->size * sizeof(float));
    }
}

typedef struct {
    const int64_t *slots, *lengths;
    const uint8_t *emits;
    const int32_t *page_table;
    int64_t *indices, *locations;
    long table_row, page_size, depth, num_requests;
} rows_ahead_work;

EXPORT void outrider_rows_ahead(const rows_ahead_work *work) {
    for (long ahead = 0, at = 0; ahead < work->depth; ahead++)
        for (long request = 0; request < work->num_requests; request++, at++) {
            int64_t index = work->lengths[work->slots[request]] - 1 + ahead;
            int64_t page = work->page_table[request * work->table_row + index / work->page_size];
            work->indices[at] = index;
            work->locations[at] = (work->emits[request] ? page : 0) * work->page_size + index % work->page_size;
        }
}

/* Where the end of each text stood in it before: see lookup.py, which says what counts more. */
typedef struct {
    const int64_t *tokens, *slots, *lengths;
    int64_t *found, *counts;
    long width, num_requests, depth, room, shortest, longest;
} lookup_work;

EXPORT void outrider_lookup(const lookup_work *work) {
    for (long request = 0; request < work->num_requests; request++) {
        const int64_t *text = work->tokens + work->slots[request] * work->width;
        long length = smaller(work->lengths[request], work->width), best = -1, best_run = 0, best_room = 0;
        for (long at = length - 2; at >= 0; at--) { /* from the latest on: of equals the first one wins */
            long run = 0, most = smaller(work->longest, at + 1);
            while (run < most && text[at - run] == text[length - 1 - run]) run++;
            long room = smaller(length - 1 - at, work->room);
            if (run < work->shortest || run < best_run || (run == best_run && room <= best_room)) continue;
            best = at, best_run = run, best_room = room;
            if (run == work->longest && room == work->room) break;
        }
        long start = best + 1;
        work->counts[request] = best < 0 ? 0 : smaller(smaller(length - start, best_run), work->depth);
        for (long i = 0; i < work->room; i++) work->found[request * work->room + i] = text[smaller(start + i, work->width - 1)];
    }
}
