/* The sparse layers of inference, for the instruction set of one_set.h. */

#include <math.h>

#define TILE 12    /* vectors of outputs held in registers: 16 in all on AVX2, some of them for weight and input */
#define STRIP 16   /* filters whose outputs wait in a small buffer to be cropped */
#define UNROLL _Pragma("GCC unroll 16")
#define MINIMUM(a, b) ((a) < (b) ? (a) : (b))

/* ---- a tile of outputs in registers, one filter after the other ---- */

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
#define TILE_CASE(R, V, U) case (R) * 16 + (V): tile_##R##x##V(t); break;
TILE_SIZES(TILE_FUNCTION)

static void run_tile(const struct tile *t, ptrdiff_t rows, ptrdiff_t vectors) {
  switch (rows * 16 + vectors) { TILE_SIZES(TILE_CASE) }
}

INLINE void copy(float *to, const float *from, ptrdiff_t count) {
  if (count >= LANES) {
    for (ptrdiff_t i = 0; i < count - LANES; i += LANES) store(to + i, load(from + i));
    store(to + count - LANES, load(from + count - LANES)); /* the last one overlaps */
    return;
  }
  if (LANES > 8 && count & 8) memcpy(to, from, 8 * sizeof(float)), to += 8, from += 8;
  if (LANES > 4 && count & 4) memcpy(to, from, 4 * sizeof(float)), to += 4, from += 4;
  if (count & 2) memcpy(to, from, 2 * sizeof(float)), to += 2, from += 2;
  if (count & 1) *to = *from;
}

/* ---- one layer, one group of images ---- */

/* Rows of outputs that are whole vectors go straight where they belong. */
TARGET static void product_rows(struct tile t, const float *planes, float *out) {
  const struct sparse_layer *layer = t.layer;
  const ptrdiff_t row = (ptrdiff_t)layer->out_width * layer->images, vectors = row / LANES;
  const ptrdiff_t across = (vectors + TILE - 1) / TILE, v_step = (vectors + across - 1) / across;
  const ptrdiff_t at_most = TILE / v_step, down = (layer->out_height + at_most - 1) / at_most;
  const ptrdiff_t r_step = (layer->out_height + down - 1) / down;
  t.in_pitch = (ptrdiff_t)layer->pitch * layer->images;
  t.out_pitch = (ptrdiff_t)layer->out_pitch * layer->images;
  t.out_filter = (ptrdiff_t)layer->out_plane * layer->images;
  for (ptrdiff_t y = 0; y < layer->out_height; y += r_step)
    for (ptrdiff_t v = 0; v < vectors; v += v_step) {
      t.in = planes + y * t.in_pitch + v * LANES;
      t.out = out + y * t.out_pitch + v * LANES;
      run_tile(&t, MINIMUM(r_step, layer->out_height - y), MINIMUM(v_step, vectors - v));
    }
}

