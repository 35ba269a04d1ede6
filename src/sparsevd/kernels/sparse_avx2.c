#if defined(__x86_64__)
#include "inference.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "sparse.h"

const struct sparse_kernels sparse_kernels_avx2 = SPARSE_KERNELS;
#endif
