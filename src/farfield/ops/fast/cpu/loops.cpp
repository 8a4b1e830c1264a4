// The loops of the CPU kernels: they read a grid once. Compiled once for each instruction set, as LEVEL.
//
// Sizes are runtime values, addresses 64 bits wide. A sum adds at most CHUNK numbers in float and then continues in
// double, so that rounding does not grow with the grid. Its order does not depend on the number of threads.
//
// Nothing here is shared with another file's object: a template of the standard library would be compiled for the most
// able processor and run on all of them.

#define WIDTH 8

#include "lanes.h"
#include "loops.h"

#define NAME_OF(level) #level
#define TEXT_OF(level) NAME_OF(level)

namespace farfield {
namespace {

// Numbers between the current address and the prefetched one. With a quarter of them reading 17 MB took 1.4 to 1.7 times
// as long on two cores of an AMD EPYC (Zen 4); with four times of them, 1.3 times.
constexpr int64_t AHEAD = 2048;

// Runs `work<4>(i)` for i = 0, 4, 8, … and `work<1>(i)` for the rest: four at a time share loads and hide latency.
template <class Work>
inline void by_fours(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) work.template operator()<4>(i);
  for (; i < count; ++i) work.template operator()<1>(i);
}

// to = number + factor · from; with `more` the numbers that follow `to` are written soon too.
inline void add_multiple(
    float number, float factor, const float* __restrict from, float* __restrict to, int64_t count, bool more) {
  int64_t x = 0;
  for (; x + WIDTH <= count; x += WIDTH) {
    if (more) __builtin_prefetch(to + x + AHEAD, 1);
    store(to + x, number + factor * load(from + x));
  }
  for (; x < count; ++x) to[x] = number + factor * from[x];
}

// Whether results are computed where they stay, and not converted or written past the caches from somewhere else.
inline bool are_in_place(const Numbers& to, bool past) { return to.format == Format::FLOAT && !past; }

// Calls `fill(to, first, length)` for parts of `count` numbers, and writes them past the caches if `past`.
template <class Fill>
inline void write_parts(const Numbers& to, int64_t count, bool past, const Fill& fill) {
  float part[CHUNK];
  const bool in_place = are_in_place(to, past);
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t length = least(CHUNK, count - first);
    fill(in_place ? static_cast<float*>(to.start) + first : part, first, length);
    if (!in_place) write(part, length, to.from(first), past);
  }
}

// columns += `K` rows; sums = the sum of each row.
template <int K>
inline void add_rows(const float* rows, int64_t width, float* __restrict columns, double* sums) {
  clear(sums, K);
  for (int64_t first = 0; first < width; first += CHUNK) {
    const int64_t last = least(width, first + CHUNK);
    Lanes lanes[K] = {};
    int64_t x = first;
    for (; x + WIDTH <= last; x += WIDTH) {
      Lanes several = {};
      for (int k = 0; k < K; ++k) {
        __builtin_prefetch(rows + K * x + k * WIDTH + AHEAD);  // in the order of memory, across rows
        const Lanes row = load(rows + k * width + x);
        lanes[k] += row;
        several += row;
      }
      store(columns + x, load(columns + x) + several);
    }
    for (int k = 0; k < K; ++k) {
      float sum = sum_of(lanes[k]);
      for (int64_t rest = x; rest < last; ++rest) {
        sum += rows[k * width + rest];
        columns[rest] += rows[k * width + rest];
      }
      sums[k] += sum;
    }
  }
}

