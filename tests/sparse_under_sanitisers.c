/* Random convolutions through the sparse kernels, on tightly allocated arrays, for each instruction set of the machine,
   against the plain sum. The geometry is made here once more, so that the program needs no Python.
   Usage: program ROUNDS */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

int sparsevd_lanes(int set);
ptrdiff_t sparsevd_sparse_scratch(const struct sparse_layer *layer);
void sparsevd_sparse_run(int set, int threads, const struct sparse_layer *layer, ptrdiff_t batch, const float *in,
                         float *out, float *scratch);

static unsigned state = 1;
static int up_to(int n) { /* 0 to n - 1 */
  state = state * 1664525u + 1013904223u;
  return (int)((state >> 8) % (unsigned)n);
}
static float number(void) { return (float)(up_to(2001) - 1000) / 1000.0f; }
static int32_t *ints(ptrdiff_t n) { return malloc(sizeof(int32_t) * (n ? n : 1)); }
static int larger_of(int a, int b) { return a > b ? a : b; }

static int rows, stride_y;
static int position(const struct sparse_layer *l, int y, int x) {
  const int phase = y % stride_y * l->stride_x + x % l->stride_x;
  return (phase * rows + y / stride_y) * l->pitch + x / l->stride_x;
}

static int one(int set, int images) {
  struct sparse_layer l = {0};
  l.channels = 1 + up_to(6), l.outputs = 1 + up_to(20), l.height = 1 + up_to(30), l.width = 1 + up_to(30);
  l.stride_x = 1 + up_to(3), l.images = images, stride_y = 1 + up_to(3);
  int top = up_to(3), left = up_to(3);
  if (up_to(4) == 0) l.height = l.width = 1 + up_to(2), top = left = 0;
  const int bottom = up_to(3) * (top > 0), right = up_to(3) * (left > 0), tall = l.height + top + bottom;
  const int wide = l.width + left + right, ky = 1 + up_to(tall < 5 ? tall : 5), kx = 1 + up_to(wide < 5 ? wide : 5);
  const int dy = 1 + (2 * (ky - 1) < tall && up_to(2)), dx = 1 + (2 * (kx - 1) < wide && up_to(2));
  const int batch = 1 + up_to(2 * images + 2), sparse = up_to(5);
  l.out_height = (tall - dy * (ky - 1) - 1) / stride_y + 1;
  l.out_width = (wide - dx * (kx - 1) - 1) / l.stride_x + 1;
  rows = (tall + stride_y - 1) / stride_y;
  const int side = larger_of(left, right), shared = l.stride_x == 1;
  l.pitch = shared ? larger_of(l.width + side, l.out_width) : (wide + l.stride_x - 1) / l.stride_x;
  l.plane = stride_y * l.stride_x * rows * l.pitch + shared * side;
  l.out_pitch = l.out_width, l.out_plane = l.out_height * l.out_width;
  l.low = up_to(2) ? -INFINITY : 0, l.high = INFINITY;

  int32_t *slot = ints(l.channels), *place = ints((ptrdiff_t)l.height * l.width), *zero = ints(2 * l.plane);
  int32_t *order = ints(l.outputs), *starts = ints(l.outputs + 1);
  char *filled = calloc(l.plane, 1);
  for (int c = 0; c < l.channels; c++) slot[c] = l.channels > 2 && c == 1 ? -1 : l.used++; /* channel 1 is dead */
  for (int y = 0; y < l.height; y++)
    for (int x = 0; x < l.width; x++)
      filled[place[y * l.width + x] = position(&l, y + top, x + left)] = 1;
  for (int p = 0; p < l.plane; p++)
    if (!filled[p]) zero[2 * l.zero_runs] = p, zero[2 * l.zero_runs++ + 1] = 1;
  const int taps = l.channels * ky * kx;
  float *weight = malloc(sizeof(float) * l.outputs * taps), *bias = malloc(sizeof(float) * l.outputs);
  struct nonzero *nonzeros = malloc(sizeof(struct nonzero) * (l.outputs * taps));
  int count = 0;
  for (int o = 0; o < l.outputs; o++) {
    order[o] = o, starts[o] = count, bias[o] = number();
    for (int t = 0; t < taps; t++) {
      const int c = t / (ky * kx), y = t / kx % ky, x = t % kx;
      weight[o * taps + t] = slot[c] >= 0 && sparse && up_to(5) < sparse ? number() : 0;
      if (weight[o * taps + t] == 0) continue;
      nonzeros[count].offset = (slot[c] * l.plane + position(&l, y * dy, x * dx)) * images;
      nonzeros[count++].weight = weight[o * taps + t];
    }
  }
  starts[l.outputs] = count;
  struct nonzero *tight = malloc(sizeof(struct nonzero) * (count ? count : 1));
  memcpy(tight, nonzeros, sizeof(struct nonzero) * count);
  free(nonzeros);
  l.slot = slot, l.place = place, l.zero = zero, l.order = order, l.starts = starts, l.nonzeros = tight, l.bias = bias;

  const ptrdiff_t in_size = (ptrdiff_t)l.channels * l.height * l.width;
  const ptrdiff_t out_size = (ptrdiff_t)l.outputs * l.out_height * l.out_width;
  const int threads = 1 + up_to(3);
  float *in = malloc(sizeof(float) * in_size * batch), *out = malloc(sizeof(float) * out_size * batch);
  float *scratch = aligned_alloc(64, (sizeof(float) * sparsevd_sparse_scratch(&l) * threads + 63) / 64 * 64 + 64);
  for (ptrdiff_t i = 0; i < in_size * batch; i++) in[i] = number();
  sparsevd_sparse_run(set, threads, &l, batch, in, out, scratch);

  int wrong = 0;
  for (int n = 0; n < batch; n++)
    for (int o = 0; o < l.outputs; o++)
      for (int y = 0; y < l.out_height; y++)
        for (int x = 0; x < l.out_width; x++) {
          double sum = bias[o];
          for (int t = 0; t < taps; t++) {
            const int iy = y * stride_y + t / kx % ky * dy - top, ix = x * l.stride_x + t % kx * dx - left;
            if (iy < 0 || iy >= l.height || ix < 0 || ix >= l.width) continue;
            sum += (double)weight[o * taps + t] * in[n * in_size + (t / (ky * kx) * l.height + iy) * l.width + ix];
          }
          if (sum < l.low) sum = l.low;
          wrong += !(fabs(sum - out[((ptrdiff_t)n * l.outputs + o) * l.out_height * l.out_width + y * l.out_width + x]) < 1e-4);
        }
  free(slot), free(place), free(zero), free(order), free(starts), free(filled), free(weight), free(bias), free(tight);
  free(in), free(out), free(scratch);
  return wrong;
}

int main(int count, char **arguments) {
  const int rounds = count > 1 ? atoi(arguments[1]) : 100;
  for (int set = GENERIC; set < INSTRUCTION_SETS; set++) {
    const int lanes = sparsevd_lanes(set);
    if (!lanes) continue;
    for (int round = 0; round < rounds; round++) {
      const int wrong = one(set, round % 3 * lanes + !(round % 3));
      if (wrong) return printf("set %d, round %d: %d outputs differ\n", set, round, wrong), 1;
    }
  }
  return 0;
}
