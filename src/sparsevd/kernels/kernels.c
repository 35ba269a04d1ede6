/* The C ABI of the kernels: plain pointers and sizes, called through ctypes. Work is cut into blocks of a fixed size,
   and every block's result depends on its position only: the number of threads changes nothing but the time. */

#include "kernels.h"

#include <string.h>

#define BLOCK 4096 /* a multiple of CHUNK */
#define CHUNK 256  /* as in train.h */

static const struct train_kernels *chosen(void) {
#if defined(__x86_64__)
  static const struct train_kernels *best;
  if (!best) {
    __builtin_cpu_init();
    best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? &train_kernels_avx512
           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")       ? &train_kernels_avx2
                                                                                   : &train_kernels_generic;
  }
  return best;
#else
  return &train_kernels_generic;
#endif
}

/* Instruction sets by number, so that the tests can try all that this machine has: 0 is the best one. */
static const struct train_kernels *numbered(int set) {
#if defined(__x86_64__)
  if (set == 2) return &train_kernels_avx2;
  if (set == 3) return &train_kernels_avx512;
#endif
  return set == 1 ? &train_kernels_generic : chosen();
}

int sparsevd_supports(int set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (set == 2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == 3) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
#endif
  return set <= 1;
}

ptrdiff_t sparsevd_blocks(ptrdiff_t n) { return (n + BLOCK - 1) / BLOCK; }

/* A loop over the blocks of n numbers on all threads; inside it a block begins at `start` and has `count` of them. */
#define FOR_EACH_BLOCK                                                                   \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > BLOCK)")       \
  for (ptrdiff_t start = 0; start < n; start += BLOCK)
#define COUNT (n - start < BLOCK ? n - start : BLOCK)

/* The sum of the KL over n weights, with both gradients. sums has room for sparsevd_blocks(n) numbers. */
double sparsevd_kl(int set, int threads, ptrdiff_t n, const float *theta, const float *log_sigma2, float *grad_theta,
                   float *grad_log_sigma2, double *sums) {
  const struct train_kernels *kernels = numbered(set);
  FOR_EACH_BLOCK
  sums[start / BLOCK] =
      kernels->kl_block(theta + start, log_sigma2 + start, grad_theta + start, grad_log_sigma2 + start, COUNT);
  double sum = 0;
  for (ptrdiff_t block = 0; block < sparsevd_blocks(n); block++) sum += sums[block];
  return sum;
}

/* gamma becomes gamma + sqrt(delta) epsilon with the noise of this seed, and delta the slope of that with respect to
   delta. epsilon, if not null, gets the noise. */
void sparsevd_sample(int set, int threads, ptrdiff_t n, uint64_t seed, float *gamma, float *delta, float *epsilon) {
  const struct train_kernels *kernels = numbered(set);
  FOR_EACH_BLOCK
  for (ptrdiff_t i = start, end = start + COUNT; i < end; i += CHUNK) {
    float noise[CHUNK];
    int count = end - i < CHUNK ? (int)(end - i) : CHUNK;
    kernels->normal_chunk(noise, seed, (uint64_t)(i / CHUNK));
    kernels->sample_chunk(gamma + i, delta + i, noise, count);
    if (epsilon) memcpy(epsilon + i, noise, sizeof(float) * count);
  }
}

/* sigma^2 = exp(log sigma^2). */
void sparsevd_exp(int set, int threads, ptrdiff_t n, const float *log_sigma2, float *sigma2) {
  const struct train_kernels *kernels = numbered(set);
  FOR_EACH_BLOCK kernels->exp_block(log_sigma2 + start, sigma2 + start, COUNT);
}

void sparsevd_exp_bf16(int set, int threads, ptrdiff_t n, const float *log_sigma2, uint16_t *sigma2) {
  const struct train_kernels *kernels = numbered(set);
  FOR_EACH_BLOCK kernels->exp_bf16_block(log_sigma2 + start, sigma2 + start, COUNT);
}

/* The gradient of sigma^2 becomes that of log sigma^2. */
void sparsevd_times_exp(int set, int threads, ptrdiff_t n, const float *log_sigma2, float *grad_sigma2) {
  const struct train_kernels *kernels = numbered(set);
  FOR_EACH_BLOCK kernels->times_exp_block(log_sigma2 + start, grad_sigma2 + start, COUNT);
}
