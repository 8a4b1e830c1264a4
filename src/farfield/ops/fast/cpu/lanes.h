// Vectors of WIDTH floats; a file that includes this defines WIDTH. No name here is seen by another file's object.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace farfield {
namespace {

// The compiler splits these vectors where those of the processor are shorter.
using Lanes = float __attribute__((vector_size(WIDTH * sizeof(float))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

inline float sum_of(Lanes lanes) {
  for (int half = WIDTH / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

template <class Number>
inline void clear(Number* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = 0;
}

// Numbers that a thread holds, from the start of a cache line; each is 0 at first.
template <class Number>
class Held {
 public:
  explicit Held(int64_t count)
      : numbers(static_cast<Number*>(operator new[](count * sizeof(Number), std::align_val_t(64)))) {
    clear(numbers, count);
  }
  ~Held() { operator delete[](numbers, std::align_val_t(64)); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Number* data() const { return numbers; }
  Number& operator[](int64_t place) const { return numbers[place]; }

 private:
  Number* numbers;
};

// Writes past the caches, where the processor can.
inline void write_past(const float* from, float* to, int64_t count) {
  int64_t x = 0;
#ifdef __AVX__
  for (; x < count && reinterpret_cast<uintptr_t>(to + x) % sizeof(__m256); ++x) to[x] = from[x];
  for (; x + 8 <= count; x += 8) _mm256_stream_ps(to + x, _mm256_loadu_ps(from + x));
#endif
  for (; x < count; ++x) to[x] = from[x];
}

// Makes numbers written past the caches visible to other threads.
inline void finish_writing() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

// e^x for x ≤ 0 to about 2 roundings: 2^n · e^r with n = round(x / ln 2); below -87 it is 0.
inline Lanes exponential(Lanes x) {
  using Whole = int32_t __attribute__((vector_size(WIDTH * sizeof(int32_t))));
  const Lanes bounded = x < -87.0f ? Lanes{} - 87.0f : x;
  const Lanes shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the sum rounds to whole numbers
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in products
  Lanes e = 1.0f / 720 + r * (1.0f / 5040);
  e = 1.0f / 120 + r * e;
  e = 1.0f / 24 + r * e;
  e = 1.0f / 6 + r * e;
  e = 0.5f + r * e;
  e = 1 + r * (1 + r * e);
  const Whole power = (__builtin_convertvector(n, Whole) + 127) << 23;
  Lanes factor;
  std::memcpy(&factor, &power, sizeof(factor));
  return x < -87.0f ? Lanes{} : e * factor;
}

inline float largest_of(Lanes lanes) {
  float most = lanes[0];
  for (int lane = 1; lane < WIDTH; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}

}  // namespace
}  // namespace farfield
