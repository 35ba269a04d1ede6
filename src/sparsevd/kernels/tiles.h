/* A tile of outputs in registers, one filter after the other: what every product is made of. */

#include <math.h>

#define TILE 12 /* vectors of outputs held in registers: 16 in all on AVX2, some of them for weight and input */
#define UNROLL _Pragma("GCC unroll 16")

struct tile {
  const struct sparse_layer *layer;
  int32_t first, last;                     /* filters in their order */
  const float *in;                         /* the tile's first position in the first plane */
  float *out;                              /* its first output of filter 0, or of filter `first` in a strip */
  ptrdiff_t in_pitch, out_pitch, out_filter; /* floats between rows, and between filters */
  int strip;                               /* filters follow each other in their order instead of by number */
};

INLINE vf clamp(vf x, float low, float high) { /* NaN stays; comparing the bounds first is cheaper than comparing x */
  if (low > -INFINITY) x = select(x < splat(low), splat(low), x);
  if (high < INFINITY) x = select(x > splat(high), splat(high), x);
  return x;
}

/* R rows of V vectors. U nonzeros at a time have sums of their own, so that even a small tile keeps the arithmetic busy. */
INLINE void tile(const struct tile *t, const int R, const int V, const int U) {
  const struct sparse_layer *layer = t->layer;
  const float low = layer->low, high = layer->high;
  for (int32_t i = t->first; i < t->last; i++) {
    const struct nonzero *k = layer->nonzeros + layer->starts[i], *end = layer->nonzeros + layer->starts[i + 1];
    const int32_t filter = layer->order[i];
    vf sum[TILE];
    const vf bias = splat(layer->bias[filter]);
    UNROLL for (int j = 0; j < R * V; j++) sum[j] = bias;
    UNROLL for (int j = R * V; j < U * R * V; j++) sum[j] = splat(0.0f);
    for (; k + U <= end; k += U)
      UNROLL for (int u = 0; u < U; u++) {
        const float *in = t->in + k[u].offset;
        const vf weight = splat(k[u].weight);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int v = 0; v < V; v++)
            sum[(u * R + r) * V + v] += weight * load(in + r * t->in_pitch + v * LANES);
      }
    if (U > 1)
      for (; k < end; k++) {
        const float *in = t->in + k->offset;
        const vf weight = splat(k->weight);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int v = 0; v < V; v++) sum[r * V + v] += weight * load(in + r * t->in_pitch + v * LANES);
      }
    float *out = t->out + t->out_filter * (t->strip ? i - t->first : filter);
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < V; v++) {
        vf total = sum[r * V + v];
        UNROLL for (int u = 1; u < U; u++) total += sum[(u * R + r) * V + v];
        store(out + r * t->out_pitch + v * LANES, clamp(total, low, high));
      }
  }
}

#define TILE_SIZES(X) \
  X(1, 1, 8) X(2, 1, 4) X(3, 1, 4) X(4, 1, 3) X(5, 1, 2) X(6, 1, 2) X(7, 1, 1) X(8, 1, 1) X(9, 1, 1) X(10, 1, 1) \
  X(11, 1, 1) X(12, 1, 1) X(1, 2, 4) X(2, 2, 3) X(3, 2, 2) X(4, 2, 1) X(5, 2, 1) X(6, 2, 1) X(1, 3, 4) X(2, 3, 2) \
  X(3, 3, 1) X(4, 3, 1) X(1, 4, 3) X(2, 4, 1) X(3, 4, 1) X(1, 5, 2) X(2, 5, 1) X(1, 6, 2) X(2, 6, 1) X(1, 7, 1) \
  X(1, 8, 1) X(1, 9, 1) X(1, 10, 1) X(1, 11, 1) X(1, 12, 1)
#define TILE_FUNCTION(R, V, U) \
  TARGET static void tile_##R##x##V(const struct tile *t) { tile(t, R, V, U); }
TILE_SIZES(TILE_FUNCTION)

#define TILE_ENTRY(R, V, U) [R][V] = tile_##R##x##V,
typedef void tile_function(const struct tile *t);
static tile_function *const tiles[TILE + 1][TILE + 1] = {TILE_SIZES(TILE_ENTRY)}; /* by rows and vectors */