// From `(b, c, *size)` to `(b, c, Σ size)`: for each index of each axis the sum over all other axes, or their mean.
void sum_axes(const SumAxes& of, int64_t begin, int64_t end) {
  const Axes& axes = of.axes;
  const int64_t width = axes.width, height = axes.height;
  const Held<float> columns(width), room(of.grid.format == Format::FLOAT ? 0 : 4 * width);
  const Held<double> sums(axes.total);
  double *last = sums.data() + axes.total - width, *upright = last - height;
  int64_t held = 0;
  const auto flush = [&] {
    for (int64_t x = 0; x < width; ++x) last[x] += columns[x];
    clear(columns.data(), width);
    held = 0;
  };
  for (int64_t p = begin; p < end; ++p) {
    clear(sums.data(), axes.total);
    for (int64_t slab = 0; slab < axes.slabs; ++slab) {
      const Numbers rows = of.grid.from((p * axes.slabs + slab) * height * width);
      double sum = 0;
      by_fours(height, [&]<int K>(int64_t y) {
        double row_sums[K];
        add_rows<K>(read(rows.from(y * width), K * width, room.data()), width, columns.data(), row_sums);
        for (int k = 0; k < K; ++k) {
          upright[y + k] += row_sums[k];
          sum += row_sums[k];
        }
        if ((held += K) >= ROWS) flush();
      });
      axes.places(slab, [&](int64_t where) { sums[where] += sum; });
    }
    flush();
    const double* sum = sums.data();
    float* result = of.out + p * axes.total;
    for (int64_t axis = 0; axis < axes.count; ++axis) {
      const double share = of.means ? axes.share(axis) : 1.0;
      for (int64_t i = 0; i < axes.size[axis]; ++i) *result++ = static_cast<float>(*sum++ * share);
    }
  }
}

// From `(b, c, Σ size)` to `(b, c, *size)`: each position is the sum of the numbers at its indices, first axis first.
// With `means` these are first divided by the number of positions of the index: the gradient of means.
void outer_sum(const OuterSum& of, int64_t begin, int64_t end) {
  const Axes& axes = of.axes;
  const int64_t width = axes.width, height = axes.height;
  const bool in_place = are_in_place(of.out, of.past);
  const int64_t rows = in_place ? height : width > CHUNK ? 1 : CHUNK / width;
  const Held<float> shares(axes.total), part(in_place ? 0 : rows * width);
  for (int64_t p = begin; p < end; ++p) {
    const float* vector = of.vectors + p * axes.total;
    if (of.means) {
      int64_t place = 0;
      for (int64_t axis = 0; axis < axes.count; ++axis) {
        const float share = static_cast<float>(axes.share(axis));
        for (int64_t i = 0; i < axes.size[axis]; ++i, ++place) shares[place] = vector[place] * share;
      }
      vector = shares.data();
    }
    const float *last = vector + axes.total - width, *upright = last - height;
    for (int64_t slab = 0; slab < axes.slabs; ++slab) {
      float sum = 0;
      axes.places(slab, [&](int64_t where) { sum += vector[where]; });
      for (int64_t first = 0; first < height; first += rows) {
        const int64_t length = least(rows, height - first);
        const Numbers own = of.out.from(((p * axes.slabs + slab) * height + first) * width);
        float* result = in_place ? static_cast<float*>(own.start) : part.data();
        for (int64_t y = 0; y < length; ++y)
          add_multiple(sum + upright[first + y], 1, last, result + y * width, width, in_place);
        if (!in_place) write(result, length * width, own, of.past);
      }
    }
  }
  finish_writing();
}

// row += Σ factors · positions, over `K` channels.
template <int K>
inline void add_scaled(
    const float* factors, const float* positions, int64_t stride, float* __restrict row, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += factors[k] * positions[k * stride + j];
    row[j] += sum;
  }
}

// totals = the sum of each of `K` channels; products = the sum of the channel times the weights.
template <int K>
inline void sum_channels(
    const float* positions, int64_t stride, const float* weights, int64_t count, double* totals, double* products) {
  clear(totals, K);
  clear(products, K);
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t last = least(count, first + CHUNK);
    Lanes total[K] = {}, product[K] = {};
    int64_t j = first;
    for (; j + WIDTH <= last; j += WIDTH) {
      const Lanes weight = load(weights + j);
      for (int k = 0; k < K; ++k) {
        const Lanes each = load(positions + k * stride + j);
        total[k] += each;
        product[k] += each * weight;
      }
    }
    for (int k = 0; k < K; ++k) {
      float sum = sum_of(total[k]), weighed = sum_of(product[k]);
      for (int64_t rest = j; rest < last; ++rest) {
        sum += positions[k * stride + rest];
        weighed += positions[k * stride + rest] * weights[rest];
      }
      totals[k] += sum;
      products[k] += weighed;
    }
  }
}

