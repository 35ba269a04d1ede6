#if defined(__x86_64__)
#include "kernels.h"

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#include "train.h"

const struct train_kernels train_kernels_avx512 = TRAIN_KERNELS;
#endif
