// The vectorised CPU path: grids are read once. `farfield kernels --build` compiles this file, and nothing else does.
//
// Sizes are runtime values, addresses 64 bits wide. A sum runs over at most CHUNK numbers in float and then in double,
// so that rounding does not grow with the grid, and in an order that does not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t CHUNK = 1024;     // numbers side by side that are summed in float
constexpr int64_t ROWS = 64;        // rows below each other that are
constexpr int64_t BLOCK = 1 << 17;  // numbers, of all channels, that stay in a level-2 cache between two looks at them
constexpr int64_t GRAIN = 1 << 15;  // numbers that are worth a thread
constexpr int WIDTH = 8;

// The compiler splits these where the processor's vectors are shorter.
using Lanes = float __attribute__((vector_size(WIDTH * sizeof(float))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

inline float sum_of(Lanes lanes) {
  float sum = 0;
  for (int lane = 0; lane < WIDTH; ++lane) sum += lanes[lane];
  return sum;
}

int64_t tasks_a_thread(int64_t numbers_a_task) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, numbers_a_task)); }

// Runs `work<4>(i)` for i = 0, 4, 8, … and `work<1>(i)` for what is left: four at a time share loads, and hide latency.
template <class Work>
inline void by_fours(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) work.template operator()<4>(i);
  for (; i < count; ++i) work.template operator()<1>(i);
}

// The axes of a grid `(batch, channels, *sides)`: memory runs along the last, `width`; rows of it along the last but one,
// `height`, make a slab; the other axes count slabs.
struct Axes {
  std::vector<int64_t> sides;
  int64_t width, height, slabs = 1, total = 0;

  explicit Axes(at::IntArrayRef all) : sides(all.vec()) {
    for (int64_t side : sides) total += side;
    width = sides.back();
    sides.pop_back();
    height = sides.back();
    sides.pop_back();
    for (int64_t side : sides) slabs *= side;
  }

  int64_t plane() const { return slabs * height * width; }

  // Calls `each` with the place of each of a slab's indices among all axes side by side.
  template <class Each>
  void places(int64_t slab, const Each& each) const {
    int64_t behind = slabs, before = 0;
    for (int64_t side : sides) {
      behind /= side;
      each(before + slab / behind % side);
      before += side;
    }
  }
};

// to = number + from
inline void add_number(float number, const float* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t x = 0; x < count; ++x) to[x] = number + from[x];
}

// to = number + factor · from
inline void add_multiple(float number, float factor, const float* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t x = 0; x < count; ++x) to[x] = number + factor * from[x];
}

// columns += `K` rows; sums = the sum of each row.
template <int K>
inline void add_rows(const float* rows, int64_t width, float* __restrict columns, double* sums) {
  std::fill(sums, sums + K, 0.0);
  for (int64_t first = 0; first < width; first += CHUNK) {
    const int64_t last = std::min(width, first + CHUNK);
    Lanes found[K] = {};
    int64_t x = first;
    for (; x + WIDTH <= last; x += WIDTH) {
      Lanes several = {};
      for (int k = 0; k < K; ++k) {
        const Lanes row = load(rows + k * width + x);
        found[k] += row;
        several += row;
      }
      store(columns + x, load(columns + x) + several);
    }
    for (int k = 0; k < K; ++k) {
      float sum = sum_of(found[k]);
      for (int64_t rest = x; rest < last; ++rest) {
        sum += rows[k * width + rest];
        columns[rest] += rows[k * width + rest];
      }
      sums[k] += sum;
    }
  }
}

// `(b, c, *sides)` to `(b, c, Σ sides)`: for each index of each axis the sum over all other axes.
Tensor axis_sums(const Tensor& grid) {
  const Axes axes(grid.sizes().slice(2));
  Tensor out = at::empty({grid.size(0), grid.size(1), axes.total}, grid.options());
  const float* from = grid.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t width = axes.width, height = axes.height;
  at::parallel_for(0, grid.size(0) * grid.size(1), tasks_a_thread(axes.plane()), [&](int64_t begin, int64_t end) {
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
          double found[K];
          add_rows<K>(rows + y * width, width, columns.data(), found);
          for (int k = 0; k < K; ++k) {
            upright[y + k] += found[k];
            sum += found[k];
          }
          if ((held += K) >= ROWS) flush();
        });
        axes.places(slab, [&](int64_t where) { sums[where] += sum; });
      }
      flush();
      std::copy(sums.begin(), sums.end(), to + p * axes.total);
    }
  });
  return out;
}

