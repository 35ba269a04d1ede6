#if defined(__x86_64__)
#include "inference.h"

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#include "sparse.h"

const struct sparse_kernels sparse_kernels_avx512 = SPARSE_KERNELS;
#endif
