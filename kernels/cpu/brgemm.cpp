// Grouped matrix products of routed rows on CPUs, in float32 and bfloat16, around torch's own
// micro-kernels (at::native::cpublas::brgemm: oneDNN's, compiled at run time for AVX2, AVX-512 or
// AMX).
//
//   rows_times_bank    out[n] = epilogue(A[rows[n]] * W[e]) for the sorted rows n of every expert e
//   bank_gradient      W'[e] += sum over n of A[rows_a[n]]^T * B[rows_b[n]]
//
// This file does the work around the micro-kernels: it gathers rows block by block into the L2
// cache, brings large matrices into it panel by panel, and applies biases, activations, gate
// weights and their gradients to the results before they are stored. oneDNN compiles a kernel for
// every new shape (some 0.1 ms), so shapes come from a small set: at most kBlock rows, the columns
// of a panel, and in gradients sums over a multiple of kStep and at most kDepth. Every element of a
// result is a sum over k in an order that depends on k alone, so a row's result depends neither on
// other rows nor on the number of threads.
//
// A lane is 32 bits: a float, or two bfloat16 consecutive along k, the layout of bfloat16 dot
// products. The interface is plain C, and of torch's headers only the micro-kernels' is included, so
// the file compiles in seconds.

#include <ATen/native/CPUBlas.h>
#include <emmintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace {

using bf16 = uint16_t;
using Lane = uint32_t;

namespace blas = at::native::cpublas;

constexpr int64_t kBlock = 64;   // rows that are multiplied at a time
constexpr int64_t kDepth = 192;  // rows that a weight gradient sums up at a time
constexpr int64_t kColumns = 512;  // of a weight gradient that are made at a time
constexpr int64_t kPanel = 1 << 16;  // lanes of a panel, 256 KiB
constexpr int64_t kGroup = 1024;     // rows that a panel of a large matrix is used for at a time
constexpr int64_t kHeld = 1 << 22;   // of their elements, at most
constexpr int64_t kStep = 8;
constexpr int64_t kAhead = 3;   // rows or pairs of rows
constexpr int64_t kWidth = 16;  // the kernels take whole vectors of columns, and tails are slower

std::atomic<bool> failed{false};  // a product, since this was last asked: none may throw in a thread

// C (m x n) = A (m x k) * B, or += if `add`; B's lanes run along k.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
              const T* a, const Lane* b, float* c) {
  try {
    constexpr bool pairs = sizeof(T) < sizeof(float);
    using Torchs = std::conditional_t<pairs, at::BFloat16, float>;
    blas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const Torchs*>(a),
                 reinterpret_cast<const Torchs*>(b), c, pairs);
  } catch (...) {
    failed = true;
  }
}

template <typename T>
constexpr int64_t kPair = sizeof(Lane) / sizeof(T);  // elements of k in a lane
constexpr int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Scratch memory, reused by each thread, because the first touch of a page is expensive.
template <int kSlot, typename T>
T* scratch(int64_t count) {
  thread_local std::unique_ptr<void, decltype(&std::free)> block(nullptr, &std::free);
  thread_local size_t size = 0;
  const size_t bytes = up(count * sizeof(T), 4096);
  if (size < bytes) {
    block.reset();
    size = 0;
    block.reset(std::aligned_alloc(4096, bytes));
    if (!block) throw std::bad_alloc();
    size = bytes;
  }
  return static_cast<T*>(block.get());
}

inline float load(float value) { return value; }
inline float load(bf16 value) {
  const Lane bits = static_cast<Lane>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline void store(float* to, float value) { *to = value; }
inline void store(bf16* to, float value) {  // to the nearest, of two the even one
  Lane bits;
  std::memcpy(&bits, &value, sizeof bits);
  const Lane rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = static_cast<bf16>(value == value ? rounded : (bits >> 16) | 0x40);
}

// Prefetches a row that will be copied soon; hardware cannot predict gathered addresses.
template <typename T>
inline void fetch(const T* row, int64_t width) {
  for (int64_t c = 0; c < width; c += 64 / sizeof(T)) __builtin_prefetch(row + c, 0, 2);
}

// to[c] = factor from[c]. Float32 uses streaming stores, which avoid reading the destination: these
// rows are most of what a call writes and are not read soon. (For bfloat16 it gained nothing.)
inline void write_out(const float* from, float factor, int64_t count, float* to) {
  int64_t c = 0;
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128) == 0)
    for (; c + 4 <= count; c += 4)
      _mm_stream_ps(to + c, _mm_mul_ps(_mm_set1_ps(factor), _mm_loadu_ps(from + c)));
  for (; c < count; ++c) to[c] = factor * from[c];
}
inline void write_out(const float* from, float factor, int64_t count, bf16* to) {
  for (int64_t c = 0; c < count; ++c) store(to + c, factor * from[c]);
}

