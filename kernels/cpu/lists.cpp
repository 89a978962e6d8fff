// Route lists on CPUs in one pass each: sums rows by index, sorts routes by expert, and counts, packs and unpacks the
// sends of an exchange. torch needs several passes for each.
//
// Every function takes pointers and int64_t, and returns int64_t (library.py).
//
// Legend: N routes, E experts, P ranks, U source rows, T target rows, M distinct (rank, row) pairs, R received routes.

#include <algorithm>
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

// Sums in float32 and rounds once, like torch's index_add_.
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

// Numbers the marked rows (>= 0) of every destination, and writes their counts to every third word.
void number_pairs(int32_t* number_PU, int64_t P, int64_t U, int64_t* counts) {
  for (int64_t v = 0; v < P; v++) {
    int32_t count = 0;
    for (int64_t u = 0; u < U; u++)
      if (number_PU[v * U + u] >= 0) number_PU[v * U + u] = count++;
    counts[3 * v] = count;
  }
}

// Lists the pairs by destination, and their places in that list by row. Pads with zeros to N.
void list_pairs(const int32_t* number_PU, int64_t P, int64_t U, int64_t N, const int64_t* counts, int32_t* row_N,
                int32_t* by_row_N, int32_t* first_U) {
  std::vector<int32_t> first_P(P);
  int32_t all = 0;
  for (int64_t v = 0; v < P; v++) {
    first_P[v] = all;
    all += static_cast<int32_t>(counts[3 * v]);
  }
  int32_t listed = 0;
  for (int64_t u = 0; u < U; u++) {
    first_U[u] = listed;
    for (int64_t v = 0; v < P; v++) {
      int32_t number = number_PU[v * U + u];
      if (number < 0) continue;
      row_N[first_P[v] + number] = static_cast<int32_t>(u);
      by_row_N[listed++] = first_P[v] + number;
    }
  }
  std::fill(row_N + all, row_N + N, 0);
  std::fill(by_row_N + all, by_row_N + N, 0);
}

// Writes slot, row, target (as integers of a weight's width) and weight of every route, by destination.
template <typename Word>
void describe(const int64_t* source_N, const int64_t* target_N, const int64_t* expert_N, int64_t N,
              const int32_t* slot_E, const Word* weight_N, int64_t U, int64_t T, const int32_t* destination_N,
              const int32_t* number_PU, const int32_t* number_PT, int32_t* place_N, Word* metadata_N4) {
  for (int64_t n = 0; n < N; n++) {
    int64_t v = destination_N[n];
    Word* out = metadata_N4 + 4 * static_cast<int64_t>(place_N[n]);
    out[0] = static_cast<Word>(slot_E[expert_N[n]]);
    out[1] = static_cast<Word>(number_PU[v * U + source_N[n]]);
    out[2] = static_cast<Word>(number_PT[v * T + target_N[n]]);
    out[3] = weight_N[n];
  }
}

// Returns 1 if a route names a row or slot that does not exist.
template <typename Word>
int read_back(const Word* metadata_R4, const int64_t* received_P3, int64_t P, int64_t R, int64_t num_slots,
              int64_t* source_R, int64_t* slot_R, int64_t* target_R, Word* weight_R) {
  int64_t r = 0, rows = 0, targets = 0;
  for (int64_t v = 0; v < P; v++) {
    const int64_t *count = received_P3 + 3 * v, end = r + count[1];
    if (end > R) return 1;
    for (; r < end; r++) {
      const Word* in = metadata_R4 + 4 * r;
      int64_t slot = static_cast<int64_t>(in[0]), row = static_cast<int64_t>(in[1]),
              target = static_cast<int64_t>(in[2]);
      if (slot < 0 || slot >= num_slots || row < 0 || row >= count[0] || target < 0 || target >= count[2]) return 1;
      slot_R[r] = slot;
      source_R[r] = rows + row;
      target_R[r] = targets + target;
      weight_R[r] = in[3];
    }
    rows += count[0];
    targets += count[2];
  }
  return r == R ? 0 : 1;
}

}  // namespace


