#if defined(__x86_64__)
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#define KERNELS kernels_avx512
#include "one_set.h"
#endif