/* Other images as one long row, the gaps between its rows computed too and cropped. */
TARGET static void product_cropped(struct tile t, const float *planes, float *out) {
  const struct sparse_layer *layer = t.layer;
  const ptrdiff_t width = layer->out_width, pitch = layer->pitch, size = width * layer->out_height;
  const ptrdiff_t out_pitch = layer->out_pitch, out_plane = layer->out_plane;
  const ptrdiff_t vectors = ((layer->out_height - 1) * pitch + width + LANES - 1) / LANES;
  const ptrdiff_t across = (vectors + TILE - 1) / TILE, step = (vectors + across - 1) / across;
  const int32_t first = t.first, last = t.last;
  float strip[STRIP * TILE * LANES];
  for (ptrdiff_t v = 0; v < vectors; v += step) {
    const ptrdiff_t count = MINIMUM(step, vectors - v), start = v * LANES, end = start + count * LANES;
    t.in = planes + start;
    if (pitch == width && out_pitch == width && end <= size) { /* no gaps */
      t.strip = 0, t.first = first, t.last = last, t.out = out + start, t.out_filter = out_plane;
      run_tile(&t, 1, count);
      continue;
    }
    const ptrdiff_t y_first = start / pitch, y_last = MINIMUM((end - 1) / pitch, layer->out_height - 1);
    t.strip = 1, t.out = strip, t.out_filter = TILE * LANES;
    for (t.first = first; t.first < last; t.first = t.last) {
      t.last = MINIMUM(t.first + STRIP, last);
      run_tile(&t, 1, count);
      for (int32_t i = t.first; i < t.last; i++) {
        float *image = out + out_plane * layer->order[i];
        const float *source = strip + TILE * LANES * (i - t.first) - start;
        for (ptrdiff_t y = y_first; y <= y_last; y++) {
          ptrdiff_t from = y * pitch, to = from + width;
          float *pixel = image + y * out_pitch - from;
          if (from < start) from = start;
          if (to > end) to = end;
          if (from < to) copy(pixel + from, source + from, to - from);
        }
      }
    }
  }
}

/* Gathering, which compilers make of a sum over scattered inputs, is slower than loading them one at a time. */
#define ONE_AT_A_TIME __asm__ volatile("")

/* A single output per filter: there is nothing to spread over lanes. Sums of neighbouring filters overlap. */
TARGET static void product_single(struct tile t, const float *in, float *out) {
  const struct sparse_layer *layer = t.layer;
  const int32_t *order = layer->order, *starts = layer->starts; /* read once: the compiler cannot know that out is apart */
  const float *bias = layer->bias, low = layer->low, high = layer->high;
  const ptrdiff_t step = layer->out_plane;
  for (int32_t i = t.first; i < t.last;) {
    const struct nonzero *k = layer->nonzeros + starts[i];
    const ptrdiff_t count = starts[i + 1] - starts[i];
    /* Filters are sorted by count: often four are alike, and share a loop, with one end to foresee. */
    const int alike = i + 4 <= t.last && starts[i + 2] - starts[i + 1] == count &&
                      starts[i + 3] - starts[i + 2] == count && starts[i + 4] - starts[i + 3] == count;
    float a = 0, b = 0, c = 0, d = 0;
    if (alike) {
      for (const struct nonzero *end = k + count; k < end; k++) {
        const struct nonzero *second = k + count, *third = second + count, *fourth = third + count;
        ONE_AT_A_TIME;
        a += k->weight * in[k->offset];
        b += second->weight * in[second->offset];
        c += third->weight * in[third->offset];
        d += fourth->weight * in[fourth->offset];
      }
    } else {
      const struct nonzero *end = k + count;
      for (; k + 2 <= end; k += 2) {
        ONE_AT_A_TIME;
        a += k[0].weight * in[k[0].offset];
        b += k[1].weight * in[k[1].offset];
      }
      if (k < end) a += k->weight * in[k->offset];
      a += b;
    }
    const float sum[4] = {a, b, c, d};
    for (int row = 0; row < (alike ? 4 : 1); row++, i++) {
      float value = sum[row] + bias[order[i]];
      value = value < low ? low : value;
      out[step * order[i]] = value > high ? high : value;
    }
  }
}

TARGET static void product(const struct sparse_layer *layer, const float *planes, float *out, int32_t first,
                           int32_t last) {
  struct tile t = {layer, first, last, planes, out, 0, 0, 0, 0};
  const ptrdiff_t row = (ptrdiff_t)layer->out_width * layer->images;
  if (row % LANES == 0) product_rows(t, planes, out);
  else if (row * layer->out_height == 1) product_single(t, planes, out);
  else product_cropped(t, planes, out);
}

/* ---- into the planes, and out of them ---- */

/* LANES vectors as the rows of a square, turned into its columns: log2(LANES) times, row i is woven with row
   i + LANES / 2. */
