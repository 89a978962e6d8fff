// The K greatest of every row of float32 scores on CPUs: where torch.topk sorts pairs of a number and a place that it
// compares with branches, here both are one integer, and most of a row is passed over sixteen at a time.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t BLOCK = 16;          // scores that are passed over together where none of them is great enough
constexpr int64_t SERIAL = 16 * 1024;  // scores for which no other thread is woken

// An integer of the same order as the float32 with these bits. NaN is the greatest of all, and −0 is 0.
inline int32_t key_of(int32_t bits) {
  const int32_t size = bits & 0x7fffffff, sign = bits >> 31;
  const int32_t ordered = (size ^ sign) - sign;             // minus the size of a negative number
  const int32_t is_nan = (0x7f800000 - size) >> 31;         // −1 or 0
  return (ordered & ~is_nan) | (is_nan & 0x7fffffff);
}

// One number that sorts by key and, of equal keys, puts the first place first.
inline int64_t pair_of(int32_t key, int32_t place) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(key)) << 32) | static_cast<uint32_t>(~place);
}

// `best` are sorted, the greatest first; the last goes. No branch: nobody could foretell where a pair belongs.
inline void insert(int64_t pair, int64_t count, int64_t* best) {
  for (int64_t at = count - 1; at > 0; at--) best[at] = std::max(best[at], std::min(pair, best[at - 1]));
  best[0] = std::max(best[0], pair);
}

inline int32_t greatest_of(const int32_t* keys) {
  int32_t most = keys[0];
  for (int64_t i = 1; i < BLOCK; i++) most = std::max(most, keys[i]);
  return most;
}

// `keys`: of whole blocks; those past the row's end are the least integer, which no score has.
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

}  // namespace

// places[r]: where the `count` greatest of the `width` scores of row r stand, the greatest first. 0 < count ≤ width < 2³¹.
extern "C" void moebius_top_k(const int32_t* scores, int64_t rows, int64_t width, int64_t count, int64_t* places,
                              int threads) {
#pragma omp parallel num_threads(threads) if (rows * width > SERIAL)
  {
    std::vector<int32_t> keys((width + BLOCK - 1) / BLOCK * BLOCK, std::numeric_limits<int32_t>::min());
    std::vector<int64_t> best(count);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      row_top_k(scores + r * width, width, count, keys, best.data(), places + r * count);
  }
}
