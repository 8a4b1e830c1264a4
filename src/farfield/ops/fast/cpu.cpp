// The vectorized CPU kernels: they read a grid once. Only `farfield kernels --build` compiles this file.
//
// Sizes are runtime values, addresses 64 bits wide. A sum adds at most CHUNK numbers in float and then continues in
// double, so that rounding does not grow with the grid. Its order does not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t CHUNK = 1024;     // contiguous numbers that are summed in float
constexpr int64_t ROWS = 64;        // consecutive rows that are summed in float
constexpr int64_t BLOCK = 1 << 17;  // numbers that stay in a level-2 cache between two reads
constexpr int64_t GRAIN = 1 << 15;  // least numbers of a thread
constexpr int WIDTH = 8;
constexpr int64_t AHEAD = 512;      // numbers between the current address and the prefetched one
// Bytes from which a response or a gradient is written past the caches. In training the output is new memory that no
// cache holds: a plain store would first load each line, and run at half the speed of the memory.
constexpr int64_t PAST_IN_TRAINING = int64_t{1} << 24, PAST = int64_t{1} << 27;

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

int64_t tasks_per_thread(int64_t numbers_per_task) {
  return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, numbers_per_task));
}

// Runs `work<4>(i)` for i = 0, 4, 8, … and `work<1>(i)` for the rest: four at a time share loads and hide latency.
template <class Work>
inline void by_fours(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) work.template operator()<4>(i);
  for (; i < count; ++i) work.template operator()<1>(i);
}

// The axes of a grid `(batch, channels, *size)`: the last, `width`, is contiguous; the last two, `height` and `width`,
// make a slab; the other axes count slabs.
struct Axes {
  std::vector<int64_t> size;
  int64_t width, height, slabs = 1, total = 0;

  explicit Axes(at::IntArrayRef all) : size(all.vec()) {
    for (int64_t extent : size) total += extent;
    width = size.back();
    size.pop_back();
    height = size.back();
    size.pop_back();
    for (int64_t extent : size) slabs *= extent;
  }

  int64_t plane() const { return slabs * height * width; }

  // Calls `each` with the place of each index of a slab in the concatenated axes.
  template <class Each>
  void places(int64_t slab, const Each& each) const {
    int64_t behind = slabs, before = 0;
    for (int64_t extent : size) {
      behind /= extent;
      each(before + slab / behind % extent);
      before += extent;
    }
  }
};

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

bool past_caches(const Tensor& out, bool training) {
  return out.numel() * static_cast<int64_t>(sizeof(float)) >= (training ? PAST_IN_TRAINING : PAST);
}

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

// Calls `fill(to, first, length)` for parts of `count` numbers, and writes them past the caches if `past`.
template <class Fill>
inline void write(float* to, int64_t count, bool past, const Fill& fill) {
  float part[CHUNK];
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t length = std::min(CHUNK, count - first);
    fill(past ? part : to + first, first, length);
    if (past) write_past(part, to + first, length);
  }
}