// `(b, c, Σ sides)` to `(b, c, *sides)`: each cell the sum of what stands at its indices, first axis first.
Tensor outer_sum(const Tensor& vectors, at::IntArrayRef sides) {
  const Axes axes(sides);
  std::vector<int64_t> sizes{vectors.size(0), vectors.size(1)};
  sizes.insert(sizes.end(), sides.begin(), sides.end());
  Tensor out = at::empty(sizes, vectors.options());
  const float* from = vectors.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t width = axes.width, height = axes.height;
  at::parallel_for(0, sizes[0] * sizes[1], tasks_a_thread(axes.plane()), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const float* vector = from + p * axes.total;
      const float *last = vector + axes.total - width, *upright = last - height;
      for (int64_t slab = 0; slab < axes.slabs; ++slab) {
        float* rows = to + (p * axes.slabs + slab) * height * width;
        float sum = 0;
        axes.places(slab, [&](int64_t where) { sum += vector[where]; });
        for (int64_t y = 0; y < height; ++y) add_number(sum + upright[y], last, rows + y * width, width);
      }
    }
  });
  return out;
}

// Softmax attention of the means along each axis to each other, in a grid by outer sum.
Tensor axis_attention(const Tensor& grid, int64_t heads, double scale) {
  const auto sides = grid.sizes().slice(2);
  const int64_t batch = grid.size(0), channels = grid.size(1), cells = Axes(sides).plane();
  Tensor means = axis_sums(grid);
  float* mean = means.mutable_data_ptr<float>();
  for (int64_t p = 0; p < batch * channels; ++p)
    for (int64_t side : sides) {
      const float count = static_cast<float>(cells / side);
      for (int64_t i = 0; i < side; ++i) mean[i] /= count;
      mean += side;
    }
  const int64_t count = means.size(2), depth = channels / heads;
  if (count <= depth) {  // the matrix is smaller than what it is made of
    const Tensor each = means.view({batch * heads, depth, count});
    const Tensor weights = at::softmax(at::bmm(scale == 1 ? each.mT() : at::mul(each.mT(), scale), each), -1);
    return outer_sum(at::bmm(each, weights.mT()).view_as(means), sides);
  }
  const Tensor each = means.view({batch, heads, depth, count}).mT().contiguous();
  const Tensor found = at::scaled_dot_product_attention(each, each, each, {}, 0.0, false, scale);
  return outer_sum(found.mT().contiguous().view_as(means), sides);
}

// rows += Σ factors · cells, of `K` channels.
template <int K>
inline void add_scaled(const float* factors, const float* cells, int64_t stride, float* __restrict rows, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += factors[k] * cells[k * stride + j];
    rows[j] += sum;
  }
}

// totals = the sum of each of `K` channels; products = that of the channel times the weights.
template <int K>
inline void sum_channels(
    const float* cells, int64_t stride, const float* weights, int64_t count, double* totals, double* products) {
  std::fill(totals, totals + K, 0.0);
  std::fill(products, products + K, 0.0);
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t last = std::min(count, first + CHUNK);
    Lanes total[K] = {}, product[K] = {};
    int64_t j = first;
    for (; j + WIDTH <= last; j += WIDTH) {
      const Lanes weight = load(weights + j);
      for (int k = 0; k < K; ++k) {
        const Lanes each = load(cells + k * stride + j);
        total[k] += each;
        product[k] += each * weight;
      }
    }
    for (int k = 0; k < K; ++k) {
      float sum = sum_of(total[k]), weighed = sum_of(product[k]);
      for (int64_t rest = j; rest < last; ++rest) {
        sum += cells[k * stride + rest];
        weighed += cells[k * stride + rest] * weights[rest];
      }
      totals[k] += sum;
      products[k] += weighed;
    }
  }
}

