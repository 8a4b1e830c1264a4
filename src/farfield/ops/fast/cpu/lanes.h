// Vectors of WIDTH floats; a file that includes this defines WIDTH. No name here is seen by another file's object.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#include "numbers.h"

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
inline int64_t greatest(int64_t one, int64_t other) { return one < other ? other : one; }

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
template <class Number>
inline void write_past(const Number* from, Number* to, int64_t count) {
  int64_t x = 0;
#ifdef __AVX__
  for (; x < count && reinterpret_cast<uintptr_t>(to + x) % sizeof(__m256i); ++x) to[x] = from[x];
  for (constexpr int64_t step = sizeof(__m256i) / sizeof(Number); x + step <= count; x += step)
    _mm256_stream_si256(
        reinterpret_cast<__m256i*>(to + x), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + x)));
#endif
  for (; x < count; ++x) to[x] = from[x];
}

// Makes numbers written past the caches visible to other threads.
inline void finish_writing() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

// ---- formats of half the width ---------------------------------------------------------------------------------------
inline float of_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

inline uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

// bfloat16 is the upper half of a float.
inline float of_bfloat16(uint16_t number) { return of_bits(uint32_t{number} << 16); }

// To nearest, ties to even; the rest of a NaN could round to infinity.
inline uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_of(number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// A float16 has the bits of a float of 10 digits whose exponent is 112 smaller; infinity and NaN keep the largest one.
inline float of_half(uint16_t number) {
  const uint32_t sign = uint32_t{number & 0x8000u} << 16, bits = uint32_t{number & 0x7fffu} << 13;
  const uint32_t finite = bits_of(of_bits(bits) * 0x1p112f);
  return of_bits(sign | ((number & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : finite));
}

inline uint16_t to_half(float number) {
  const uint32_t all = bits_of(number), sign = all >> 16 & 0x8000, bits = all & 0x7fffffff;
  const uint32_t below = bits_of(of_bits(bits) + 0.5f) - bits_of(0.5f);  // less than 2^-14: 0.5 leaves multiples of 2^-24
  const uint32_t usual = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;   // the exponent minus 112, rounded to even
  const uint32_t large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  return static_cast<uint16_t>(sign | (bits >= 0x47800000 ? large : bits < 0x38800000 ? below : usual));
}

// `count` floats at `to` = numbers.
inline void widen(const Numbers& from, int64_t count, float* __restrict to) {
  const uint16_t* numbers = static_cast<const uint16_t*>(from.start);
  int64_t i = 0;
  if (from.format == Format::FLOAT) return void(std::memcpy(to, from.start, count * sizeof(float)));
  if (from.format == Format::BFLOAT16) {
    for (; i < count; ++i) to[i] = of_bfloat16(numbers[i]);
    return;
  }
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + i))));
#endif
  for (; i < count; ++i) to[i] = of_half(numbers[i]);
}

// Numbers = `count` floats at `from`.
inline void narrow(const float* __restrict from, int64_t count, const Numbers& to) {
  uint16_t* __restrict numbers = static_cast<uint16_t*>(to.start);
  int64_t i = 0;
  if (to.format == Format::FLOAT) return void(std::memcpy(to.start, from, count * sizeof(float)));
  if (to.format == Format::BFLOAT16) {
    for (; i < count; ++i) numbers[i] = to_bfloat16(from[i]);
    return;
  }
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < count; ++i) numbers[i] = to_half(from[i]);
}

// Numbers as floats: where they are, or in `room`.
inline const float* read(const Numbers& from, int64_t count, float* room) {
  if (from.format == Format::FLOAT) return static_cast<const float*>(from.start);
  widen(from, count, room);
  return room;
}

// Numbers = `count` floats at `from`, past the caches if `past`.
inline void write(const float* from, int64_t count, const Numbers& to, bool past) {
  constexpr int64_t SOME = 1024;
  if (!past) return narrow(from, count, to);
  if (to.format == Format::FLOAT) return write_past(from, static_cast<float*>(to.start), count);
  uint16_t some[SOME];
  for (int64_t first = 0; first < count; first += SOME) {
    const int64_t length = least(SOME, count - first);
    narrow(from + first, length, {some, to.format});
    write_past(some, static_cast<uint16_t*>(to.start) + first, length);
  }
}

// ---- functions -------------------------------------------------------------------------------------------------------
// e^x for x ≤ 0 to about 2 roundings: 2^n · e^r with n = round(x / ln 2); below -104 it is 0. Where it is less than the
// smallest normal number, 2^(n + 64) is one.
inline Lanes exponential(Lanes x) {
  using Whole = int32_t __attribute__((vector_size(WIDTH * sizeof(int32_t))));
  const Lanes bounded = x < -104.0f ? Lanes{} - 104.0f : x;
  const Lanes shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the sum rounds to whole numbers
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in products
  Lanes e = 1.0f / 720 + r * (1.0f / 5040);
  e = 1.0f / 120 + r * e;
  e = 1.0f / 24 + r * e;
  e = 1.0f / 6 + r * e;
  e = 0.5f + r * e;
  e = 1 + r * (1 + r * e);
  const Whole power = (__builtin_convertvector(n, Whole) + 127 + 64) << 23;
  Lanes factor;
  std::memcpy(&factor, &power, sizeof(factor));
  return x < -104.0f ? Lanes{} : e * factor * 0x1p-64f;
}

inline float largest_of(Lanes lanes) {
  float most = lanes[0];
  for (int lane = 1; lane < WIDTH; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}

}  // namespace
}  // namespace farfield