// The rows `offset + matrix · positions`, and for each block of positions the sums over it of [1; weights] ⊗ positions;
// without weights the rows are the weights. A block is still in a cache when it is read a second time.
void project_and_sum(const ProjectAndSum& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.count;
  const bool widened = of.positions.format != Format::FLOAT;
  const Held<float> room(widened ? channels * (count / of.blocks + 1) : 0);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.blocks, block = task % of.blocks;
    const int64_t first = count * block / of.blocks, length = count * (block + 1) / of.blocks - first;
    const Numbers there = of.positions.from(b * channels * count + first);
    for (int64_t c = 0; widened && c < channels; ++c) widen(there.from(c * count), length, &room[c * length]);
    const float* own = widened ? room.data() : static_cast<const float*>(there.start);
    const int64_t stride = widened ? length : count;
    float* row = of.out + b * of.rows * count + first;
    for (int64_t r = 0; r < of.rows * count; r += count) {
      if (of.offset) std::memcpy(row + r, of.offset + b * of.rows * count + r + first, length * sizeof(float));
      else clear(row + r, length);
    }
    by_fours(channels, [&]<int K>(int64_t c) {
      for (int64_t r = 0; r < of.rows; ++r)
        add_scaled<K>(of.matrix + (b * of.rows + r) * channels + c, own + c * stride, stride, row + r * count, length);
    });
    const float* weight = of.weights ? of.weights + b * (of.slots - 1) * count + first : row;
    double* part = of.sums + (block * of.batch + b) * of.slots * channels;
    by_fours(channels, [&]<int K>(int64_t c) {
      for (int64_t s = 1; s < of.slots; ++s)
        sum_channels<K>(own + c * stride, stride, weight + (s - 1) * count, length, part + c, part + s * channels + c);
    });
  }
}

// The response of a position: the mean position times its score, plus, with `both`, the mean of positions times scores.
void respond_to_scores(const RespondToScores& of, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t b = p / of.channels, c = p % of.channels, head = c / (of.channels / of.heads);
    const float* own = of.sums + b * (1 + of.heads) * of.channels + c;
    const float mean = own[0] / static_cast<float>(of.count);
    const float start = of.both ? own[(1 + head) * of.channels] / static_cast<float>(of.count) : 0.0f;
    const float* score = of.scores + (b * of.heads + head) * of.count;
    write_parts(of.out.from(p * of.count), of.count, of.past, [&](float* result, int64_t first, int64_t length) {
      add_multiple(start, mean, score + first, result, length, !of.past);
    });
  }
  finish_writing();
}

// The gradient of the positions, (∂mean + ∂u s) / n + matrix · ∂s.
void spread_gradients(const SpreadGradients& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.count, heads = of.heads;
  const float share = 1.0f / static_cast<float>(count);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t b = p / channels, c = p % channels, head = c / (channels / heads);
    const float start = of.sums[(b * (1 + heads) + 1 + head) * channels + c] * share;
    const float half = of.halves[(b * heads + head) * channels + c];
    write_parts(of.out.from(p * count), count, of.past, [&](float* result, int64_t first, int64_t length) {
      add_multiple(start, half, of.scores + (b * heads + head) * count + first, result, length, !of.past);
      for (int64_t h = 0; h < heads; ++h)
        add_scaled<1>(of.matrix + h * channels + c, of.rows + (b * heads + h) * count + first, count, result, length);
    });
  }
  finish_writing();
}

// The gradient of a number before the clamp: none if it is at a bound.
template <class Number>
inline Number unclamped(Number norm, Number grad, float low, float high) {
  const Number below = norm < high ? grad : Number{};
  return norm > low ? below : Number{};
}