// columns += `K` rows; sums = the sum of each row.
template <int K>
inline void add_rows(const float* rows, int64_t width, float* __restrict columns, double* sums) {
  std::fill(sums, sums + K, 0.0);
  for (int64_t first = 0; first < width; first += CHUNK) {
    const int64_t last = std::min(width, first + CHUNK);
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
Tensor along_axes(const Tensor& grid, bool means) {
  const Axes axes(grid.sizes().slice(2));
  Tensor out = at::empty({grid.size(0), grid.size(1), axes.total}, grid.options());
  const float* from = grid.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t width = axes.width, height = axes.height;
  at::parallel_for(0, grid.size(0) * grid.size(1), tasks_per_thread(axes.plane()), [&](int64_t begin, int64_t end) {
    std::vector<float> columns(width);
    std::vector<double> sums(axes.total);
    double *last = sums.data() + axes.total - width, *upright = last - height;
    int64_t held = 0;
    const auto flush = [&] {
      for (int64_t x = 0; x < width; ++x) last[x] += columns[x];
      std::fill(columns.begin(), columns.end(), 0.0f);
      held = 0;
    };
    for (int64_t p = begin; p < end; ++p) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t slab = 0; slab < axes.slabs; ++slab) {
        const float* rows = from + (p * axes.slabs + slab) * height * width;
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
      float* result = to + p * axes.total;
      for (int64_t extent : grid.sizes().slice(2)) {
        const double share = means ? static_cast<double>(extent) / static_cast<double>(axes.plane()) : 1.0;
        for (int64_t i = 0; i < extent; ++i) *result++ = static_cast<float>(*sum++ * share);
      }
    }
  });
  return out;
}

Tensor axis_sums(const Tensor& grid) { return along_axes(grid, false); }

Tensor axis_means(const Tensor& grid) { return along_axes(grid, true); }

// From `(b, c, Σ size)` to `(b, c, *size)`: each position is the sum of the numbers at its indices, first axis first.
// With `means` these are first divided by the number of positions of the index: the gradient of means.
Tensor outer_sum(const Tensor& vectors, at::IntArrayRef size, bool means, bool training) {
  const Axes axes(size);
  std::vector<int64_t> sizes{vectors.size(0), vectors.size(1)};
  sizes.insert(sizes.end(), size.begin(), size.end());
  Tensor out = at::empty(sizes, vectors.options());
  const bool past = past_caches(out, training);
  const float* from = vectors.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t width = axes.width, height = axes.height;
  const int64_t rows = past ? std::max<int64_t>(1, CHUNK / width) : height;
  at::parallel_for(0, sizes[0] * sizes[1], tasks_per_thread(axes.plane()), [&](int64_t begin, int64_t end) {
    std::vector<float> shares(axes.total), part(past ? rows * width : 0);
    for (int64_t p = begin; p < end; ++p) {
      const float* vector = from + p * axes.total;
      if (means) {
        int64_t place = 0;
        for (int64_t extent : size) {
          const float share = static_cast<float>(extent) / static_cast<float>(axes.plane());
          for (int64_t i = 0; i < extent; ++i, ++place) shares[place] = vector[place] * share;
        }
        vector = shares.data();
      }
      const float *last = vector + axes.total - width, *upright = last - height;
      for (int64_t slab = 0; slab < axes.slabs; ++slab) {
        float sum = 0;
        axes.places(slab, [&](int64_t where) { sum += vector[where]; });
        for (int64_t first = 0; first < height; first += rows) {
          const int64_t length = std::min(rows, height - first);
          float* own = to + ((p * axes.slabs + slab) * height + first) * width;
          float* result = past ? part.data() : own;
          for (int64_t y = 0; y < length; ++y)
            add_multiple(sum + upright[first + y], 1, last, result + y * width, width, !past);
          if (past) write_past(result, own, length * width);
        }
      }
    }
    finish_writing();
  });
  return out;
}

// Splits positions `(b, c, n)` into heads, `(b · h, c / h, n)`.
Tensor split_heads(const Tensor& positions, int64_t heads) {
  return positions.view({positions.size(0) * heads, positions.size(1) / heads, positions.size(2)});
}

// The matrix of coefficients `(b · h, n, n)` of positions that attend to each other; a row belongs to a query.
Tensor coefficients(const Tensor& positions, int64_t heads, double scale) {
  const Tensor each = split_heads(positions, heads);
  Tensor products = at::bmm(scale == 1 ? each.mT() : at::mul(each.mT(), scale), each);
  return at::_softmax_out(products, products, -1, false);
}

Tensor weigh(const Tensor& positions, const Tensor& weights, int64_t heads) {
  return at::bmm(split_heads(positions, heads), weights.mT()).view_as(positions);
}

// Softmax attention of positions `(b, c, n)` to each other.
Tensor self_attention(const Tensor& positions, int64_t heads, double scale) {
  const int64_t count = positions.size(2), depth = positions.size(1) / heads;
  // The matrix is smaller than its factors, or stays in a cache.
  if (count <= depth || positions.size(0) * heads * count * count <= BLOCK)
    return weigh(positions, coefficients(positions, heads, scale), heads);
  const Tensor each = positions.view({positions.size(0), heads, depth, count}).mT().contiguous();
  return at::scaled_dot_product_attention(each, each, each, {}, 0.0, false, scale).mT().contiguous().view_as(positions);
}

// The same, also returning the matrix.
std::tuple<Tensor, Tensor> position_attention(const Tensor& positions, int64_t heads, double scale) {
  const Tensor weights = coefficients(positions, heads, scale);
  return {weigh(positions, weights, heads), weights};
}

// Its gradient. With coefficients A, P = ∂yᵀ · positions and ∂S = A ∘ (P − row sums of A ∘ P), the values contribute
// ∂y A, the keys and queries positions (∂S + ∂Sᵀ): in one product where the matrices are the smaller ones.
Tensor position_attention_backward(
    const Tensor& positions, const std::optional<Tensor>& kept, int64_t heads, double scale,
    const Tensor& grad_output) {
  const Tensor each = split_heads(positions, heads), grad_each = split_heads(grad_output, heads);
  const Tensor weights = kept ? *kept : coefficients(positions, heads, scale);
  Tensor products = at::bmm(grad_each.mT(), each), grad = at::bmm(grad_each, weights);
  at::_softmax_backward_data_out(products, products, weights, -1, at::kFloat);
  if (each.size(2) <= each.size(1)) grad.baddbmm_(each, at::add(products, products.mT()), 1, scale);
  else grad.baddbmm_(each, products, 1, scale).baddbmm_(each, products.mT(), 1, scale);
  return grad.view_as(positions);
}

// Softmax attention of the means along each axis to each other, made a grid by outer sum. With `once` the mean of the
// responses counts once and not once per axis (KAN Eq. 13).
Tensor axis_attention(const Tensor& grid, int64_t heads, double scale, bool once) {
  const auto size = grid.sizes().slice(2);
  Tensor vectors = self_attention(axis_means(grid), heads, scale);
  if (once) {
    const double axes = static_cast<double>(size.size());
    Tensor mean = at::zeros({grid.size(0), grid.size(1), 1}, grid.options());
    int64_t first = 0;
    for (int64_t extent : size) {
      mean.add_(vectors.narrow(2, first, extent).mean(2, true));
      first += extent;
    }
    vectors.sub_(mean, (axes - 1) / (axes * axes));
  }
  return outer_sum(vectors, size, false, false);
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
  std::fill(totals, totals + K, 0.0);
  std::fill(products, products + K, 0.0);
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t last = std::min(count, first + CHUNK);
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

// From positions `(b, c, n)`: the rows `offset + matrix · positions`, `(b, r, n)`, and the sums over positions of
// [1; weights] ⊗ positions, `(b, 1 + s, c)`. The matrix is `(b, r, c)`, the offset `(b, r, n)` and the weights
// `(b, s, n)`; without weights the rows are the weights. Positions are taken in blocks that are
// still in a cache when they are read a second time.
std::tuple<Tensor, Tensor> project_and_sum(
    const Tensor& positions, const Tensor& matrix, const std::optional<Tensor>& offset,
    const std::optional<Tensor>& weights) {
  const int64_t batch = positions.size(0), channels = positions.size(1), count = positions.size(2);
  const int64_t height = matrix.size(1);  // rows
  const int64_t slots = 1 + (weights ? weights->size(1) : height);
  const int64_t most = std::clamp<int64_t>(BLOCK / channels, 64, 4096), blocks = (count + most - 1) / most;
  Tensor rows = at::empty({batch, height, count}, positions.options());
  Tensor parts = at::empty({blocks, batch, slots, channels}, positions.options().dtype(at::kDouble));
  const float* from = positions.const_data_ptr<float>();
  const float* factors = matrix.const_data_ptr<float>();
  const float* start = offset ? offset->const_data_ptr<float>() : nullptr;
  const float* given = weights ? weights->const_data_ptr<float>() : nullptr;
  float* to = rows.mutable_data_ptr<float>();
  double* sums = parts.mutable_data_ptr<double>();
  at::parallel_for(0, batch * blocks, tasks_per_thread(count / blocks * channels), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks, block = task % blocks;
      const int64_t first = count * block / blocks, length = count * (block + 1) / blocks - first;
      const float* own = from + b * channels * count + first;
      float* row = to + b * height * count + first;
      for (int64_t r = 0; r < height * count; r += count) {
        if (start) std::copy_n(start + b * height * count + r + first, length, row + r);
        else std::fill_n(row + r, length, 0.0f);
      }
      by_fours(channels, [&]<int K>(int64_t c) {
        for (int64_t r = 0; r < height; ++r)
          add_scaled<K>(factors + (b * height + r) * channels + c, own + c * count, count, row + r * count, length);
      });
      const float* weight = given ? given + b * (slots - 1) * count + first : row;
      double* part = sums + (block * batch + b) * slots * channels;
      by_fours(channels, [&]<int K>(int64_t c) {
        for (int64_t s = 1; s < slots; ++s)
          sum_channels<K>(own + c * count, count, weight + (s - 1) * count, length, part + c, part + s * channels + c);
      });
    }
  });
  return {rows, parts.sum(0).to(at::kFloat)};
}

