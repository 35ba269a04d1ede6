/* Feeds random bytes to the decoder of coder.c, and reads back what the encoder writes, with tightly allocated arrays. The
   sanitisers see reads and writes past the end and overflows; results are checked by test_pack.py. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct coder;
struct coder *sparsevd_coder_open(const uint8_t *, ptrdiff_t, const float *);
void sparsevd_coder_learn(struct coder *, uint8_t *, ptrdiff_t);
int sparsevd_coder_bytes(struct coder *, uint8_t *, ptrdiff_t);
int sparsevd_coder_matrix(struct coder *, int32_t *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, const int32_t *, int);
ptrdiff_t sparsevd_coder_finish(struct coder *);
const uint8_t *sparsevd_coder_written(const struct coder *);
void sparsevd_coder_close(struct coder *);

static uint32_t state = 1;
static uint32_t draw(uint32_t below) {
  state = state * 1664525u + 1013904223u;
  return (uint32_t)((uint64_t)(state >> 8) * below >> 24);
}

int main(void) {
  int runs = 0;
  for (; runs < 500; runs++) {
    ptrdiff_t rows = draw(9), columns = draw(30), width = draw((uint32_t)columns + 1), plane = draw((uint32_t)columns + 1);
    int mantissa = (int)draw(25) - 1;
    size_t n = (size_t)(rows * columns);
    int32_t *values = calloc(n ? n : 1, sizeof *values), *hint = calloc((size_t)columns + !columns, sizeof *hint);
    for (ptrdiff_t i = 0; i < columns; i++) hint[i] = (int32_t)draw(9);
    uint8_t text[20] = {0};

    ptrdiff_t length = draw(200); /* random bytes */
    uint8_t *data = malloc((size_t)length + !length);
    for (ptrdiff_t i = 0; i < length; i++) data[i] = (uint8_t)(runs % 3 ? draw(256) : 255 * draw(2));
    struct coder *decoder = sparsevd_coder_open(data, length, NULL);
    sparsevd_coder_bytes(decoder, text, 20);
    for (int i = 0; i < 3; i++) {
      memset(values, 0, n * sizeof *values);
      sparsevd_coder_matrix(decoder, values, rows, columns, width, plane, runs % 2 ? hint : NULL, mantissa);
    }
    sparsevd_coder_close(decoder);
    free(data);

    int32_t *again = calloc(n ? n : 1, sizeof *again); /* there and back */
    for (size_t i = 0; i < n; i++) {
      int32_t sign = draw(2) ? 1 : -1;
      values[i] = draw(3)        ? 0
                  : mantissa < 0 ? sign * (int32_t)(1 + draw(1u << draw(20)))
                                 : (int32_t)((draw(1u << 16) << 16 | draw(1u << 16)) & ~((1u << (23 - mantissa)) - 1));
    }
    struct coder *encoder = sparsevd_coder_open(NULL, 0, NULL);
    sparsevd_coder_learn(encoder, text, 20);
    sparsevd_coder_matrix(encoder, values, rows, columns, width, plane, hint, mantissa);
    ptrdiff_t size = sparsevd_coder_finish(encoder);
    uint8_t *copy = malloc((size_t)size + !size);
    if (size) memcpy(copy, sparsevd_coder_written(encoder), (size_t)size);
    struct coder *reader = sparsevd_coder_open(copy, size, NULL);
    sparsevd_coder_learn(reader, text, 20);
    int failed = sparsevd_coder_matrix(reader, again, rows, columns, width, plane, hint, mantissa);
    if (failed || memcmp(values, again, n * sizeof *values)) return 1;
    sparsevd_coder_close(encoder), sparsevd_coder_close(reader);
    free(copy), free(values), free(again), free(hint);
  }
  printf("%d runs\n", runs);
  return 0;
}
