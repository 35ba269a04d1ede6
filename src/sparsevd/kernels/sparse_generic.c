#include "inference.h"

#define LANES 4
#define TARGET
#include "sparse.h"

const struct sparse_kernels sparse_kernels_generic = SPARSE_KERNELS;
