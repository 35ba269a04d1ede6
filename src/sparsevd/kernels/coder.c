/* How bytes and matrices become the binary decisions of adaptive.h, and the C ABI of both; docs/format.md specifies it.
   modelfile/symbols.py is the same in Python: change both together. */

#include "adaptive.h"

/* Regions of the counters, and the mixers. */
enum {
  BYTES_AT = 0,         /* 3 orders of 16384 */
  ROWS_AT = 3 << 14,    /* the rest in units of 4096 */
  COLUMNS_AT = 13 << 12,
  FLAGS_AT = 14 << 12,  /* 3 contexts for matrices, 3 for vectors */
  SIGNS_AT = 20 << 12,
  EXPONENTS_AT = 21 << 12,
  MANTISSAS_AT = 24 << 12,
};
enum {
  BYTE_MIXER, /* 8, one for each place in the byte */
  ROW_MIXER = 8,
  COLUMN_MIXER,
  FLAG_MIXER,
  VECTOR_FLAG_MIXER,
  SIGN_MIXER,
  MANTISSA_MIXER,
  FLOAT_MANTISSA_MIXER,
  EXPONENT_MIXER = 16, /* 31, one for each exponent */
  FLOAT_EXPONENT_MIXER = 56,
};

static int bucket(int n) { return n < 5 ? n : n < 7 ? 5 : n < 10 ? 6 : n < 16 ? 7 : n < 32 ? 8 : 9; }
static int at_most(int n, int most) { return n < most ? n : most; }

int sparsevd_coder_bytes(struct coder *s, uint8_t *bytes, ptrdiff_t n) {
  uint32_t before = 0;
  for (ptrdiff_t i = 0; i < n && !s->failed; i++) {
    int node = 1, order1 = (int)(before & 255), order2 = (int)((before & 0xFFFF) * 40503u >> 4 & 0x3FFF);
    for (int k = 7; k >= 0; k--) {
      int contexts[3] = {
          BYTES_AT + node,
          BYTES_AT + (1 << 14) + (int)(((uint32_t)order1 << 8 | (uint32_t)node) * 2654435761u >> 18),
          BYTES_AT + (2 << 14) + (int)(((uint32_t)order2 << 8 | (uint32_t)node) * 2654435761u >> 18),
      };
      node = node << 1 | code_bit(s, bytes[i] >> k & 1, BYTE_MIXER + 7 - k, contexts, 3);
    }
    bytes[i] = (uint8_t)node;
    before = before << 8 | bytes[i];
  }
  return s->failed;
}

struct place {                 /* what is known around the number to be coded */
  int32_t left, above, behind; /* numbers beside it, `width` and `plane` columns back; 0 where there is none */
  int column_sign;             /* of the last number in this column: 0 none, 1 negative, 2 positive */
  int row_exponent;            /* of the last number in this row, plus 1; the number's own afterwards */
  int column_exponent;         /* of the last number in this column, plus 1 */
};

static int sign_of(int32_t value) { return value ? 1 + (value > 0) : 0; }

static int code_sign(struct coder *s, int negative, const struct place *at) {
  int left = sign_of(at->left), above = sign_of(at->above), behind = sign_of(at->behind);
  int contexts[2] = {SIGNS_AT + left * 9 + above * 3 + behind, SIGNS_AT + 32 + at->column_sign * 3 + left};
  return code_bit(s, negative, SIGN_MIXER, contexts, 2);
}

/* The exponent of an integer in unary, with the exponents around it as context; then what follows its first bit. */
static int32_t code_integer(struct coder *s, int32_t value, struct place *at) {
  uint32_t magnitude = (uint32_t)(value < 0 ? -(int64_t)value : value);
  int negative = code_sign(s, value < 0, at);
  int length = 0;
  if (!s->decoding)
    while (magnitude >> length > 1) length++;
  int exponent = 0;
  for (;; exponent++) {
    if (exponent > 30) {
      s->failed = 1;
      return 0;
    }
    int contexts[3] = {EXPONENTS_AT + exponent, EXPONENTS_AT + 32 + 32 * at->row_exponent + exponent,
                       EXPONENTS_AT + 2048 + 32 * at->column_exponent + exponent};
    if (!code_bit(s, length > exponent, EXPONENT_MIXER + exponent, contexts, 3)) break;
  }
  uint32_t node = 1;
  int fine = at_most(exponent, 3); /* bits that are predicted; the rest are as good as random */
  for (int k = 1; k <= fine; k++) {
    int place = exponent * 16 + (int)node;
    int contexts[2] = {MANTISSAS_AT + place, MANTISSAS_AT + 1024 + place * 32 + at->column_exponent};
    node = node << 1 | (uint32_t)code_bit(s, magnitude >> (exponent - k) & 1, MANTISSA_MIXER, contexts, 2);
  }
  node = node << (exponent - fine) | code_raw(s, magnitude & ((1u << (exponent - fine)) - 1), exponent - fine);
  at->row_exponent = exponent + 1;
  return negative ? -(int32_t)node : (int32_t)node;
}

