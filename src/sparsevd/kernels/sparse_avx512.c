#if defined(__x86_64__)
#include "inference.h"

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#define NAME(f) f##_avx512
#include "sparse.h"
#endif
