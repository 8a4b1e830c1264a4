// The CPU kernels as operations of torch, by its stable ABI: one file for all versions from TORCH_TARGET_VERSION on.
//
// Here are tensors, threads and the order of the loops; the loops themselves are in `loops.cpp` and `products.cpp`.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "loops.h"
#include "products.h"

namespace farfield {

// Instruction sets that `loops.cpp` and `products.cpp` were compiled for, the best one first.
#if defined(__x86_64__)
extern const Loops x86_64_v4, x86_64_v3, x86_64_v2;
extern const Products x86_64_v4_products, x86_64_v3_products, x86_64_v2_products;
#else
extern const Loops portable;
extern const Products portable_products;
#endif

namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t GRAIN = 1 << 15;  // least numbers of a thread

// Bytes of the caches: of a core's level 2, and of the last level.
struct Caches {
  int64_t second = 1 << 20, last = 1 << 25;  // where the system does not state them
};

// The caches of the first processor, as Linux states them.
Caches find_caches() {
  Caches caches;
  for (int index = 0; index < 8; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    std::ifstream level_file(folder + "level"), type_file(folder + "type"), size_file(folder + "size");
    int64_t level = 0, size = 0;
    std::string type, unit;
    if (!(level_file >> level && type_file >> type && size_file >> size) || type == "Instruction" || size <= 0) continue;
    size_file >> unit;
    size *= unit == "K" ? 1 << 10 : unit == "M" ? 1 << 20 : 1;
    if (level == 2) caches.second = size;
    if (level >= 2) caches.last = size;
  }
  return caches;
}

const Caches caches = find_caches();
// Numbers that stay in a level-2 cache between two reads: half of it.
const int64_t block_numbers = caches.second / 2 / static_cast<int64_t>(sizeof(float));
// Bytes from which a response is written past the caches: with what it is computed from, the last cache cannot hold it,
// and a plain store would first load each line. In training the output is new memory, which no cache holds.
const int64_t past = caches.last / 2, past_in_training = std::min<int64_t>(past, int64_t{1} << 24);

struct Instructions {
  const Loops& loops;
  const Products& products;
};

// The loops of the best instruction set that the processor has, or of the one named by FARFIELD_INSTRUCTIONS if it has it.
Instructions best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const std::pair<Instructions, bool> sets[] = {
      {{x86_64_v4, x86_64_v4_products}, __builtin_cpu_supports("x86-64-v4")},
      {{x86_64_v3, x86_64_v3_products}, __builtin_cpu_supports("x86-64-v3")},
      {{x86_64_v2, x86_64_v2_products}, true}};
  const char* name = std::getenv("FARFIELD_INSTRUCTIONS");
  const Instructions* chosen = nullptr;
  for (const auto& [set, runs] : sets)
    if (runs && (!chosen || (name && std::string(name) == set.loops.name))) chosen = &set;
  return *chosen;
#else
  return {portable, portable_products};
#endif
}

const Instructions chosen = best();
const Loops& loops = chosen.loops;
const Products& products = chosen.products;

int64_t tasks_per_thread(int64_t numbers_per_task) {
  return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, numbers_per_task));
}

// Runs a loop over its tasks, on the threads of torch.
template <class Job>
void run(void (*loop)(const Job&, int64_t, int64_t), const Job& job, int64_t tasks, int64_t numbers_per_task) {
  torch::stable::parallel_for(
      0, tasks, tasks_per_thread(numbers_per_task), [&](int64_t begin, int64_t end) { loop(job, begin, end); });
}

// Calls an operation of torch that has no typed form in the stable ABI.
template <class... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string(name) + " failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor allocate(IntHeaderOnlyArrayRef size, ScalarType type = ScalarType::Float) {
  return torch::stable::empty(size, type);
}

void check(bool right, const char* text) {
  if (!right) throw std::runtime_error(std::string("farfield's kernels take ") + text);
}

// The numbers of a grid or of positions.
Numbers numbers_of(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  const bool is_bfloat16 = type == ScalarType::BFloat16, is_half = type == ScalarType::Half;
  check(type == ScalarType::Float || is_bfloat16 || is_half, "grids of float32, bfloat16 and float16 alone");
  const Format format = is_bfloat16 ? Format::BFLOAT16 : is_half ? Format::HALF : Format::FLOAT;
  return {const_cast<void*>(tensor.const_data_ptr()), format};
}

const float* read(const Tensor& tensor) {
  check(tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Float, "contiguous float32 matrices alone");
  return static_cast<const float*>(tensor.const_data_ptr());
}

// A grid or positions of either memory order, contiguous or channels-last.
Numbers grid_of(const Tensor& tensor) {
  if (tensor.is_contiguous()) return numbers_of(tensor);
  int64_t stride = 1;
  const auto fits = [&](int64_t axis) {
    const bool right = tensor.size(axis) == 1 || tensor.stride(axis) == stride;
    stride *= tensor.size(axis);
    return right;
  };
  bool right = tensor.dim() > 2 && fits(1);
  for (int64_t axis = tensor.dim() - 1; axis > 1; --axis) right = right && fits(axis);
  check(right && fits(0), "contiguous and channels-last grids alone");
  return numbers_of(tensor);
}

