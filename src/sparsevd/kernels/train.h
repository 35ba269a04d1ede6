/* The training kernels, for the instruction set of one_set.h. */

#define K1 0.63576f
#define K2 1.87320f
#define K3 1.48695f
#define SMALLEST 1.17549435e-38f /* the smallest normal number */

/* KL (eq. 14, C = -k1) of up to CHUNK weights, and its two gradients. As functional.py writes it:
     KL = k1 t + log(1 + 1/alpha)/2   with  t = 1 / (1 + exp(k2 + k3 log alpha))
     dKL/d log sigma^2 = dKL/d log alpha = -k1 k3 t (1 - t) - sigmoid(-log alpha)/2
     dKL/d theta = -2/theta times that, and its limit 0 where theta is no normal number
   Returns the sum. Number i is added to sum i mod 16 whatever LANES is. The logarithms of 1 + 1/alpha are taken
   sixteen at a time, as one logarithm of their product, after the whole powers of e were taken out. */
INLINE double kl_chunk(const float *theta, const float *log_sigma2, float *grad_theta, float *grad_log_sigma2) {
  float log_alphas[CHUNK], ez[CHUNK], ea[CHUNK];
  vf sums[16 / LANES], products[16 / LANES];
  for (int i = 0; i < CHUNK; i += LANES)
    store(log_alphas + i, load(log_sigma2 + i) - 2.0f * logarithm(larger(absolute(load(theta + i)), splat(SMALLEST))));
  for (int i = 0; i < CHUNK; i += LANES) store(ez + i, exponential(-absolute(K2 + K3 * load(log_alphas + i))));
  for (int i = 0; i < CHUNK; i += LANES) store(ea + i, exponential(-absolute(load(log_alphas + i))));
  for (int part = 0; part < 16 / LANES; part++) sums[part] = splat(0.0f), products[part] = splat(1.0f);
  for (int start = 0; start < CHUNK; start += 16)
    for (int part = 0; part < 16 / LANES; part++) {
      int i = start + part * LANES;
      vf log_alpha = load(log_alphas + i), z = K2 + K3 * log_alpha, e = load(ea + i), w = load(theta + i);
      vf above_z = 1.0f + load(ez + i), above = 1.0f + e, both = 1.0f / (above_z * above);
      vf t = select(z > splat(0.0f), load(ez + i), splat(1.0f)) * above * both;
      vf q = select(log_alpha > splat(0.0f), e, splat(1.0f)) * above_z * both; /* sigmoid(-log alpha) */
      vf slope = -K1 * K3 * t * (1.0f - t) - 0.5f * q;
      vi normal = absolute(w) >= splat(SMALLEST);
      store(grad_log_sigma2 + i, slope);
      store(grad_theta + i, select(normal, -2.0f * slope / select(normal, w, splat(1.0f)), splat(0.0f)));
      /* e - (above - 1) is what rounding 1 + e lost */
      sums[part] += K1 * t + 0.5f * (larger(-log_alpha, splat(0.0f)) + (e - (above - 1.0f)));
      products[part] *= above;
    }
  double sum = 0;
  for (int part = 0; part < 16 / LANES; part++) sums[part] += 0.5f * logarithm(products[part]);
  for (int i = 0; i < 16; i++) sum += sums[i / LANES][i % LANES];
  return sum;
}

/* The same over a block of n weights. What is past the end counts as theta = 0, whose KL is 0. */
TARGET static double kl_block(const float *theta, const float *log_sigma2, float *grad_theta,
                              float *grad_log_sigma2, ptrdiff_t n) {
  double sum = 0;
  ptrdiff_t i = 0;
  for (; i + CHUNK <= n; i += CHUNK)
    sum += kl_chunk(theta + i, log_sigma2 + i, grad_theta + i, grad_log_sigma2 + i);
  if (i < n) {
    float rest[4][CHUNK] = {{0}};
    size_t bytes = sizeof(float) * (n - i);
    memcpy(rest[0], theta + i, bytes);
    memcpy(rest[1], log_sigma2 + i, bytes);
    sum += kl_chunk(rest[0], rest[1], rest[2], rest[3]);
    memcpy(grad_theta + i, rest[2], bytes);
    memcpy(grad_log_sigma2 + i, rest[3], bytes);
  }
  return sum;
}

