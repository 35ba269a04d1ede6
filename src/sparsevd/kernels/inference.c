/* The C ABI of sparse inference: one layer, from [batch][channels][height][width] to the same layout. Groups of images
   go to the threads while there are enough of them; else the threads share the filters of a group. A filter is summed
   by one thread and in one order, so the number of threads changes nothing but the time. */

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

#include "kernels.h"
#include "plan.h"

static ptrdiff_t rounded(ptrdiff_t floats) { return (floats + 15) / 16 * 16; }

/* Tiles read up to a vector past the last plane. */
static ptrdiff_t planes_size(const struct sparse_layer *layer) {
  return layer->direct ? 0 : rounded((ptrdiff_t)layer->used * layer->plane * layer->images + 16);
}

static ptrdiff_t group_size(const struct sparse_layer *layer) {
  const ptrdiff_t outputs = (ptrdiff_t)layer->outputs * layer->out_height * layer->out_width;
  return planes_size(layer) + (layer->images > 1 ? rounded(outputs * layer->images) : 0);
}

/* Floats of scratch memory that a call needs, for each thread; its address is a multiple of 64. */
ptrdiff_t sparsevd_sparse_scratch(const struct sparse_layer *layer) { return group_size(layer); }

/* The filters of part `part` of `parts`, by their order, with about as many nonzeros in each part. */
static int32_t share(const struct sparse_layer *layer, int part, int parts) {
  /* A filter without nonzeros costs something too. */
  const int64_t all = layer->starts[layer->outputs] + (int64_t)layer->outputs, wanted = all * part / parts;
  int32_t low = 0, high = layer->outputs;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (layer->starts[middle] + (int64_t)middle < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void one_group(const struct sparse_kernels *kernels, const struct sparse_layer *layer, ptrdiff_t batch,
                      ptrdiff_t group, const float *in, float *out, float *scratch, int threads) {
  const ptrdiff_t in_size = (ptrdiff_t)layer->channels * layer->height * layer->width;
  const ptrdiff_t out_size = (ptrdiff_t)layer->outputs * layer->out_height * layer->out_width;
  const ptrdiff_t start = group * layer->images, left = batch - start;
  const ptrdiff_t images = left < layer->images ? left : layer->images;
  float *interleaved = layer->images > 1 ? scratch + planes_size(layer) : out + start * out_size;
  const float *source = in + start * in_size;
  const float *planes = layer->direct ? source : scratch;
  if (threads == 1) {
    if (!layer->direct) kernels->pack(layer, source, in_size, images, scratch, 0, layer->channels);
    kernels->product(layer, planes, interleaved, 0, layer->outputs);
    if (layer->images > 1)
      kernels->unpack(interleaved, layer->images, images, out + start * out_size, out_size, 0, out_size);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    if (!layer->direct) {
#pragma omp for schedule(static)
      for (int part = 0; part < threads; part++)
        kernels->pack(layer, source, in_size, images, scratch, (ptrdiff_t)layer->channels * part / threads,
                      (ptrdiff_t)layer->channels * (part + 1) / threads);
    }
#pragma omp for schedule(static)
    for (int part = 0; part < threads; part++)
      kernels->product(layer, planes, interleaved, share(layer, part, threads), share(layer, part + 1, threads));
    if (layer->images > 1) {
#pragma omp for schedule(static)
      for (int part = 0; part < threads; part++)
        kernels->unpack(interleaved, layer->images, images, out + start * out_size, out_size, out_size * part / threads,
                        out_size * (part + 1) / threads);
    }
  }
}

/* scratch has room for sparsevd_sparse_scratch(layer) floats per thread. */
void sparsevd_sparse_run(int set, int threads, const struct sparse_layer *layer, ptrdiff_t batch, const float *in,
                         float *out, float *scratch) {
  const struct sparse_kernels *kernels = &kernels_of(set)->sparse;
  const ptrdiff_t groups = (batch + layer->images - 1) / layer->images, step = group_size(layer);
  if (threads == 1 || groups < threads) {
    for (ptrdiff_t group = 0; group < groups; group++)
      one_group(kernels, layer, batch, group, in, out, scratch, threads);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int part = 0; part < threads; part++)
    for (ptrdiff_t group = groups * part / threads; group < groups * (part + 1) / threads; group++)
      one_group(kernels, layer, batch, group, in, out, scratch + part * step, 1);
}

/* ---- a whole network ---- */

static void part_of_step(const struct sparse_kernels *kernels, const struct plan *plan, const struct step *step,
                         float *scratch, int part, int parts) {
  if (step->kind == PRODUCT)
    kernels->step(step, scratch, plan->images, share(step->layer, part, parts), share(step->layer, part + 1, parts));
  else
    kernels->step(step, scratch, plan->images, (ptrdiff_t)step->input.channels * part / parts,
                  (ptrdiff_t)step->input.channels * (part + 1) / parts);
}

static void plan_group(const struct sparse_kernels *kernels, const struct plan *plan, ptrdiff_t batch, ptrdiff_t group,
                       const float *in, float *out, float *scratch, int part, int parts) {
  const struct sparse_layer *input = plan->input;
  const ptrdiff_t in_size = (ptrdiff_t)input->channels * input->height * input->width;
  const ptrdiff_t start = group * plan->images, left = batch - start;
  const ptrdiff_t images = left < plan->images ? left : plan->images;
  if (part == 0) kernels->pack(input, in + start * in_size, in_size, images, scratch + plan->input_planes, 0, input->channels);
  for (int32_t i = 0; i < plan->steps; i++) {
    if (parts > 1) {
#pragma omp barrier
    }
    part_of_step(kernels, plan, plan->step + i, scratch, part, parts);
  }
  if (parts > 1) {
#pragma omp barrier
  }
  if (part > 0) return;
  const float *result = scratch + plan->out_planes;
  float *to = out + start * plan->out_size;
  if (plan->images > 1) kernels->unpack(result, plan->images, images, to, plan->out_size, 0, plan->out_size);
  else
    for (int32_t i = 0; i < plan->out_size; i++) to[i] = result[i];
}

/* scratch has room for plan->scratch floats per thread; between calls only calls of the same plan may touch it. */
void sparsevd_plan_run(int set, int threads, const struct plan *plan, ptrdiff_t batch, const float *in, float *out,
                       float *scratch) {
  const struct sparse_kernels *kernels = &kernels_of(set)->sparse;
  const ptrdiff_t groups = (batch + plan->images - 1) / plan->images;
  if (threads == 1) {
    for (ptrdiff_t group = 0; group < groups; group++) plan_group(kernels, plan, batch, group, in, out, scratch, 0, 1);
  } else if (groups >= threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++)
      for (ptrdiff_t group = groups * part / threads; group < groups * (part + 1) / threads; group++)
        plan_group(kernels, plan, batch, group, in, out, scratch + part * plan->scratch, 0, 1);
  } else {
#pragma omp parallel num_threads(threads)
    {
      /* OpenMP may give fewer threads than asked for */
      for (ptrdiff_t group = 0; group < groups; group++)
        plan_group(kernels, plan, batch, group, in, out, scratch, omp_get_thread_num(), omp_get_num_threads());
    }
  }
}
