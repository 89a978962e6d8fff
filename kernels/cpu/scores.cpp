// A router's float32 scores on CPUs: top-k of every row, and sums of rows' softmaxes with their gradient.
//
// torch.topk compares (value, index) pairs with branches. Here a pair is one integer, and most of a row is skipped
// sixteen values at a time. Heads of a few experts are too narrow for vectors, so exponentials are computed over all
// heads of a row together, and no probability is written to memory. A row's softmax depends on no other row and rows
// are added in order, so the number of threads changes no bit.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SERIAL = 16 * 1024;  // scores for which no other thread is woken
constexpr int64_t BLOCK = 16;          // scores that are passed over together where none of them is great enough

// Returns an integer that orders like the float32 with these bits. NaN is the greatest, and −0 equals 0.
inline int32_t key_of(int32_t bits) {
  const int32_t size = bits & 0x7fffffff, sign = bits >> 31;
  const int32_t ordered = (size ^ sign) - sign;             // minus the size of a negative number
  const int32_t is_nan = (0x7f800000 - size) >> 31;         // −1 or 0
  return (ordered & ~is_nan) | (is_nan & 0x7fffffff);
}

// Returns a number that sorts by key, then by place.
inline int64_t pair_of(int32_t key, int32_t place) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(key)) << 32) | static_cast<uint32_t>(~place);
}

// Inserts a pair into `best`, sorted greatest first, and drops the last; branch-free, because the place is unpredictable.
inline void insert(int64_t pair, int64_t count, int64_t* best) {
  for (int64_t at = count - 1; at > 0; at--) best[at] = std::max(best[at], std::min(pair, best[at - 1]));
  best[0] = std::max(best[0], pair);
}

inline int32_t greatest_of(const int32_t* keys) {
  int32_t most = keys[0];
  for (int64_t i = 1; i < BLOCK; i++) most = std::max(most, keys[i]);
  return most;
}

// `keys` fill whole blocks; those past the row's end are the least integer, which no score has.
void row_top_k(const int32_t* row, int64_t width, int64_t count, std::vector<int32_t>& keys, int64_t* best,
               int64_t* places) {
  int32_t found[BLOCK];
  for (int64_t i = 0; i < width; i++) keys[i] = key_of(row[i]);
  std::fill_n(best, count, std::numeric_limits<int64_t>::min());
  for (int64_t first = 0; first < width; first += BLOCK) {
    const int32_t least = static_cast<int32_t>(best[count - 1] >> 32);
    if (greatest_of(&keys[first]) <= least) continue;
    int64_t number = 0;
    for (int64_t i = first; i < first + BLOCK; i++) {
      found[number] = static_cast<int32_t>(i);
      number += keys[i] > least;
    }
    for (int64_t n = 0; n < number; n++) insert(pair_of(keys[found[n]], found[n]), count, best);
  }
  for (int64_t i = 0; i < count; i++) places[i] = static_cast<uint32_t>(~static_cast<uint32_t>(best[i]));
}

constexpr int64_t LANES = 8;            // partial results of a row, so that they need not wait for each other

// e to the x for x <= 0 or NaN, within two units in the last place; 0 if the result would be subnormal.
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

// Reduces value(0), value(1), ... in an order that depends only on the width.
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

// Computes the softmax of each head of a row.
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

// places[r]: the indices of the `count` greatest of row r's `width` scores, greatest first. 0 < count ≤ width < 2³¹.
extern "C" void moebius_top_k(const int32_t* scores, int64_t rows, int64_t width, int64_t count, int64_t* places,
                              int64_t threads) {
#pragma omp parallel num_threads(threads) if (rows * width > SERIAL)
  {
    std::vector<int32_t> keys((width + BLOCK - 1) / BLOCK * BLOCK, std::numeric_limits<int32_t>::min());
    std::vector<int64_t> best(count);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      row_top_k(scores + r * width, width, count, keys, best.data(), places + r * count);
  }
}

// sums[b] = the sum of the softmaxes of sequence b's `rows` rows, each with `heads` heads of `width` logits.
extern "C" void moebius_softmax_sums(const float* logits, int64_t sequences, int64_t rows, int64_t heads, int64_t width,
                                     float* sums, int64_t threads) {
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

// Computes the gradient of the logits from that of the sums.
extern "C" void moebius_softmax_sums_gradient(const float* gradient, const float* logits, int64_t sequences, int64_t rows,
                                              int64_t heads, int64_t width, float* out, int64_t threads) {
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