/* The bits of a float32 whose last 23 - mantissa bits are zero. */
static int32_t code_float(struct coder *s, int32_t value, struct place *at, int mantissa) {
  uint32_t bits = (uint32_t)value;
  int negative = code_sign(s, (int)(bits >> 31), at);
  uint32_t node = 1;
  for (int k = 7; k >= 0; k--) {
    int contexts[2] = {EXPONENTS_AT + 4096 + (int)node, EXPONENTS_AT + 8192 + ((at->row_exponent & 15) << 8 | (int)node)};
    node = node << 1 | (uint32_t)code_bit(s, bits >> (23 + k) & 1, FLOAT_EXPONENT_MIXER + k, contexts, 2);
  }
  uint32_t exponent = node & 255;
  int fine = at_most(mantissa, 2);
  uint32_t fraction = 1;
  for (int k = 1; k <= fine; k++) {
    int context = MANTISSAS_AT + 20480 + (int)(exponent << 2 | fraction);
    fraction = fraction << 1 | (uint32_t)code_bit(s, bits >> (23 - k) & 1, FLOAT_MANTISSA_MIXER, &context, 1);
  }
  fraction &= (1u << fine) - 1;
  fraction = fraction << (mantissa - fine) |
             code_raw(s, bits >> (23 - mantissa) & ((1u << (mantissa - fine)) - 1), mantissa - fine);
  at->row_exponent = (int)(exponent & 31);
  return (int32_t)((uint32_t)negative << 31 | exponent << 23 | fraction << (23 - mantissa));
}

/* What a matrix needs while it is coded. The arrays with a margin hold zeros left of the first column and right of the
   last, so that places outside the matrix need no question. */
struct columns {
  ptrdiff_t n, margin;
  uint8_t *there;    /* margin: where the present row has a number so far */
  uint8_t *expected; /* from the hint, or null without: 1 empty, 2 to 15 by the ratio to the mean */
  /* What only a matrix needs; a vector, which may be as long as a whole file allows, has no memory for it. */
  ptrdiff_t n_alive, *alive;
  uint8_t *living;          /* margin */
  int32_t *count;           /* margin: numbers in the rows above */
  uint8_t *sign, *exponent; /* of the last number in the column */
};

static void free_columns(struct columns *c) {
  free(c->alive), free(c->living), free(c->there), free(c->count), free(c->expected), free(c->sign), free(c->exponent);
}

static int make_columns(struct columns *c, ptrdiff_t n, ptrdiff_t width, ptrdiff_t plane, const int32_t *hint,
                        int vector) {
  size_t room = (size_t)n;
  memset(c, 0, sizeof *c);
  c->n = n;
  c->margin = (width > plane ? width : plane) + 2;
  c->there = calloc(room + 2 * (size_t)c->margin, 1);
  if (!c->there) return 1;
  if (!vector) {
    c->alive = malloc(room * sizeof *c->alive);
    c->living = calloc(room + 2 * (size_t)c->margin, 1);
    c->count = calloc(room + 2 * (size_t)c->margin, sizeof *c->count);
    c->sign = calloc(room, 1);
    c->exponent = calloc(room, 1);
    if (!c->alive || !c->living || !c->count || !c->sign || !c->exponent) return 1;
  }
  if (hint) {
    c->expected = malloc(room);
    if (!c->expected) return 1;
    int64_t sum = 0, fed = 0;
    for (ptrdiff_t i = 0; i < n; i++) sum += hint[i], fed += hint[i] > 0;
    for (ptrdiff_t i = 0; i < n; i++) {
      int64_t eighths = hint[i] > 0 ? 8 * (int64_t)hint[i] * fed / sum : 0;
      c->expected[i] = (uint8_t)(hint[i] > 0 ? 2 + (eighths < 26 ? eighths : 26) / 2 : 1);
    }
  }
  return 0;
}