// Transposition -----------------------------------------------------------------------------------

// Converts rows to lanes: out[i] is row i, or in bfloat16 rows 2i and 2i + 1 (the latter optional).
inline void as_lanes(const float* const* rows, int64_t count, int64_t width, Lane* out,
                     int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(rows[i + kAhead], width);
    std::memcpy(out + i * stride, rows[i], width * sizeof(Lane));
  }
}
inline void as_lanes(const bf16* const* rows, int64_t count, int64_t width, Lane* out,
                     int64_t stride) {
  for (int64_t i = 0; i < count; i += 2, out += stride) {
    for (int64_t j = i + 2 * kAhead; j < std::min(i + 2 * kAhead + 2, count); ++j)
      fetch(rows[j], width);
    const bf16 *first = rows[i], *second = i + 1 < count ? rows[i + 1] : nullptr;
    if (second)
      for (int64_t c = 0; c < width; ++c) out[c] = first[c] | static_cast<Lane>(second[c]) << 16;
    else
      for (int64_t c = 0; c < width; ++c) out[c] = first[c];
  }
}

typedef Lane Lanes __attribute__((vector_size(32)));
#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, Lanes{__VA_ARGS__})
#endif

// out[c][r] = in[r][c].
void transpose(const Lane* in, int64_t in_stride, int64_t rows, int64_t columns, Lane* out,
               int64_t out_stride) {
  for (int64_t c = 0; c < columns; c += 8) {
    for (int64_t r = 0; r < rows; r += 8) {
      const Lane* from = in + r * in_stride + c;
      Lane* to = out + c * out_stride + r;
      if (r + 8 > rows || c + 8 > columns) {
        for (int64_t i = 0; i < std::min<int64_t>(8, columns - c); ++i)
          for (int64_t j = 0; j < std::min<int64_t>(8, rows - r); ++j)
            to[i * out_stride + j] = from[j * in_stride + i];
        continue;
      }
      Lanes x[8], y[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&x[i], from + i * in_stride, sizeof x[i]);
      for (int i = 0; i < 8; i += 2) {
        y[i] = MIX(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[i + 1] = MIX(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
      for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
          x[i + 2 * j] = MIX(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          x[i + 2 * j + 1] = MIX(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
      for (int i = 0; i < 4; ++i) {
        y[i] = MIX(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = MIX(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
      for (int i = 0; i < 8; ++i) std::memcpy(to + i * out_stride, &y[i], sizeof y[i]);
    }
  }
}

// Converts `depth` rows and `width` columns of a bank's (k x n) matrix, or of the transpose of a
// stored (n x k) one, to lanes along k; `from` is their first element.
template <typename T>
void as_panel(const T* from, int64_t k, int64_t n, bool transposed, int64_t depth, int64_t width,
              Lane* out, int64_t stride) {
  constexpr int64_t pair = kPair<T>;
  const int64_t even = up(depth, pair);
  if (!transposed)
    for (int64_t i = 0; i < depth; i += pair, out += stride) {
      const T* two[] = {from + i * n, from + (i + 1) * n};
      as_lanes(two, std::min(pair, depth - i), width, out, stride);
    }
  else if (k % pair == 0)
    transpose(reinterpret_cast<const Lane*>(from), k / pair, width, depth / pair, out, stride);
  else {
    T* copy = scratch<1, T>(width * even);
    for (int64_t i = 0; i < width; ++i) {
      std::copy_n(from + i * k, depth, copy + i * even);
      if (even > depth) copy[i * even + depth] = 0;
    }
    transpose(reinterpret_cast<const Lane*>(copy), even / pair, width, even / pair, out, stride);
  }
}

enum Activation : int64_t {
  kNone = 0, kRelu = 1, kRelu2 = 2, kGelu = 3, kSilu = 4, kClampedSilu = 5
};
constexpr float kLimit = 7.0f, kAlpha = 1.702f;  // of gpt-oss's kClampedSilu; see reference.py

// What is stored of a result row z at sorted place n: g z, or with an activation z + bias, or its
// ReLU, or (with `hidden`) both z + bias and its activation h.
template <typename T>
struct Epilogue {
  Activation activation;
  bool is_gated;      // the activation of the first half of the columns times the second half
  const float* gate;  // (N,); null: ones
  const T* bias;      // (E, columns); null: zeros
  T* hidden;          // (N, F)
  // Gradient: z is the gradient of g h. Stores the gradient before the activation, `hidden` = g h
  // and `gate_gradient` = h . z. What went into the activation, or came out of a ReLU, is row
  // saved_rows[n] of `saved`, or row n where that is null.
  const T* saved;  // null: forward
  const int32_t* saved_rows;
  int64_t saved_stride;
  float* gate_gradient;  // (N,)
};

// e^x, with a relative error of 1e-7 and, in vectors and tails alike, the same bits (Cephes).
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);  // NaN passes
  constexpr float round = 12582912.0f;
  const float n = (x * 1.44269504f + round) - round;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                           5.0000001201e-1f, 1.0f, 1.0f})
    sum = sum * r + next;
  const Lane bits = static_cast<Lane>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// The normal distribution's cumulative function (Press et al., Numerical Recipes, 6.2: 1.2e-7).
inline float cumulative(float x) {
  const float y = std::abs(x) * 0.707106781f, t = 1 / (1 + 0.5f * y);
  float sum = 0.17087277f;
  for (const float next : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                           0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f})
    sum = sum * t + next;
  const float tail = 0.5f * t * exponential(sum - y * y);
  return x > 0 ? 1 - tail : tail;
}

// value[c] = a(z[c]), slope[c] = a'(z[c]).
void activate(Activation a, const float* z, int64_t count, float* value, float* slope) {
  const auto each = [=](auto function) {
    for (int64_t c = 0; c < count; ++c) function(z[c], value[c], slope[c]);
  };
  if (a == kNone) each([](float x, float& v, float& s) { v = x, s = 1; });
  if (a == kRelu) each([](float x, float& v, float& s) { v = x < 0 ? 0 : x, s = x <= 0 ? 0 : 1; });
  if (a == kRelu2) each([](float x, float& v, float& s) {
    const float positive = x < 0 ? 0 : x;
    v = positive * positive, s = 2 * positive;
  });
  if (a == kSilu) each([](float x, float& v, float& s) {
    const float sigmoid = 1 / (1 + exponential(-x));
    v = x * sigmoid, s = (1 - sigmoid) * v + sigmoid;
  });
  if (a == kClampedSilu) each([](float x, float& v, float& s) {
    const float gate = x > kLimit ? kLimit : x;  // NaN passes
    const float sigmoid = 1 / (1 + exponential(-kAlpha * gate));
    v = gate * sigmoid, s = x > kLimit ? 0 : (1 - sigmoid) * v * kAlpha + sigmoid;
  });
  if (a == kGelu) each([](float x, float& v, float& s) {
    const float below = cumulative(x);
    v = x * below, s = x * (0.398942280f * exponential(-0.5f * x * x)) + below;
  });
}

// `work` has room for 4 F floats.
template <typename T>
void finish(const Epilogue<T>& e, float* z, int64_t n, int64_t expert, int64_t columns, float* work,
            T* out) {
  const float g = e.gate ? e.gate[n] : 1.0f;
  if (e.activation == kNone && !e.saved) return write_out(z, g, columns, out + n * columns);
  const int64_t width = !e.saved && e.is_gated ? columns / 2 : columns;
  const int64_t wide = e.is_gated ? 2 * width : width;
  const bool is_clamped = e.activation == kClampedSilu;
  // A gated activation multiplies its gate's value by this.
  const auto factor = [=](float content) {
    return is_clamped ? std::clamp(content, -kLimit, kLimit) + 1 : content;
  };
  float *value = work, *slope = value + width, *before = slope + width;
  T* hidden = e.hidden ? e.hidden + n * width : nullptr;
  out += n * wide;
  if (!e.saved) {
    if (e.bias)
      for (int64_t c = 0; c < wide; ++c) z[c] += load(e.bias[expert * wide + c]);
    if (!hidden) {
      for (int64_t c = 0; c < wide; ++c) store(out + c, z[c] < 0 ? 0 : z[c]);  // NaN passes
      return;
    }
    write_out(z, 1, wide, out);
    if (sizeof(T) < sizeof *z)
      for (int64_t c = 0; c < wide; ++c) z[c] = load(out[c]);  // as the gradient will read it
    activate(e.activation, z, width, value, slope);
    for (int64_t c = 0; c < width; ++c)
      store(hidden + c, value[c] * (e.is_gated ? factor(z[width + c]) : 1));
    return;
  }
  const T* saved = e.saved + (e.saved_rows ? e.saved_rows[n] : n) * e.saved_stride;
  for (int64_t c = 0; c < wide; ++c) before[c] = load(saved[c]);
  activate(e.activation, before, width, value, slope);
  if (e.is_gated)
    for (int64_t c = 0; c < width; ++c) {
      const float content = before[width + c];
      const bool is_open = !is_clamped || !(std::abs(content) > kLimit);
      store(out + width + c, is_open ? g * z[c] * value[c] : 0);
      value[c] *= factor(content);
      slope[c] *= factor(content);
    }
  for (int64_t c = 0; c < width; ++c) {
    store(hidden + c, g * value[c]);
    store(out + c, g * z[c] * slope[c]);
    z[c] *= value[c];
  }
  // The order depends only on the width, not on the row's address.
  float sums[16] = {};
  int64_t c = 0;
  for (; c + 16 <= width; c += 16)
    for (int i = 0; i < 16; ++i) sums[i] += z[c + i];
  for (int i = 0; c < width; ++c, ++i) sums[i] += z[c];
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  e.gate_gradient[n] = sums[0];
}

template <typename T>
void rows_times_bank(const T* a, int64_t stride, const int32_t* index, const T* bank, int64_t k,
                     int64_t columns, bool transposed, const int32_t* starts, int64_t experts,
                     const Epilogue<T>& e, T* out, int64_t threads) {
  constexpr int64_t pair = kPair<T>;
  const int64_t total = starts[experts], even = up(k, pair);
  // Panels are `deep` x `panel` elements, whose results are added up in this order for any rows.
  const int64_t wide = up(columns, kWidth), deep = std::min(even, kPanel / kBlock * pair);
  const int64_t panel = std::min(wide, kPanel * pair / deep / kWidth * kWidth);
  const int64_t group =
      std::clamp(kHeld / std::max(wide, even) / kBlock * kBlock, kBlock, kGroup);
  // Rows a power of two apart evict each other from the L1 cache.
  const int64_t near = up(k, 64 / sizeof(T)) + 64 / sizeof(T);
  const bool direct = !index && even == k && stride * sizeof(T) % 1024;
  // Equal shares of the rows, several per thread, scheduled dynamically. Converting a large matrix
  // twice is costly: there they begin where an expert does if that is within half a share.
  const int64_t several = std::clamp(total / (4 * kBlock), threads * 2, threads * 8),
                shares = threads == 1 ? 1 : std::min(several, up(total, kBlock) / kBlock);
  const auto edge = [=](int64_t share) {
    const int64_t row = total * share / shares;
    const int32_t* next = std::upper_bound(starts, starts + experts, row);
    const int64_t nearest = *next - row < row - next[-1] ? *next : next[-1];
    const bool is_large = panel < wide || deep < even;
    return is_large && std::abs(nearest - row) * shares * 2 < total ? nearest : row;
  };
#pragma omp parallel num_threads(threads)
  {
    Lane* packed = scratch<0, Lane>(deep / pair * panel);
    T* copy = scratch<2, T>(group * near);
    float* tile = scratch<3, float>(group * wide);
    float* work = scratch<4, float>(4 * columns);
#pragma omp for schedule(dynamic)
    for (int64_t share = 0; share < shares; ++share) {
      const int64_t low = edge(share), high = edge(share + 1);
      int64_t expert = std::upper_bound(starts, starts + experts + 1, low) - starts - 1;
      for (int64_t begin = low, end; begin < high; begin = end, ++expert) {
        end = std::min<int64_t>(starts[expert + 1], high);
        if (begin >= end) continue;
        const T* matrix = bank + expert * k * columns;
        // For few rows copying does not pay.
        const bool in_place = !transposed && pair == 1 && columns == wide &&
                              (k * columns <= 2 * kPanel || end - begin < 2 * kBlock);
        const int64_t step = in_place ? wide : panel;
        const bool is_one = step == wide && deep == even;
        for (int64_t n = begin, count; n < end; n += count) {
          count = std::min(is_one ? kBlock : group, end - n);
          if (!direct)
            for (int64_t i = 0; i < count; ++i) {
              if (index && n + i + kAhead < high) fetch(a + index[n + i + kAhead] * stride, k);
              std::copy_n(a + (index ? index[n + i] : n + i) * stride, k, copy + i * near);
              if (even > k) copy[i * near + k] = 0;
            }
          const T* rows = direct ? a + n * stride : copy;
          const int64_t apart = direct ? stride : near;
          for (int64_t c = 0; c < wide; c += step)
            for (int64_t from = 0; from < even; from += deep) {
              const int64_t width = std::min(step, wide - c), depth = std::min(deep, even - from);
              const T* first = matrix + (transposed ? c * k + from : from * columns + c);
              if (!in_place && (!is_one || n == begin))
                as_panel(first, k, columns, transposed, std::min(depth, k - from),
                         std::min(width, columns - c), packed, width);
              const Lane* lanes = in_place ? reinterpret_cast<const Lane*>(first) : packed;
              for (int64_t i = 0; i < count; i += kBlock)
                multiply(std::min(kBlock, count - i), width, depth, apart, width, wide, from > 0,
                         rows + i * apart + from, lanes, tile + i * wide + c);
            }
          for (int64_t i = 0; i < count; ++i)
            finish(e, tile + i * wide, n + i, expert, columns, work, out);
        }
      }
    }
    if (pair == 2) blas::brgemm_release(true);
    _mm_sfence();  // streamed results are seen by whoever reads them next
  }
}

// Gradient of a bank ------------------------------------------------------------------------------

template <typename T>
struct Rows {
  const T* base;
  int64_t width;
  const int32_t* index;  // null: as they lie
  const T* row(int64_t n) const { return base + (index ? index[n] : n) * width; }
};

template <typename T>
void put(const float* from, int64_t stride, int64_t rows, int64_t columns, bool add, T* to,
         int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += to_stride)
    if (add)
      for (int64_t c = 0; c < columns; ++c) store(to + c, load(to[c]) + from[c]);
    else
      write_out(from, 1, columns, to);
}

template <typename T>
void bank_gradient(Rows<T> a, Rows<T> b, const int32_t* starts, int64_t experts, bool add, T* into,
                   int64_t threads) {
  constexpr int64_t pair = kPair<T>;
  // Transposes the narrow side; if that is b, the sum is transposed too.
  const bool turned = a.width > b.width;
  const Rows<T>&narrow = turned ? b : a, &wide = turned ? a : b;
  // One thread per expert, in any order, with as many columns as fit in the L2 cache. If a few experts
  // have most rows, several threads share an expert by columns.
  int64_t most = 0;
  for (int64_t e = 0; e < experts; ++e) most = std::max<int64_t>(most, starts[e + 1] - starts[e]);
  int64_t parts = (wide.width + kColumns - 1) / kColumns;
  if (most * threads * 8 > starts[experts])
    parts = std::max(parts, std::min<int64_t>(threads, wide.width / 128));
  const int64_t columns = up((wide.width + parts - 1) / parts, kWidth);
#pragma omp parallel num_threads(threads)
  {
    const int64_t left_stride = up(narrow.width, kWidth), right_stride = columns,
                  turned_stride = kDepth / pair + kWidth;
    Lane* lanes = scratch<0, Lane>(kDepth / pair * left_stride);
    Lane* left = scratch<1, Lane>(narrow.width * turned_stride);
    Lane* right = scratch<2, Lane>(kDepth / pair * right_stride);
    float* sums = scratch<3, float>(narrow.width * columns);
    float* block = scratch<4, float>(64 * left_stride);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < experts * parts; ++item) {
      const int64_t expert = item / parts, first = item % parts * columns,
                    width = std::min(columns, wide.width - first);
      const int64_t begin = starts[expert], end = starts[expert + 1];
      T* result = into + expert * a.width * b.width;
      if (begin >= end && !add && item % parts == 0) std::fill_n(result, a.width * b.width, T{});
      if (begin >= end || width <= 0) continue;
      for (int64_t i = 0; i < kDepth / pair; ++i)  // in columns that there are not
        std::fill_n(right + i * right_stride + width, up(width, kWidth) - width, 0);
      for (int64_t n = begin; n < end; n += kDepth) {
        const int64_t count = std::min(kDepth, end - n), depth = up(count, kStep),
                      filled = up(count, pair) / pair;
        const T *left_rows[kDepth], *right_rows[kDepth];
        for (int64_t i = 0; i < count; ++i) {
          left_rows[i] = narrow.row(n + i);
          right_rows[i] = wide.row(n + i) + first;
        }
        as_lanes(left_rows, count, narrow.width, lanes, left_stride);
        as_lanes(right_rows, count, width, right, right_stride);
        for (int64_t i = filled; i < depth / pair; ++i) {
          std::fill_n(lanes + i * left_stride, narrow.width, 0);
          std::fill_n(right + i * right_stride, width, 0);
        }
        transpose(lanes, left_stride, depth / pair, narrow.width, left, turned_stride);
        multiply(narrow.width, up(width, kWidth), depth, turned_stride * pair, right_stride, columns, n > begin,
                 reinterpret_cast<const T*>(left), right, sums);
      }
      if (!turned) {
        put(sums, columns, narrow.width, width, add, result + first, wide.width);
        continue;
      }
      for (int64_t c = 0; c < width; c += 64) {
        const int64_t some = std::min<int64_t>(64, width - c);
        transpose(reinterpret_cast<const Lane*>(sums) + c, columns, narrow.width, some,
                  reinterpret_cast<Lane*>(block), left_stride);
        put(block, left_stride, some, narrow.width, add, result + (first + c) * narrow.width,
            narrow.width);
      }
    }
    if (pair == 2) blas::brgemm_release(true);
    _mm_sfence();
  }
}

}  // namespace

extern "C" {

// Each function returns 0, or 1 if there is no micro-kernel.
#define MOEBIUS_FUNCTIONS(T, name)                                                                 \
  int64_t moebius_rows_times_bank_##name(                                                          \
      const T* a, int64_t stride, const int32_t* rows, const T* bank, int64_t k, int64_t columns,  \
      int64_t transposed, const int32_t* starts, int64_t experts, int64_t activation,              \
      int64_t is_gated, const float* gate, const T* bias, T* hidden, const T* saved,               \
      const int32_t* saved_rows, int64_t saved_stride, float* gate_gradient, T* out,               \
      int64_t threads) {                                                                           \
    const Epilogue<T> e{static_cast<Activation>(activation), is_gated != 0, gate, bias, hidden,    \
                        saved, saved_rows, saved_stride, gate_gradient};                           \
    rows_times_bank<T>(a, stride, rows, bank, k, columns, transposed, starts, experts, e, out,     \
                       threads);                                                                   \
    return failed.exchange(false);                                                                 \
  }                                                                                                \
  int64_t moebius_bank_gradient_##name(const T* a, int64_t a_width, const int32_t* a_rows,         \
                                       const T* b, int64_t b_width, const int32_t* b_rows,         \
                                       const int32_t* starts, int64_t experts, int64_t add,        \
                                       T* into, int64_t threads) {                                 \
    bank_gradient<T>({a, a_width, a_rows}, {b, b_width, b_rows}, starts, experts, add, into,       \
                     threads);                                                                     \
    return failed.exchange(false);                                                                 \
  }
MOEBIUS_FUNCTIONS(float, float32)
MOEBIUS_FUNCTIONS(bf16, bfloat16)
}
