/* Into the planes, and out of them: images of a batch beside each other, with zeros around them. */

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
