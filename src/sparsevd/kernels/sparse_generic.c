#include "inference.h"

#define LANES 4
#define TARGET 
#define NAME(f) f##_generic
#include "sparse.h"
