/* A sparse Linear or Conv layer made ready for one size of image, and what one instruction set does with it.

   Every such layer is the same sum. The input is copied once into planes with zeros around the image, one plane per
   channel (for a stride s, one per channel and phase: the columns 0, s, 2s, ... then 1, s + 1, ...). There a weight
   needs only its offset: output (y, x) of a filter is the sum of weight * in[offset + y * pitch + x] over the filter's
   nonzeros. Several images may lie beside each other, innermost: then all positions and offsets count groups of them,
   and a Linear layer is a convolution of 1x1 images. */
#ifndef SPARSEVD_INFERENCE_H
#define SPARSEVD_INFERENCE_H

#include <stddef.h>
#include <stdint.h>

struct nonzero {
  int32_t offset; /* in floats from the plane of the first channel */
  float weight;
};

struct sparse_layer {
  int32_t channels, height, width;         /* of the input */
  int32_t outputs, out_height, out_width;  /* of the output */
  int32_t images;                          /* beside each other in a plane: 1, or a multiple of the vector's lanes */
  int32_t used;                            /* channels that any weight reads; only these are copied */
  int32_t stride_x;                        /* with 1 the pixels of a row stay together */
  int32_t pitch;                           /* positions from one row of a phase to the next */
  int32_t plane;                           /* positions from one used channel to the next, all phases */
  int32_t zero_runs;                       /* of positions in a plane that no pixel fills */
  int32_t direct;                          /* the input itself already has the layout of the planes */
  int32_t out_pitch, out_plane;            /* positions between rows and between filters of the output */
  float low, high;                         /* the activation is clamp(x, low, high) */
  const int32_t *slot;                     /* [channels]: which plane a channel has, -1 for none */
  const int32_t *place;                    /* [height * width]: where in the plane a pixel lies */
  const int32_t *zero;                     /* [zero_runs][2]: the other positions, first and count */
  const int32_t *order;                    /* [outputs]: filters by their number of nonzeros, which loops then predict */
  const int32_t *starts;                   /* [outputs + 1]: where in nonzeros those of filter order[i] start */
  const struct nonzero *nonzeros;
  const float *bias; /* [outputs] */
};

/* An activation within a whole network: one plane per channel, in the scratch memory of a group of images. */
struct value {
  int32_t channels, height, width;
  int32_t pitch, plane; /* positions between rows and between channels; what lies between them is zero */
  int32_t planes;       /* floats from the start of the scratch memory to the first plane */
  int32_t first;        /* positions from the start of a plane to its first pixel */
};

enum step_kind { PRODUCT, REPACK, MAX_POOL, AVERAGE_POOL, AFFINE, ADD };

/* One operation of a network. */
struct step {
  int32_t kind;
  struct value input, second, out;
  int32_t kernel_y, kernel_x, stride_y, stride_x, top, left, dilation_y, dilation_x; /* of a window */
  int32_t count_padding;    /* an average counts the zeros around the image too */
  float low, high;          /* the activation of AFFINE and ADD */
  const float *scale, *shift; /* [channels] of AFFINE */
  const struct sparse_layer *layer; /* of PRODUCT and REPACK */
};

/* A part of the work on one group of images: filters order[first] to order[last - 1]. */
struct sparse_kernels {
  void (*pack)(const struct sparse_layer *layer, const float *in, ptrdiff_t image_stride, ptrdiff_t images,
               float *planes, ptrdiff_t first_channel, ptrdiff_t last_channel);
  void (*product)(const struct sparse_layer *layer, const float *planes, float *out, int32_t first, int32_t last);
  void (*unpack)(const float *interleaved, ptrdiff_t group, ptrdiff_t images, float *out, ptrdiff_t image_stride,
                 ptrdiff_t first, ptrdiff_t last);
  void (*step)(const struct step *step, float *scratch, int32_t images, ptrdiff_t first, ptrdiff_t last);
};

#endif