float* write(const Tensor& tensor) { return const_cast<float*>(read(tensor)); }

Axes axes_of(IntHeaderOnlyArrayRef size) {
  check(size.size() >= 2 && size.size() <= MOST_AXES, "grids of 2 to 16 spatial dims alone");
  return Axes(size.data(), static_cast<int64_t>(size.size()));
}

Axes axes_of(const Tensor& grid) { return axes_of(grid.sizes().slice(2)); }

int64_t positions_of(const Tensor& grid) {
  int64_t count = 1;
  for (int64_t axis = 2; axis < grid.dim(); ++axis) count *= grid.size(axis);
  return count;
}

bool past_caches(const Tensor& out, int64_t limit) { return out.numel() * bytes_of(numbers_of(out).format) >= limit; }

// Bytes from which the outer sum of responses is written past the caches. Several threads write past them no faster than
// one, while what stays in a cache is written back while positions attend to each other in the next call.
int64_t past_after_attention() { return torch::stable::get_num_threads() > 1 ? caches.last : past; }

// Whether the channels of a grid or of positions are contiguous, and not its positions.
bool is_wide(const Tensor& tensor) { return !tensor.is_contiguous(); }

// Parts of a sample that threads take where each writes its own positions.
int64_t pieces_of(int64_t rows) { return std::clamp<int64_t>(rows, 1, 16); }

// A new grid `(b, c, *size)`, in channels-last format if `wide`.
Tensor allocate_grid(std::vector<int64_t> sizes, ScalarType type, bool wide) {
  if (!wide) return allocate(sizes, type);
  std::vector<int64_t> order{0, static_cast<int64_t>(sizes.size()) - 1};
  for (int64_t axis = 1; axis + 1 < static_cast<int64_t>(sizes.size()); ++axis) order.push_back(axis);
  sizes.push_back(sizes[1]);
  sizes.erase(sizes.begin() + 1);
  return call("aten::permute", "", allocate(sizes, type), IntHeaderOnlyArrayRef(order));
}

std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// From `(b, c, *size)` to `(b, c, Σ size)`: for each index of each axis the sum over all other axes, or their mean.
Tensor along_axes(const Tensor& grid, bool means) {
  const Axes axes = axes_of(grid);
  Tensor out = allocate({grid.size(0), grid.size(1), axes.total});
  const SumAxes job{axes, grid.size(1), grid_of(grid), write(out), means};
  const int64_t chunks = (grid.size(1) + SOME_CHANNELS - 1) / SOME_CHANNELS;
  if (is_wide(grid)) run(loops.wide.sum_axes, job, grid.size(0) * chunks, axes.plane() * SOME_CHANNELS);
  else run(loops.sum_axes, job, grid.size(0) * grid.size(1), axes.plane());
  return out;
}

Tensor axis_sums(const Tensor& grid) { return along_axes(grid, false); }

Tensor axis_means(const Tensor& grid) { return along_axes(grid, true); }

// From `(b, c, Σ size)` to `(b, c, *size)`: each position is the sum of the numbers at its indices, first axis first.
// Vectors with contiguous channels make a grid in channels-last format. The vectors are floats, the grid of a type.
Tensor make_grid(const Tensor& vectors, std::vector<int64_t> size, ScalarType type, bool means, int64_t limit) {
  const Axes axes = axes_of(size);
  size.insert(size.begin(), {vectors.size(0), vectors.size(1)});
  const bool wide = is_wide(vectors);
  const int64_t rows = axes.slabs * axes.height, pieces = pieces_of(rows);
  Tensor out = allocate_grid(size, type, wide);
  const float* numbers = static_cast<const float*>(grid_of(vectors).start);
  const OuterSum job{axes, size[1], pieces, numbers, grid_of(out), means, past_caches(out, limit)};
  if (wide) run(loops.wide.outer_sum, job, size[0] * pieces, axes.plane() / pieces * size[1]);
  else run(loops.outer_sum, job, size[0] * size[1], axes.plane());
  return out;
}

Tensor outer_sum(const Tensor& vectors, std::vector<int64_t> size, bool means, bool training) {
  const ScalarType type = vectors.scalar_type();
  const Tensor floats = type == ScalarType::Float ? vectors : torch::stable::to(vectors, ScalarType::Float);
  return make_grid(floats, std::move(size), type, means, training ? past_in_training : past);
}

// Softmax attention of positions `(b, c, n)` to each other, with values `(b, p, n)` and a factor of the products per
// head; the weights `(b · h, n, n)` are written if they are wanted.
Tensor attend(
    const Tensor& positions, const Tensor& values, const std::vector<float>& factors,
    const std::optional<Tensor>& weights) {
  const int64_t count = positions.size(2), heads = factors.size(), matrices = positions.size(0) * heads;
  Tensor out = allocate(values.sizes());
  const Attend job{count, positions.size(1) / heads, values.size(1) / heads, heads, factors.data(), read(positions),
                   read(values), write(out), weights ? write(*weights) : nullptr};
  run(products.attend, job, matrices * query_blocks(count), std::min(count, QUERIES) * count);
  return out;
}