// The sums over a channel of which the gradient of its norm consists.
void sum_norm_gradient(const NormGradient& of, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) {
    const float mean = of.means[c], factor = of.factors[c], shift = of.shifts[c];
    double *sum = of.sums + c, *product = sum + of.channels;
    *sum = *product = 0;
    for (int64_t b = 0; b < of.batch; ++b) {
      const float* from = of.grid + (b * of.channels + c) * of.count;
      const float* grads = of.grad_output + (b * of.channels + c) * of.count;
      for (int64_t first = 0; first < of.count; first += CHUNK) {
        const int64_t last = least(of.count, first + CHUNK);
        Lanes some = {}, products = {};
        int64_t i = first;
        for (; i + WIDTH <= last; i += WIDTH) {
          const Lanes each = load(from + i);
          const Lanes grad = unclamped(factor * each + shift, load(grads + i), of.low, of.high);
          some += grad;
          products += grad * (each - mean);
        }
        float rest = sum_of(some), rest_products = sum_of(products);
        for (; i < last; ++i) {
          const float grad = unclamped(factor * from[i] + shift, grads[i], of.low, of.high);
          rest += grad;
          rest_products += grad * (from[i] - mean);
        }
        *sum += rest;
        *product += rest_products;
      }
    }
  }
}

// The gradient of a channel: factor · (g - mean of g - (x - mean) / variance · mean of g (x - mean)).
void spread_norm_gradient(const NormGradient& of, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) {
    const float mean = of.means[c], factor = of.factors[c], shift = of.shifts[c], start = of.starts[c], slope = of.slopes[c];
    for (int64_t b = 0; b < of.batch; ++b) {
      const int64_t place = (b * of.channels + c) * of.count;
      const float *from = of.grid + place, *grads = of.grad_output + place;
      float* __restrict result = of.out + place;
#pragma omp simd
      for (int64_t i = 0; i < of.count; ++i) {
        const float grad = unclamped(factor * from[i] + shift, grads[i], of.low, of.high);
        result[i] = factor * grad + (start + slope * (from[i] - mean));
      }
    }
  }
}

// ---- channels-last: the channels of a position are contiguous --------------------------------------------------------
// row and columns += positions of `K` vectors of channels each.
template <int K>
inline void add_positions(const float* from, int64_t stride, float* columns, float* row, int64_t count) {
  Lanes sums[K];
  for (int k = 0; k < K; ++k) sums[k] = load(row + k * WIDTH);
  for (int64_t x = 0; x < count; ++x, from += stride, columns += SOME_CHANNELS)
    for (int k = 0; k < K; ++k) {
      const Lanes each = load(from + k * WIDTH);
      sums[k] += each;
      store(columns + k * WIDTH, load(columns + k * WIDTH) + each);
    }
  for (int k = 0; k < K; ++k) store(row + k * WIDTH, sums[k]);
}

