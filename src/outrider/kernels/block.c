/* A whole decoder block in one call: attention over the normed residual, or over another input, added to the residual,
 * then the gated MLP; either may be normed before it is added. And several blocks in one call. Nothing new is computed
 * here: these are the kernels of native.c one after the other, with the same bits, and without a dozen returns to
 * Python a layer. Included by native.c. */

typedef struct {
    matrix qkv, output, gate_up, down;
    const float *qkv_bias, *q_norm, *k_norm, *output_bias, *mlp_norm, *gate_up_bias, *down_bias;
    const float *attention_norm; /* NULL: the attention's input is given */
    const float *attended_norm, *fed_norm; /* of what is added to the residual; NULL: it is added as it is */
    long hidden_size, input_size, num_heads, intermediate_size, window, gelu;
    double eps, head_eps, scale, softcap, norm_offset, head_offset;
    page_view keys, values;
} block_layer;

typedef struct {
    const block_layer *layer;
    const float *residual, *input, *cosine, *sine;
    const int64_t *write_locations, *indices;
    const int32_t *page_table, *query_start;
    float *scratch, *out;
    long num_rows, num_requests, table_width, rotary_half, first_key, num_threads;
} block_call;

typedef struct {
    float *qkv;
    const float *q_norm, *k_norm;
    long width, num_heads, num_key_heads, head_dim;
    double eps, offset;
} head_norms;

static void head_norm_rows(const void *opaque, long first, long end) {
    const head_norms *work = opaque;
    for (long row = first; row < end; row++)
        for (long head = 0; head < work->num_heads + work->num_key_heads; head++) {
            float *x = work->qkv + row * work->width + head * work->head_dim;
            norm_work norm = {.weight = head < work->num_heads ? work->q_norm : work->k_norm,
                              .width = work->head_dim, .eps = work->eps, .offset = work->offset};
            norm_row(&norm, x, NULL, NULL, x);
        }
}

static void project(const block_call *call, const float *x, long depth, const matrix *weights, const float *bias,
                    float *out, long num_outputs) {
    linear_work work = {x, bias, out, call->num_rows, num_outputs, depth, call->num_threads, *weights};
    outrider_linear(&work);
}

/* input -> attention before its output projection; returns where it is. scratch: qkv, queries, mixed. */
static float *attend(const block_layer *layer, const block_call *call, const float *input, float *scratch) {
    long dim = layer->keys.head_dim, key_heads = layer->keys.num_heads, heads = layer->num_heads;
    long width = (heads + key_heads) * dim + key_heads * layer->values.head_dim;
    float *qkv = scratch, *query = qkv + call->num_rows * width, *mixed = query + call->num_rows * heads * dim;
    project(call, input, layer->input_size, &layer->qkv, layer->qkv_bias, qkv, width);
    if (layer->q_norm) {
        head_norms norms = {qkv, layer->q_norm, layer->k_norm, width, heads, key_heads, dim, layer->head_eps,
                            layer->head_offset};
        for_rows(head_norm_rows, &norms, call->num_rows, call->num_rows * width, call->num_threads);
    }
    rope_work rope = {.query = qkv, .key = qkv + heads * dim, .value = qkv + (heads + key_heads) * dim,
                      .cosine = call->cosine, .sine = call->sine, .write_locations = call->write_locations,
                      .query_out = query, .num_rows = call->num_rows, .query_stride = width, .key_stride = width,
                      .value_stride = width, .num_query_heads = heads, .rotary_half = call->rotary_half,
                      .num_threads = call->num_threads, .keys = layer->keys, .values = layer->values};
    outrider_rope_write(&rope);
    attention_work attention = {.query = query, .page_table = call->page_table, .query_start = call->query_start,
                                .indices = call->indices, .out = mixed, .num_requests = call->num_requests,
                                .table_width = call->table_width, .num_query_heads = heads,
                                .first_key = call->first_key, .window = layer->window,
                                .num_threads = call->num_threads, .scale = layer->scale,
                                .softcap = layer->softcap, .keys = layer->keys, .values = layer->values};
    outrider_paged_attention(&attention);
    return mixed;
}

/* x over its root mean square; x + residual in `sum` first where there is a residual. */
static void block_norm(const block_call *call, const float *x, const float *residual, const float *weight, float *sum,
                       float *out) {
    const block_layer *layer = call->layer;
    norm_work norm = {x, residual, weight, out, sum, call->num_rows, layer->hidden_size, call->num_threads, layer->eps,
                      layer->norm_offset};
    outrider_rms_norm(&norm);
}

EXPORT void outrider_block(const block_call *call) {
    const block_layer *layer = call->layer;
    long rows = call->num_rows, hidden = layer->hidden_size, inner = layer->intermediate_size;
    float *sum = call->scratch, *normed = sum + rows * hidden, *projected = normed + rows * hidden;
    float *rest = projected + rows * hidden; /* attention's, then the MLP's */
    if (layer->attention_norm) block_norm(call, call->residual, NULL, layer->attention_norm, NULL, normed);
    float *mixed = attend(layer, call, layer->attention_norm ? normed : call->input, rest);
    project(call, mixed, layer->num_heads * layer->values.head_dim, &layer->output, layer->output_bias, projected, hidden);
    if (layer->attended_norm) block_norm(call, projected, NULL, layer->attended_norm, NULL, projected);
    block_norm(call, projected, call->residual, layer->mlp_norm, sum, normed);
    float *gate_up = rest, *activated = rest + rows * 2 * inner;
    project(call, normed, hidden, &layer->gate_up, layer->gate_up_bias, gate_up, 2 * inner);
    gated_work gated = {gate_up, activated, rows, inner, layer->gelu, call->num_threads};
    outrider_gated(&gated);
    project(call, activated, inner, &layer->down, layer->down_bias, projected, hidden);
    if (layer->fed_norm) block_norm(call, projected, NULL, layer->fed_norm, NULL, projected);
    for (long i = 0; i < rows * hidden; i++) call->out[i] = sum[i] + projected[i];
}

typedef struct {
    const float *cosine, *sine;
    long half;
} block_angles;

typedef struct {
    const block_layer *const *layers;
    const int64_t *angles_of; /* which of the angles each layer turns by */
    const block_angles *angles;
    const int64_t *tap_after; /* which of the taps the stream after each layer is; -1: none */
    float *taps; /* [taps, rows, hidden] */
    long num_layers;
    block_call call; /* with the first layer's residual */
} stack_call;

/* A block is done with its residual when it writes its output: from the second one on, they are the same. */
EXPORT void outrider_stack(const stack_call *stack) {
    block_call call = stack->call;
    for (long i = 0; i < stack->num_layers; i++) {
        const block_angles *angles = stack->angles + stack->angles_of[i];
        call.layer = stack->layers[i];
        call.cosine = angles->cosine, call.sine = angles->sine, call.rotary_half = angles->half;
        outrider_block(&call);
        call.residual = call.out;
        long size = call.num_rows * call.layer->hidden_size, tap = stack->tap_after[i];
        if (tap >= 0) memcpy(stack->taps + tap * size, call.out, (size_t)size * sizeof *call.out);
    }
}