// Repeats a matrix `(h, c)` for every sample, `(b, h, c)`.
Tensor expand_batch(const Tensor& matrix, int64_t batch) {
  return matrix.unsqueeze(0).expand({batch, matrix.size(0), matrix.size(1)}).contiguous();
}

// Attention by scores; the scores of a head are its row of `matrix`, `(h, c)`, times the positions. The response of a
// position is the mean position times its score, plus, with `both`, the mean of positions times their scores.
// Also returns the scores, `(b, h, n)`, and the sums over positions of [1; scores] ⊗ positions, `(b, 1 + h, c)`.
std::tuple<Tensor, Tensor, Tensor> score_attention(const Tensor& grid, const Tensor& matrix, bool both, bool training) {
  const int64_t batch = grid.size(0), channels = grid.size(1), heads = matrix.size(0);
  const Tensor positions = grid.flatten(2);
  const int64_t count = positions.size(2);
  const auto [rows, sums] = project_and_sum(positions, expand_batch(matrix, batch), {}, {});
  Tensor out = at::empty(grid.sizes(), grid.options());
  const bool past = past_caches(out, training);
  const float *scores = rows.const_data_ptr<float>(), *sum = sums.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch * channels, tasks_per_thread(count), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t b = p / channels, c = p % channels, head = c / (channels / heads);
      const float* own = sum + b * (1 + heads) * channels + c;
      const float mean = own[0] / static_cast<float>(count);
      const float start = both ? own[(1 + head) * channels] / static_cast<float>(count) : 0.0f;
      const float* score = scores + (b * heads + head) * count;
      write(to + p * count, count, past, [&](float* result, int64_t first, int64_t length) {
        add_multiple(start, mean, score + first, result, length, !past);
      });
    }
    finish_writing();
  });
  return {out, rows, sums};
}