#if LANES == 4
#define WEAVE_LOW 0, 4, 1, 5
#define WEAVE_HIGH 2, 6, 3, 7
#elif LANES == 8
#define WEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define WEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define WEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define WEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#ifdef __clang__
#define WEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define WEAVE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
INLINE void transpose(vf square[LANES]) {
  UNROLL for (int stage = 1; stage < LANES; stage *= 2) {
    vf woven[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      woven[2 * i] = WEAVE(square[i], square[i + LANES / 2], WEAVE_LOW);
      woven[2 * i + 1] = WEAVE(square[i], square[i + LANES / 2], WEAVE_HIGH);
    }
    UNROLL for (int i = 0; i < LANES; i++) square[i] = woven[i];
  }
}

INLINE void zeros(float *to, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, splat(0.0f));
  for (; i < count; i++) to[i] = 0;
}

/* The positions of a plane that no pixel fills. */
INLINE void clear(const struct sparse_layer *layer, float *plane) {
  for (int32_t run = 0; run < layer->zero_runs; run++) {
    float *to = plane + (ptrdiff_t)layer->zero[2 * run] * layer->images;
    zeros(to, (ptrdiff_t)layer->zero[2 * run + 1] * layer->images);
  }
}

/* One image, channel by channel. */
TARGET static void pack_single(const struct sparse_layer *layer, const float *in, float *planes,
                               ptrdiff_t first_channel, ptrdiff_t last_channel) {
  const ptrdiff_t width = layer->width, size = layer->height * width, pitch = layer->pitch, gap = pitch - width;
  const int32_t *place = layer->place;
  const int rows_together = layer->stride_x == 1, in_order = layer->height == 1 || place[width] == place[0] + pitch;
  for (ptrdiff_t channel = first_channel; channel < last_channel; channel++) {
    if (layer->slot[channel] < 0) continue;
    const float *row = in + channel * size, *end = row + size;
    float *plane = planes + (ptrdiff_t)layer->slot[channel] * layer->plane;
    if (layer->plane <= 8 * LANES && rows_together) { /* all of a small plane is sooner zero than its gaps */
      zeros(plane, layer->plane);
      for (ptrdiff_t i = 0; i < size; i += width) copy(plane + place[i], row + i, width);
      continue;
    }
    if (rows_together && in_order) { /* no stride: zeros, row, gap, row, gap, ..., row, zeros */
      float *to = plane + place[0];
      zeros(plane, place[0]);
      for (; row + width < end; row += width, to += pitch) {
        copy(to, row, width);
        for (ptrdiff_t x = 0; x < gap; x++) to[width + x] = 0;
      }
      copy(to, row, width);
      zeros(to + width, plane + layer->plane - (to + width));
      continue;
    }
    clear(layer, plane);
    if (rows_together)
      for (ptrdiff_t i = 0; i < size; i += width) copy(plane + place[i], row + i, width);
    else
      for (ptrdiff_t i = 0; i < size; i++) plane[place[i]] = row[i];
  }
}

