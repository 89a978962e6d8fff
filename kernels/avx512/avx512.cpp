// Grouped matrix products of routed rows on CPUs with AVX-512, in float32 and (with AVX512_BF16) in
// bfloat16.
//
//   rows_times_bank    out[n] = epilogue(A[rows[n]] * W[e]) for the sorted rows n of every expert e
//   bank_gradient      W'[e] += sum over n of A[rows_a[n]]^T * B[rows_b[n]]
//
// What a library's matrix product cannot do, and why this file exists: rows are read where they
// lie, through their index, so no gathered copy is made; a new number of rows costs nothing; gate
// weights, ReLU and its gradient are applied while the result is in registers. A row's result does
// not depend on which rows it is computed with, nor on the number of threads: every element is one
// chain of fused multiply-adds over k.
//
// Tile: MR x 32 results in registers (14 x 2 of the 32 vectors), one row element broadcast per
// step. The bank's matrix is packed once per expert and thread into panels of 32 columns. In
// bfloat16 two neighbours along k make one 32-bit lane, as VDPBF16PS wants them; sums are float32.
// Plain C interface, no torch headers: it compiles in seconds.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace {

using bf16 = uint16_t;

constexpr int kRows = 14;   // of a tile
constexpr int kCols = 32;   // of a panel: two vectors
constexpr int kStrip = 16;  // from a lane of a strip to the next: a cache line, kRows of it used
// Lanes per pass of a weight gradient: their panel stays in the first-level cache.
constexpr int kDepth = 192;
constexpr int64_t kCacheBytes = 256 << 10;  // of rows that all panels run over before the next ones

// Scratch memory, reused by each thread: the first touch of a page is dear.
template <int kSlot>
void* scratch(size_t bytes) {
  thread_local std::unique_ptr<void, decltype(&std::free)> block(nullptr, &std::free);
  thread_local size_t size = 0;
  if (size < bytes) {
    block.reset();
    size = (bytes + 4095) / 4096 * 4096;
    block.reset(std::aligned_alloc(4096, size));
    if (!block) {
      size = 0;
      throw std::bad_alloc();
    }
  }
  return block.get();
}

inline __mmask16 mask_of(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
}

inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// What differs between the two types.
template <typename T>
struct Lane;

template <>
struct Lane<float> {
  static constexpr int kWide = 1;  // elements of k in a 32-bit lane
  static __m512 multiply_add(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
  static __m512 broadcast(const float* row, int64_t k) { return _mm512_set1_ps(row[k]); }
  static __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
  static void store(float* p, __mmask16 m, __m512 v) { _mm512_mask_storeu_ps(p, m, v); }
  static void stream(float* p, __m512 v0, __m512 v1) {
    _mm512_stream_ps(p, v0);
    _mm512_stream_ps(p + 16, v1);
  }
};

template <>
struct Lane<bf16> {
  static constexpr int kWide = 2;
  static __m512 multiply_add(__m512 sum, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __m512 broadcast(const bf16* row, int64_t k) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * k, sizeof pair);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static __m512 load(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
  static void store(bf16* p, __mmask16 m, __m512 v) {
    _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(v));
  }
  static void stream(bf16* p, __m512 v0, __m512 v1) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)_mm512_cvtne2ps_pbh(v1, v0));
  }
};

inline int64_t lanes(int64_t k, int wide) { return (k + wide - 1) / wide; }

// Packing -----------------------------------------------------------------------------------------

// 16 x 16 lanes of 32 bits.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline __m512i load_lanes(const float* p, int64_t left) {
  return _mm512_maskz_loadu_epi32(mask_of(left), p);
}
inline __m512i load_lanes(const bf16* p, int64_t left) {
  const __mmask32 m =
      left >= 32 ? 0xffffffffu : static_cast<__mmask32>((1ull << std::max<int64_t>(left, 0)) - 1);
  return _mm512_maskz_loadu_epi16(m, p);
}

// 16 columns of lane k: of a row of float32, or of two rows of bfloat16, the second of which may be
// missing.
inline __m512i lane_of_rows(const float* first, const float*, __mmask16 m) {
  return _mm512_maskz_loadu_epi32(m, first);
}
inline __m512i lane_of_rows(const bf16* first, const bf16* second, __mmask16 m) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, first));
  if (!second) return low;
  return _mm512_or_si512(
      low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, second)), 16));
}