// The gradients of grid and matrix. With responses y = mean · s + u, u being the mean of positions times scores:
// ∂s = mean · ∂y + ∂u · x / n, ∂matrix = Σ ∂s ⊗ x and ∂x = (∂mean + ∂u s) / n + matrix · ∂s. `grad_output`, ∂y, and the
// grid are read once each.
std::tuple<Tensor, Tensor> score_attention_backward(
    const Tensor& grid, const Tensor& matrix, bool both, const Tensor& scores, const Tensor& sums,
    const Tensor& grad_output) {
  const int64_t batch = grid.size(0), channels = grid.size(1), heads = matrix.size(0), depth = channels / heads;
  const Tensor positions = grid.flatten(2);
  const int64_t count = positions.size(2);
  const float share = 1.0f / static_cast<float>(count);
  const float* sum = sums.const_data_ptr<float>();
  Tensor means = at::zeros({batch, heads, channels}, grid.options());
  Tensor halves = at::zeros({batch, heads, channels}, grid.options());  // ∂u / n
  float *mean = means.mutable_data_ptr<float>(), *half = halves.mutable_data_ptr<float>();
  const auto in_its_head = [&](const auto& each) {  // each(place in (b, h, c), b, c, h)
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t c = 0; c < channels; ++c) each((b * heads + c / depth) * channels + c, b, c, c / depth);
  };
  in_its_head([&](int64_t place, int64_t b, int64_t c, int64_t) {
    mean[place] = sum[b * (1 + heads) * channels + c] * share;
  });
  const auto [started, grad_sums] = project_and_sum(grad_output.flatten(2), means, {}, scores);
  const float* grad_sum = grad_sums.const_data_ptr<float>();
  if (both)
    in_its_head([&](int64_t place, int64_t b, int64_t c, int64_t) {
      half[place] = grad_sum[b * (1 + heads) * channels + c] * share;
    });
  const auto [rows, products] = project_and_sum(positions, halves, started, {});
  Tensor out = at::empty(grid.sizes(), grid.options());
  const bool past = past_caches(out, true);
  const float *score = scores.const_data_ptr<float>(), *row = rows.const_data_ptr<float>();
  const float* factors = matrix.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch * channels, tasks_per_thread(count), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t b = p / channels, c = p % channels, head = c / depth;
      const float start = grad_sum[(b * (1 + heads) + 1 + head) * channels + c] * share;
      const float own = half[(b * heads + head) * channels + c];
      write(to + p * count, count, past, [&](float* result, int64_t first, int64_t length) {
        add_multiple(start, own, score + (b * heads + head) * count + first, result, length, !past);
        for (int64_t h = 0; h < heads; ++h)
          add_scaled<1>(factors + h * channels + c, row + (b * heads + h) * count + first, count, result, length);
      });
    }
    finish_writing();
  });
  return {out, products.narrow(1, 1, heads).sum(0)};
}

