/* All kernels for one instruction set. The file of each includes this, after defining
   LANES    floats in a register
   TARGET   the function attribute that allows the instruction set
   KERNELS  the name of its table
   All other names are static, since each instruction set is a translation unit of its own. The order matters: each of
   these headers uses those before it. */

#include "kernels.h"
#include "vectors.h"

#include "train.h"

#include "tiles.h"
#include "product.h"
#include "packing.h"
#include "steps.h"

const struct kernels KERNELS = {LANES, TRAIN_KERNELS, SPARSE_KERNELS};
