/* What one instruction set provides; library.c chooses among them at run time. */
#ifndef SPARSEVD_KERNELS_H
#define SPARSEVD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "inference.h"

/* Python spells them in loading.py. BEST is the widest that the machine has. */
enum instruction_set { BEST, GENERIC, AVX2, AVX512, INSTRUCTION_SETS };

/* Settings of Adam. The rates are divided by 1 - beta1^step; deviation is sqrt(1 - beta2^step). */
struct adam {
  float kl_weight, beta1, beta2, deviation, epsilon, theta_rate, log_sigma2_rate;
};

/* A tensor in training: its numbers, the data's gradient of them, and Adam's two averages. */
struct trained {
  float *x;
  const float *grad;
  float *mean, *square;
};

static inline struct trained trained_from(const struct trained *all, ptrdiff_t start) {
  return (struct trained){all->x + start, all->grad + start, all->mean + start, all->square + start};
}

/* The matrix product of a BLAS. Its matrices are column by column, ours row by row: each is the other's transpose. */
typedef void sgemm_function(const char *, const char *, const int *, const int *, const int *, const float *,
                            const float *, const int *, const float *, const int *, const float *, float *,
                            const int *);

/* A fully-connected layer and its batch. */
struct linear {
  int32_t rows, ins, outs;
  sgemm_function *sgemm;
  const float *x;                  /* [rows, ins] */
  const float *theta, *log_sigma2; /* [outs, ins] */
  float *x2, *sigma2;              /* scratch of their sizes */
};

/* Work is done in steps over a few hundred numbers, each step a short loop: one weight's logarithms and exponentials wait
   for each other, those of many weights need not. */
#define CHUNK 256

struct train_kernels {
  double (*kl_block)(const float *theta, const float *log_sigma2, float *grad_theta, float *grad_log_sigma2,
                     ptrdiff_t n);
  void (*normal_chunk)(float *out, uint64_t seed, uint64_t chunk);
  void (*sample_chunk)(float *gamma, float *delta, const float *epsilon, int n);
  void (*exp_block)(const float *x, float *out, ptrdiff_t n);
  void (*exp_bf16_block)(const float *x, uint16_t *out, ptrdiff_t n);
  void (*times_exp_block)(const float *log_sigma2, float *grad_sigma2, ptrdiff_t n);
  void (*multiply_block)(const float *a, const float *b, float *c, ptrdiff_t n);
  void (*add_twice_product_block)(const float *a, const float *b, float *c, ptrdiff_t n);
  void (*adam_block)(const struct adam *adam, struct trained theta, struct trained log_sigma2, ptrdiff_t n);
};

struct kernels {
  int lanes; /* floats in a register */
  struct train_kernels train;
  struct sparse_kernels sparse;
};

extern const struct kernels kernels_generic, kernels_avx2, kernels_avx512;

/* Null if this machine does not have the instruction set. */
const struct kernels *kernels_of(int set);

#endif