/* A group of images beside each other; those that are missing are zeros. */
TARGET static void pack(const struct sparse_layer *layer, const float *in, ptrdiff_t image_stride, ptrdiff_t images,
                        float *planes, ptrdiff_t first_channel, ptrdiff_t last_channel) {
  if (layer->images == 1) {
    pack_single(layer, in, planes, first_channel, last_channel);
    return;
  }
  const ptrdiff_t size = (ptrdiff_t)layer->height * layer->width, group = layer->images, end = last_channel * size;
  const ptrdiff_t plane_size = layer->plane * group;
  for (ptrdiff_t channel = first_channel; channel < last_channel; channel++)
    if (layer->slot[channel] >= 0) clear(layer, planes + layer->slot[channel] * plane_size);
  ptrdiff_t channel = first_channel, pixel = 0;
  for (ptrdiff_t i = first_channel * size; i < end; i += LANES) {
    ptrdiff_t to[LANES]; /* where each of these pixels goes, -1 for nowhere */
    for (int column = 0; column < LANES; column++) {
      to[column] = -1;
      if (i + column >= end) continue;
      if (layer->slot[channel] >= 0) to[column] = layer->slot[channel] * plane_size + layer->place[pixel] * group;
      if (++pixel == size) pixel = 0, channel++;
    }
    for (ptrdiff_t n = 0; n < group; n += LANES) {
      const float *from = in + n * image_stride + i;
      vf square[LANES];
      if (n + LANES <= images && i + LANES <= end) {
        UNROLL for (int row = 0; row < LANES; row++) square[row] = load(from + row * image_stride);
      } else {
        for (int row = 0; row < LANES; row++)
          square[row] = n + row < images ? load_part(from + row * image_stride, end - i) : splat(0.0f);
      }
      transpose(square);
      UNROLL for (int column = 0; column < LANES; column++)
        if (to[column] >= 0) store(planes + to[column] + n, square[column]);
    }
  }
}

/* Numbers first to last - 1 of every image, out of a group of images beside each other. */
TARGET static void unpack(const float *interleaved, ptrdiff_t group, ptrdiff_t images, float *out,
                          ptrdiff_t image_stride, ptrdiff_t first, ptrdiff_t last) {
  for (ptrdiff_t i = first; i < last; i += LANES) {
    const ptrdiff_t count = MINIMUM(last - i, LANES);
    for (ptrdiff_t n = 0; n < images; n += LANES) {
      const float *from = interleaved + i * group + n;
      float *to = out + n * image_stride + i;
      vf square[LANES];
      UNROLL for (int row = 0; row < LANES; row++) square[row] = row < count ? load(from + row * group) : splat(0.0f);
      transpose(square);
      if (count == LANES && n + LANES <= images) {
        UNROLL for (int column = 0; column < LANES; column++) store(to + column * image_stride, square[column]);
      } else {
        for (int column = 0; column < LANES && n + column < images; column++)
          store_part(to + column * image_stride, square[column], count);
      }
    }
  }
}

/* ---- the other operations of a network, from channel first to last - 1 ---- */

INLINE vf larger_or_nan(vf a, vf b) { return select((a < b) | (b != b), b, a); }

#if LANES == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#endif

/* The commonest pooling, for one image: windows of 2x2 beside each other. */
TARGET static void max_pool_2x2(const struct step *step, const float *in, float *out) {
  const struct value *from = &step->input, *to = &step->out;
  for (ptrdiff_t y = 0; y < to->height; y++) {
    const float *a = in + 2 * y * from->pitch, *b = a + from->pitch;
    float *row = out + y * to->pitch;
    ptrdiff_t x = 0;
    for (; x + LANES <= to->width; x += LANES) {
      const vf left = larger_or_nan(load(a + 2 * x), load(b + 2 * x));
      const vf right = larger_or_nan(load(a + 2 * x + LANES), load(b + 2 * x + LANES));
      store(row + x, larger_or_nan(WEAVE(left, right, EVEN), WEAVE(left, right, ODD)));
    }
    for (; x < to->width; x++) {
      const float four[4] = {a[2 * x], a[2 * x + 1], b[2 * x], b[2 * x + 1]};
      float best = four[0];
      for (int i = 1; i < 4; i++) best = best < four[i] || four[i] != four[i] ? four[i] : best;
      row[x] = best;
    }
  }
}