Tensor attend(const Tensor& positions, int64_t heads, double scale, const std::optional<Tensor>& weights) {
  return attend(positions, positions, std::vector<float>(heads, static_cast<float>(scale)), weights);
}

// The gradient of the positions; weights that were not kept are computed again.
Tensor attend_gradient(
    const Tensor& positions, const std::optional<Tensor>& kept, int64_t heads, double scale,
    const Tensor& grad_output) {
  const int64_t count = positions.size(2), depth = positions.size(1) / heads, matrices = positions.size(0) * heads;
  const Tensor weights = kept ? *kept : allocate({matrices, count, count}), grads = allocate({matrices, count, count});
  Tensor out = allocate(positions.sizes());
  const AttendGradient job{count,         depth,        static_cast<float>(scale), read(positions), read(grad_output),
                           write(weights), write(grads), write(out),                kept.has_value()};
  const int64_t tasks = matrices * query_blocks(count), numbers = std::min(count, QUERIES) * count;
  run(products.gradient_of_products, job, tasks, numbers);
  run(products.attend_gradient, job, tasks, numbers);
  return out;
}

// Calls `work(vector)` for each vector of `(b, c, Σ size)`, on the threads of torch.
template <class Work>
void run_on_vectors(const Axes& axes, const Tensor& vectors, const Work& work) {
  constexpr int64_t SLOWER = 4;  // a sum of doubles waits for each addition
  float* numbers = write(vectors);
  const auto loop = [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) work(numbers + p * axes.total);
  };
  torch::stable::parallel_for(0, vectors.size(0) * vectors.size(1), tasks_per_thread(SLOWER * axes.total), loop);
}

// What is subtracted from each number of a vector, times the mean of an axis: then the mean of the axes' means counts
// once in their outer sum, and not once per axis (KAN Eq. 13).
double surplus_of(const Axes& axes) {
  return static_cast<double>(axes.count - 1) / static_cast<double>(axes.count * axes.count);
}

void count_means_once(const Axes& axes, const Tensor& vectors) {
  run_on_vectors(axes, vectors, [&](float* vector) {
    double means = 0;
    int64_t place = 0;
    for (int64_t axis = 0; axis < axes.count; ++axis) {
      double sum = 0;
      for (int64_t i = 0; i < axes.size[axis]; ++i) sum += vector[place++];
      means += sum / static_cast<double>(axes.size[axis]);
    }
    for (int64_t i = 0; i < axes.total; ++i) vector[i] -= static_cast<float>(surplus_of(axes) * means);
  });
}

void count_means_once_gradient(const Axes& axes, const Tensor& grads) {
  run_on_vectors(axes, grads, [&](float* grad) {
    double sum = 0;
    for (int64_t i = 0; i < axes.total; ++i) sum += grad[i];
    int64_t place = 0;
    for (int64_t axis = 0; axis < axes.count; ++axis) {
      const float share = static_cast<float>(surplus_of(axes) * sum / static_cast<double>(axes.size[axis]));
      for (int64_t i = 0; i < axes.size[axis]; ++i) grad[place++] -= share;
    }
  });
}

// The outer sum of vectors `(b, c, Σ size)` whose axes are contiguous, in channels-last format if `wide`.
Tensor make_grid_in(
    bool wide, const Tensor& vectors, const std::vector<int64_t>& size, ScalarType type, int64_t limit) {
  if (!wide) return make_grid(vectors, size, type, false, limit);
  const Tensor turned = torch::stable::contiguous(torch::stable::transpose(vectors, 1, 2));
  return make_grid(torch::stable::transpose(turned, 1, 2), size, type, false, limit);
}

// Softmax attention of the means along each axis to each other, made a grid by outer sum. With `once` the mean of the
// responses counts once and not once per axis.
Tensor axis_attention(const Tensor& grid, int64_t heads, double scale, bool once) {
  const Axes axes = axes_of(grid);
  const Tensor vectors = attend(axis_means(grid), heads, scale, std::nullopt);
  if (once) count_means_once(axes, vectors);
  const std::vector<int64_t> size(axes.size, axes.size + axes.count);
  return make_grid_in(is_wide(grid), vectors, size, grid.scalar_type(), past_after_attention());
}

// The same without the grid: the vectors `(b, p, Σ size)` of the axes, from means `(b, c, Σ size)`, values and a factor
// of the products per head.
Tensor attend_means(
    const Tensor& means, const Tensor& values, const Tensor& factors, std::vector<int64_t> size, bool once) {
  const float* first = read(factors);
  const Tensor vectors = attend(means, values, {first, first + factors.numel()}, std::nullopt);
  if (once) count_means_once(axes_of(size), vectors);
  return vectors;
}

// The same as `axis_attention` from the means, in training; also the weights `(b · h, n, n)`, none of them if they are
// more than `most`.
std::tuple<Tensor, Tensor> axis_responses(
    const Tensor& means, std::vector<int64_t> size, int64_t heads, double scale, bool once, ScalarType type, bool wide,
    int64_t most) {
  const int64_t count = means.size(2), matrices = means.size(0) * heads;
  const bool kept = matrices * count * count <= most;
  const Tensor weights = allocate({kept ? matrices : 0, count, count});
  const Tensor vectors = attend(means, heads, scale, kept ? std::optional<Tensor>(weights) : std::nullopt);
  if (once) count_means_once(axes_of(size), vectors);
  return {make_grid_in(wide, vectors, size, type, past_in_training), weights};
}

