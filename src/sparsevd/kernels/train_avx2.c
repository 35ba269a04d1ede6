#if defined(__x86_64__)
#include "kernels.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "train.h"

const struct train_kernels train_kernels_avx2 = TRAIN_KERNELS;
#endif
