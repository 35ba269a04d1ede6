/* What one instruction set provides; kernels.c chooses among them at run time. */
#ifndef SPARSEVD_KERNELS_H
#define SPARSEVD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

struct train_kernels {
  double (*kl_block)(const float *theta, const float *log_sigma2, float *grad_theta, float *grad_log_sigma2,
                     ptrdiff_t n);
  void (*normal_block)(float *out, uint64_t seed, uint64_t block);
  void (*noise_forward_block)(const float *gamma, const float *delta, float *out, const float *epsilon, int n);
  void (*noise_backward_block)(const float *grad, const float *delta, float *grad_delta, const float *epsilon, int n);
};

extern const struct train_kernels train_kernels_generic;
#if defined(__x86_64__)
extern const struct train_kernels train_kernels_avx2, train_kernels_avx512;
#endif

#endif
