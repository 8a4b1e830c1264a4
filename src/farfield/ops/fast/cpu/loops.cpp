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

constexpr int64_t AHEAD = 512;  // numbers between the current address and the prefetched one

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

// Calls `fill(to, first, length)` for parts of `count` numbers, and writes them past the caches if `past`.
template <class Fill>
inline void write(float* to, int64_t count, bool past, const Fill& fill) {
  float part[CHUNK];
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t length = least(CHUNK, count - first);
    fill(past ? part : to + first, first, length);
    if (past) write_past(part, to + first, length);
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
  const Held<float> columns(width);
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
      const float* rows = of.grid + (p * axes.slabs + slab) * height * width;
      double sum = 0;
      by_fours(height, [&]<int K>(int64_t y) {
        double row_sums[K];
        add_rows<K>(rows + y * width, width, columns.data(), row_sums);
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
  const int64_t rows = !of.past ? height : width > CHUNK ? 1 : CHUNK / width;
  const Held<float> shares(axes.total), part(of.past ? rows * width : 0);
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
        float* own = of.out + ((p * axes.slabs + slab) * height + first) * width;
        float* result = of.past ? part.data() : own;
        for (int64_t y = 0; y < length; ++y)
          add_multiple(sum + upright[first + y], 1, last, result + y * width, width, !of.past);
        if (of.past) write_past(result, own, length * width);
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
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / of.blocks, block = task % of.blocks;
    const int64_t first = count * block / of.blocks, length = count * (block + 1) / of.blocks - first;
    const float* own = of.positions + b * channels * count + first;
    float* row = of.out + b * of.rows * count + first;
    for (int64_t r = 0; r < of.rows * count; r += count) {
      if (of.offset) std::memcpy(row + r, of.offset + b * of.rows * count + r + first, length * sizeof(float));
      else clear(row + r, length);
    }
    by_fours(channels, [&]<int K>(int64_t c) {
      for (int64_t r = 0; r < of.rows; ++r)
        add_scaled<K>(of.matrix + (b * of.rows + r) * channels + c, own + c * count, count, row + r * count, length);
    });
    const float* weight = of.weights ? of.weights + b * (of.slots - 1) * count + first : row;
    double* part = of.sums + (block * of.batch + b) * of.slots * channels;
    by_fours(channels, [&]<int K>(int64_t c) {
      for (int64_t s = 1; s < of.slots; ++s)
        sum_channels<K>(own + c * count, count, weight + (s - 1) * count, length, part + c, part + s * channels + c);
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
    write(of.out + p * of.count, of.count, of.past, [&](float* result, int64_t first, int64_t length) {
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
    write(of.out + p * count, count, of.past, [&](float* result, int64_t first, int64_t length) {
      add_multiple(start, half, of.scores + (b * heads + head) * count + first, result, length, !of.past);
      for (int64_t h = 0; h < heads; ++h)
        add_scaled<1>(of.matrix + h * channels + c, of.rows + (b * heads + h) * count + first, count, result, length);
    });
  }
  finish_writing();
}

void softmax(const Softmax& of, int64_t begin, int64_t end) {
  constexpr float LOWEST = -__builtin_inff();
  for (int64_t row = begin; row < end; ++row) {
    float* own = of.rows + row * of.count;
    Lanes most = Lanes{} + LOWEST, total = {};
    for (int64_t i = 0; i < of.count; i += WIDTH) {
      const Lanes each = load_some(own + i, of.count - i, of.scale, LOWEST);
      most = each > most ? each : most;
    }
    const float largest = largest_of(most);
    double sum = 0;
    for (int64_t i = 0, held = 0; i < of.count; i += WIDTH) {
      const Lanes each = exponential(load_some(own + i, of.count - i, of.scale, LOWEST) - largest);
      store_some(own + i, of.count - i, each);
      total += each;
      if (++held == CHUNK / WIDTH || i + WIDTH >= of.count) {
        sum += sum_of(total);
        total = Lanes{};
        held = 0;
      }
    }
    const float share = static_cast<float>(1 / sum);
    for (int64_t i = 0; i < of.count; ++i) own[i] *= share;
  }
}

// With weights A and their gradient P, ∂S = A ∘ (P − row sums of A ∘ P); keys are queries, so that both S and Sᵀ count.
void softmax_gradient(const SoftmaxGradient& of, int64_t begin, int64_t end) {
  constexpr int64_t TILE = 16;
  const int64_t count = of.count;
  for (int64_t matrix = begin; matrix < end; ++matrix) {
    const float* weights = of.weights + matrix * count * count;
    float* products = of.products + matrix * count * count;
    for (int64_t row = 0; row < count * count; row += count) {
      double sum = 0;
      for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t length = least(CHUNK, count - first);
        Lanes total = {};
        for (int64_t i = first; i < first + length; i += WIDTH)
          total += load_some(weights + row + i, count - i, 1, 0) * load_some(products + row + i, count - i, 1, 0);
        sum += sum_of(total);
      }
      const float mean = static_cast<float>(sum);
#pragma omp simd
      for (int64_t i = row; i < row + count; ++i) products[i] = of.scale * weights[i] * (products[i] - mean);
    }
    for (int64_t top = 0; top < count; top += TILE)
      for (int64_t left = 0; left <= top; left += TILE)
        for (int64_t i = top; i < least(count, top + TILE); ++i)
          for (int64_t j = left; j < least(i + 1, left + TILE); ++j)
            products[i * count + j] = products[j * count + i] = products[i * count + j] + products[j * count + i];
  }
}

void add(const Add& of, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) of.out[i] += of.numbers[i];
}

}  // namespace

extern const Loops LEVEL;
const Loops LEVEL{TEXT_OF(LEVEL),     &sum_axes, &outer_sum,        &project_and_sum, &respond_to_scores,
                  &spread_gradients, &softmax,  &softmax_gradient, &add};

}  // namespace farfield
