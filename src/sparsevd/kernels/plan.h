/* A whole network. Its input and output are [batch][numbers]; in between, a group of images stays in scratch memory. */
#ifndef SPARSEVD_PLAN_H
#define SPARSEVD_PLAN_H

#include "inference.h"

struct plan {
  int32_t images, steps;
  int32_t out_planes, out_size; /* where the output lies, without gaps, and its numbers for each image */
  int64_t scratch;              /* floats for a group of images; zero before the first call */
  const struct sparse_layer *input; /* how the input is packed */
  int32_t input_planes;
  const struct step *step;
};

#endif
