#if defined(__x86_64__)
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define KERNELS kernels_avx2
#include "one_set.h"
#endif