void sum_axes_wide(const SumAxes& of, int64_t begin, int64_t end) {
  const Axes& axes = of.axes;
  const int64_t width = axes.width, height = axes.height, chunks = (of.channels + SOME_CHANNELS - 1) / SOME_CHANNELS;
  const bool widened = of.grid.format != Format::FLOAT;
  const Held<float> columns(width * SOME_CHANNELS), row(SOME_CHANNELS);
  const Held<float> room(widened ? least(width, CHUNK) * SOME_CHANNELS : 0);
  const Held<double> sums(axes.total * SOME_CHANNELS), slab_sums(SOME_CHANNELS);
  double *last = sums.data() + (axes.total - width) * SOME_CHANNELS, *upright = last - height * SOME_CHANNELS;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / chunks, first_channel = task % chunks * SOME_CHANNELS;
    const int64_t channels = least(SOME_CHANNELS, of.channels - first_channel);
    int64_t held = 0;
    const auto flush = [&] {
      for (int64_t i = 0; i < width * SOME_CHANNELS; ++i) last[i] += columns[i];
      clear(columns.data(), width * SOME_CHANNELS);
      held = 0;
    };
    clear(sums.data(), axes.total * SOME_CHANNELS);
    for (int64_t slab = 0; slab < axes.slabs; ++slab) {
      clear(slab_sums.data(), SOME_CHANNELS);
      for (int64_t y = 0; y < height; ++y) {
        const Numbers there = of.grid.from(((b * axes.slabs + slab) * height + y) * width * of.channels + first_channel);
        for (int64_t first = 0; first < width; first += CHUNK) {
          const int64_t length = least(CHUNK, width - first), stride = widened ? SOME_CHANNELS : of.channels;
          const Numbers own = there.from(first * of.channels);
          for (int64_t x = 0; widened && x < length; ++x)
            widen(own.from(x * of.channels), channels, &room[x * SOME_CHANNELS]);
          const float* from = widened ? room.data() : static_cast<const float*>(own.start);
          clear(row.data(), SOME_CHANNELS);
          int64_t c = 0;
          for (; c + 4 * WIDTH <= channels; c += 4 * WIDTH)
            add_positions<4>(from + c, stride, &columns[first * SOME_CHANNELS + c], &row[c], length);
          for (; c + WIDTH <= channels; c += WIDTH)
            add_positions<1>(from + c, stride, &columns[first * SOME_CHANNELS + c], &row[c], length);
          for (; c < channels; ++c)
            for (int64_t x = 0; x < length; ++x) {
              row[c] += from[x * stride + c];
              columns[(first + x) * SOME_CHANNELS + c] += from[x * stride + c];
            }
          for (int64_t i = 0; i < channels; ++i) {
            upright[y * SOME_CHANNELS + i] += row[i];
            slab_sums[i] += row[i];
          }
        }
        if (++held == ROWS) flush();
      }
      axes.places(slab, [&](int64_t where) {
        for (int64_t i = 0; i < channels; ++i) sums[where * SOME_CHANNELS + i] += slab_sums[i];
      });
    }
    flush();
    const double* sum = sums.data();
    float* out = of.out + (b * of.channels + first_channel) * axes.total;
    for (int64_t axis = 0; axis < axes.count; ++axis) {
      const double share = of.means ? axes.share(axis) : 1.0;
      for (int64_t i = 0; i < axes.size[axis]; ++i, ++out, sum += SOME_CHANNELS)
        for (int64_t c = 0; c < channels; ++c) out[c * axes.total] = static_cast<float>(sum[c] * share);
    }
  }
}

// Calls `fill(to, position)` for `count` positions from `first` on, and writes them past the caches if `past`.
template <class Fill>
inline void write_positions(
    const Numbers& to, int64_t first, int64_t count, int64_t channels, bool past, const Fill& fill) {
  const bool in_place = are_in_place(to, past);
  const int64_t some = in_place ? count : channels > CHUNK ? 1 : CHUNK / channels;
  const Held<float> part(in_place ? 0 : some * channels);
  for (int64_t start = first; start < first + count; start += some) {
    const int64_t length = least(some, first + count - start);
    const Numbers own = to.from(start * channels);
    float* result = in_place ? static_cast<float*>(own.start) : part.data();
    for (int64_t i = 0; i < length; ++i) fill(result + i * channels, start + i);
    if (!in_place) write(result, length * channels, own, past);
  }
}

