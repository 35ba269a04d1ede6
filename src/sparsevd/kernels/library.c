/* What Python asks before it uses the library, and the choice among instruction sets. */

#include "kernels.h"
#include "plan.h"

static const struct kernels *tables[INSTRUCTION_SETS]; /* null for a set that this machine does not have */

__attribute__((constructor)) static void find_tables(void) { /* once, before any thread can ask */
  tables[BEST] = tables[GENERIC] = &kernels_generic;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables[BEST] = tables[AVX2] = &kernels_avx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
    tables[BEST] = tables[AVX512] = &kernels_avx512;
#endif
}

const struct kernels *kernels_of(int set) { return set >= 0 && set < INSTRUCTION_SETS ? tables[set] : NULL; }

/* Floats in a vector of this instruction set; 0 if the machine does not have it. */
int sparsevd_lanes(int set) { return kernels_of(set) ? kernels_of(set)->lanes : 0; }

/* The structs that Python fills, with their sizes and where their last fields begin: structs.py compares them with its
   own, since a library that reads others would read what is not there. */
struct layout {
  const char *name;
  size_t size, last;
};
#define LAYOUT(type, field) {#type, sizeof(struct type), offsetof(struct type, field)}
const struct layout *sparsevd_layouts(void) {
  static const struct layout layouts[] = {
      LAYOUT(adam, log_sigma2_rate), LAYOUT(trained, square), LAYOUT(linear, sigma2),
      LAYOUT(nonzero, weight),       LAYOUT(value, first),    LAYOUT(sparse_layer, bias),
      LAYOUT(step, layer),           LAYOUT(plan, step),      {NULL, 0, 0},
  };
  return layouts;
}

/* Which sources this library was built from, as setup.py says. Kernels that were built from others than those beside
   them would pass for these; a test compares the two. */
#ifndef SPARSEVD_SOURCES
#define SPARSEVD_SOURCES "" /* built in another way, such as with sanitisers */
#endif
const char *sparsevd_sources(void) { return SPARSEVD_SOURCES; }
