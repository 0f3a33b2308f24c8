/* Small whole numbers as floats, sixteen at a time: level * scale + offset. Included by native.c. */

/* Sixteen bytes as floats, low or high halves or whole with sign, times scale plus offset: spelt out for the processors
 * at hand, as compilers take the vector conversion apart byte by byte. */
#if defined(__AVX512F__)
INLINE void expand16(__m128i bytes, float scale, float offset, float *to, int with_sign) {
    __m512i wide = with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale));
    _mm512_storeu_ps(to, with_sign ? value : _mm512_add_ps(value, _mm512_set1_ps(offset)));
}
#elif defined(__AVX2__)
INLINE void expand8(__m128i bytes, float scale, float offset, float *to, int with_sign) {
    __m256i wide = with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(scale));
    _mm256_storeu_ps(to, with_sign ? value : _mm256_add_ps(value, _mm256_set1_ps(offset)));
}
INLINE void expand16(__m128i bytes, float scale, float offset, float *to, int with_sign) {
    expand8(bytes, scale, offset, to, with_sign);
    expand8(_mm_srli_si128(bytes, 8), scale, offset, to + 8, with_sign);
}
#endif

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint64_t words2 __attribute__((vector_size(16)));

INLINE bytes16 load_bytes(const uint8_t *from) {
    bytes16 bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

/* Sixteen bits, the lowest first, as bytes that are all ones or zero. */
INLINE bytes16 spread_bits(const uint8_t *from) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (bytes16)_mm_movm_epi8((__mmask16)(from[0] | from[1] << 8));
#else
    const bytes16 masks = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    bytes16 bytes = (bytes16)(words2){from[0] * 0x0101010101010101u, from[1] * 0x0101010101010101u};
    return (bytes16)((bytes & masks) == masks);
#endif
}

/* Sixteen levels without sign, times scale plus offset; or with sign, times scale. */
INLINE void spread_levels(bytes16 levels, float scale, float offset, float *to, int with_sign) {
#if defined(__AVX2__)
    expand16((__m128i)levels, scale, offset, to, with_sign);
#else
    for (long i = 0; i < 16; i++) {
        float level = with_sign ? (float)(int8_t)levels[i] : (float)levels[i];
        to[i] = with_sign ? level * scale : level * scale + offset;
    }
#endif
}
