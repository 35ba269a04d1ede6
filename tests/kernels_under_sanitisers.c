/* Calls every kernel on tightly allocated arrays of all small sizes, for each instruction set of the machine. The
   sanitisers see reads and writes past the end; results are checked by test_kernels.py. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

ptrdiff_t sparsevd_blocks(ptrdiff_t n);
int sparsevd_supports(int set);
double sparsevd_kl(int, int, ptrdiff_t, const float *, const float *, float *, float *, double *);
void sparsevd_sample(int, int, ptrdiff_t, uint64_t, float *, float *, float *);
void sparsevd_exp(int, int, ptrdiff_t, const float *, float *);
void sparsevd_exp_bf16(int, int, ptrdiff_t, const float *, uint16_t *);
void sparsevd_times_exp(int, int, ptrdiff_t, const float *, float *);

static float *array(ptrdiff_t n, float scale) {
  float *a = malloc(sizeof(float) * (n ? n : 1));
  for (ptrdiff_t i = 0; i < n; i++) a[i] = scale * (float)(i % 7);
  return a;
}

int main(void) {
  int runs = 0;
  for (int set = 0; set <= 3; set++) {
    if (!sparsevd_supports(set)) continue;
    for (ptrdiff_t n = 0; n < 9000; n = n < 200 ? n + 1 : n + 1231) {
      float *theta = array(n, 0.1f), *log_sigma2 = array(n, -3.0f), *a = array(n, 0), *b = array(n, 0);
      double *sums = malloc(sizeof(double) * (sparsevd_blocks(n) + !n));
      sparsevd_kl(set, 2, n, theta, log_sigma2, a, b, sums);
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
  printf("%d runs\n", runs);
  return 0;
}