// Of cells `(b, c, n)`: the rows `offset + matrix · cells`, `(b, r, n)`, and the sums over cells of [1; weights] ⊗ cells,
// `(b, 1 + s, c)`. The matrix is `(b, r, c)`, the offset `(b, r, n)`, the weights `(b, s, n)`; without weights the rows
// themselves weigh. Cells come in blocks that are still in a cache when they are looked at again.
std::tuple<Tensor, Tensor> read_and_sum(
    const Tensor& cells, const Tensor& matrix, const std::optional<Tensor>& offset, const std::optional<Tensor>& weights) {
  const int64_t batch = cells.size(0), channels = cells.size(1), count = cells.size(2), read = matrix.size(1);
  const int64_t slots = 1 + (weights ? weights->size(1) : read);
  const int64_t most = std::clamp<int64_t>(BLOCK / channels, 64, 4096), blocks = (count + most - 1) / most;
  Tensor rows = at::empty({batch, read, count}, cells.options());
  Tensor parts = at::empty({blocks, batch, slots, channels}, cells.options().dtype(at::kDouble));
  const float* from = cells.const_data_ptr<float>();
  const float* factors = matrix.const_data_ptr<float>();
  const float* start = offset ? offset->const_data_ptr<float>() : nullptr;
  const float* given = weights ? weights->const_data_ptr<float>() : nullptr;
  float* to = rows.mutable_data_ptr<float>();
  double* sums = parts.mutable_data_ptr<double>();
  at::parallel_for(0, batch * blocks, tasks_a_thread(count / blocks * channels), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks, block = task % blocks;
      const int64_t first = count * block / blocks, length = count * (block + 1) / blocks - first;
      const float* own = from + b * channels * count + first;
      float* found = to + b * read * count + first;
      for (int64_t r = 0; r < read * count; r += count) {
        if (start) std::copy_n(start + b * read * count + r + first, length, found + r);
        else std::fill_n(found + r, length, 0.0f);
      }
      by_fours(channels, [&]<int K>(int64_t c) {
        for (int64_t r = 0; r < read; ++r)
          add_scaled<K>(factors + (b * read + r) * channels + c, own + c * count, count, found + r * count, length);
      });
      const float* weigh = given ? given + b * (slots - 1) * count + first : found;
      double* part = sums + (block * batch + b) * slots * channels;
      by_fours(channels, [&]<int K>(int64_t c) {
        for (int64_t s = 1; s < slots; ++s)
          sum_channels<K>(own + c * count, count, weigh + (s - 1) * count, length, part + c, part + s * channels + c);
      });
    }
  });
  return {rows, parts.sum(0).to(at::kFloat)};
}

// Attention by scores, those of a head being `matrix`'s row · cells: each cell is answered by the mean cell times its own
// score and, with `both`, by the mean of cells times their scores. The matrix is `(h, c)`.
Tensor score_attention(const Tensor& grid, const Tensor& matrix, bool both) {
  const int64_t batch = grid.size(0), channels = grid.size(1), heads = matrix.size(0);
  const Tensor cells = grid.flatten(2), each = matrix.unsqueeze(0).expand({batch, heads, channels}).contiguous();
  const int64_t count = cells.size(2);
  const auto [rows, sums] = read_and_sum(cells, each, {}, {});
  Tensor out = at::empty(grid.sizes(), grid.options());
  const float *scores = rows.const_data_ptr<float>(), *sum = sums.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch * channels, tasks_a_thread(count), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t b = p / channels, c = p % channels, head = c / (channels / heads);
      const float* own = sum + b * (1 + heads) * channels + c;
      const float mean = own[0] / static_cast<float>(count);
      const float start = both ? own[(1 + head) * channels] / static_cast<float>(count) : 0.0f;
      add_multiple(start, mean, scores + (b * heads + head) * count, to + p * count, count);
    }
  });
  return out;
}

TORCH_LIBRARY(farfield, library) {
  library.def("axis_sums(Tensor grid) -> Tensor");
  library.def("axis_attention(Tensor grid, int heads, float scale) -> Tensor");
  library.def("score_attention(Tensor grid, Tensor matrix, bool both) -> Tensor");
  library.def("outer_sum(Tensor vectors, int[] sides) -> Tensor");
  library.def("read_and_sum(Tensor cells, Tensor matrix, Tensor? offset, Tensor? weights) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(farfield, CPU, library) {
  library.impl("axis_sums", &axis_sums);
  library.impl("axis_attention", &axis_attention);
  library.impl("score_attention", &score_attention);
  library.impl("outer_sum", &outer_sum);
  library.impl("read_and_sum", &read_and_sum);
}

}  // namespace
