// Lists of routes on CPUs, in one pass each: rows added up by index, what gathering a copy and
// `index_add_` do in two; routes sorted by expert, what takes torch a sort and seven small operations.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

template <typename T>
void add_rows(const char* rows, int64_t stride, const int32_t* place_N, const int64_t* index_N, int64_t N,
              int64_t width, T* sums) {
  for (int64_t n = 0; n < N; n++) {
    const T* __restrict row = reinterpret_cast<const T*>(rows + (place_N == nullptr ? n : place_N[n]) * stride);
    T* __restrict sum = sums + index_N[n] * width;
    for (int64_t d = 0; d < width; d++) sum[d] += row[d];
  }
}

float wide(uint16_t bits) {
  uint32_t widened = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &widened, 4);
  return value;
}

uint16_t narrow(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sums in float32, rounded once, as torch's index_add_ has them.
void add_rows_bfloat16(const char* rows, int64_t stride, const int32_t* place_N, const int64_t* index_N, int64_t N,
                       int64_t num_sums, int64_t width, uint16_t* out) {
  std::vector<float> sums(num_sums * width);
  for (int64_t n = 0; n < N; n++) {
    const auto* __restrict row =
        reinterpret_cast<const uint16_t*>(rows + (place_N == nullptr ? n : place_N[n]) * stride);
    float* __restrict sum = sums.data() + index_N[n] * width;
    for (int64_t d = 0; d < width; d++) sum[d] += wide(row[d]);
  }
  for (int64_t i = 0; i < num_sums * width; i++) out[i] = narrow(sums[i]);
}

}  // namespace

// out[index[n]] += rows[place[n]] in the order of n. `stride`: bytes from one row to the next.
// `out`: zeros. dtype 0: float32, 1: float64, 2: bfloat16. Returns 1 where an index is out of range, and nothing is done.
extern "C" int moebius_add_rows(const char* rows, int64_t num_rows, int64_t stride, const int32_t* place_N,
                                const int64_t* index_N, int64_t N, int64_t num_sums, int64_t width, int dtype,
                                char* out) {
  for (int64_t n = 0; n < N; n++) {
    int64_t place = place_N == nullptr ? n : place_N[n];
    if (place < 0 || place >= num_rows || index_N[n] < 0 || index_N[n] >= num_sums) return 1;
  }
  if (dtype == 0)
    add_rows(rows, stride, place_N, index_N, N, width, reinterpret_cast<float*>(out));
  else if (dtype == 1)
    add_rows(rows, stride, place_N, index_N, N, width, reinterpret_cast<double*>(out));
  else
    add_rows_bfloat16(rows, stride, place_N, index_N, N, num_sums, width, reinterpret_cast<uint16_t*>(out));
  return 0;
}

// Sorts routes by expert, stably. order[i]: the route at place i; place[n]: where route n went;
// starts[e]: the first place of expert e, starts[E] = N. Returns 1 where an expert is out of range.
extern "C" int moebius_sort_routes(const int64_t* expert_N, int64_t N, int64_t E, int32_t* order_N, int32_t* place_N,
                                   int32_t* starts_E1) {
  std::memset(starts_E1, 0, (E + 1) * sizeof(int32_t));
  for (int64_t n = 0; n < N; n++) {
    if (expert_N[n] < 0 || expert_N[n] >= E) return 1;
    starts_E1[expert_N[n] + 1]++;
  }
  for (int64_t e = 0; e < E; e++) starts_E1[e + 1] += starts_E1[e];
  std::vector<int32_t> next(starts_E1, starts_E1 + E);
  for (int64_t n = 0; n < N; n++) {
    int32_t place = next[expert_N[n]]++;
    place_N[n] = place;
    order_N[place] = static_cast<int32_t>(n);
  }
  return 0;
}