// out[index[n]] += rows[place[n]] in order of n. `stride`: bytes from one row to the next. `out`: zeros.
// dtype 0: float32, 1: float64, 2: bfloat16. Returns 1, and does nothing, if an index is out of range.
extern "C" int64_t moebius_add_rows(const char* rows, int64_t num_rows, int64_t stride, const int32_t* place_N,
                                const int64_t* index_N, int64_t N, int64_t num_sums, int64_t width, int64_t dtype,
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

// Sorts routes stably by expert. order[i]: the route at place i; place[n]: the place of route n;
// starts[e]: the first place of expert e, starts[E] = N. Returns 1 if an expert is out of range.
extern "C" int64_t moebius_sort_routes(const int64_t* expert_N, int64_t N, int64_t E, int32_t* order_N, int32_t* place_N,
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


// Writes every route's destination; the numbers of distinct rows, routes and distinct target rows for
// every rank, (P, 3); and every row's index among those of each destination, −1 if the row does not go
// there. `number_PT` null: the target rows are the source rows. Returns the number of a route that is
// out of range, or −1.
extern "C" int64_t moebius_count_sends(const int64_t* source_N, const int64_t* target_N, const int64_t* expert_N,
                                       int64_t N, const int32_t* rank_E, int64_t E, int64_t U, int64_t T, int64_t P,
                                       int64_t* counts_P3, int32_t* destination_N,
                                       int32_t* number_PU, int32_t* number_PT) {
  std::fill(counts_P3, counts_P3 + 3 * P, 0);
  std::fill(number_PU, number_PU + P * U, -1);
  if (number_PT != nullptr) std::fill(number_PT, number_PT + P * T, -1);
  for (int64_t n = 0; n < N; n++) {
    int64_t source = source_N[n], target = target_N[n], expert = expert_N[n];
    if (source < 0 || source >= U || target < 0 || target >= T || expert < 0 || expert >= E) return n;
    if (rank_E[expert] < 0 || rank_E[expert] >= P) return n;
    int64_t v = rank_E[expert];
    destination_N[n] = static_cast<int32_t>(v);
    number_PU[v * U + source] = 0;
    if (number_PT != nullptr) number_PT[v * T + target] = 0;
    counts_P3[3 * v + 1]++;
  }
  number_pairs(number_PU, P, U, counts_P3);
  if (number_PT != nullptr) number_pairs(number_PT, P, T, counts_P3 + 2);
  else
    for (int64_t v = 0; v < P; v++) counts_P3[3 * v + 2] = counts_P3[3 * v];
  return -1;
}

// Packs the counted routes by destination, and writes each route's place and the distinct rows by
// destination and by row. Weights have 4 or 8 bytes. `number_PT` null: as above; the lists of target
// rows are then not written.
extern "C" void moebius_pack_sends(const int64_t* source_N, const int64_t* target_N, const int64_t* expert_N, int64_t N,
                                   const int32_t* slot_E, const char* weight_N, int64_t weight_bytes, int64_t U, int64_t T,
                                   int64_t P, const int64_t* counts_P3, const int32_t* destination_N,
                                   const int32_t* number_PU, const int32_t* number_PT, char* metadata_N4,
                                   int32_t* place_N, int32_t* row_N, int32_t* by_row_N, int32_t* first_U,
                                   int32_t* target_row_N, int32_t* target_by_row_N, int32_t* first_T) {
  std::vector<int32_t> next_P(P);
  int32_t all = 0;
  for (int64_t v = 0; v < P; v++) {
    next_P[v] = all;
    all += static_cast<int32_t>(counts_P3[3 * v + 1]);
  }
  for (int64_t n = 0; n < N; n++) place_N[n] = next_P[destination_N[n]]++;
  const int32_t* targets = number_PT == nullptr ? number_PU : number_PT;
  if (weight_bytes == 4)
    describe(source_N, target_N, expert_N, N, slot_E, reinterpret_cast<const int32_t*>(weight_N), U, T, destination_N,
             number_PU, targets, place_N, reinterpret_cast<int32_t*>(metadata_N4));
  else
    describe(source_N, target_N, expert_N, N, slot_E, reinterpret_cast<const int64_t*>(weight_N), U, T, destination_N,
             number_PU, targets, place_N, reinterpret_cast<int64_t*>(metadata_N4));
  list_pairs(number_PU, P, U, N, counts_P3, row_N, by_row_N, first_U);
  if (number_PT != nullptr) list_pairs(number_PT, P, T, N, counts_P3 + 2, target_row_N, target_by_row_N, first_T);
}

// Unpacks received routes in source order; rows and targets are numbered in order of arrival. Returns 1
// if the counts do not match, or a route names a row or slot that does not exist.
extern "C" int64_t moebius_unpack_sends(const char* metadata_R4, const int64_t* received_P3, int64_t P, int64_t R,
                                    int64_t weight_bytes, int64_t num_slots, int64_t* source_R, int64_t* slot_R,
                                    int64_t* target_R, char* weight_R) {
  if (weight_bytes == 4)
    return read_back(reinterpret_cast<const int32_t*>(metadata_R4), received_P3, P, R, num_slots, source_R, slot_R,
                     target_R, reinterpret_cast<int32_t*>(weight_R));
  return read_back(reinterpret_cast<const int64_t*>(metadata_R4), received_P3, P, R, num_slots, source_R, slot_R,
                   target_R, reinterpret_cast<int64_t*>(weight_R));
}
