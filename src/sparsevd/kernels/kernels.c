/* The C ABI of the kernels: plain pointers and sizes, called through ctypes. Work is cut into blocks of a fixed size,
   and every block's result depends on its position only: the number of threads changes nothing but the time. */

#include "kernels.h"

#define KL_BLOCK 4096
#define NOISE_BLOCK 64 /* as normal_block makes them */

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

ptrdiff_t sparsevd_kl_blocks(ptrdiff_t n) { return (n + KL_BLOCK - 1) / KL_BLOCK; }

/* The sum of the KL over n weights, with both gradients. sums has room for sparsevd_kl_blocks(n) numbers. */
double sparsevd_kl(int set, int threads, ptrdiff_t n, const float *theta, const float *log_sigma2, float *grad_theta,
                   float *grad_log_sigma2, double *sums) {
  const struct train_kernels *kernels = numbered(set);
  ptrdiff_t blocks = sparsevd_kl_blocks(n);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (ptrdiff_t block = 0; block < blocks; block++) {
    ptrdiff_t start = block * KL_BLOCK, count = n - start < KL_BLOCK ? n - start : KL_BLOCK;
    sums[block] = kernels->kl_block(theta + start, log_sigma2 + start, grad_theta + start, grad_log_sigma2 + start, count);
  }
  double sum = 0;
  for (ptrdiff_t block = 0; block < blocks; block++) sum += sums[block];
  return sum;
}

/* out = gamma + sqrt(delta) epsilon with the noise of this seed; out may be gamma. epsilon, if not null, gets it. */
void sparsevd_noise_forward(int set, int threads, ptrdiff_t n, uint64_t seed, const float *gamma, const float *delta,
                            float *out, float *epsilon) {
  const struct train_kernels *kernels = numbered(set);
  ptrdiff_t blocks = (n + NOISE_BLOCK - 1) / NOISE_BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (ptrdiff_t block = 0; block < blocks; block++) {
    float noise[NOISE_BLOCK];
    ptrdiff_t start = block * NOISE_BLOCK;
    int count = n - start < NOISE_BLOCK ? (int)(n - start) : NOISE_BLOCK;
    kernels->normal_block(noise, seed, (uint64_t)block);
    kernels->noise_forward_block(gamma + start, delta + start, out + start, noise, count);
    if (epsilon)
      for (int i = 0; i < count; i++) epsilon[start + i] = noise[i];
  }
}

/* The gradient of delta: the noise is made again from the seed instead of being kept. */
void sparsevd_noise_backward(int set, int threads, ptrdiff_t n, uint64_t seed, const float *grad, const float *delta,
                             float *grad_delta) {
  const struct train_kernels *kernels = numbered(set);
  ptrdiff_t blocks = (n + NOISE_BLOCK - 1) / NOISE_BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (ptrdiff_t block = 0; block < blocks; block++) {
    float noise[NOISE_BLOCK];
    ptrdiff_t start = block * NOISE_BLOCK;
    int count = n - start < NOISE_BLOCK ? (int)(n - start) : NOISE_BLOCK;
    kernels->normal_block(noise, seed, (uint64_t)block);
    kernels->noise_backward_block(grad + start, delta + start, grad_delta + start, noise, count);
  }
}