/* Which rows and columns hold anything. */
static void code_living(struct coder *s, uint8_t *rows, ptrdiff_t n_rows, struct columns *columns, ptrdiff_t width,
                        ptrdiff_t plane, const int32_t *hint) {
  for (ptrdiff_t r = 0; r < n_rows && !s->failed; r++) {
    int context = ROWS_AT + (r > 0 ? rows[r - 1] : 0) + 2 * (r > 1 ? rows[r - 2] : 0);
    rows[r] = (uint8_t)code_bit(s, rows[r], ROW_MIXER, &context, 1);
  }
  for (ptrdiff_t c = 0; c < columns->n && !s->failed; c++) {
    uint8_t *here = columns->living + columns->margin + c;
    int left = here[-1], above = width ? here[-width] : 0, behind = plane ? here[-plane] : 0;
    int above_right = width > 1 ? here[1 - width] : 0, above_left = width ? here[-1 - width] : 0;
    int fed = hint ? 1 + (hint[c] > 0) : 0;
    int contexts[2] = {COLUMNS_AT + (left | above << 1 | above_right << 2 | behind << 3) * 3 + fed,
                       COLUMNS_AT + 64 + (left | here[-2] << 1 | above << 2 | above_left << 3) * 3 + fed};
    *here = (uint8_t)code_bit(s, *here, COLUMN_MIXER, contexts, 2);
  }
}

static void code_row(struct coder *s, int32_t *row, struct columns *columns, ptrdiff_t width, ptrdiff_t plane,
                     int vector, int mantissa) {
  int flags = FLAGS_AT + (vector ? 3 << 12 : 0), mixer = vector ? VECTOR_FLAG_MIXER : FLAG_MIXER;
  struct place at = {0};
  const ptrdiff_t n = vector ? columns->n : columns->n_alive;
  for (ptrdiff_t i = 0; i < n && !s->failed; i++) {
    ptrdiff_t c = vector ? i : columns->alive[i];
    uint8_t *there = columns->there + columns->margin + c;
    int left = there[-1], left2 = there[-2], behind = plane ? there[-plane] : 0;
    int above = 0, above_left = 0, above_right = 0, here = 0, around = 0;
    if (width) above = there[-width], above_left = there[-width - 1], above_right = width > 1 ? there[1 - width] : 0;
    if (!vector) {
      const int32_t *count = columns->count + columns->margin + c;
      here = *count, around = count[-1] + count[1];
      if (width)
        around += count[-width - 1] + count[-width] + count[-width + 1] + count[width - 1] + count[width] + count[width + 1];
    }
    int contexts[3] = {
        flags + (columns->expected ? columns->expected[c] : 0) * 16 + bucket(here),
        flags + (1 << 12) + (left | left2 << 1 | above << 2 | above_left << 3 | above_right << 4 | behind << 5),
        flags + (2 << 12) + bucket(around) * 8 + left + left2 + above + above_left + above_right + behind,
    };
    if (!code_bit(s, row[c] != 0, mixer, contexts, 3)) continue;
    s->account = &s->values;
    at.left = left ? row[c - 1] : 0, at.above = above ? row[c - width] : 0, at.behind = behind ? row[c - plane] : 0;
    at.column_sign = vector ? 0 : columns->sign[c];
    at.column_exponent = vector ? 0 : columns->exponent[c];
    int32_t value = mantissa < 0 ? code_integer(s, row[c], &at) : code_float(s, row[c], &at, mantissa);
    s->account = &s->positions;
    if (s->decoding) row[c] = value; /* an encoder's memory may be read-only */
    *there = value != 0;
    if (vector) continue;
    columns->sign[c] = (uint8_t)sign_of(value);
    columns->exponent[c] = (uint8_t)at.row_exponent;
  }
  for (ptrdiff_t i = 0; i < columns->n_alive; i++) {
    uint8_t *there = columns->there + columns->margin + columns->alive[i];
    columns->count[columns->margin + columns->alive[i]] += *there;
    *there = 0;
  }
}

