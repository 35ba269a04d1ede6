/* The adaptive binary coder of the model file; docs/format.md specifies it, modelfile/adaptive.py is the same in Python.

   Everything is integer arithmetic, so that every machine makes the same bytes and reads the same numbers. Each function
   serves both directions: an encoder is given the value and returns it, a decoder ignores what it is given and returns
   what the file says. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_STRETCH 3071 /* of the logistic domain: 12, in steps of 1/256 */
#define CERTAIN 16           /* no probability is nearer to 0 or 1 than this, of 65536 */
#define DECISIONS_PER_BYTE 22720 /* at least: a decision costs at least -log2(1 - 16/65536) bits */
#define COUNT_LIMIT 1023
#define RATE_LIMIT 4095
#define MAX_INPUTS 4
#define FIRST_WEIGHT 22000 /* a third */
#define COUNTERS (1 << 17)
#define MIXERS 64

static uint16_t squash_table[2 * LARGEST_STRETCH + 1]; /* stretch -> probability of 65536 */
static int16_t stretch_table[65537];
static uint16_t step_table[COUNT_LIMIT + 1], trust_table[COUNT_LIMIT + 1], rate_table[RATE_LIMIT + 1];

struct counter {
  uint32_t probability; /* of a one, of 2^32 */
  uint32_t seen;
};

struct mixer {
  int32_t weights[MAX_INPUTS]; /* 65536 is one */
  uint32_t seen;
};

struct coder {
  struct counter counters[COUNTERS];
  struct mixer mixers[MIXERS];
  int decoding, failed;
  uint8_t *out; /* encoder: what is written */
  size_t size, capacity;
  const uint8_t *in; /* decoder: what is read */
  size_t length, position;
  int64_t budget;
  uint32_t low, range, code;
  int learning;       /* nothing is written or read */
  const float *price; /* encoder: bits of a decision by its probability of 4096, for the account, or null */
  double *account;    /* where the bits go at present */
  double positions, values;
};

__attribute__((constructor)) static void make_tables(void) {
  uint64_t e = 1ull << 32; /* e^(-k/256) */
  for (int k = 0; k <= LARGEST_STRETCH; k++) {
    uint64_t p = (1ull << 48) / ((1ull << 32) + e);
    squash_table[LARGEST_STRETCH + k] = (uint16_t)p;
    squash_table[LARGEST_STRETCH - k] = (uint16_t)(65536 - p);
    e = e * 4278222849ull >> 32; /* e^(-1/256) */
  }
  int x = 0;
  for (int p = 0; p <= 65536; p++) {
    while (x < 2 * LARGEST_STRETCH && squash_table[x] < p) x++;
    stretch_table[p] = (int16_t)(x - LARGEST_STRETCH);
  }
  for (int n = 0; n <= COUNT_LIMIT; n++) {
    step_table[n] = (uint16_t)(655360 / (10 * n + 16));
    trust_table[n] = (uint16_t)(65536 * 2 * n / (2 * n + 3));
  }
  for (int n = 0; n <= RATE_LIMIT; n++) rate_table[n] = (uint16_t)(131 + 235930 / (200 + n));
}

static void put_byte(struct coder *s, uint8_t byte) {
  if (s->size == s->capacity) {
    size_t capacity = s->capacity ? 2 * s->capacity : 4096;
    uint8_t *grown = realloc(s->out, capacity);
    if (!grown) {
      s->failed = 1;
      return;
    }
    s->out = grown;
    s->capacity = capacity;
  }
  s->out[s->size++] = byte;
}

static void carry(struct coder *s) {
  for (size_t i = s->size; i-- > 0 && ++s->out[i] == 0;) {
  }
}

static uint8_t next_byte(struct coder *s) { return s->position < s->length ? s->in[s->position++] : 0; }

/* One binary decision with a given probability of a one, of 65536. */
static int decide(struct coder *s, int bit, uint32_t probability) {
  if (probability < CERTAIN) probability = CERTAIN;
  if (probability > 65536 - CERTAIN) probability = 65536 - CERTAIN;
  if (s->learning) return bit;
  if (s->price) *s->account += s->price[(bit ? probability : 65536 - probability) >> 4];
  uint32_t bound = (s->range >> 16) * probability;
  if (s->decoding) {
    if (--s->budget < 0) s->failed = 1;
    bit = s->code < bound;
    if (!bit) s->code -= bound;
  } else if (!bit) {
    uint32_t before = s->low;
    s->low += bound;
    if (s->low < before) carry(s);
  }
  s->range = bit ? bound : s->range - bound;
  while (s->range < 1u << 24) {
    if (s->decoding)
      s->code = s->code << 8 | next_byte(s);
    else
      put_byte(s, (uint8_t)(s->low >> 24));
    s->low <<= 8;
    s->range <<= 8;
  }
  return bit;
}

/* One decision predicted by n counters, whose opinions a mixer weighs. */
static int code_bit(struct coder *s, int bit, int mixer_number, const int *contexts, int n) {
  struct mixer *mixer = &s->mixers[mixer_number];
  struct counter *counters[MAX_INPUTS];
  int32_t inputs[MAX_INPUTS];
  int64_t dot = (int64_t)mixer->weights[n] * 256;
  for (int i = 0; i < n; i++) {
    counters[i] = &s->counters[contexts[i]];
    inputs[i] = stretch_table[counters[i]->probability >> 16] * (int32_t)trust_table[counters[i]->seen] >> 16;
    dot += (int64_t)mixer->weights[i] * inputs[i];
  }
  inputs[n] = 256;
  dot >>= 16;
  if (dot > LARGEST_STRETCH) dot = LARGEST_STRETCH;
  if (dot < -LARGEST_STRETCH) dot = -LARGEST_STRETCH;
  int32_t probability = squash_table[dot + LARGEST_STRETCH];
  bit = decide(s, bit, (uint32_t)probability);

  int64_t step = ((int64_t)(bit << 16) - probability) * rate_table[mixer->seen] >> 8;
  if (mixer->seen < RATE_LIMIT) mixer->seen++;
  for (int i = 0; i <= n; i++) {
    int64_t weight = mixer->weights[i] + (step * inputs[i] >> 16);
    mixer->weights[i] = (int32_t)(weight > 1 << 20 ? 1 << 20 : weight < -(1 << 20) ? -(1 << 20) : weight);
  }
  for (int i = 0; i < n; i++) {
    int64_t distance = (bit ? 0xFFFFFFFFll : 0) - (int64_t)counters[i]->probability;
    counters[i]->probability += (uint32_t)(distance * step_table[counters[i]->seen] >> 16);
    if (counters[i]->seen < COUNT_LIMIT) counters[i]->seen++;
  }
  return bit;
}

static uint32_t code_raw(struct coder *s, uint32_t value, int bits) {
  uint32_t result = 0;
  while (bits-- > 0) result = result << 1 | (uint32_t)decide(s, value >> bits & 1, 32768);
  return result;
}
