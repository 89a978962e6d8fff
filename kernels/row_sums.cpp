// Adds rows up by index in one pass: what gathering a copy and `index_add_` do in two.

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