/* Threefry-4x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3, 2011):
   four random words from a counter and a key, with additions, rotations and exclusive-ors only. Sixteen counters at a
   time: x[w][p] is word w of part p of them. */
#define PARTS (16 / LANES)
#define ROTATE(x, r) (((x) << (r)) | ((x) >> (32 - (r))))
INLINE void threefry(vu x[4][PARTS], uint32_t key0, uint32_t key1) {
  static const int rotations[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
  const uint32_t key[5] = {key0, key1, 0, 0, 0x1BD11BDA ^ key0 ^ key1};
  for (int i = 0; i < 4; i++)
    for (int p = 0; p < PARTS; p++) x[i][p] += key[i];
#pragma GCC unroll 20
  for (int round = 0; round < 20; round++) {
    int a = round % 2 ? 3 : 1, b = round % 2 ? 1 : 3;
    for (int p = 0; p < PARTS; p++) {
      x[0][p] += x[a][p];
      x[a][p] = ROTATE(x[a][p], rotations[round % 8][0]) ^ x[0][p];
      x[2][p] += x[b][p];
      x[b][p] = ROTATE(x[b][p], rotations[round % 8][1]) ^ x[2][p];
    }
    if (round % 4 == 3) {
      uint32_t s = round / 4 + 1;
      for (int i = 0; i < 4; i++)
        for (int p = 0; p < PARTS; p++) x[i][p] += key[(s + i) % 5] + (i == 3 ? s : 0);
    }
  }
}

/* Two standard normal numbers from two words (Box and Muller): the radius from one, the angle from the other. */
INLINE void normal_pair(vu a, vu b, vf *first, vf *second) {
  /* (a / 2^8 + 1) / 2^24 lies in (0, 1] */
  vf u = __builtin_convertvector((vi)(a >> 8) + 1, vf) * 5.9604644775390625e-8f;
  vf radius = square_root(larger(-2.0f * logarithm(u), splat(0.0f)));
  /* b / 2^8 as a turn in quarters: a whole number k of them, and the rest r in [-pi/4, pi/4] */
  vf quarters = __builtin_convertvector((vi)(b >> 8), vf) * (4.0f * 5.9604644775390625e-8f);
  vf k = (quarters + 12582912.0f) - 12582912.0f;
  vf r = (quarters - k) * 1.57079632679f, z = r * r;
  vf sine = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  vf cosine =
      1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  vi quadrant = __builtin_convertvector(k, vi);
  vi odd = -(quadrant & 1);
  vf c = select(odd, sine, cosine), s = select(odd, cosine, sine);
  vi flip_c = ((quadrant + 1) & 2) << 30, flip_s = (quadrant & 2) << 30;
  *first = radius * (vf)((vi)c ^ flip_c);
  *second = radius * (vf)((vi)s ^ flip_s);
}

/* CHUNK standard normal numbers, the chunk-th of the stream of this key: of each 64, number 16 w + l comes from word w
   of counter l of their 16, whatever LANES is. */
TARGET static void normal_chunk(float *out, uint64_t seed, uint64_t chunk) {
  uint32_t words[CHUNK];
  static const uint32_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int start = 0; start < CHUNK; start += 64) {
    uint64_t counter = chunk * (CHUNK / 4) + start / 4; /* a multiple of 16: no carry into its upper half */
    vu x[4][PARTS];
    for (int p = 0; p < PARTS; p++) {
      memcpy(&x[0][p], count + p * LANES, sizeof(vu));
      x[0][p] += (uint32_t)counter;
      x[1][p] = (vu){0} + (uint32_t)(counter >> 32);
      x[2][p] = x[3][p] = (vu){0};
    }
    threefry(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    memcpy(words + start, x, sizeof x);
  }
  for (int start = 0; start < CHUNK; start += 32)
    for (int i = start; i < start + 16; i += LANES) {
      vu a, b;
      vf first, second;
      memcpy(&a, words + i, sizeof a);
      memcpy(&b, words + i + 16, sizeof b);
      normal_pair(a, b, &first, &second);
      store(out + i, first);
      store(out + i + 16, second);
    }
}

/* b = gamma + sqrt(delta) epsilon (eq. 17, 18) in place of gamma, and its slope d b / d delta = epsilon / (2 sqrt(delta))
   in place of delta, for up to CHUNK outputs. Below the smallest normal number delta is held there, with slope 0. */
TARGET static void sample_chunk(float *gamma, float *delta, const float *epsilon, int n) {
  for (int i = 0; i < n; i += LANES) {
    vf d = load_part(delta + i, n - i), e = load(epsilon + i);
    vf deviation = square_root(larger(d, splat(SMALLEST)));
    store_part(gamma + i, load_part(gamma + i, n - i) + deviation * e, n - i);
    store_part(delta + i, select(d < splat(SMALLEST), splat(0.0f), 0.5f * e / deviation), n - i);
  }
}

TARGET static void exp_block(const float *x, float *out, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += LANES) store_part(out + i, exponential(load_part(x + i, n - i)), n - i);
}

