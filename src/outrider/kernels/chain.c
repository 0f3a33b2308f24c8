/* A drafting head that feeds its own state back, token after token, in one call: embedding and state normed side by
 * side, one block, the final norm, the head, the choice of a token; then the same from that token. Nothing new is computed
 * here: these are the kernels of native.c one after the other, with the same bits. Included by native.c. */

typedef struct {
    const float *embedding_norm, *state_norm, *final_norm;
    matrix embedding, head;
    const int64_t *ids; /* the target's ids of the head's tokens; NULL: the same */
    const float *state; /* [B, H] fed back by the row before */
    int64_t *tokens; /* [depth, B] of which the first are known */
    float *scratch; /* see NativeChain */
    long depth, num_outputs, residual_is_normed, head_reads_normed, feeds_normed;
    double eps;
    block_call call; /* of the rows one place ahead; those further ahead follow in cosine, write_locations, ... */
    draw_work draw; /* how tokens are drawn, and where those of the first place will stand; no seed: greedily */
} chain_call;

static void choose_tokens(const chain_call *chain, const float *logits, long ahead) {
    long rows = chain->call.num_rows;
    int64_t *tokens = chain->tokens + ahead * rows;
    if (chain->draw.seed) {
        draw_work draw = chain->draw;
        draw.logits = logits, draw.positions += ahead * rows, draw.out = tokens;
        outrider_draw(&draw);
        return;
    }
    argmax_work best = {logits, tokens, rows, chain->num_outputs, chain->call.num_threads};
    outrider_row_argmax(&best);
    for (long row = 0; chain->ids && row < rows; row++) tokens[row] = chain->ids[tokens[row]];
}

EXPORT void outrider_chain(const chain_call *chain) {
    block_call call = chain->call;
    const block_layer *layer = call.layer;
    long rows = call.num_rows, hidden = layer->hidden_size, width = layer->input_size;
    float *inputs = chain->scratch, *residual = inputs + rows * width, *out = residual + rows * hidden;
    float *normed = out + rows * hidden, *logits = normed + rows * hidden;
    norm_work norm = {.width = hidden, .eps = chain->eps};
    memcpy(normed, chain->state, (size_t)(rows * hidden) * sizeof *normed);
    const float *state = normed;
    for (long ahead = 1; ahead < chain->depth; ahead++) {
        const int64_t *before = chain->tokens + (ahead - 1) * rows;
        for (long row = 0; row < rows; row++) {
            float *input = inputs + row * width;
            norm.weight = chain->embedding_norm;
            look_up_row(&chain->embedding, hidden, before[row], input);
            norm_row(&norm, input, NULL, NULL, input);
            norm.weight = chain->state_norm;
            norm_row(&norm, state + row * hidden, NULL, NULL, input + hidden);
            const float *kept = chain->residual_is_normed ? input + hidden : state + row * hidden;
            memcpy(residual + row * hidden, kept, (size_t)hidden * sizeof *kept);
        }
        call.residual = residual, call.input = inputs, call.out = out;
        outrider_block(&call);
        norm.weight = chain->final_norm;
        for (long row = 0; row < rows; row++)
            norm_row(&norm, out + row * hidden, NULL, NULL, normed + row * hidden);
        project(&call, chain->head_reads_normed ? normed : out, hidden, &chain->head, NULL, logits, chain->num_outputs);
        choose_tokens(chain, logits, ahead);
        state = chain->feeds_normed ? normed : out;
        call.cosine += rows * call.rotary_half, call.sine += rows * call.rotary_half;
        call.write_locations += rows, call.indices += rows;
    }
}
