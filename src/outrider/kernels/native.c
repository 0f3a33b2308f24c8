/* CPU kernels in fp32 for native.py: linear, norms, activations, rotary cache writes, paged attention, and the choice
 * of a token.
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
typedef uint32_t unsigned_integers __attribute__((vector_size(LANES * 4)));
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

#include "vectors.c"
#include "levels.c"
#include "dequantise.c"
#include "unpack.c"
#include "tiles.c"
#include "look_up.c"
#include "tile_dots.c"
#include "linear.c"
#include "tile_linear.c"
#include "rows.c"
#include "sampling.c"
#include "logprobs.c"
#include "adjust.c"
#include "masks.c"
#include "attention.c"
#include "block.c"
#include "chain.c"
#include "experts.c"
#include "mamba.c"
#include "round.c"
