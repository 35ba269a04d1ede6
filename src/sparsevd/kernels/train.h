/* The training kernels. Included once per instruction set, after its LANES, TARGET and NAME. */

#include "vectors.h"

#define K1 0.63576f
#define K2 1.87320f
#define K3 1.48695f
#define SMALLEST 1.17549435e-38f /* the smallest normal number */

/* KL (eq. 14, C = -k1) of LANES weights, and its two gradients. As functional.py writes it:
     KL = k1 t + log(1 + 1/alpha)/2   with  t = 1 / (1 + exp(k2 + k3 log alpha))
     dKL/d log sigma^2 = dKL/d log alpha = -k1 k3 t (1 - t) - sigmoid(-log alpha)/2
     dKL/d theta = -2/theta times that, and its limit 0 where theta is no normal number */
INLINE vf NAME(kl_lanes)(vf theta, vf log_sigma2, vf *grad_theta, vf *grad_log_sigma2) {
  vf size = absolute(theta);
  vi normal = size >= splat(SMALLEST);
  vf log_alpha = log_sigma2 - 2.0f * logarithm(larger(size, splat(SMALLEST)));
  vf z = K2 + K3 * log_alpha, e = exponential(-absolute(z));
  vf t = select(z > splat(0.0f), e, splat(1.0f)) / (1.0f + e);
  e = exponential(-absolute(log_alpha));
  vf above = 1.0f + e;
  vf log1p = logarithm(above) + (e - (above - 1.0f)) / above; /* the rounding of 1 + e put back */
  vi positive = log_alpha > splat(0.0f);
  vf q = select(positive, e, splat(1.0f)) / above; /* sigmoid(-log alpha) */
  vf slope = -K1 * K3 * t * (1.0f - t) - 0.5f * q;
  *grad_log_sigma2 = slope;
  *grad_theta = select(normal, -2.0f * slope / select(normal, theta, splat(1.0f)), splat(0.0f));
  return K1 * t + 0.5f * (larger(-log_alpha, splat(0.0f)) + log1p);
}

/* The same over a block of n weights. Returns the sum: number i is added to sum i mod 16 whatever LANES is, and what is
   read past the end is theta = 0, whose KL is 0. */
TARGET static double NAME(kl_block)(const float *theta, const float *log_sigma2, float *grad_theta,
                                    float *grad_log_sigma2, ptrdiff_t n) {
  vf sums[16 / LANES] = {{0}};
  for (ptrdiff_t start = 0; start < n; start += 16) {
    for (int part = 0; part < 16 / LANES; part++) {
      ptrdiff_t i = start + part * LANES;
      if (i >= n) break;
      vf gt, gl;
      sums[part] += NAME(kl_lanes)(load_part(theta + i, n - i), load_part(log_sigma2 + i, n - i), &gt, &gl);
      store_part(grad_theta + i, gt, n - i);
      store_part(grad_log_sigma2 + i, gl, n - i);
    }
  }
  double sum = 0;
  for (int i = 0; i < 16; i++) sum += sums[i / LANES][i % LANES];
  return sum;
}

/* Threefry-4x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3, 2011):
   four random words from a counter and a key, with additions, rotations and exclusive-ors only. */
#define ROTATE(x, r) (((x) << (r)) | ((x) >> (32 - (r))))
INLINE void NAME(threefry)(vu x[4], uint32_t key0, uint32_t key1) {
  static const int rotations[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
  const uint32_t key[5] = {key0, key1, 0, 0, 0x1BD11BDA ^ key0 ^ key1};
  for (int i = 0; i < 4; i++) x[i] += key[i];
  for (int round = 0; round < 20; round++) {
    int a = round % 2 ? 3 : 1, b = round % 2 ? 1 : 3;
    x[0] += x[a];
    x[a] = ROTATE(x[a], rotations[round % 8][0]) ^ x[0];
    x[2] += x[b];
    x[b] = ROTATE(x[b], rotations[round % 8][1]) ^ x[2];
    if (round % 4 == 3) {
      uint32_t s = round / 4 + 1;
      for (int i = 0; i < 4; i++) x[i] += key[(s + i) % 5];
      x[3] += s;
    }
  }
}

/* Two standard normal numbers from two words (Box and Muller): the radius from one, the angle from the other. */
INLINE void NAME(normal_pair)(vu a, vu b, vf *first, vf *second) {
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

/* 64 standard normal numbers, the block-th of the stream of this key. Number 16 w + l comes from word w of counter
   16 block + l, whatever LANES is. */
TARGET static void NAME(normal_block)(float *out, uint64_t seed, uint64_t block) {
  for (int start = 0; start < 16; start += LANES) {
    vu x[4];
    for (int lane = 0; lane < LANES; lane++) {
      uint64_t counter = 16 * block + start + lane;
      x[0][lane] = (uint32_t)counter;
      x[1][lane] = (uint32_t)(counter >> 32);
    }
    x[2] = x[3] = (vu){0};
    NAME(threefry)(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    vf normal[4];
    NAME(normal_pair)(x[0], x[1], &normal[0], &normal[1]);
    NAME(normal_pair)(x[2], x[3], &normal[2], &normal[3]);
    for (int w = 0; w < 4; w++) store(out + 16 * w + start, normal[w]);
  }
}

/* b = gamma + sqrt(delta) epsilon (eq. 17, 18) for up to 64 outputs; delta is held at the smallest normal number. */
TARGET static void NAME(noise_forward_block)(const float *gamma, const float *delta, float *out, const float *epsilon,
                                             int n) {
  for (int i = 0; i < n; i += LANES) {
    vf deviation = square_root(larger(load_part(delta + i, n - i), splat(SMALLEST)));
    store_part(out + i, load_part(gamma + i, n - i) + deviation * load(epsilon + i), n - i);
  }
}

/* d b / d delta = epsilon / (2 sqrt(delta)), and 0 where delta is held. */
TARGET static void NAME(noise_backward_block)(const float *grad, const float *delta, float *grad_delta,
                                              const float *epsilon, int n) {
  for (int i = 0; i < n; i += LANES) {
    vf d = load_part(delta + i, n - i);
    vf g = 0.5f * load_part(grad + i, n - i) * load(epsilon + i) / square_root(larger(d, splat(SMALLEST)));
    store_part(grad_delta + i, select(d < splat(SMALLEST), splat(0.0f), g), n - i);
  }
}

const struct train_kernels NAME(train_kernels) = {NAME(kl_block), NAME(normal_block), NAME(noise_forward_block),
                                                  NAME(noise_backward_block)};
