/* The product of one layer with one group of images: rows of whole vectors, rows to be cropped, or single outputs. */

#define STRIP 16 /* filters whose outputs wait in a small buffer to be cropped */
#define MINIMUM(a, b) ((a) < (b) ? (a) : (b))

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
      tiles[MINIMUM(r_step, layer->out_height - y)][MINIMUM(v_step, vectors - v)](&t);
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
      tiles[1][count](&t);
      continue;
    }
    const ptrdiff_t y_first = start / pitch, y_last = MINIMUM((end - 1) / pitch, layer->out_height - 1);
    t.strip = 1, t.out = strip, t.out_filter = TILE * LANES;
    for (t.first = first; t.first < last; t.first = t.last) {
      t.last = MINIMUM(t.first + STRIP, last);
      tiles[1][count](&t);
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
