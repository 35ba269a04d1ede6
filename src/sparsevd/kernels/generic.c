/* What every machine has; on AArch64 that is NEON. */
#define LANES 4
#define TARGET
#define KERNELS kernels_generic
#include "one_set.h"