/* The same as bfloat16: the upper half of a float, rounded to nearest even. Rounding could carry a NaN over into zero. */
TARGET static void exp_bf16_block(const float *x, uint16_t *out, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += LANES) {
    vf value = exponential(load_part(x + i, n - i));
    vu bits = (vu)value, no_number = (vu)(value != value);
    bits = ((bits + 0x7fff + ((bits >> 16) & 1)) & ~no_number) | (no_number & 0x7fc00000);
    vh upper = __builtin_convertvector(bits >> 16, vh);
    memcpy(out + i, &upper, sizeof(uint16_t) * (n - i < LANES ? n - i : LANES));
  }
}

/* grad_sigma2 becomes the gradient of log sigma^2: times sigma^2. */
TARGET static void times_exp_block(const float *log_sigma2, float *grad_sigma2, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += LANES) {
    vf sigma2 = exponential(load_part(log_sigma2 + i, n - i));
    store_part(grad_sigma2 + i, load_part(grad_sigma2 + i, n - i) * sigma2, n - i);
  }
}

/* c = a b */
TARGET static void multiply_block(const float *a, const float *b, float *c, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += LANES)
    store_part(c + i, load_part(a + i, n - i) * load_part(b + i, n - i), n - i);
}

/* c += 2 a b */
TARGET static void add_twice_product_block(const float *a, const float *b, float *c, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += LANES)
    store_part(c + i, load_part(c + i, n - i) + 2.0f * load_part(a + i, n - i) * load_part(b + i, n - i), n - i);
}

INLINE void adam_chunk(const struct adam *adam, float rate, struct trained t, const float *grad_kl, ptrdiff_t n) {
  const vf per_deviation = splat(1.0f / adam->deviation), epsilon = splat(adam->epsilon);
  for (ptrdiff_t i = 0; i < n; i += LANES) {
    vf g = load_part(t.grad + i, n - i) + adam->kl_weight * load(grad_kl + i);
    vf m = load_part(t.mean + i, n - i), v = load_part(t.square + i, n - i);
    m += (1.0f - adam->beta1) * (g - m);
    v = adam->beta2 * v + (1.0f - adam->beta2) * g * g;
    store_part(t.mean + i, m, n - i);
    store_part(t.square + i, v, n - i);
    store_part(t.x + i, load_part(t.x + i, n - i) - rate * m / (square_root(v) * per_deviation + epsilon), n - i);
  }
}

/* Adam's step (Kingma and Ba, 2015) with the gradient of the KL, which is made here, added to the one that is given. */
TARGET static void adam_block(const struct adam *adam, struct trained theta, struct trained log_sigma2, ptrdiff_t n) {
  for (ptrdiff_t i = 0; i < n; i += CHUNK) {
    float kl_theta[CHUNK] = {0}, kl_log_sigma2[CHUNK] = {0};
    const ptrdiff_t count = n - i < CHUNK ? n - i : CHUNK;
    kl_block(theta.x + i, log_sigma2.x + i, kl_theta, kl_log_sigma2, count);
    adam_chunk(adam, adam->theta_rate, trained_from(&theta, i), kl_theta, count);
    adam_chunk(adam, adam->log_sigma2_rate, trained_from(&log_sigma2, i), kl_log_sigma2, count);
  }
}

/* A struct train_kernels. */
#define TRAIN_KERNELS                                                                                                \
  {kl_block, normal_chunk, sample_chunk, exp_block, exp_bf16_block, times_exp_block, multiply_block,                 \
   add_twice_product_block, adam_block}