/* A matrix of integers (mantissa < 0) or of float32 bits. width and plane say how many columns back the places above and
   behind are, or 0. hint, or null, says of each column how many numbers the row of the matrix before has that feeds it.
   Returns 0, or 1 when the file is not one that an encoder has made. */
int sparsevd_coder_matrix(struct coder *s, int32_t *values, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t width,
                          ptrdiff_t plane, const int32_t *hint, int mantissa) {
  if (rows == 0 || columns == 0) return s->failed;
  s->account = &s->positions;
  int vector = rows == 1;
  struct columns of;
  uint8_t *row_living = calloc((size_t)rows, 1);
  if (make_columns(&of, columns, width, plane, hint, vector) || !row_living) s->failed = 1;
  if (!s->failed && vector) {
    row_living[0] = 1;
  } else if (!s->failed) {
    for (ptrdiff_t r = 0; r < rows && !s->decoding; r++)
      for (ptrdiff_t c = 0; c < columns; c++)
        if (values[r * columns + c]) row_living[r] = of.living[of.margin + c] = 1;
    code_living(s, row_living, rows, &of, width, plane, hint);
  }
  for (ptrdiff_t c = 0; c < columns && !vector && !s->failed; c++)
    if (of.living[of.margin + c]) of.alive[of.n_alive++] = c;
  for (ptrdiff_t r = 0; r < rows && !s->failed; r++)
    if (row_living[r]) code_row(s, values + r * columns, &of, width, plane, vector, mantissa);
  free_columns(&of);
  free(row_living);
  return s->failed;
}

/* Learn from bytes that both sides know. */
void sparsevd_coder_learn(struct coder *s, uint8_t *bytes, ptrdiff_t n) {
  int decoding = s->decoding;
  s->learning = 1, s->decoding = 0;
  sparsevd_coder_bytes(s, bytes, n);
  s->learning = 0, s->decoding = decoding;
}

/* Know all that another has learned: copying it takes less time than learning it anew. */
void sparsevd_coder_prime_from(struct coder *s, const struct coder *other) {
  memcpy(s->counters, other->counters, sizeof s->counters);
  memcpy(s->mixers, other->mixers, sizeof s->mixers);
}

/* An encoder when data is null, else a decoder of it, which must stay in place. Null when there is no memory. */
struct coder *sparsevd_coder_open(const uint8_t *data, ptrdiff_t length, const float *price) {
  struct coder *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  for (int i = 0; i < COUNTERS; i++) s->counters[i].probability = 1u << 31;
  for (int i = 0; i < MIXERS; i++)
    for (int j = 0; j < MAX_INPUTS; j++) s->mixers[i].weights[j] = FIRST_WEIGHT;
  s->range = 0xFFFFFFFF;
  s->price = price;
  s->account = &s->values;
  if (data) {
    s->decoding = 1;
    s->in = data;
    s->length = (size_t)length;
    s->budget = DECISIONS_PER_BYTE * ((int64_t)length + 8);
    for (int i = 0; i < 4; i++) s->code = s->code << 8 | next_byte(s);
  }
  return s;
}

/* Bits spent so far: on positions, and on values and bytes. */
void sparsevd_coder_account(const struct coder *s, double *bits) { bits[0] = s->positions, bits[1] = s->values; }

/* Write the fewest bytes that tell the last range; after them a decoder reads zeros. Returns the size, or -1. */
ptrdiff_t sparsevd_coder_finish(struct coder *s) {
  int keep = 0;
  uint64_t value = 0;
  for (; keep <= 4; keep++) {
    uint64_t below = ((uint64_t)1 << 8 * (4 - keep)) - 1;
    value = (s->low + below) & ~below;
    if (value < (uint64_t)s->low + s->range) break;
  }
  if (value >> 32) carry(s);
  for (int i = 0; i < keep; i++) put_byte(s, (uint8_t)(value >> 8 * (3 - i)));
  return s->failed ? -1 : (ptrdiff_t)s->size;
}

const uint8_t *sparsevd_coder_written(const struct coder *s) { return s->out; }

void sparsevd_coder_close(struct coder *s) {
  free(s->out);
  free(s);
}