// The gradient of the means.
Tensor axis_responses_backward(
    const Tensor& means, const Tensor& weights, int64_t heads, double scale, bool once, const Tensor& grad_output) {
  const Tensor grads = axis_sums(grad_output);
  if (once) count_means_once_gradient(axes_of(grad_output), grads);
  return attend_gradient(
      means, weights.size(0) ? std::optional<Tensor>(weights) : std::nullopt, heads, scale, grads);
}

// From positions `(b, c, n)`: the rows `offset + matrix · positions`, `(b, r, n)`, and the sums over positions of
// [1; weights] ⊗ positions, `(b, 1 + s, c)`. The matrix is `(b, r, c)`, the offset `(b, r, n)` and the weights
// `(b, s, n)`; without weights the rows are the weights.
std::tuple<Tensor, Tensor> project_and_sum(
    const Numbers& positions, bool wide, int64_t batch, int64_t channels, int64_t count, const float* matrix,
    int64_t rows, const float* offset, const float* weights, int64_t given) {
  const int64_t slots = 1 + (weights ? given : rows);
  const int64_t most = std::clamp<int64_t>(block_numbers / std::max<int64_t>(1, channels), 64, 4096);
  const int64_t blocks = (count + most - 1) / most;
  Tensor out = allocate({batch, rows, count}), sums = allocate({batch, slots, channels});
  std::vector<double> parts(blocks * sums.numel());
  const ProjectAndSum job{batch,  channels, count,  rows,    slots,      blocks,      positions,
                          matrix, offset,   weights, write(out), parts.data()};
  run(wide ? loops.wide.project_and_sum : loops.project_and_sum, job, batch * blocks, count / std::max<int64_t>(1, blocks) * channels);
  float* sum = write(sums);
  for (int64_t i = 0, all = sums.numel(); i < all; ++i) {
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += parts[block * all + i];
    sum[i] = static_cast<float>(total);
  }
  return {out, sums};
}

std::tuple<Tensor, Tensor> project_and_sum_of(
    const Tensor& positions, const Tensor& matrix, const std::optional<Tensor>& offset,
    const std::optional<Tensor>& weights) {
  return project_and_sum(
      grid_of(positions), is_wide(positions), positions.size(0), positions.size(1), positions.size(2), read(matrix), matrix.size(1),
      offset ? read(*offset) : nullptr, weights ? read(*weights) : nullptr, weights ? weights->size(1) : 0);
}

// Attention by scores; the scores of a head are its row of `matrix`, `(h, c)`, times the positions. The response of a
// position is the mean position times its score, plus, with `both`, the mean of positions times their scores.
// Also returns the scores, `(b, h, n)`, and the sums over positions of [1; scores] ⊗ positions, `(b, 1 + h, c)`.
std::tuple<Tensor, Tensor, Tensor> score_attention(const Tensor& grid, const Tensor& matrix, bool both, bool training) {
  const int64_t batch = grid.size(0), channels = grid.size(1), heads = matrix.size(0), count = positions_of(grid);
  std::vector<float> matrices(batch * matrix.numel());
  for (int64_t b = 0; b < batch; ++b) std::copy_n(read(matrix), matrix.numel(), matrices.data() + b * matrix.numel());
  const auto [scores, sums] =
      project_and_sum(grid_of(grid), is_wide(grid), batch, channels, count, matrices.data(), heads, nullptr, nullptr, 0);
  Tensor out = allocate_grid(sizes_of(grid), grid.scalar_type(), is_wide(grid));
  const int64_t pieces = pieces_of(count);
  const RespondToScores job{
      channels, count, heads, pieces, read(scores), read(sums), grid_of(out), both,
      past_caches(out, training ? past_in_training : past)};
  if (is_wide(grid)) run(loops.wide.respond_to_scores, job, batch * pieces, count / pieces * channels);
  else run(loops.respond_to_scores, job, batch * channels, count);
  return {out, scores, sums};
}