void outer_sum_wide(const OuterSum& of, int64_t begin, int64_t end) {
  const Axes& axes = of.axes;
  const int64_t width = axes.width, height = axes.height, rows = axes.slabs * height, channels = of.channels;
  const Held<float> shares(of.means ? axes.total * channels : 0), base(channels);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.parts, part = task % of.parts;
    const float* vectors = of.vectors + b * axes.total * channels;
    if (of.means) {
      int64_t place = 0;
      for (int64_t axis = 0; axis < axes.count; ++axis) {
        const float share = static_cast<float>(axes.share(axis));
        for (int64_t i = 0; i < axes.size[axis] * channels; ++i, ++place) shares[place] = vectors[place] * share;
      }
      vectors = shares.data();
    }
    const float *last = vectors + (axes.total - width) * channels, *upright = last - height * channels;
    for (int64_t row = rows * part / of.parts; row < rows * (part + 1) / of.parts; ++row) {
      clear(base.data(), channels);
      axes.places(row / height, [&](int64_t where) {
        for (int64_t c = 0; c < channels; ++c) base[c] += vectors[where * channels + c];
      });
      for (int64_t c = 0; c < channels; ++c) base[c] += upright[row % height * channels + c];
      const Numbers to = of.out.from((b * rows + row) * width * channels);
      write_positions(to, 0, width, channels, of.past, [&](float* __restrict result, int64_t x) {
        const float *own = last + x * channels, *start = base.data();
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) result[c] = start[c] + own[c];
      });
    }
  }
  finish_writing();
}

inline float dot(const float* one, const float* other, int64_t count) {
  Lanes total = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) total += load(one + i) * load(other + i);
  float sum = sum_of(total);
  for (; i < count; ++i) sum += one[i] * other[i];
  return sum;
}

// totals += `K` positions, and, with weights, totals += weights · positions
template <int K>
inline void add_weighted(
    const float* positions, int64_t channels, const float* weights, float* __restrict totals) {
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += weights ? weights[k] * positions[k * channels + c] : positions[k * channels + c];
    totals[c] += sum;
  }
}

void project_and_sum_wide(const ProjectAndSum& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.count;
  const Held<float> held(of.slots * channels), room(of.positions.format == Format::FLOAT ? 0 : 4 * channels);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.blocks, block = task % of.blocks;
    const int64_t first = count * block / of.blocks, last = count * (block + 1) / of.blocks;
    double* sums = of.sums + (block * of.batch + b) * of.slots * channels;
    for (int64_t start = first; start < last; start += CHUNK) {
      const int64_t length = least(CHUNK, last - start);
      by_fours(length, [&]<int K>(int64_t j) {
        const float* own = read(of.positions.from((b * count + start + j) * channels), K * channels, room.data());
        for (int64_t r = 0; r < of.rows; ++r) {
          const int64_t place = (b * of.rows + r) * count + start + j;
          for (int k = 0; k < K; ++k)
            of.out[place + k] = (of.offset ? of.offset[place + k] : 0) +
                                dot(of.matrix + (b * of.rows + r) * channels, own + k * channels, channels);
        }
        add_weighted<K>(own, channels, nullptr, held.data());
        const float* weights = of.weights ? of.weights + b * (of.slots - 1) * count : of.out + b * of.rows * count;
        for (int64_t s = 1; s < of.slots; ++s)
          add_weighted<K>(own, channels, weights + (s - 1) * count + start + j, &held[s * channels]);
      });
      for (int64_t i = 0; i < of.slots * channels; ++i) sums[i] += held[i];
      clear(held.data(), of.slots * channels);
    }
  }
}

void respond_to_scores_wide(const RespondToScores& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, depth = channels / of.heads;
  const Held<float> means(channels), starts(channels);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.parts, part = task % of.parts;
    const int64_t first = of.count * part / of.parts, last = of.count * (part + 1) / of.parts;
    const float* own = of.sums + b * (1 + of.heads) * channels;
    for (int64_t c = 0; c < channels; ++c) {
      means[c] = own[c] / static_cast<float>(of.count);
      starts[c] = of.both ? own[(1 + c / depth) * channels + c] / static_cast<float>(of.count) : 0;
    }
    const float* scores = of.scores + b * of.heads * of.count;
    const Numbers to = of.out.from(b * of.count * channels);
    write_positions(to, first, last - first, channels, of.past, [&](float* __restrict result, int64_t j) {
      for (int64_t h = 0; h < of.heads; ++h) {
        const float score = scores[h * of.count + j], *mean = &means[h * depth], *start = &starts[h * depth];
        float* place = result + h * depth;
#pragma omp simd
        for (int64_t c = 0; c < depth; ++c) place[c] = start[c] + mean[c] * score;
      }
    });
  }
  finish_writing();
}

