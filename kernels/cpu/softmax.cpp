// Sums of softmaxes of float32 rows on CPUs, and their gradient. Heads of a few experts are too narrow for vectors by
// themselves, so exponentials are taken of a row's heads together, and no probability is written to memory.
//
// A row's softmax depends on no other row, and rows are added in their order, so the number of threads changes no bit.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 8;            // partial results of a row, so that they need not wait for each other
constexpr int64_t SERIAL = 16 * 1024;  // logits for which no other thread is woken

// e to the x, for x <= 0 or NaN, within two units of the last place; 0 where the result had fewer digits.
inline float exponential(float x) {
  x = x < -88.0f ? -88.0f : x;
  const float shift = 12582912.0f;  // adding it rounds to a whole number
  const float n = (x * 1.44269504f + shift) - shift;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power = static_cast<int32_t>(n), bits = power < -126 ? 0 : (power + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// value(0), value(1), ... joined, in an order that hangs on the width alone.
template <typename Value, typename Join>
inline float joined(int64_t width, float start, Value value, Join join) {
  float lanes[LANES];
  std::fill_n(lanes, LANES, start);
  int64_t a = 0;
  for (; a + LANES <= width; a += LANES)
    for (int64_t i = 0; i < LANES; i++) lanes[i] = join(lanes[i], value(a + i));
  for (int64_t i = 0; a < width; a++, i++) lanes[i] = join(lanes[i], value(a));
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] = join(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline float greater(float a, float b) { return a < b ? b : a; }
inline float sum(float a, float b) { return a + b; }

// The softmax of each of a row's heads.
void softmax(const float* logits, int64_t heads, int64_t width, float* out) {
  for (int64_t h = 0; h < heads; h++) {
    const float *row = logits + h * width;
    const float most = joined(width, -INFINITY, [=](int64_t a) { return row[a]; }, greater);
    for (int64_t a = 0; a < width; a++) out[h * width + a] = row[a] - most;
  }
  for (int64_t i = 0; i < heads * width; i++) out[i] = exponential(out[i]);
  for (int64_t h = 0; h < heads; h++) {
    float* row = out + h * width;
    const float share = 1.0f / joined(width, 0.0f, [=](int64_t a) { return row[a]; }, sum);
    for (int64_t a = 0; a < width; a++) row[a] *= share;
  }
}

}  // namespace

// sums[b] = the sum over the `rows` rows of sequence b of their softmaxes, each of `heads` heads of `width` logits.
extern "C" void moebius_softmax_sums(const float* logits, int64_t sequences, int64_t rows, int64_t heads, int64_t width,
                                     float* sums, int threads) {
  const int64_t size = heads * width;
#pragma omp parallel num_threads(threads) if (sequences * rows * size > SERIAL)
  {
    std::vector<float> row(size);
    std::vector<double> total(size);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < sequences; b++) {
      std::fill(total.begin(), total.end(), 0.0);
      for (int64_t r = 0; r < rows; r++) {
        softmax(logits + (b * rows + r) * size, heads, width, row.data());
        for (int64_t i = 0; i < size; i++) total[i] += row[i];
      }
      for (int64_t i = 0; i < size; i++) sums[b * size + i] = static_cast<float>(total[i]);
    }
  }
}

// The gradient of the logits, given that of the sums.
extern "C" void moebius_softmax_sums_gradient(const float* gradient, const float* logits, int64_t sequences, int64_t rows,
                                              int64_t heads, int64_t width, float* out, int threads) {
  const int64_t size = heads * width;
#pragma omp parallel for schedule(static) num_threads(threads) if (sequences * rows * size > SERIAL)
  for (int64_t r = 0; r < sequences * rows; r++) {
    const float* given = gradient + r / rows * size;
    float* made = out + r * size;
    softmax(logits + r * size, heads, width, made);
    for (int64_t h = 0; h < heads; h++, given += width, made += width) {
      const float mean = joined(width, 0.0f, [=](int64_t a) { return made[a] * given[a]; }, sum);
      for (int64_t a = 0; a < width; a++) made[a] *= given[a] - mean;
    }
  }
}