// The gradients of grid and matrix. With responses y = mean · s + u, u being the mean of positions times scores:
// ∂s = mean · ∂y + ∂u · x / n, ∂matrix = Σ ∂s ⊗ x and ∂x = (∂mean + ∂u s) / n + matrix · ∂s. `grad_output`, ∂y, and the
// grid are read once each.
std::tuple<Tensor, Tensor> score_attention_backward(
    const Tensor& grid, const Tensor& matrix, bool both, const Tensor& scores, const Tensor& sums,
    const Tensor& grad_output) {
  const int64_t batch = grid.size(0), channels = grid.size(1), heads = matrix.size(0), depth = channels / heads;
  const int64_t count = positions_of(grid), slots = 1 + heads;
  const float share = 1.0f / static_cast<float>(count);
  const float* sum = read(sums);
  std::vector<float> means(batch * heads * channels), halves(batch * heads * channels);  // halves: ∂u / n
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t c = 0; c < channels; ++c) means[(b * heads + c / depth) * channels + c] = sum[b * slots * channels + c] * share;
  const auto [started, grad_sums] = project_and_sum(
      grid_of(grad_output), is_wide(grad_output), batch, channels, count, means.data(), heads, nullptr, read(scores), heads);
  const float* grad_sum = read(grad_sums);
  if (both)
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t c = 0; c < channels; ++c)
        halves[(b * heads + c / depth) * channels + c] = grad_sum[b * slots * channels + c] * share;
  const auto [rows, products] =
      project_and_sum(grid_of(grid), is_wide(grid), batch, channels, count, halves.data(), heads, read(started), nullptr, 0);
  Tensor out = allocate_grid(sizes_of(grid), grid.scalar_type(), is_wide(grid)), grad_matrix = allocate(matrix.sizes());
  const int64_t pieces = pieces_of(count);
  const SpreadGradients job{channels,     count,    heads,         pieces,     read(scores), read(rows),
                            read(matrix), grad_sum, halves.data(), grid_of(out), past_caches(out, past_in_training)};
  if (is_wide(grid)) run(loops.wide.spread_gradients, job, batch * pieces, count / pieces * channels);
  else run(loops.spread_gradients, job, batch * channels, count);
  float* result = write(grad_matrix);
  for (int64_t i = 0, all = matrix.numel(); i < all; ++i) {
    float total = 0;
    for (int64_t b = 0; b < batch; ++b) total += read(products)[b * slots * channels + channels + i];
    result[i] = total;
  }
  return {out, grad_matrix};
}

// ---- batch norm in training and a clamp after it --------------------------------------------------------------------
// The gradients of grid, weight and bias: with means and deviations of the channels, the grid x is normed to
// z = (x - mean) / deviation · weight + bias, and z clamped. `inverses` are 1 / deviation. Grid and `grad_output` are read
// twice; what was clamped is found by computing z again.
std::tuple<Tensor, Tensor, Tensor> norm_and_clamp_backward(
    const Tensor& grid, const Tensor& weight, const Tensor& bias, const Tensor& means, const Tensor& inverses, double low,
    double high, const Tensor& grad_output) {
  const int64_t batch = grid.size(0), channels = grid.size(1), count = positions_of(grid);
  const bool wide = is_wide(grid);
  const Numbers numbers = grid_of(grid), grads = grid_of(grad_output);
  check(numbers.format == Format::FLOAT && grads.format == Format::FLOAT, "norms of float32 alone");
  check(wide == is_wide(grad_output), "a grid and its gradient in one memory order");
  Tensor out = allocate_grid(sizes_of(grid), grid.scalar_type(), wide);
  Tensor grad_weight = allocate({channels}), grad_bias = allocate({channels});
  const int64_t parts = wide ? pieces_of(batch * count) : 1;
  std::vector<float> factors(channels), shifts(channels), starts(channels), slopes(channels);
  std::vector<double> sums(parts * 2 * channels);
  const float *mean = read(means), *inverse = read(inverses), *scale = read(weight), *shift = read(bias);
  for (int64_t c = 0; c < channels; ++c) {
    factors[c] = scale[c] * inverse[c];
    shifts[c] = shift[c] - mean[c] * factors[c];
  }
  const NormGradient job{
      batch, channels, count, parts, static_cast<const float*>(numbers.start), static_cast<const float*>(grads.start),
      mean, factors.data(), shifts.data(), static_cast<float>(low), static_cast<float>(high), sums.data(),
      starts.data(), slopes.data(), static_cast<float*>(grid_of(out).start)};
  float *to_weight = write(grad_weight), *to_bias = write(grad_bias);
  const auto combine = [&](int64_t c) {
    double sum = 0, product = 0;
    for (int64_t part = 0; part < parts; ++part) {
      sum += sums[part * 2 * channels + c];
      product += sums[(part * 2 + 1) * channels + c];
    }
    const double share = factors[c] / static_cast<double>(batch * count);
    to_bias[c] = static_cast<float>(sum);
    to_weight[c] = static_cast<float>(product * inverse[c]);
    starts[c] = static_cast<float>(-share * sum);
    slopes[c] = static_cast<float>(-share * product * inverse[c] * inverse[c]);
  };
  if (wide) {
    run(loops.wide.sum_norm_gradient, job, parts, batch * count / parts * channels);
    for (int64_t c = 0; c < channels; ++c) combine(c);
    run(loops.wide.spread_norm_gradient, job, parts, batch * count / parts * channels);
  } else {  // what a channel is summed from may be in a cache when its gradient is written
    const auto each = [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        loops.sum_norm_gradient(job, c, c + 1);
        combine(c);
        loops.spread_norm_gradient(job, c, c + 1);
      }
    };
    torch::stable::parallel_for(0, channels, tasks_per_thread(batch * count), each);
  }
  return {out, grad_weight, grad_bias};
}

// ---- operators with a basis: a block of positions is projected, weighed and summed in a cache ------------------------
// Parts of a sample that threads take; their number depends on the positions alone, and so does the order of the sums.
int64_t parts_of(int64_t count) { return std::clamp<int64_t>((count + 8191) / 8192, 1, 16); }

