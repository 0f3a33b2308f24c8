/* Vectors of LANES floats, whatever the processor offers: loads, stores, multiply-adds, folds, exp.
 * Included by native.c. */

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

/* Without its sign. */
INLINE vector size_of(vector v) { return (vector)((integers)v & 0x7fffffff); }

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
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#endif
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
