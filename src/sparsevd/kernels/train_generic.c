#include "kernels.h"

#define LANES 4
#define TARGET
#include "train.h"

const struct train_kernels train_kernels_generic = TRAIN_KERNELS;