// Positions `(b, c, n)`; those that are not contiguous have contiguous channels.
Positions view_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  check(strides.size() == 3 && (strides[1] == 1 || strides[2] == 1), "positions with one stride of 1 alone");
  return {numbers_of(tensor), tensor.size(1), strides[0], strides[1], strides[2]};
}

// New positions of the type of others, with contiguous channels if `wide`.
Tensor allocate_positions(const Tensor& like, int64_t batch, int64_t channels, int64_t count, bool wide) {
  if (!wide) return allocate({batch, channels, count}, like.scalar_type());
  return torch::stable::transpose(allocate({batch, count, channels}, like.scalar_type()), 1, 2);
}

// The same, in the memory order of the others.
Tensor allocate_like(const Tensor& like) {
  return allocate_positions(like, like.size(0), like.size(1), like.size(2), is_wide(like));
}

const float* read(const std::optional<Tensor>& tensor) { return tensor ? read(*tensor) : nullptr; }

// Sums over the parts of each sample, `(b, row)` from `(b, parts, row)`.
Tensor sum_parts(const std::vector<double>& parts, int64_t batch, int64_t count, int64_t row) {
  Tensor sums = allocate({batch, row});
  float* to = write(sums);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < row; ++i) {
      double total = 0;
      for (int64_t part = 0; part < count; ++part) total += parts[(b * count + part) * row + i];
      to[b * row + i] = static_cast<float>(total);
    }
  return sums;
}

// A matrix `(rows, c)`, or one for the channels of each head, `(h, r, c / h)`.
Matrix matrix_of(const Tensor& positions, const std::optional<Tensor>& matrix, const std::optional<Tensor>& bias) {
  if (!matrix) return {nullptr, nullptr, 1, positions.size(1), positions.size(1)};
  const int64_t dims = matrix->dim();
  return {read(matrix), read(bias), dims == 3 ? matrix->size(0) : 1, matrix->size(dims - 2), matrix->size(dims - 1)};
}

// From positions `(b, c, n)`: the last rows of `matrix · positions + bias` are the queries, `(b, q, n)`; without a matrix
// the rows are the positions. The first are keys; with weights that are features of them, a slot each, perhaps relative
// to a peak `(b, s)`: the sums over positions of weight ⊗ value, `(b, s, p / groups)`, and of the weights, `(b, s)`. A
// group of slots sums its own channels. If `totals`, also the sums of the values, `(b, p)`. Values `(b, p, n)` are the
// positions if there are none.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> project_and_summarize(
    const Tensor& positions, const std::optional<Tensor>& own_values, const std::optional<Tensor>& matrix,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& valid, int64_t keys, int64_t queries, int64_t heads,
    int64_t groups, int64_t map, bool totals) {
  const Tensor& summed = own_values ? *own_values : positions;
  const Matrix by = matrix_of(positions, matrix, bias);
  const int64_t batch = positions.size(0), channels = summed.size(1), count = positions.size(2);
  const int64_t parts = parts_of(count), slots = features_of(Map{map}, keys), group = slots / groups;
  const int64_t own = channels / groups, width = padded(group);
  Tensor out = allocate_positions(positions, batch, queries, count, false);
  Tensor sums = allocate({batch, slots, own}), weights = allocate({batch, slots}), peak = allocate({batch, slots});
  std::vector<double> values(batch * parts * channels * width), all_weights(batch * parts * slots);
  std::vector<double> all(totals ? batch * parts * channels : 0);
  std::vector<float> peaks(batch * parts * slots);
  run(products.summarize,
      Summarize{parts, count, heads, keys, by.all_rows(), queries, groups, Map{map}, own_values.has_value(),
                view_of(positions), view_of(summed), by, read(valid), view_of(out), peaks.data(), values.data(),
                all_weights.data(), totals ? all.data() : nullptr},
      batch * parts, count / parts * channels);
  float *sum = write(sums), *weight = write(weights), *most = write(peak);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = 0; s < slots; ++s) {
      const float* own_peaks = peaks.data() + b * parts * slots + s;
      float largest = own_peaks[0];
      for (int64_t part = 1; part < parts; ++part) largest = std::max(largest, own_peaks[part * slots]);
      std::vector<double> row(own);
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const double factor = Map{map} == Map::EXPONENTIALS
            ? std::exp(static_cast<double>(own_peaks[part * slots]) - static_cast<double>(largest)) : 1;
        const int64_t place = b * parts + part, g = s / group;
        total += factor * all_weights[place * slots + s];
        const double* from = values.data() + (place * channels + g * own) * width + s % group;
        for (int64_t c = 0; c < own; ++c) row[c] += factor * from[c * width];
      }
      std::copy(row.begin(), row.end(), sum + (b * slots + s) * own);
      weight[b * slots + s] = static_cast<float>(total);
      most[b * slots + s] = largest;
    }
  return {out, sums, weights, peak, sum_parts(all, batch, parts, totals ? channels : 0)};
}