/* Any pooling of one channel. */
TARGET static void pool(const struct step *step, const float *in, float *out, ptrdiff_t images) {
  const struct value *from = &step->input, *to = &step->out;
  for (int32_t y = 0; y < to->height; y++)
    for (int32_t x = 0; x < to->width; x++) {
      const int32_t top = y * step->stride_y - step->top, left = x * step->stride_x - step->left;
      int32_t all = 0, inside = 0; /* in the window with its padding, and on the image */
      for (int32_t ky = 0; ky < step->kernel_y; ky++)
        for (int32_t kx = 0; kx < step->kernel_x; kx++) {
          const int32_t iy = top + ky * step->dilation_y, ix = left + kx * step->dilation_x;
          all += iy < from->height + step->top && ix < from->width + step->left;
          inside += iy >= 0 && iy < from->height && ix >= 0 && ix < from->width;
        }
      const float part = 1.0f / (float)(step->count_padding ? all : inside);
      for (ptrdiff_t n = 0; n < images; n += LANES) {
        const ptrdiff_t count = images - n;
        vf best = splat(step->kind == MAX_POOL ? -INFINITY : 0.0f);
        for (int32_t ky = 0; ky < step->kernel_y; ky++)
          for (int32_t kx = 0; kx < step->kernel_x; kx++) {
            const int32_t iy = top + ky * step->dilation_y, ix = left + kx * step->dilation_x;
            if (iy < 0 || iy >= from->height || ix < 0 || ix >= from->width) continue;
            const vf pixel = load_part(in + ((ptrdiff_t)iy * from->pitch + ix) * images + n, count);
            best = step->kind == MAX_POOL ? larger_or_nan(best, pixel) : best + pixel;
          }
        if (step->kind != MAX_POOL) best *= part;
        store_part(out + ((ptrdiff_t)y * to->pitch + x) * images + n, best, count);
      }
    }
}

TARGET static void step(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  const struct value *a = &step->input, *b = &step->second, *to = &step->out;
  if (step->kind == PRODUCT) {
    float *out = scratch + to->planes + (ptrdiff_t)to->first * images;
    product(step->layer, scratch + a->planes, out, (int32_t)first, (int32_t)last);
    return;
  }
  for (ptrdiff_t channel = first; channel < last; channel++) {
    const float *in = scratch + a->planes + (channel * a->plane + a->first) * images;
    const float *other = scratch + b->planes + (channel * b->plane + b->first) * images;
    float *out = scratch + to->planes + (channel * to->plane + to->first) * images;
    if (step->kind == MAX_POOL || step->kind == AVERAGE_POOL) {
      const int windows = step->kernel_y == 2 && step->kernel_x == 2 && step->stride_y == 2 && step->stride_x == 2;
      const int inside = !step->top && !step->left && 2 * to->height <= a->height && 2 * to->width <= a->width;
      const int plain = windows && inside && step->dilation_y == 1 && step->dilation_x == 1;
      if (plain && images == 1 && step->kind == MAX_POOL) max_pool_2x2(step, in, out);
      else pool(step, in, out, images);
      continue;
    }
    const int affine = step->kind == AFFINE;
    const float scale = affine ? step->scale[channel] : 1, shift = affine ? step->shift[channel] : 0;
    const ptrdiff_t width = (ptrdiff_t)to->width * images;
    for (ptrdiff_t y = 0; y < a->height; y++) {
      const float *row = in + y * a->pitch * images, *other_row = other + y * b->pitch * images;
      if (step->kind == REPACK) { /* place lies within a whole plane, not from its first pixel */
        const int32_t *place = step->layer->place + y * a->width;
        float *plane = scratch + to->planes + channel * to->plane * images;
        for (ptrdiff_t x = 0; x < a->width; x++) copy(plane + (ptrdiff_t)place[x] * images, row + x * images, images);
        continue;
      }
      float *to_row = out + y * to->pitch * images;
      for (ptrdiff_t i = 0; i < width; i += LANES) {
        vf x = load_part(row + i, width - i);
        x = step->kind == ADD ? x + load_part(other_row + i, width - i) : x * scale + shift;
        store_part(to_row + i, clamp(x, step->low, step->high), width - i);
      }
    }
  }
}

#define SPARSE_KERNELS {pack, product, unpack, step} /* a struct sparse_kernels */
