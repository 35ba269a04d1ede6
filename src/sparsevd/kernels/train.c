/* The C ABI of training: plain pointers and sizes, called through ctypes. Work is cut into blocks of a fixed size,
   and every block's result depends on its position only: the number of threads changes nothing but the time. */

#include "kernels.h"

#include <string.h>

#define BLOCK 4096 /* a multiple of CHUNK */

ptrdiff_t sparsevd_blocks(ptrdiff_t n) { return (n + BLOCK - 1) / BLOCK; }

/* A loop over the blocks of n numbers on all threads; inside it a block begins at `start` and has `count` of them. */
#define FOR_EACH_BLOCK                                                                   \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > BLOCK)")       \
  for (ptrdiff_t start = 0; start < n; start += BLOCK)
#define COUNT (n - start < BLOCK ? n - start : BLOCK)

/* The sum of the KL over n weights, with both gradients. sums has room for sparsevd_blocks(n) numbers. */
double sparsevd_kl(int set, int threads, ptrdiff_t n, const float *theta, const float *log_sigma2, float *grad_theta,
                   float *grad_log_sigma2, double *sums) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK
  sums[start / BLOCK] =
      kernels->kl_block(theta + start, log_sigma2 + start, grad_theta + start, grad_log_sigma2 + start, COUNT);
  double sum = 0;
  for (ptrdiff_t block = 0; block < sparsevd_blocks(n); block++) sum += sums[block];
  return sum;
}

/* One step of Adam on the data's gradients and the KL's, for n pairs (theta, log sigma^2). Each of the two comes with its
   gradient and Adam's two averages. */
void sparsevd_adam(int set, int threads, ptrdiff_t n, const struct adam *adam, float *theta, const float *grad_theta,
                   float *mean_theta, float *square_theta, float *log_sigma2, const float *grad_log_sigma2,
                   float *mean_log_sigma2, float *square_log_sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK
  kernels->adam_block(adam, theta + start, grad_theta + start, mean_theta + start, square_theta + start,
                      log_sigma2 + start, grad_log_sigma2 + start, mean_log_sigma2 + start, square_log_sigma2 + start,
                      COUNT);
}

/* gamma becomes gamma + sqrt(delta) epsilon with the noise of this seed, and delta the slope of that with respect to
   delta. epsilon, if not null, gets the noise. */
void sparsevd_sample(int set, int threads, ptrdiff_t n, uint64_t seed, float *gamma, float *delta, float *epsilon) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
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
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK kernels->exp_block(log_sigma2 + start, sigma2 + start, COUNT);
}

void sparsevd_exp_bf16(int set, int threads, ptrdiff_t n, const float *log_sigma2, uint16_t *sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK kernels->exp_bf16_block(log_sigma2 + start, sigma2 + start, COUNT);
}

/* The gradient of sigma^2 becomes that of log sigma^2. */
void sparsevd_times_exp(int set, int threads, ptrdiff_t n, const float *log_sigma2, float *grad_sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK kernels->times_exp_block(log_sigma2 + start, grad_sigma2 + start, COUNT);
}

static void multiply(int set, int threads, ptrdiff_t n, const float *a, const float *b, float *c) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK kernels->multiply_block(a + start, b + start, c + start, COUNT);
}

/* A fully-connected layer in one call: on a small network the calls cost as much as the work. The matrix products are
   those of the BLAS whose sgemm is given. Its matrices are column by column, ours row by row: each is the other's
   transpose. x is [batch, in], theta and log_sigma2 are [out, in]. */
typedef void sgemm_function(const char *, const char *, const int *, const int *, const int *, const float *,
                            const float *, const int *, const float *, const int *, const float *, float *,
                            const int *);

/* out = gamma + sqrt(delta) epsilon (eq. 17); slope is d out / d delta. Scratch: x2 [batch, in], sigma2 [out, in]. */
void sparsevd_linear_forward(int set, int threads, ptrdiff_t rows, uint64_t seed, int ins, int outs,
                             sgemm_function *sgemm, const float *x, const float *theta, const float *log_sigma2,
                             const float *bias, float *out, float *slope, float *x2, float *sigma2) {
  const int batch = (int)rows;
  const float zero = 0, one = 1;
  multiply(set, threads, rows * ins, x, x, x2);
  sparsevd_exp(set, threads, (ptrdiff_t)ins * outs, log_sigma2, sigma2);
  if (bias)
    for (ptrdiff_t row = 0; row < rows; row++) memcpy(out + row * outs, bias, sizeof(float) * outs);
  sgemm("T", "N", &outs, &batch, &ins, &one, theta, &ins, x, &ins, bias ? &one : &zero, out, &outs);
  sgemm("T", "N", &outs, &batch, &ins, &one, sigma2, &ins, x2, &ins, &zero, slope, &outs);
  sparsevd_sample(set, threads, rows * outs, seed, out, slope, NULL);
}

/* Gradients of theta and log sigma^2, of the bias and of x unless these are null. Scratch: delta [batch, out], x2
   [batch, in], and for the gradient of x also sigma2 [out, in]. */
void sparsevd_linear_backward(int set, int threads, ptrdiff_t rows, int ins, int outs, sgemm_function *sgemm,
                              const float *grad, const float *slope, const float *x, const float *theta,
                              const float *log_sigma2, float *grad_theta, float *grad_log_sigma2, float *grad_bias,
                              float *grad_x, float *delta, float *x2, float *sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  const int batch = (int)rows;
  const float zero = 0, one = 1;
  multiply(set, threads, rows * outs, grad, slope, delta);
  multiply(set, threads, rows * ins, x, x, x2);
  sgemm("N", "T", &ins, &outs, &batch, &one, x, &ins, grad, &outs, &zero, grad_theta, &ins);
  sgemm("N", "T", &ins, &outs, &batch, &one, x2, &ins, delta, &outs, &zero, grad_log_sigma2, &ins);
  if (grad_x) {
    sparsevd_exp(set, threads, (ptrdiff_t)ins * outs, log_sigma2, sigma2);
    multiply(set, threads, (ptrdiff_t)ins * outs, grad_log_sigma2, sigma2, grad_log_sigma2);
    sgemm("N", "N", &ins, &batch, &outs, &one, theta, &ins, grad, &outs, &zero, grad_x, &ins);
    sgemm("N", "N", &ins, &batch, &outs, &one, sigma2, &ins, delta, &outs, &zero, x2, &ins);
    ptrdiff_t n = rows * ins; /* d A^2 = 2 A d A */
    FOR_EACH_BLOCK kernels->add_twice_product_block(x + start, x2 + start, grad_x + start, COUNT);
  } else {
    sparsevd_times_exp(set, threads, (ptrdiff_t)ins * outs, log_sigma2, grad_log_sigma2);
  }
  if (grad_bias) {
    memset(grad_bias, 0, sizeof(float) * outs);
    for (ptrdiff_t row = 0; row < rows; row++)
      for (int unit = 0; unit < outs; unit++) grad_bias[unit] += grad[row * outs + unit];
  }
}