// Its gradients, of the positions (in their memory order; none if not `wanted`), of values that are others, the matrix and
// the bias. With `same` the rows are both keys and queries. The gradients of queries may be absent.
std::tuple<Tensor, Tensor, Tensor, Tensor> project_and_summarize_backward(
    const Tensor& positions, const std::optional<Tensor>& own_values, const std::optional<Tensor>& matrix,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& valid, const std::optional<Tensor>& peak,
    const Tensor& grad_sums, const Tensor& grad_weights, const std::optional<Tensor>& grad_totals,
    const std::optional<Tensor>& grad_queries, int64_t keys, int64_t heads, int64_t map, bool same, bool wanted) {
  const Matrix by = matrix_of(positions, matrix, bias);
  const Tensor& summed = own_values ? *own_values : positions;
  const int64_t batch = positions.size(0), channels = by.channels, count = positions.size(2);
  const int64_t parts = parts_of(count), rows = by.all_rows(), width = by.across(), learned = matrix ? batch * parts : 0;
  Tensor out = wanted ? allocate_like(positions) : allocate_positions(positions, 0, positions.size(1), count, false);
  Tensor out_values = own_values ? allocate_like(summed) : allocate_positions(summed, 0, summed.size(1), count, false);
  Tensor grad_matrix = allocate({matrix ? rows : 0, channels}), grad_bias = allocate({matrix ? rows : 0});
  std::vector<double> matrices(learned * channels * width), biases(learned * rows);
  Positions target = view_of(out), target_values = view_of(out_values);
  target.past = target_values.past = past_caches(out, past_in_training);
  if (!wanted) target.numbers.start = nullptr;
  run(products.summarize_gradient,
      SummarizeGradient{parts, count, heads, keys, rows, summed.size(1) / grad_sums.size(2), Map{map}, same,
                        own_values.has_value(), view_of(positions), view_of(summed), target, target_values, grad_queries ? view_of(*grad_queries) : Positions{}, by, read(valid), read(peak), read(grad_sums),
                        read(grad_weights), read(grad_totals), matrices.data(), biases.data()},
      batch * parts, count / parts * channels);
  if (!matrix) return {out, out_values, grad_matrix, grad_bias};
  float *to = write(grad_matrix), *to_bias = write(grad_bias);
  for (int64_t r = 0; r < rows; ++r) {
    double total = 0;
    for (int64_t task = 0; task < batch * parts; ++task) total += biases[task * rows + r];
    to_bias[r] = static_cast<float>(total);
  }
  std::vector<double> total(channels * width);
  for (int64_t task = 0; task < batch * parts; ++task)
    for (int64_t i = 0; i < channels * width; ++i) total[i] += matrices[task * channels * width + i];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0, column = r / by.rows * padded(by.rows) + r % by.rows; c < channels; ++c)
      to[r * channels + c] = static_cast<float>(total[c * width + column]);
  return {out, out_values, grad_matrix, grad_bias};
}

Coefficients coefficients_of(
    const Tensor& queries, const std::optional<Tensor>& sums, int64_t heads, int64_t map, int64_t factor,
    double epsilon) {
  return {heads, queries.size(1), Map{map}, Factor{factor}, static_cast<float>(epsilon), read(sums)};
}

// Slots `(b, g, s, p)` combined by coefficients, which are features of the queries `(b, h · r, n)`, perhaps with a factor
// by the `sums` `(b, features)`: `(b, g · p, n)`, with channels contiguous if `wide`. One slot more than coefficients is
// a bias.
Tensor combine_slots(
    const Tensor& queries, const Tensor& slots, const std::optional<Tensor>& sums, int64_t heads, int64_t map,
    int64_t factor, double epsilon, bool wide) {
  const int64_t batch = queries.size(0), count = queries.size(2), parts = parts_of(count), groups = slots.size(1);
  const int64_t channels = groups * slots.size(3);
  Tensor out = allocate_positions(queries, batch, channels, count, wide);
  Positions target = view_of(out);
  target.past = past_caches(out, past_in_training);
  run(products.respond,
      Respond{parts, count, groups, slots.size(2), slots.size(3),
              coefficients_of(queries, sums, heads, map, factor, epsilon), read(slots), view_of(queries), target},
      batch * parts, count / parts * channels);
  return out;
}

// Its gradients, of the queries, of the slots, and of the sums, if there are some.
std::tuple<Tensor, Tensor, Tensor> combine_slots_backward(
    const Tensor& queries, const Tensor& slots, const std::optional<Tensor>& sums, const Tensor& grad_output,
    int64_t heads, int64_t map, int64_t factor, double epsilon) {
  const Coefficients coefficients = coefficients_of(queries, sums, heads, map, factor, epsilon);
  const int64_t batch = queries.size(0), count = queries.size(2), parts = parts_of(count);
  const int64_t groups = slots.size(1), number = slots.size(2), channels = slots.size(3);
  const int64_t group = coefficients.count() / groups, width = padded(group), across = width + 1;
  const int64_t summed = sums ? coefficients.features() : 0;
  Tensor grad_queries = allocate_like(queries), grad_slots = allocate(slots.sizes());
  std::vector<double> all(batch * parts * groups * channels * across), all_sums(batch * parts * summed);
  run(products.respond_gradient,
      RespondGradient{parts, count, groups, number, channels, coefficients, read(slots), view_of(queries),
                      view_of(grad_output), view_of(grad_queries), all.data(), sums ? all_sums.data() : nullptr},
      batch * parts, count / parts * groups * channels);
  float* to = write(grad_slots);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t s = 0; s < number; ++s)
        for (int64_t c = 0; c < channels; ++c) {
          double total = 0;
          for (int64_t part = 0; part < parts; ++part)
            total += all[((b * parts + part) * groups * channels + g * channels + c) * across + (s < group ? s : width)];
          to[((b * groups + g) * number + s) * channels + c] = static_cast<float>(total);
        }
  return {grad_queries, grad_slots, sum_parts(all_sums, batch, parts, summed)};
}

