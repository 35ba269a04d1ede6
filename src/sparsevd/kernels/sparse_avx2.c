#if defined(__x86_64__)
#include "inference.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(f) f##_avx2
#include "sparse.h"
#endif
