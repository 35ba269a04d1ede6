/* The C ABI of training: plain pointers and sizes, called through ctypes. Work is cut into blocks of a fixed size,
   and every block's result depends on its position only: the number of threads changes nothing but the time. */

#include "kernels.h"

#include <string.h>

#define BLOCK 4096 /* a multiple of CHUNK */

ptrdiff_t sparsevd_blocks(ptrdiff_t n) { return (n + BLOCK - 1) / BLOCK; }

/* A loop over the blocks of n numbers on so many threads; `start` is where a block begins. */
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#define FOR_EACH_BLOCK(start, n, threads)                                         \
  PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((n) > BLOCK)) \
  for (ptrdiff_t start = 0; start < (n); start += BLOCK)

static inline ptrdiff_t block_size(ptrdiff_t start, ptrdiff_t n) { return n - start < BLOCK ? n - start : BLOCK; }

/* The sum of the KL over n weights, with both gradients. sums has room for sparsevd_blocks(n) numbers. */
double sparsevd_kl(int set, int threads, ptrdiff_t n, const float *theta, const float *log_sigma2, float *grad_theta,
                   float *grad_log_sigma2, double *sums) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads)
  sums[start / BLOCK] = kernels->kl_block(theta + start, log_sigma2 + start, grad_theta + start,
                                          grad_log_sigma2 + start, block_size(start, n));
  double sum = 0;
  for (ptrdiff_t block = 0; block < sparsevd_blocks(n); block++) sum += sums[block];
  return sum;
}

/* One step of Adam on the data's gradients and the KL's, for n pairs (theta, log sigma^2). */
void sparsevd_adam(int set, int threads, ptrdiff_t n, const struct adam *adam, const struct trained *theta,
                   const struct trained *log_sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads)
  kernels->adam_block(adam, trained_from(theta, start), trained_from(log_sigma2, start), block_size(start, n));
}

/* gamma becomes gamma + sqrt(delta) epsilon with the noise of this seed, and delta the slope of that with respect to
   delta. epsilon, if not null, gets the noise. */
void sparsevd_sample(int set, int threads, ptrdiff_t n, uint64_t seed, float *gamma, float *delta, float *epsilon) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads)
  for (ptrdiff_t i = start, end = start + block_size(start, n); i < end; i += CHUNK) {
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
  FOR_EACH_BLOCK(start, n, threads) kernels->exp_block(log_sigma2 + start, sigma2 + start, block_size(start, n));
}

void sparsevd_exp_bf16(int set, int threads, ptrdiff_t n, const float *log_sigma2, uint16_t *sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads) kernels->exp_bf16_block(log_sigma2 + start, sigma2 + start, block_size(start, n));
}

/* The gradient of sigma^2 becomes that of log sigma^2. */
void sparsevd_times_exp(int set, int threads, ptrdiff_t n, const float *log_sigma2, float *grad_sigma2) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads)
  kernels->times_exp_block(log_sigma2 + start, grad_sigma2 + start, block_size(start, n));
}

static void multiply(int set, int threads, ptrdiff_t n, const float *a, const float *b, float *c) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  FOR_EACH_BLOCK(start, n, threads) kernels->multiply_block(a + start, b + start, c + start, block_size(start, n));
}

/* A fully-connected layer in one call: on a small network the calls cost as much as the work.

   out = gamma + sqrt(delta) epsilon (eq. 17); slope is d out / d delta. bias may be null. */
void sparsevd_linear_forward(int set, int threads, const struct linear *layer, uint64_t seed, const float *bias,
                             float *out, float *slope) {
  const int rows = layer->rows, ins = layer->ins, outs = layer->outs;
  const ptrdiff_t inputs = (ptrdiff_t)rows * ins, outputs = (ptrdiff_t)rows * outs, weights = (ptrdiff_t)ins * outs;
  const float *x = layer->x, zero = 0, one = 1;
  multiply(set, threads, inputs, x, x, layer->x2);
  sparsevd_exp(set, threads, weights, layer->log_sigma2, layer->sigma2);
  if (bias)
    for (ptrdiff_t i = 0; i < outputs; i += outs) memcpy(out + i, bias, sizeof(float) * outs);
  layer->sgemm("T", "N", &outs, &rows, &ins, &one, layer->theta, &ins, x, &ins, bias ? &one : &zero, out, &outs);
  layer->sgemm("T", "N", &outs, &rows, &ins, &one, layer->sigma2, &ins, layer->x2, &ins, &zero, slope, &outs);
  sparsevd_sample(set, threads, outputs, seed, out, slope, NULL);
}

/* Gradients of theta and log sigma^2, of the bias and of x unless these are null. delta is scratch [rows, outs]; the
   layer's sigma2 is needed for the gradient of x only. */
void sparsevd_linear_backward(int set, int threads, const struct linear *layer, const float *grad, const float *slope,
                              float *grad_theta, float *grad_log_sigma2, float *grad_bias, float *grad_x,
                              float *delta) {
  const struct train_kernels *kernels = &kernels_of(set)->train;
  const int rows = layer->rows, ins = layer->ins, outs = layer->outs;
  const ptrdiff_t inputs = (ptrdiff_t)rows * ins, outputs = (ptrdiff_t)rows * outs, weights = (ptrdiff_t)ins * outs;
  const float *x = layer->x, zero = 0, one = 1;
  float *x2 = layer->x2, *sigma2 = layer->sigma2;
  multiply(set, threads, outputs, grad, slope, delta);
  multiply(set, threads, inputs, x, x, x2);
  layer->sgemm("N", "T", &ins, &outs, &rows, &one, x, &ins, grad, &outs, &zero, grad_theta, &ins);
  layer->sgemm("N", "T", &ins, &outs, &rows, &one, x2, &ins, delta, &outs, &zero, grad_log_sigma2, &ins);
  if (grad_x) {
    sparsevd_exp(set, threads, weights, layer->log_sigma2, sigma2);
    multiply(set, threads, weights, grad_log_sigma2, sigma2, grad_log_sigma2);
    layer->sgemm("N", "N", &ins, &rows, &outs, &one, layer->theta, &ins, grad, &outs, &zero, grad_x, &ins);
    layer->sgemm("N", "N", &ins, &rows, &outs, &one, sigma2, &ins, delta, &outs, &zero, x2, &ins);
    FOR_EACH_BLOCK(start, inputs, threads) /* d A^2 = 2 A d A */
    kernels->add_twice_product_block(x + start, x2 + start, grad_x + start, block_size(start, inputs));
  } else {
    sparsevd_times_exp(set, threads, weights, layer->log_sigma2, grad_log_sigma2);
  }
  if (grad_bias) {
    memset(grad_bias, 0, sizeof(float) * outs);
    for (ptrdiff_t i = 0; i < outputs; i += outs)
      for (int unit = 0; unit < outs; unit++) grad_bias[unit] += grad[i + unit];
  }
}