// The instruction set whose loops run.
std::string instructions() { return loops.name; }

// Bytes of the level-2 cache and of the last one, by which blocks are sized.
std::vector<int64_t> cache_bytes() { return {caches.second, caches.last}; }

// The formats of half the width that the processor multiplies itself, as torch's matrix products then do.
std::string multiplied() {
  std::string formats;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) formats += "bfloat16 ";
  if (__builtin_cpu_supports("avx512fp16")) formats += "float16 ";
#endif
  return formats;
}

STABLE_TORCH_LIBRARY(farfield, library) {
  library.def("axis_means(Tensor grid) -> Tensor");
  library.def("axis_sums(Tensor grid) -> Tensor");
  library.def("axis_attention(Tensor grid, int heads, float scale, bool once=False) -> Tensor");
  library.def("attend_means(Tensor means, Tensor values, Tensor factors, int[] size, bool once) -> Tensor");
  library.def(
      "axis_responses(Tensor means, int[] size, int heads, float scale, bool once, ScalarType dtype, bool wide,"
      " int most) -> (Tensor, Tensor)");
  library.def(
      "axis_responses_backward(Tensor means, Tensor weights, int heads, float scale, bool once, Tensor grad_output)"
      " -> Tensor");
  library.def(
      "score_attention(Tensor grid, Tensor matrix, bool both, bool training=False) -> (Tensor, Tensor, Tensor)");
  library.def(
      "score_attention_backward(Tensor grid, Tensor matrix, bool both, Tensor scores, Tensor sums, Tensor grad_output)"
      " -> (Tensor, Tensor)");
  library.def("outer_sum(Tensor vectors, int[] size, bool means=False, bool training=False) -> Tensor");
  library.def("project_and_sum(Tensor positions, Tensor matrix, Tensor? offset, Tensor? weights) -> (Tensor, Tensor)");
  library.def(
      "project_and_summarize(Tensor positions, Tensor? values, Tensor? matrix, Tensor? bias, Tensor? valid, int keys,"
      " int queries, int heads, int groups, int map, bool totals) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "project_and_summarize_backward(Tensor positions, Tensor? values, Tensor? matrix, Tensor? bias, Tensor? valid,"
      " Tensor? peak, Tensor grad_sums, Tensor grad_weights, Tensor? grad_totals, Tensor? grad_queries, int keys,"
      " int heads, int map, bool same, bool wanted) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "combine_slots(Tensor queries, Tensor slots, Tensor? sums, int heads, int map, int factor, float epsilon,"
      " bool wide) -> Tensor");
  library.def(
      "combine_slots_backward(Tensor queries, Tensor slots, Tensor? sums, Tensor grad_output, int heads, int map,"
      " int factor, float epsilon) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_and_clamp_backward(Tensor grid, Tensor weight, Tensor bias, Tensor means, Tensor inverses, float low,"
      " float high, Tensor grad_output) -> (Tensor, Tensor, Tensor)");
  library.def("instructions() -> str");
  library.def("multiplied() -> str");
  library.def("cache_bytes() -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(farfield, CPU, library) {
  library.impl("axis_means", TORCH_BOX(&axis_means));
  library.impl("axis_sums", TORCH_BOX(&axis_sums));
  library.impl("axis_attention", TORCH_BOX(&axis_attention));
  library.impl("score_attention", TORCH_BOX(&score_attention));
  library.impl("score_attention_backward", TORCH_BOX(&score_attention_backward));
  library.impl("attend_means", TORCH_BOX(&attend_means));
  library.impl("axis_responses", TORCH_BOX(&axis_responses));
  library.impl("axis_responses_backward", TORCH_BOX(&axis_responses_backward));
  library.impl("norm_and_clamp_backward", TORCH_BOX(&norm_and_clamp_backward));
  library.impl("outer_sum", TORCH_BOX(&outer_sum));
  library.impl("project_and_sum", TORCH_BOX(&project_and_sum_of));
  library.impl("project_and_summarize", TORCH_BOX(&project_and_summarize));
  library.impl("project_and_summarize_backward", TORCH_BOX(&project_and_summarize_backward));
  library.impl("combine_slots", TORCH_BOX(&combine_slots));
  library.impl("combine_slots_backward", TORCH_BOX(&combine_slots_backward));
}

STABLE_TORCH_LIBRARY_IMPL(farfield, CompositeExplicitAutograd, library) {
  library.impl("instructions", TORCH_BOX(&instructions));
  library.impl("multiplied", TORCH_BOX(&multiplied));
  library.impl("cache_bytes", TORCH_BOX(&cache_bytes));
}

}  // namespace

// A quarter of a level-2 cache.
const int64_t in_cache = caches.second / 4 / static_cast<int64_t>(sizeof(float));

}  // namespace farfield
