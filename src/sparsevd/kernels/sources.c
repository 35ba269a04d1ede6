/* Which sources this library was built from, as setup.py says. Kernels that were built from others than those beside
   them would pass for these; a test compares the two. */

#ifndef SPARSEVD_SOURCES
#define SPARSEVD_SOURCES "" /* built in another way, such as with sanitisers */
#endif

const char *sparsevd_sources(void) { return SPARSEVD_SOURCES; }