// A (k x n) matrix, or the transpose of a stored (n x k) one, into panels [n / 32][lanes of k][32],
// zeros in missing columns.
template <typename T>
void pack(const T* matrix, int64_t k, int64_t n, bool transposed, float* out) {
  constexpr int wide = Lane<T>::kWide;
  const int64_t depth = lanes(k, wide);
  for (int64_t column = 0; column < n; column += kCols, out += depth * kCols) {
    for (int half = 0; half < kCols; half += 16) {
      const int64_t first = column + half;
      if (!transposed) {
        const __mmask16 m = mask_of(n - first);
        for (int64_t i = 0; i < depth; ++i) {
          const T* row = matrix + i * wide * n + first;
          const T* next = wide == 2 && i * 2 + 1 < k ? row + n : nullptr;
          _mm512_store_si512(out + i * kCols + half, lane_of_rows(row, next, m));
        }
        continue;
      }
      for (int64_t i = 0; i < depth; i += 16) {
        __m512i block[16];
        for (int r = 0; r < 16; ++r)
          block[r] = first + r < n ? load_lanes(matrix + (first + r) * k + i * wide, k - i * wide)
                                   : _mm512_setzero_si512();
        transpose(block);
        for (int r = 0; r < 16 && i + r < depth; ++r)
          _mm512_store_si512(out + (i + r) * kCols + half, block[r]);
      }
    }
  }
}

// Rows times a bank's matrix ----------------------------------------------------------------------

// tile[MR][32] = rows * panel.
template <typename T, int MR>
void multiply(const T* const* rows, const float* panel, int64_t k, float* tile) {
  constexpr int wide = Lane<T>::kWide;
  __m512 sum[MR][2];
  for (int r = 0; r < MR; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  const T* row[MR];
  for (int r = 0; r < MR; ++r) row[r] = rows[r];
  const int64_t whole = k / wide;
  for (int64_t i = 0; i < whole; ++i, panel += kCols) {
    const __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const __m512 a = Lane<T>::broadcast(row[r], i);
      sum[r][0] = Lane<T>::multiply_add(sum[r][0], a, b0);
      sum[r][1] = Lane<T>::multiply_add(sum[r][1], a, b1);
    }
  }
  if (wide * whole < k) {  // the last element has no neighbour: what lies behind it is not ours
    const __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const __m512 a = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int32_t>(row[r][k - 1])));
      sum[r][0] = Lane<T>::multiply_add(sum[r][0], a, b0);
      sum[r][1] = Lane<T>::multiply_add(sum[r][1], a, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    _mm512_store_ps(tile + r * kCols, sum[r][0]);
    _mm512_store_ps(tile + r * kCols + 16, sum[r][1]);
  }
}

template <typename T>
using Multiply = void (*)(const T* const*, const float*, int64_t, float*);
template <typename T>
constexpr Multiply<T> kMultiply[kRows] = {
    multiply<T, 1>,  multiply<T, 2>,  multiply<T, 3>,  multiply<T, 4>, multiply<T, 5>,
    multiply<T, 6>,  multiply<T, 7>,  multiply<T, 8>,  multiply<T, 9>, multiply<T, 10>,
    multiply<T, 11>, multiply<T, 12>, multiply<T, 13>, multiply<T, 14>};

enum Mode : int32_t { kPlain = 0, kRelu = 1, kGradient = 2, kReluGradient = 3 };

}  // namespace

extern "C" {

// How a result row z of sorted place n becomes what is stored.
struct Epilogue {
  int32_t mode;         // plain: z, or g z with `wide_stride`; relu: max(z, 0); gradient: below
  const float* gate;    // (N,); null: ones
  int64_t wide_stride;  // plain: not 0 where rows of `out` are that far apart, whole panels of
                        // whole cache lines
  // Gradient: z is that of g h by its product. Stored are g z (times [h > 0] after a ReLU), `gated`
  // = g h, `gate_gradient` = h . z.
  const void* hidden;  // row hidden_rows[n], or n where that is null
  const int32_t* hidden_rows;
  int64_t hidden_stride;
  void* gated;           // (N, columns)
  float* gate_gradient;  // (N,)
};
}

