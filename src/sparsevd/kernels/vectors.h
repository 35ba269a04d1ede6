/* Vector arithmetic in GCC/Clang vector extensions, for the LANES and the TARGET of one_set.h. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
/* The same for the first count of LANES numbers; the others are read as zero and not written. */
INLINE vf load_part(const float *p, ptrdiff_t count) {
  if (count >= LANES) return load(p);
  vf v = {0};
  memcpy(&v, p, sizeof(float) * count);
  return v;
}
INLINE void store_part(float *p, vf v, ptrdiff_t count) {
  if (count >= LANES) store(p, v);
  else memcpy(p, &v, sizeof(float) * count);
}

/* mask ? a : b for a mask of all ones or all zeros per lane, as comparisons give it */
INLINE vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf larger(vf a, vf b) { return select(a < b, b, a); } /* a where that is NaN */

INLINE vf square_root(vf x) {
  vf y;
  for (int lane = 0; lane < LANES; lane++) y[lane] = __builtin_sqrtf(x[lane]);
  return y;
}

/* e^x to 1 ulp or so: x = n log 2 + r with |r| <= log(2)/2, then a polynomial. 0 below -87, where
   it would be no normal number any more, infinity above 89. */
INLINE vf exponential(vf x) {
  vi vanishes = x < splat(-87.0f);
  x = select(x > splat(89.0f), splat(89.0f), larger(x, splat(-87.0f)));
  vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* adding 1.5 * 2^23 rounds to the nearest integer */
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi exponent = __builtin_convertvector(n, vi); /* 2^n in two factors: 2^128 is no float, 2^128 p may be one */
  vi half = exponent >> 1;
  p = p * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
  return select(vanishes, splat(0.0f), p);
}

/* log x to 1 ulp or so, for normal positive x: x = 2^e m with m around 1, then a polynomial in m - 1. Infinity and NaN
   stay what they are. */
INLINE vf logarithm(vf x) {
  vi finite = absolute(x) <= splat(3.40282347e38f);
  vi bits = (vi)x;
  vi e = (bits >> 23) - 126;
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
  vi low = m < splat(0.70710678f);
  e += low; /* a mask of ones is -1 */
  m = select(low, m + m, m) - 1.0f;
  vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  vf n = __builtin_convertvector(e, vf);
  p += n * -2.12194440e-4f - 0.5f * z;
  return select(finite, m + p + n * 0.693359375f, x);
}