void spread_gradients_wide(const SpreadGradients& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.count, heads = of.heads, depth = channels / heads;
  const float share = 1.0f / static_cast<float>(count);
  const Held<float> starts(channels), halves(channels);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.parts, part = task % of.parts;
    const int64_t first = count * part / of.parts, last = count * (part + 1) / of.parts;
    for (int64_t c = 0; c < channels; ++c) {
      starts[c] = of.sums[(b * (1 + heads) + 1 + c / depth) * channels + c] * share;
      halves[c] = of.halves[(b * heads + c / depth) * channels + c];
    }
    const Numbers to = of.out.from(b * count * channels);
    write_positions(to, first, last - first, channels, of.past, [&](float* __restrict result, int64_t j) {
      for (int64_t h = 0; h < heads; ++h) {
        const float score = of.scores[(b * heads + h) * count + j], *half = &halves[h * depth], *start = &starts[h * depth];
        float* place = result + h * depth;
#pragma omp simd
        for (int64_t c = 0; c < depth; ++c) place[c] = start[c] + half[c] * score;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const float row = of.rows[(b * heads + h) * count + j], *factors = of.matrix + h * channels;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) result[c] += factors[c] * row;
      }
    });
  }
  finish_writing();
}

// sums += the gradients of `K` positions, products += those times their distance from the mean.
template <int K>
inline void add_norm_gradients(
    const NormGradient& of, const float* from, const float* grads, float* __restrict sums, float* __restrict products) {
  const int64_t channels = of.channels;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    float sum = 0, product = 0;
    for (int k = 0; k < K; ++k) {
      const float each = from[k * channels + c];
      const float grad = unclamped(of.factors[c] * each + of.shifts[c], grads[k * channels + c], of.low, of.high);
      sum += grad;
      product += grad * (each - of.means[c]);
    }
    sums[c] += sum;
    products[c] += product;
  }
}

void sum_norm_gradient_wide(const NormGradient& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.batch * of.count;
  const Held<float> held(2 * channels);
  for (int64_t part = begin; part < end; ++part) {
    double* sums = of.sums + part * 2 * channels;
    clear(sums, 2 * channels);
    const int64_t last = count * (part + 1) / of.parts;
    for (int64_t first = count * part / of.parts; first < last; first += ROWS) {
      by_fours(least(ROWS, last - first), [&]<int K>(int64_t i) {
        const int64_t place = (first + i) * channels;
        add_norm_gradients<K>(of, of.grid + place, of.grad_output + place, held.data(), held.data() + channels);
      });
      for (int64_t i = 0; i < 2 * channels; ++i) sums[i] += held[i];
      clear(held.data(), 2 * channels);
    }
  }
}

void spread_norm_gradient_wide(const NormGradient& of, int64_t begin, int64_t end) {
  const int64_t channels = of.channels, count = of.batch * of.count;
  for (int64_t position = count * begin / of.parts; position < count * end / of.parts; ++position) {
    const float *from = of.grid + position * channels, *grads = of.grad_output + position * channels;
    float* __restrict result = of.out + position * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float grad = unclamped(of.factors[c] * from[c] + of.shifts[c], grads[c], of.low, of.high);
      result[c] = of.factors[c] * grad + (of.starts[c] + of.slopes[c] * (from[c] - of.means[c]));
    }
  }
}

}  // namespace

extern const Loops LEVEL;
const Loops LEVEL{
    TEXT_OF(LEVEL),
    &sum_axes,
    &outer_sum,
    &project_and_sum,
    &respond_to_scores,
    &spread_gradients,
    &sum_norm_gradient,
    &spread_norm_gradient,
    {&sum_axes_wide, &outer_sum_wide, &project_and_sum_wide, &respond_to_scores_wide, &spread_gradients_wide,
     &sum_norm_gradient_wide, &spread_norm_gradient_wide}};

}  // namespace farfield
