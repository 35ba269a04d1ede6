/* Calls every kernel on tightly allocated arrays of all small sizes, for each instruction set of the machine. The
   sanitisers see reads and writes past the end; results are checked by test_kernels.py. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

int sparsevd_lanes(int set);
ptrdiff_t sparsevd_blocks(ptrdiff_t n);
double sparsevd_kl(int, int, ptrdiff_t, const float *, const float *, float *, float *, double *);
void sparsevd_adam(int, int, ptrdiff_t, const struct adam *, const struct trained *, const struct trained *);
void sparsevd_sample(int, int, ptrdiff_t, uint64_t, float *, float *, float *);
void sparsevd_exp(int, int, ptrdiff_t, const float *, float *);
void sparsevd_exp_bf16(int, int, ptrdiff_t, const float *, uint16_t *);
void sparsevd_times_exp(int, int, ptrdiff_t, const float *, float *);

void sparsevd_linear_forward(int, int, const struct linear *, uint64_t, const float *, float *, float *);
void sparsevd_linear_backward(int, int, const struct linear *, const float *, const float *, float *, float *, float *,
                              float *, float *);

/* c = alpha op(a) op(b) + beta c, column by column, as BLAS has it */
static void sgemm(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha,
                  const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
                  const int *ldc) {
  for (int j = 0; j < *n; j++)
    for (int i = 0; i < *m; i++) {
      float sum = 0;
      for (int l = 0; l < *k; l++)
        sum += (*ta == 'N' ? a[i + l * *lda] : a[l + i * *lda]) * (*tb == 'N' ? b[l + j * *ldb] : b[j + l * *ldb]);
      c[i + j * *ldc] = *alpha * sum + (*beta != 0 ? *beta * c[i + j * *ldc] : 0);
    }
}

static float *array(ptrdiff_t n, float scale) {
  float *a = malloc(sizeof(float) * (n ? n : 1));
  for (ptrdiff_t i = 0; i < n; i++) a[i] = scale * (float)(i % 7);
  return a;
}

int main(void) {
  int runs = 0;
  for (int set = BEST; set < INSTRUCTION_SETS; set++) {
    if (!sparsevd_lanes(set)) continue;
    for (ptrdiff_t n = 0; n < 9000; n = n < 200 ? n + 1 : n + 1231) {
      float *theta = array(n, 0.1f), *log_sigma2 = array(n, -3.0f), *a = array(n, 0), *b = array(n, 0);
      double *sums = malloc(sizeof(double) * (sparsevd_blocks(n) + !n));
      sparsevd_kl(set, 2, n, theta, log_sigma2, a, b, sums);
      const struct adam settings = {1e-4f, 0.9f, 0.99f, 0.1f, 1e-8f, 1e-2f, 1e-3f};
      float *m = array(n, 0), *v = array(n, 0.1f), *m2 = array(n, 0), *v2 = array(n, 0.1f);
      sparsevd_adam(set, 2, n, &settings, &(struct trained){theta, a, m, v}, &(struct trained){log_sigma2, b, m2, v2});
      free(m), free(v), free(m2), free(v2);
      sparsevd_sample(set, 2, n, 5, theta, a, b);
      sparsevd_sample(set, 2, n, 5, theta, a, NULL);
      uint16_t *half = malloc(sizeof(uint16_t) * (n ? n : 1));
      sparsevd_exp(set, 2, n, log_sigma2, a);
      sparsevd_exp_bf16(set, 2, n, log_sigma2, half);
      sparsevd_times_exp(set, 2, n, log_sigma2, b);
      free(half);
      free(theta), free(log_sigma2), free(a), free(b), free(sums);
      runs++;
    }
  }
  for (int rows = 1; rows < 6; rows += 2)
    for (int ins = 1; ins < 40; ins += 6)
      for (int outs = 1; outs < 20; outs += 5) {
        float *x = array(rows * ins, 0.1f), *theta = array(ins * outs, 0.1f), *noise = array(ins * outs, -3.0f);
        float *bias = array(outs, 1), *out = array(rows * outs, 0), *slope = array(rows * outs, 0);
        float *x2 = array(rows * ins, 0), *sigma2 = array(ins * outs, 0), *delta = array(rows * outs, 0);
        float *g1 = array(ins * outs, 0), *g2 = array(ins * outs, 0), *g3 = array(outs, 0), *g4 = array(rows * ins, 0);
        for (int with = 0; with < 2; with++) {
          struct linear layer = {rows, ins, outs, sgemm, x, theta, noise, x2, sigma2};
          sparsevd_linear_forward(BEST, 2, &layer, 5, with ? bias : NULL, out, slope);
          if (!with) layer.sigma2 = NULL;
          sparsevd_linear_backward(BEST, 2, &layer, out, slope, g1, g2, with ? g3 : NULL, with ? g4 : NULL, delta);
        }
        free(x), free(theta), free(noise), free(bias), free(out), free(slope), free(x2), free(sigma2), free(delta);
        free(g1), free(g2), free(g3), free(g4);
        runs++;
      }
  printf("%d runs\n", runs);
  return 0;
}