namespace {

// Results that are only written: whole cache lines, past the caches, so that they are not read
// first.
template <typename T>
void finish_wide(const float* gates, const float* tile, int64_t n, int count, int64_t column,
                 int64_t stride, T* out) {
  for (int r = 0; r < count; ++r, ++n) {
    const __m512 g = _mm512_set1_ps(gates ? gates[n] : 1.0f);
    const __m512 z0 = _mm512_load_ps(tile + r * kCols), z1 = _mm512_load_ps(tile + r * kCols + 16);
    Lane<T>::stream(out + n * stride + column, _mm512_mul_ps(g, z0), _mm512_mul_ps(g, z1));
  }
}

template <typename T>
void finish(const Epilogue& e, const float* tile, int64_t n, int count, int64_t column,
            int64_t columns, T* out) {
  using L = Lane<T>;
  const __mmask16 masks[2] = {mask_of(columns - column), mask_of(columns - column - 16)};
  for (int r = 0; r < count; ++r, ++n) {
    T* stored = out + n * columns + column;
    const float gate = e.gate ? e.gate[n] : 1.0f;
    const __m512 g = _mm512_set1_ps(gate), zero = _mm512_setzero_ps();
    __m512 product = zero;
    for (int v = 0; v < 2; ++v) {
      __m512 z = _mm512_load_ps(tile + r * kCols + 16 * v);
      if (e.mode == kRelu) {
        z = _mm512_max_ps(zero, z);  // in this order a NaN passes through
      } else if (e.mode >= kGradient) {
        const int64_t place = e.hidden_rows ? e.hidden_rows[n] : n;
        const __m512 h = L::load(
            static_cast<const T*>(e.hidden) + place * e.hidden_stride + column + 16 * v, masks[v]);
        product = _mm512_mask3_fmadd_ps(h, z, product, masks[v]);
        L::store(static_cast<T*>(e.gated) + n * columns + column + 16 * v, masks[v],
                 _mm512_mul_ps(g, h));
        z = _mm512_mul_ps(g, z);
        if (e.mode == kReluGradient)
          z = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(h, zero, _CMP_NLE_UQ), z);
      }
      L::store(stored + 16 * v, masks[v], z);
    }
    if (e.mode >= kGradient)
      e.gate_gradient[n] = (column ? e.gate_gradient[n] : 0.0f) + _mm512_reduce_add_ps(product);
  }
}

template <typename T>
void rows_times_bank(const T* a, int64_t stride, const int32_t* rows, const T* bank, int64_t k,
                     int64_t columns, bool transposed, const int32_t* starts, int64_t experts,
                     const Epilogue& e, T* out, int threads) {
  const int64_t total = starts[experts], depth = lanes(k, Lane<T>::kWide),
                panels = (columns + kCols - 1) / kCols;
  const int64_t cached = std::max<int64_t>(kCacheBytes / (k * sizeof(T)) / kRows, 4) * kRows;
  // Rows that lie a multiple of 1 KiB apart push each other out of the first-level cache: such are
  // copied to where they do not.
  const bool aliased = stride * sizeof(T) % 1024 == 0;
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    const int64_t low = total * thread / num_threads, high = total * (thread + 1) / num_threads;
    float* packed = static_cast<float*>(scratch<0>(panels * depth * kCols * sizeof(float)));
    const int64_t near = k + 64 / sizeof(T);
    T* copy = aliased ? static_cast<T*>(scratch<4>(cached * near * sizeof(T))) : nullptr;
    alignas(64) float tile[kRows * kCols];
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t begin = std::max<int64_t>(starts[expert], low),
                    end = std::min<int64_t>(starts[expert + 1], high);
      if (begin >= end) continue;
      pack(bank + expert * k * columns, k, columns, transposed, packed);
      for (int64_t chunk = begin; chunk < end; chunk += cached) {
        const int64_t chunk_end = std::min(end, chunk + cached);
        if (aliased)
          for (int64_t n = chunk; n < chunk_end; ++n)
            std::copy_n(a + (rows ? rows[n] : n) * stride, k, copy + (n - chunk) * near);
        for (int64_t panel = 0; panel < panels; ++panel) {
          for (int64_t n = chunk; n < chunk_end; n += kRows) {
            const int count = static_cast<int>(std::min<int64_t>(kRows, chunk_end - n));
            const T* row[kRows];
            for (int r = 0; r < count; ++r)
              row[r] = aliased ? copy + (n + r - chunk) * near
                               : a + (rows ? rows[n + r] : n + r) * stride;
            kMultiply<T>[count - 1](row, packed + panel * depth * kCols, k, tile);
            if (e.wide_stride)
              finish_wide(e.gate, tile, n, count, panel * kCols, e.wide_stride, out);
            else
              finish(e, tile, n, count, panel * kCols, columns, out);
          }
        }
      }
    }
    _mm_sfence();  // streamed results are seen by whoever reads them next
  }
}