TORCH_LIBRARY(farfield, library) {
  library.def("axis_means(Tensor grid) -> Tensor");
  library.def("axis_sums(Tensor grid) -> Tensor");
  library.def("axis_attention(Tensor grid, int heads, float scale, bool once=False) -> Tensor");
  library.def("position_attention(Tensor positions, int heads, float scale) -> (Tensor, Tensor)");
  library.def(
      "position_attention_backward(Tensor positions, Tensor? weights, int heads, float scale, Tensor grad_output)"
      " -> Tensor");
  library.def(
      "score_attention(Tensor grid, Tensor matrix, bool both, bool training=False) -> (Tensor, Tensor, Tensor)");
  library.def(
      "score_attention_backward(Tensor grid, Tensor matrix, bool both, Tensor scores, Tensor sums, Tensor grad_output)"
      " -> (Tensor, Tensor)");
  library.def("outer_sum(Tensor vectors, int[] size, bool means=False, bool training=False) -> Tensor");
  library.def("project_and_sum(Tensor positions, Tensor matrix, Tensor? offset, Tensor? weights) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(farfield, CPU, library) {
  library.impl("axis_means", &axis_means);
  library.impl("axis_sums", &axis_sums);
  library.impl("axis_attention", &axis_attention);
  library.impl("score_attention", &score_attention);
  library.impl("score_attention_backward", &score_attention_backward);
  library.impl("position_attention", &position_attention);
  library.impl("position_attention_backward", &position_attention_backward);
  library.impl("outer_sum", &outer_sum);
  library.impl("project_and_sum", &project_and_sum);
}

}  // namespace
