/* The operations of a network besides its products, from channel first to last - 1. */

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

/* Any pooling of one channel: the largest number of a window, or else the average. */
INLINE void pool(const struct step *step, const float *in, float *out, ptrdiff_t images, const int largest) {
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
        vf best = splat(largest ? -INFINITY : 0.0f);
        for (int32_t ky = 0; ky < step->kernel_y; ky++)
          for (int32_t kx = 0; kx < step->kernel_x; kx++) {
            const int32_t iy = top + ky * step->dilation_y, ix = left + kx * step->dilation_x;
            if (iy < 0 || iy >= from->height || ix < 0 || ix >= from->width) continue;
            const vf pixel = load_part(in + ((ptrdiff_t)iy * from->pitch + ix) * images + n, count);
            best = largest ? larger_or_nan(best, pixel) : best + pixel;
          }
        if (!largest) best *= part;
        store_part(out + ((ptrdiff_t)y * to->pitch + x) * images + n, best, count);
      }
    }
}

/* Where the first pixel of a channel lies. */
INLINE float *pixels(const struct value *value, float *scratch, ptrdiff_t channel, ptrdiff_t images) {
  return scratch + value->planes + (channel * value->plane + value->first) * images;
}

TARGET static void max_pool(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  const struct value *from = &step->input, *to = &step->out;
  const int windows = step->kernel_y == 2 && step->kernel_x == 2 && step->stride_y == 2 && step->stride_x == 2;
  const int inside = !step->top && !step->left && 2 * to->height <= from->height && 2 * to->width <= from->width;
  const int plain = images == 1 && windows && inside && step->dilation_y == 1 && step->dilation_x == 1;
  for (ptrdiff_t channel = first; channel < last; channel++) {
    const float *in = pixels(from, scratch, channel, images);
    if (plain) max_pool_2x2(step, in, pixels(to, scratch, channel, images));
    else pool(step, in, pixels(to, scratch, channel, images), images, 1);
  }
}

TARGET static void average_pool(const struct step *step, float *scratch, int32_t images, ptrdiff_t first,
                                ptrdiff_t last) {
  for (ptrdiff_t channel = first; channel < last; channel++)
    pool(step, pixels(&step->input, scratch, channel, images), pixels(&step->out, scratch, channel, images), images, 0);
}

/* Pixels into the phases of a stride. place lies within a whole plane, not from its first pixel. */
TARGET static void repack(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  const struct value *from = &step->input, *to = &step->out;
  for (ptrdiff_t channel = first; channel < last; channel++) {
    const float *in = pixels(from, scratch, channel, images);
    float *plane = scratch + to->planes + channel * to->plane * images;
    const int32_t *place = step->layer->place;
    for (ptrdiff_t y = 0; y < from->height; y++)
      for (ptrdiff_t x = 0; x < from->width; x++, place++)
        copy(plane + (ptrdiff_t)*place * images, in + (y * from->pitch + x) * images, images);
  }
}

/* The sum of two activations, or else scale times one plus shift; then the activation function. */
INLINE void combine(const struct step *step, float *scratch, ptrdiff_t images, ptrdiff_t channel, const int sum) {
  const struct value *from = &step->input, *second = &step->second, *to = &step->out;
  const float *in = pixels(from, scratch, channel, images), *other = pixels(second, scratch, channel, images);
  float *out = pixels(to, scratch, channel, images);
  const float scale = sum ? 1 : step->scale[channel], shift = sum ? 0 : step->shift[channel];
  const ptrdiff_t width = to->width * images;
  for (ptrdiff_t y = 0; y < from->height; y++) {
    const float *row = in + y * from->pitch * images, *other_row = other + y * second->pitch * images;
    float *to_row = out + y * to->pitch * images;
    for (ptrdiff_t i = 0; i < width; i += LANES) {
      vf x = load_part(row + i, width - i);
      x = sum ? x + load_part(other_row + i, width - i) : x * scale + shift;
      store_part(to_row + i, clamp(x, step->low, step->high), width - i);
    }
  }
}

TARGET static void add(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  for (ptrdiff_t channel = first; channel < last; channel++) combine(step, scratch, images, channel, 1);
}

TARGET static void affine(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  for (ptrdiff_t channel = first; channel < last; channel++) combine(step, scratch, images, channel, 0);
}

TARGET static void step(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last) {
  switch (step->kind) {
    case PRODUCT:
      product(step->layer, scratch + step->input.planes, pixels(&step->out, scratch, 0, images), (int32_t)first,
              (int32_t)last);
      break;
    case REPACK: repack(step, scratch, images, first, last); break;
    case MAX_POOL: max_pool(step, scratch, images, first, last); break;
    case AVERAGE_POOL: average_pool(step, scratch, images, first, last); break;
    case AFFINE: affine(step, scratch, images, first, last); break;
    case ADD: add(step, scratch, images, first, last); break;
  }
}

#define SPARSE_KERNELS {pack, product, unpack, step} /* a struct sparse_kernels */