// Gradient of a bank ------------------------------------------------------------------------------

// The sum over `depth` lanes of a strip of A, MR of its columns, times a panel of B; it goes on
// from `sums`, unless that is null, and is added to `result`, or where that is null left in `rest`.
template <typename T, int MR>
void outer(const float* strip, const float* panel, int64_t depth, const float* sums, float* rest,
           T* result, int64_t stride, __mmask16 m0, __mmask16 m1) {
  __m512 sum[MR][2];
  for (int r = 0; r < MR; ++r) {
    sum[r][0] = sums ? _mm512_maskz_loadu_ps(m0, sums + r * stride) : _mm512_setzero_ps();
    sum[r][1] = sums ? _mm512_maskz_loadu_ps(m1, sums + r * stride + 16) : _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < depth; ++i, panel += kCols, strip += kStrip) {
    const __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const __m512 x = _mm512_set1_ps(strip[r]);
      sum[r][0] = Lane<T>::multiply_add(sum[r][0], x, b0);
      sum[r][1] = Lane<T>::multiply_add(sum[r][1], x, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    if (result) {
      T* stored = result + r * stride;
      Lane<T>::store(stored, m0, _mm512_add_ps(Lane<T>::load(stored, m0), sum[r][0]));
      Lane<T>::store(stored + 16, m1, _mm512_add_ps(Lane<T>::load(stored + 16, m1), sum[r][1]));
    } else {
      _mm512_mask_storeu_ps(rest + r * stride, m0, sum[r][0]);
      _mm512_mask_storeu_ps(rest + r * stride + 16, m1, sum[r][1]);
    }
  }
}

template <typename T>
using Outer = void (*)(const float*, const float*, int64_t, const float*, float*, T*, int64_t,
                       __mmask16, __mmask16);
template <typename T>
constexpr Outer<T> kOuter[kRows] = {
    outer<T, 1>, outer<T, 2>, outer<T, 3>,  outer<T, 4>,  outer<T, 5>,  outer<T, 6>,  outer<T, 7>,
    outer<T, 8>, outer<T, 9>, outer<T, 10>, outer<T, 11>, outer<T, 12>, outer<T, 13>, outer<T, 14>};

// Columns of some rows as lanes: a strip of A [depth][16], 14 of them used, or a panel of B
// [depth][32].
template <int kWidth, typename T>
void pack_columns(const T* const* rows, int64_t count, int64_t column, int64_t columns,
                  float* out) {
  constexpr int wide = Lane<T>::kWide;
  for (int half = 0; half < kWidth; half += 16) {
    const __mmask16 m = mask_of(columns - half);
    for (int64_t n = 0; n < count; n += wide) {
      const T* second = wide == 2 && n + 1 < count ? rows[n + 1] + column + half : nullptr;
      _mm512_store_si512(out + n / wide * kWidth + half,
                         lane_of_rows(rows[n] + column + half, second, m));
    }
  }
}

template <typename T>
void bank_gradient(const T* a, int64_t a_width, const int32_t* a_rows, const T* b, int64_t b_width,
                   const int32_t* b_rows, const int32_t* starts, int64_t experts, T* into,
                   int threads) {
  constexpr int wide = Lane<T>::kWide;
  constexpr int64_t deepest = kDepth * wide, strip_size = kDepth * kStrip,
                    panel_size = kDepth * kCols;
  const int64_t panels = (b_width + kCols - 1) / kCols, strips = (a_width + kRows - 1) / kRows;
  const bool a_is_wide = a_width > b_width;
  // One thread per expert, in whatever order; unless a few experts have most rows, then several
  // share one, by columns.
  int64_t most = 0;
  for (int64_t e = 0; e < experts; ++e) most = std::max<int64_t>(most, starts[e + 1] - starts[e]);
  const int64_t parts =
      most * threads * 2 > starts[experts] ? std::min<int64_t>(panels, threads) : 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t item = 0; item < experts * parts; ++item) {
    const int64_t expert = item / parts, first = panels * (item % parts) / parts,
                  last = panels * (item % parts + 1) / parts;
    const int64_t begin = starts[expert], end = starts[expert + 1];
    if (begin >= end) continue;
    T* result = into + expert * a_width * b_width;
    // bfloat16 is summed up in float32 over all rows, and rounded once; float32 is added where it
    // belongs.
    float* sums = nullptr;
    if (wide == 2 && end - begin > deepest)
      sums = static_cast<float*>(scratch<1>(a_width * b_width * sizeof(float)));
    // The narrower side is packed whole, the wider one piece by piece.
    float* panel =
        static_cast<float*>(scratch<2>((a_is_wide ? panels : 1) * panel_size * sizeof(float)));
    float* strip =
        static_cast<float*>(scratch<3>((a_is_wide ? 1 : strips) * strip_size * sizeof(float)));
    for (int64_t n = begin; n < end; n += deepest) {
      const int64_t count = std::min<int64_t>(deepest, end - n), depth = lanes(count, wide);
      const T *row_a[deepest], *row_b[deepest];
      for (int64_t i = 0; i < count; ++i) {
        row_a[i] = a + (a_rows ? a_rows[n + i] : n + i) * a_width;
        row_b[i] = b + (b_rows ? b_rows[n + i] : n + i) * b_width;
      }
      const auto pack_strip = [&](int64_t s, float* out) {
        pack_columns<kStrip>(row_a, count, s * kRows, std::min<int64_t>(kRows, a_width - s * kRows),
                             out);
      };
      const auto pack_panel = [&](int64_t p, float* out) {
        pack_columns<kCols>(row_b, count, p * kCols, b_width - p * kCols, out);
      };
      const auto multiply_packed = [&](int64_t s, const float* packed_strip, int64_t p,
                                       const float* packed_panel) {
        const int64_t row = s * kRows, column = p * kCols, at = row * b_width + column;
        const bool finished = !sums || n + count == end;
        kOuter<T>[std::min<int64_t>(kRows, a_width - row) - 1](
            packed_strip, packed_panel, depth, sums&& n > begin ? sums + at : nullptr,
            sums ? sums + at : nullptr, finished ? result + at : nullptr, b_width,
            mask_of(b_width - column), mask_of(b_width - column - 16));
      };
      if (a_is_wide) {
        for (int64_t p = first; p < last; ++p) pack_panel(p, panel + p * panel_size);
        for (int64_t s = 0; s < strips; ++s) {
          pack_strip(s, strip);
          for (int64_t p = first; p < last; ++p)
            multiply_packed(s, strip, p, panel + p * panel_size);
        }
      } else {
        for (int64_t s = 0; s < strips; ++s) pack_strip(s, strip + s * strip_size);
        for (int64_t p = first; p < last; ++p) {
          pack_panel(p, panel);
          for (int64_t s = 0; s < strips; ++s) multiply_packed(s, strip + s * strip_size, p, panel);
        }
      }
    }
  }
}

}  // namespace

extern "C" {

void moebius_rows_times_bank_float32(const float* a, int64_t stride, const int32_t* rows,
                                     const float* bank, int64_t k, int64_t columns,
                                     int32_t transposed, const int32_t* starts, int64_t experts,
                                     const Epilogue* e, float* out, int32_t threads) {
  rows_times_bank<float>(a, stride, rows, bank, k, columns, transposed, starts, experts, *e, out,
                         threads);
}

void moebius_rows_times_bank_bfloat16(const bf16* a, int64_t stride, const int32_t* rows,
                                      const bf16* bank, int64_t k, int64_t columns,
                                      int32_t transposed, const int32_t* starts, int64_t experts,
                                      const Epilogue* e, bf16* out, int32_t threads) {
  rows_times_bank<bf16>(a, stride, rows, bank, k, columns, transposed, starts, experts, *e, out,
                        threads);
}

void moebius_bank_gradient_float32(const float* a, int64_t a_width, const int32_t* a_rows,
                                   const float* b, int64_t b_width, const int32_t* b_rows,
                                   const int32_t* starts, int64_t experts, float* into,
                                   int32_t threads) {
  bank_gradient<float>(a, a_width, a_rows, b, b_width, b_rows, starts, experts, into, threads);
}

void moebius_bank_gradient_bfloat16(const bf16* a, int64_t a_width, const int32_t* a_rows,
                                    const bf16* b, int64_t b_width, const int32_t* b_rows,
                                    const int32_t* starts, int64_t experts, bf16* into,
                                    int32_t threads) {
  bank_gradient<bf16>(a, a_width, a_rows, b, b_width, b_rows, starts, experts, into, threads);
}
}
