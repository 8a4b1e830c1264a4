// The operators with a basis in blocks of positions that stay in a cache: a block is projected, weighed and summed, or
// combined, and read from memory once. Compiled once for each instruction set, as LEVEL.
//
// A product sums at most HELD positions in float and then continues in double. The order of the sums does not depend
// on the number of threads. Nothing here is shared with another file's object (see `loops.cpp`).

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

#include "products.h"

#include "lanes.h"

#define JOIN(one, other) one##other
#define PRODUCTS_OF(level) JOIN(level, _products)

namespace farfield {
namespace {

constexpr float LOWEST = -3.4028234663852886e38f, INFINITE = __builtin_inff();
constexpr int TILE = WIDTH == 16 ? 8 : 4;  // rows of a tile, whose sums are held in registers
constexpr int VECTORS = 2;
constexpr int64_t SUMMED = 64;  // numbers that are summed one after the other

// A matrix of any strides.
struct Left {
  const float* numbers;
  int64_t row, column;
};

// out (K × columns) = or += left · right
template <int K>
inline void multiply_rows(
    const Left& left, const float* right, int64_t stride, float* out, int64_t out_stride, int64_t inner,
    int64_t columns, bool add) {
  for (int64_t x = 0; x < columns; x += VECTORS * WIDTH) {
    Lanes sums[K][VECTORS];
    for (int k = 0; k < K; ++k)
      for (int v = 0; v < VECTORS; ++v) sums[k][v] = Lanes{};
    const float *from = left.numbers, *row = right + x;
    for (int64_t i = 0; i < inner; ++i, from += left.column, row += stride) {
      Lanes each[VECTORS];
      for (int v = 0; v < VECTORS; ++v) each[v] = load(row + v * WIDTH);
      for (int k = 0; k < K; ++k)
        for (int v = 0; v < VECTORS; ++v) sums[k][v] += from[k * left.row] * each[v];
    }
    for (int k = 0; k < K; ++k)
      for (int v = 0; v < VECTORS; ++v) {
        float* to = out + k * out_stride + x + v * WIDTH;
        store(to, add ? load(to) + sums[k][v] : sums[k][v]);
      }
  }
}

// out (rows × columns) = left (rows × inner) · right (inner × columns), or added to it; columns are a multiple of COLUMNS.
// At most SUMMED products are summed one after the other, so that rounding grows with the length's root at most.
void multiply(
    Left left, const float* right, int64_t stride, float* out, int64_t out_stride, int64_t rows, int64_t inner,
    int64_t columns, bool add) {
  for (int64_t first = 0; first < inner || first == 0; first += SUMMED, add = true) {
    Left part{left.numbers + first * left.column, left.row, left.column};
    const float* some = right + first * stride;
    const int64_t length = least(SUMMED, inner - first);
    int64_t i = 0;
    for (; i + TILE <= rows; i += TILE, part.numbers += TILE * part.row)
      multiply_rows<TILE>(part, some, stride, out + i * out_stride, out_stride, length, columns, add);
    for (; i < rows; ++i, part.numbers += part.row)
      multiply_rows<1>(part, some, stride, out + i * out_stride, out_stride, length, columns, add);
  }
}

constexpr int64_t SIDE = 16;  // of a square of numbers that are converted

// The lanes of two vectors in turns, from the first half of each or from the second.
template <bool second>
inline Lanes interleave(Lanes one, Lanes other) {
  constexpr int start = second ? WIDTH / 2 : 0;
#if defined(__clang__)  // makes one instruction of the loop
  Lanes result;
  for (int i = 0; i < WIDTH / 2; ++i) {
    result[2 * i] = one[start + i];
    result[2 * i + 1] = other[start + i];
  }
  return result;
#else
  using Places = int32_t __attribute__((vector_size(WIDTH * sizeof(int32_t))));
  Places places = {};
  for (int i = 0; i < WIDTH / 2; ++i) {
    places[2 * i] = start + i;
    places[2 * i + 1] = WIDTH + start + i;
  }
  return __builtin_shuffle(one, other, places);
#endif
}

// A square of WIDTH × WIDTH numbers, transposed: after each of log2 WIDTH steps a row has twice as many of a column.
inline void transpose_square(const float* from, int64_t stride, float* to, int64_t to_stride) {
  Lanes rows[WIDTH], others[WIDTH];
  for (int i = 0; i < WIDTH; ++i) rows[i] = load(from + i * stride);
  for (int step = 1; step < WIDTH; step *= 2) {
    for (int i = 0; i < WIDTH / 2; ++i) {
      others[2 * i] = interleave<false>(rows[i], rows[i + WIDTH / 2]);
      others[2 * i + 1] = interleave<true>(rows[i], rows[i + WIDTH / 2]);
    }
    for (int i = 0; i < WIDTH; ++i) rows[i] = others[i];
  }
  for (int i = 0; i < WIDTH; ++i) store(to + i * to_stride, rows[i]);
}

// to (columns × rows) = from (rows × columns), in squares.
void transpose(const float* from, int64_t stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t top = 0; top < rows; top += WIDTH)
    for (int64_t left = 0; left < columns; left += WIDTH)
      if (top + WIDTH <= rows && left + WIDTH <= columns)
        transpose_square(from + top * stride + left, stride, to + left * to_stride + top, to_stride);
      else
        for (int64_t j = left; j < least(columns, left + WIDTH); ++j)
          for (int64_t i = top; i < least(rows, top + WIDTH); ++i) to[j * to_stride + i] = from[i * stride + j];
}

// to (channels × block) = `length` positions from `first` on, and 0 behind them.
void read_block(
    const Positions& of, int64_t sample, int64_t first, int64_t length, float* to, int64_t block) {
  const Numbers from = of.numbers.from(sample * of.sample + first * of.position);
  if (of.position == 1)
    for (int64_t c = 0; c < of.channels; ++c) widen(from.from(c * of.channel), length, to + c * block);
  else if (from.format == Format::FLOAT)
    transpose(static_cast<const float*>(from.start), of.position, to, block, length, of.channels);
  else {
    float square[SIDE * SIDE];
    for (int64_t top = 0; top < length; top += SIDE)
      for (int64_t left = 0; left < of.channels; left += SIDE) {
        const int64_t rows = least(SIDE, length - top), columns = least(SIDE, of.channels - left);
        for (int64_t i = 0; i < rows; ++i) widen(from.from((top + i) * of.position + left), columns, square + i * SIDE);
        transpose(square, SIDE, to + left * block + top, block, rows, columns);
      }
  }
  for (int64_t c = 0; c < of.channels && length < block; ++c) clear(to + c * block + length, block - length);
}

void write_block(
    const Positions& of, int64_t sample, int64_t first, int64_t length, const float* from, int64_t block) {
  const Numbers to = of.numbers.from(sample * of.sample + first * of.position);
  if (of.position == 1)
    for (int64_t c = 0; c < of.channels; ++c) write(from + c * block, length, to.from(c * of.channel), of.past);
  else if (to.format == Format::FLOAT)
    transpose(from, block, static_cast<float*>(to.start), of.position, of.channels, length);
  else {
    float square[SIDE * SIDE];
    for (int64_t left = 0; left < length; left += SIDE)
      for (int64_t top = 0; top < of.channels; top += SIDE) {
        const int64_t rows = least(SIDE, of.channels - top), columns = least(SIDE, length - left);
        transpose(from + top * block + left, block, square, SIDE, rows, columns);
        for (int64_t i = 0; i < columns; ++i) narrow(square + i * SIDE, rows, to.from((left + i) * of.position + top));
      }
  }
}

inline void fill(float* row, int64_t count, float number) {
  for (int64_t i = 0; i < count; ++i) row[i] = number;
}

// Sum of a row of a block; what is behind its length is 0.
inline float sum_row(const float* row, int64_t block) {
  Lanes total = {};
  for (int64_t i = 0; i < block; i += WIDTH) total += load(row + i);
  return sum_of(total);
}

// The first rows of projected positions: matrix · positions + bias. Without a matrix they are the positions.
void project(const Matrix& by, const float* positions, int64_t block, int64_t rows, float* to) {
  if (!by.numbers) return void(std::memcpy(to, positions, rows * block * sizeof(float)));
  for (int64_t r = 0; by.bias && r < rows; ++r) fill(to + r * block, block, by.bias[r]);
  for (int64_t p = 0, some = rows / by.pieces; p < by.pieces; ++p)
    multiply({by.numbers + p * some * by.channels, by.channels, 1}, positions + p * by.channels * block, block,
             to + p * some * block, block, some, by.channels, block, by.bias);
}

// numbers += held, held = 0
void flush(float* held, double* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] += held[i];
  clear(held, count);
}

// The first position of a part; parts are whole blocks.
inline int64_t start_of(int64_t part, int64_t parts, int64_t count, int64_t block) {
  const int64_t blocks = (count + block - 1) / block;
  return least(count, blocks * part / parts * block);
}

// The sum of `each(r)` for r from 0 to `count`, SUMMED at a time.
template <class Each>
inline Lanes sum_rows(int64_t count, const Each& each) {
  Lanes total = {};
  for (int64_t first = 0; first < count; first += SUMMED) {
    Lanes some = {};
    for (int64_t r = first; r < least(count, first + SUMMED); ++r) some += each(r);
    total += some;
  }
  return total;
}

// ---- features --------------------------------------------------------------------------------------------------------
// In place: the softmax over the rows of a block.
void softmax_of_rows(float* rows, int64_t depth, int64_t block) {
  for (int64_t i = 0; i < block; i += WIDTH) {
    Lanes most = load(rows + i);
    for (int64_t r = 1; r < depth; ++r) {
      const Lanes each = load(rows + r * block + i);
      most = each > most ? each : most;
    }
    const Lanes share = 1 / sum_rows(depth, [&](int64_t r) {
      const Lanes each = exponential(load(rows + r * block + i) - most);
      store(rows + r * block + i, each);
      return each;
    });
    for (int64_t r = 0; r < depth; ++r) store(rows + r * block + i, load(rows + r * block + i) * share);
  }
}

// In place of ∂a: ∂x = a ∘ (∂a − Σ a ∘ ∂a) with a = softmax x.
void gradient_of_softmax(const float* rows, float* grads, int64_t depth, int64_t block) {
  for (int64_t i = 0; i < block; i += WIDTH) {
    const float* a = rows + i;
    float* grad = grads + i;
    const Lanes mean = sum_rows(depth, [&](int64_t r) { return load(a + r * block) * load(grad + r * block); });
    for (int64_t r = 0; r < depth; ++r)
      store(grad + r * block, load(a + r * block) * (load(grad + r * block) - mean));
  }
}

// to (heads × step × block) = the features of rows (heads × depth × block), perhaps in place. What is no number stays so.
void map_rows(Map map, const float* from, int64_t heads, int64_t depth, int64_t block, float* to, int64_t step) {
  const int64_t size = depth * block;
  for (int64_t h = 0; h < heads; ++h, from += size, to += step * block) {
    const auto each = [&](float* start, const auto& feature) {
      for (int64_t i = 0; i < size; i += WIDTH) store(start + i, feature(load(from + i)));
    };
    const auto positive = [](Lanes x) { return x < 0 ? Lanes{} : x; };
    if (map == Map::RELU) each(to, positive);
    else if (map == Map::ELU_PLUS_ONE)
      each(to, [&](Lanes x) { return exponential(x > 0 ? Lanes{} : x) + positive(x); });
    else if (from != to) std::memcpy(to, from, size * sizeof(float));
    if (map == Map::SOFTMAX_PAIR) {
      each(to + size, [](Lanes x) { return -x; });
      softmax_of_rows(to + size, depth, block);
    }
    if (map == Map::SOFTMAX || map == Map::SOFTMAX_PAIR) softmax_of_rows(to, depth, block);
  }
}

// to (heads × depth × block) = the gradients of the rows, from features and their gradients (heads × step × block), which
// are overwritten.
void gradient_of_map(
    Map map, const float* features, float* grads, int64_t heads, int64_t depth, int64_t block, float* to, int64_t step) {
  const int64_t size = depth * block;
  for (int64_t h = 0; h < heads; ++h, features += step * block, grads += step * block, to += size) {
    const auto each = [&](const auto& gradient) {
      for (int64_t i = 0; i < size; i += WIDTH) store(to + i, gradient(load(features + i), load(grads + i), i));
    };
    if (map == Map::SOFTMAX || map == Map::SOFTMAX_PAIR) gradient_of_softmax(features, grads, depth, block);
    if (map == Map::SOFTMAX_PAIR) {
      gradient_of_softmax(features + size, grads + size, depth, block);
      each([&](Lanes, Lanes grad, int64_t i) { return grad - load(grads + size + i); });
    } else if (map == Map::EXPONENTIALS) each([](Lanes x, Lanes grad, int64_t) { return x * grad; });
    else if (map == Map::RELU) each([](Lanes x, Lanes grad, int64_t) { return x <= 0 ? Lanes{} : grad; });
    else if (map == Map::ELU_PLUS_ONE) each([](Lanes x, Lanes grad, int64_t) { return x >= 1 ? grad : x * grad; });
    else if (to != grads) std::memcpy(to, grads, size * sizeof(float));
  }
}

// Row = 0 where a position is not valid, and behind the length.
inline void hide(float* row, const float* valid, int64_t length, int64_t block) {
  for (int64_t i = 0; valid && i < length; ++i) row[i] = valid[i] == 0 ? 0 : row[i];
  clear(row + length, block - length);
}

// ---- sums over positions ---------------------------------------------------------------------------------------------
// Row = its exponentials relative to the peak, which may rise; returns the factor of what was summed before. What is not
// valid has none, and what is no number is no peak.
float exponentials_of(float* row, const float* valid, int64_t length, int64_t block, float& peak) {
  const float before = peak;
  fill(row + length, block - length, -INFINITE);
  for (int64_t i = 0; valid && i < length; ++i) row[i] = valid[i] == 0 ? -INFINITE : row[i];
  Lanes most = Lanes{} + peak;
  for (int64_t i = 0; i < block; i += WIDTH) {
    const Lanes each = load(row + i);
    most = each > most ? each : most;
  }
  peak = largest_of(most);
  for (int64_t i = 0; i < block; i += WIDTH) store(row + i, exponential(load(row + i) - peak));
  return exponential(Lanes{} + (before - peak))[0];
}

void summarize(const Summarize& of, int64_t begin, int64_t end) {
  const int64_t channels = of.values.channels, most = greatest(channels, of.positions.channels);
  const int64_t block = block_of(of.count, most), slots = of.slots(), own = channels / of.groups;
  const int64_t group = slots / of.groups, width = padded(group);
  const bool in_place = slots == of.keys;
  const Held<float> positions(most * block), rows(of.rows * block), others(in_place ? 0 : slots * block);
  const Held<float> weights(block * width), held(channels * width), factors(of.groups * width);
  float* features = in_place ? rows.data() : others.data();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / of.parts, part = task % of.parts;
    const int64_t last = start_of(part + 1, of.parts, of.count, block);
    double *values = of.sums + task * channels * width, *sums = of.weights + task * slots;
    float* peaks = of.peaks + task * slots;
    fill(peaks, slots, LOWEST);
    int64_t held_positions = 0;
    for (int64_t first = start_of(part, of.parts, of.count, block); first < last; first += block) {
      const int64_t length = least(block, last - first);
      const float* valid = of.valid ? of.valid + sample * of.count + first : nullptr;
      read_block(of.positions, sample, first, length, positions.data(), block);
      project(of.matrix, positions.data(), block, of.rows, rows.data());
      if (of.queries)
        write_block(of.out, sample, first, length, rows.data() + (of.rows - of.queries) * block, block);
      if (of.apart) read_block(of.values, sample, first, length, positions.data(), block);
      for (int64_t c = 0; of.totals && c < channels; ++c)
        of.totals[task * channels + c] += sum_row(positions.data() + c * block, block);
      map_rows(of.map, rows.data(), of.heads, of.keys / of.heads, block, features, slots / of.heads);
      bool rescaled = false;
      for (int64_t k = 0; k < slots; ++k) {
        float *row = features + k * block, &factor = factors[k / group * width + k % group];
        if (of.map == Map::EXPONENTIALS) {
          factor = exponentials_of(row, valid, length, block, peaks[k]);
          sums[k] *= factor;
          rescaled = rescaled || factor != 1;
        } else {
          hide(row, valid, length, block);
        }
        sums[k] += sum_row(row, block);
      }
      if (rescaled) {
        for (int64_t i = 0; i < channels; ++i)
          for (int64_t j = 0; j < width; ++j) {
            held[i * width + j] *= factors[i / own * width + j];
            values[i * width + j] *= factors[i / own * width + j];
          }
      }
      for (int64_t g = 0; g < of.groups; ++g) {
        transpose(features + g * group * block, block, weights.data(), width, group, length);
        multiply({positions.data() + g * own * block, block, 1}, weights.data(), width,
                 held.data() + g * own * width, width, own, length, width, true);
      }
      if ((held_positions += length) >= HELD) {
        flush(held.data(), values, channels * width);
        held_positions = 0;
      }
    }
    flush(held.data(), values, channels * width);
  }
}

// With E the features of the keys, ∂E = ∂values · x + ∂weights, and ∂k by the gradient of the features:
// ∂x = ∂valuesᵀ · E + matrixᵀ · [∂k; ∂q] + ∂totals, ∂matrix = Σ [∂k; ∂q] ⊗ x. Where values are not the positions, their
// gradient is apart: ∂valuesᵀ · E + ∂totals.
void summarize_gradient(const SummarizeGradient& of, int64_t begin, int64_t end) {
  const int64_t channels = of.values.channels, of_positions = of.positions.channels, slots = of.slots();
  const int64_t most = greatest(channels, of_positions), block = block_of(of.count, 2 * most);
  const int64_t group = slots / of.groups, own = channels / of.groups, width = of.matrix.across();
  const int64_t inner = of.matrix.channels, each = padded(of.matrix.rows);
  const int64_t depth = of.keys / of.heads, step = slots / of.heads, queries = of.same ? of.rows : of.rows - of.keys;
  const bool in_place = slots == of.keys;
  const Held<float> positions(of_positions * block), grad_positions(most * block), keys(of.keys * block);
  const Held<float> rows(of.rows * block), mapped(in_place ? 0 : 2 * slots * block), own_values(of.apart ? channels * block : 0);
  const Held<float> others(queries * block), turned(block * width), held(inner * width);
  const float* values = of.apart ? own_values.data() : positions.data();
  float* features = in_place ? keys.data() : mapped.data();
  float* grads = in_place ? rows.data() : mapped.data() + slots * block;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / of.parts, part = task % of.parts;
    const int64_t last = start_of(part + 1, of.parts, of.count, block);
    double *grad_matrix = of.grad_matrix + task * inner * width, *grad_bias = of.grad_bias + task * of.rows;
    const float *peak = of.peak ? of.peak + sample * slots : nullptr, *grad_weight = of.grad_weights + sample * slots;
    int64_t held_positions = 0;
    for (int64_t first = start_of(part, of.parts, of.count, block); first < last; first += block) {
      const int64_t length = least(block, last - first);
      const float* valid = of.valid ? of.valid + sample * of.count + first : nullptr;
      read_block(of.positions, sample, first, length, positions.data(), block);
      if (of.apart) read_block(of.values, sample, first, length, own_values.data(), block);
      project(of.matrix, positions.data(), block, of.keys, keys.data());
      map_rows(of.map, keys.data(), of.heads, depth, block, features, step);
      for (int64_t k = 0; k < slots; ++k) {
        float* row = features + k * block;
        if (of.map == Map::EXPONENTIALS)
          for (int64_t i = 0; i < block; i += WIDTH) {
            const Lanes lower = load(row + i) - peak[k];  // a product of another block may round to above the peak
            store(row + i, exponential(lower > 0 ? Lanes{} : lower));
          }
        hide(row, valid, length, block);
        fill(grads + k * block, block, grad_weight[k]);
      }
      for (int64_t c = 0; of.grad_totals && c < channels; ++c) {
        float* row = grad_positions.data() + c * block;
        fill(row, block, of.grad_totals[sample * channels + c]);
        hide(row, valid, length, block);
      }
      for (int64_t g = 0; g < of.groups; ++g) {
        const float* grad_sums = of.grad_sums + (sample * slots + g * group) * own;
        multiply({grad_sums, own, 1}, values + g * own * block, block, grads + g * group * block, block, group, own,
                 block, true);
        multiply({grad_sums, 1, own}, features + g * group * block, block, grad_positions.data() + g * own * block,
                 block, own, group, block, of.grad_totals);
      }
      for (int64_t k = 0; k < slots; ++k) hide(grads + k * block, valid, length, block);
      gradient_of_map(of.map, features, grads, of.heads, depth, block, rows.data(), step);
      if (of.grad_queries.numbers.start) {
        read_block(of.grad_queries, sample, first, length, others.data(), block);
        float* place = rows.data() + (of.rows - queries) * block;
        for (int64_t i = 0; i < queries * block; i += WIDTH)
          store(place + i, of.same ? load(place + i) + load(others.data() + i) : load(others.data() + i));
      }
      if (of.apart) {
        write_block(of.grad_values, sample, first, length, grad_positions.data(), block);
        clear(grad_positions.data(), of_positions * block);
      }
      for (int64_t p = 0; of.matrix.numbers && p < of.matrix.pieces; ++p)
        multiply({of.matrix.numbers + p * of.matrix.rows * inner, 1, inner}, rows.data() + p * of.matrix.rows * block, block,
                 grad_positions.data() + p * inner * block, block, inner, of.matrix.rows, block, true);
      for (int64_t i = 0; !of.matrix.numbers && i < of_positions * block; i += WIDTH)
        store(grad_positions.data() + i, load(grad_positions.data() + i) + load(rows.data() + i));
      if (of.grad_positions.numbers.start)
        write_block(of.grad_positions, sample, first, length, grad_positions.data(), block);
      if (!of.matrix.numbers) continue;
      for (int64_t r = 0; r < of.rows; ++r) grad_bias[r] += sum_row(rows.data() + r * block, block);
      for (int64_t p = 0; p < of.matrix.pieces; ++p) {
        transpose(rows.data() + p * of.matrix.rows * block, block, turned.data() + p * each, width, of.matrix.rows, length);
        multiply({positions.data() + p * inner * block, block, 1}, turned.data() + p * each, width,
                 held.data() + p * each, width, inner, length, each, true);
      }
      if ((held_positions += length) >= HELD) {
        flush(held.data(), grad_matrix, inner * width);
        held_positions = 0;
      }
    }
    if (of.matrix.numbers) flush(held.data(), grad_matrix, inner * width);
  }
  finish_writing();
}

// ---- responses -------------------------------------------------------------------------------------------------------
// The coefficients of a block of queries, and the gradients of the queries.
class Queries {
 public:
  Queries(const Coefficients& of, int64_t block)
      : of(of), block(block), depth(of.rows / of.heads), count(of.features() / of.heads), step(of.of_head()),
        rows(of.rows * block), others(step == depth ? 0 : of.count() * block),
        own(of.factor == Factor::NONE ? 0 : of.count() * block),
        divisors(of.factor == Factor::NONE ? 0 : of.heads * block), grads_of_sums(of.features() * WIDTH),
        features(step == depth ? rows.data() : others.data()) {}

  // Returns coefficients (heads × step × block).
  const float* read(const Positions& from, int64_t sample, int64_t first, int64_t length) {
    read_block(from, sample, first, length, rows.data(), block);
    map_rows(of.map, rows.data(), of.heads, depth, block, features, step);
    if (of.factor == Factor::NONE) return features;
    for (int64_t h = 0; h < of.heads; ++h) {
      const float* sums = of.sums + (sample * of.heads + h) * count;
      for (int64_t i = 0; i < block; i += WIDTH) {
        const float* feature = features + h * step * block + i;
        float* to = own.data() + h * step * block + i;
        const Lanes z = sum_rows(count, [&](int64_t r) { return sums[r] * load(feature + r * block); });
        Lanes divisor = z + of.epsilon;
        if (of.factor == Factor::OF_SUM) divisor = z == 0 ? Lanes{} + 1 : divisor;
        else store(to + count * block, -z);
        store(&divisors[h * block + i], divisor);
        const Quotient quotient = divide_by(divisor);
        for (int64_t r = 0; r < count; ++r)
          store(to + r * block, sums[r] * load(feature + r * block) * quotient.lift * quotient.factor);
      }
    }
    return own.data();
  }

  // Returns the gradients of the queries, from those of the coefficients, which are overwritten; adds those of the sums.
  const float* derive(float* grads, int64_t sample, double* grad_sums) {
    for (int64_t h = 0; of.factor != Factor::NONE && h < of.heads; ++h) {
      const float* sums = of.sums + (sample * of.heads + h) * count;
      for (int64_t i = 0; i < block; i += WIDTH) derive_factor(h, i, sums, grads);
      for (int64_t r = 0; r < count; ++r)
        grad_sums[h * count + r] += sum_of(load(&grads_of_sums[(h * count + r) * WIDTH]));
    }
    clear(grads_of_sums.data(), of.features() * WIDTH);
    gradient_of_map(of.map, features, grads, of.heads, depth, block, rows.data(), step);
    return rows.data();
  }

 private:
  // With products p = u ∘ f, z = Σ p, a divisor d = z + ε, and a numerator e, which is 1 or d + 1: c = p / d · e.
  Lanes numerator(Lanes divisor) const { return of.factor == Factor::OF_MAGNITUDE ? divisor + 1 : Lanes{} + 1; }

  // p / d · e is p · lift · factor: the inverse of a divisor that is no normal number would be infinite.
  struct Quotient {
    Lanes lift, factor;
  };

  Quotient divide_by(Lanes divisor) const {
    const Lanes lift = (divisor < 0x1p-100f) & (divisor > -0x1p-100f) ? Lanes{} + 0x1p100f : Lanes{} + 1;
    return {lift, numerator(divisor) / (divisor * lift)};
  }

  // ∂p = (∂c − Σ c ∘ ∂c / e²) / d · e, less the gradient of the last coefficient, -z.
  void derive_factor(int64_t head, int64_t i, const float* sums, float* grads) {
    const int64_t first = head * step * block + i;
    const float *feature = features + first, *coefficient = own.data() + first;
    float* grad = grads + first;
    const Lanes divisor = load(&divisors[head * block + i]), e = numerator(divisor);
    const Quotient quotient = divide_by(divisor);
    const auto product = [&](int64_t r) { return load(coefficient + r * block) * load(grad + r * block); };
    const Lanes mean = sum_rows(count, product) / (e * e);
    const Lanes last = of.factor == Factor::OF_MAGNITUDE ? load(grad + count * block) : Lanes{};
    for (int64_t r = 0; r < count; ++r) {
      float *to = grad + r * block, *total = &grads_of_sums[(head * count + r) * WIDTH];
      const Lanes of_product = (load(to) - mean) * quotient.lift * quotient.factor - last;
      store(total, load(total) + load(feature + r * block) * of_product);
      store(to, sums[r] * of_product);
    }
  }

  const Coefficients& of;
  const int64_t block, depth, count, step;  // count, step: features and coefficients of a head
  const Held<float> rows, others, own;      // own: coefficients that are not the features
  const Held<float> divisors, grads_of_sums;
  float* const features;
};

void respond(const Respond& of, int64_t begin, int64_t end) {
  const int64_t block = block_of(of.count, of.out.channels), group = of.coefficients.count() / of.groups;
  const Held<float> out(of.out.channels * block);
  Queries queries(of.coefficients, block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / of.parts, part = task % of.parts;
    const int64_t last = start_of(part + 1, of.parts, of.count, block);
    for (int64_t first = start_of(part, of.parts, of.count, block); first < last; first += block) {
      const int64_t length = least(block, last - first);
      const float* rows = queries.read(of.queries, sample, first, length);
      for (int64_t g = 0; g < of.groups; ++g) {
        const float* slots = of.slot_values + (sample * of.groups + g) * of.slots * of.channels;
        float* own = out.data() + g * of.channels * block;
        const bool has_bias = of.slots > group;
        for (int64_t c = 0; has_bias && c < of.channels; ++c)
          fill(own + c * block, block, slots[group * of.channels + c]);
        multiply({slots, 1, of.channels}, rows + g * group * block, block, own, block, of.channels, group, block,
                 has_bias);
      }
      write_block(of.out, sample, first, length, out.data(), block);
    }
  }
  finish_writing();
}

void respond_gradient(const RespondGradient& of, int64_t begin, int64_t end) {
  const int64_t channels = of.grad_output.channels, block = block_of(of.count, channels);
  const int64_t count = of.coefficients.count(), group = count / of.groups, width = padded(group), across = width + 1;
  const Held<float> output(channels * block), grads(count * block), weights(block * width), held(channels * width);
  Queries queries(of.coefficients, block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / of.parts, part = task % of.parts;
    const int64_t last = start_of(part + 1, of.parts, of.count, block);
    double* sums = of.grad_slots + task * channels * across;
    int64_t held_positions = 0;
    const auto flush_all = [&] {
      for (int64_t c = 0; c < channels; ++c) flush(held.data() + c * width, sums + c * across, width);
      held_positions = 0;
    };
    for (int64_t first = start_of(part, of.parts, of.count, block); first < last; first += block) {
      const int64_t length = least(block, last - first);
      read_block(of.grad_output, sample, first, length, output.data(), block);
      const float* rows = queries.read(of.queries, sample, first, length);
      for (int64_t g = 0; g < of.groups; ++g) {
        const float* slots = of.slot_values + (sample * of.groups + g) * of.slots * of.channels;
        const float* own = output.data() + g * of.channels * block;
        multiply({slots, of.channels, 1}, own, block, grads.data() + g * group * block, block, group, of.channels,
                 block, false);
        transpose(rows + g * group * block, block, weights.data(), width, group, length);
        multiply({own, block, 1}, weights.data(), width, held.data() + g * of.channels * width, width, of.channels,
                 length, width, true);
      }
      for (int64_t c = 0; c < channels && of.slots > group; ++c)
        sums[c * across + width] += sum_row(output.data() + c * block, block);
      const float* grad_queries =
          queries.derive(grads.data(), sample, of.grad_sums ? of.grad_sums + task * of.coefficients.features() : nullptr);
      write_block(of.grad_queries, sample, first, length, grad_queries, block);
      if ((held_positions += length) >= HELD) flush_all();
    }
    flush_all();
  }
}

// ---- positions that attend to each other -----------------------------------------------------------------------------
// to (rows × block) = columns of a matrix, times a factor, and 0 behind them.
void read_columns(
    const float* from, int64_t stride, int64_t rows, int64_t first, int64_t length, float factor, float* to,
    int64_t block) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < length; ++i) to[r * block + i] = factor * from[r * stride + first + i];
    clear(to + r * block + length, block - length);
  }
}

void write_columns(const float* from, int64_t stride, int64_t rows, int64_t first, int64_t length, float* to, int64_t block) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to + r * stride + first, from + r * block, length * sizeof(float));
}

// weights (n × block): the softmax over keys of the products of all keys with a block of queries. Keys and queries are
// the same positions, so that those of the block have symmetric products: each square beside the diagonal is computed
// once, and transposed.
void weigh(
    const float* positions, int64_t count, int64_t depth, int64_t first, int64_t length, float scale, float* queries,
    float* weights, int64_t block) {
  const int64_t last = first + length;
  const auto products = [&](int64_t begin, int64_t end, int64_t column, int64_t columns) {
    multiply({positions + begin, 1, count}, queries + column, block, weights + begin * block + column, block, end - begin,
             depth, columns, false);
  };
  read_columns(positions, count, depth, first, length, scale, queries, block);
  products(0, first, 0, block);
  products(last, count, 0, block);
  for (int64_t column = 0; column < length; column += COLUMNS) {
    products(first + column, last, column, COLUMNS);
    const int64_t below = column + COLUMNS;
    if (below < length)
      transpose(weights + (first + below) * block + column, block, weights + (first + column) * block + below, block,
                length - below, COLUMNS);
  }
  softmax_of_rows(weights, count, block);
}

void attend(const Attend& of, int64_t begin, int64_t end) {
  const int64_t count = of.count, depth = of.depth, width = of.width;
  const int64_t block = queries_of(count), blocks = query_blocks(count);
  const Held<float> queries((depth < width ? width : depth) * block), weights(count * block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t matrix = task / blocks, first = task % blocks * block, length = least(block, count - first);
    weigh(of.positions + matrix * depth * count, count, depth, first, length, of.factors[matrix % of.heads],
          queries.data(), weights.data(), block);
    if (of.weights) write_columns(weights.data(), count, count, first, length, of.weights + matrix * count * count, block);
    multiply({of.values + matrix * width * count, count, 1}, weights.data(), block, queries.data(), block, width, count,
             block, false);
    write_columns(queries.data(), count, width, first, length, of.out + matrix * width * count, block);
  }
}

// With weights A of keys and queries and P = positionsᵀ · ∂y, the gradient of the products is scale · A ∘ (P − Σ A ∘ P),
// the sum being that over keys.
void gradient_of_products(const AttendGradient& of, int64_t begin, int64_t end) {
  const int64_t count = of.count, depth = of.depth, block = queries_of(count), blocks = query_blocks(count);
  const Held<float> queries(depth * block), weights(count * block), products(count * block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t matrix = task / blocks, first = task % blocks * block, length = least(block, count - first);
    const float* positions = of.positions + matrix * depth * count;
    float* kept = of.weights + matrix * count * count;
    if (of.kept) read_columns(kept, count, count, first, length, 1, weights.data(), block);
    else {
      weigh(positions, count, depth, first, length, of.scale, queries.data(), weights.data(), block);
      write_columns(weights.data(), count, count, first, length, kept, block);
    }
    read_columns(of.grad_output + matrix * depth * count, count, depth, first, length, 1, queries.data(), block);
    multiply({positions, 1, count}, queries.data(), block, products.data(), block, count, depth, block, false);
    for (int64_t i = 0; i < block; i += WIDTH) {
      const Lanes mean =
          sum_rows(count, [&](int64_t j) { return load(&weights[j * block + i]) * load(&products[j * block + i]); });
      for (int64_t j = 0; j < count; ++j)
        store(&products[j * block + i],
              of.scale * load(&weights[j * block + i]) * (load(&products[j * block + i]) - mean));
    }
    write_columns(products.data(), count, count, first, length, of.grad_products + matrix * count * count, block);
  }
}

// The gradient of the positions: of the values ∂y · Aᵀ, of the keys and queries positions · (∂S + ∂Sᵀ).
void attend_gradient(const AttendGradient& of, int64_t begin, int64_t end) {
  const int64_t count = of.count, depth = of.depth, block = queries_of(count), blocks = query_blocks(count);
  const Held<float> right(count * block), turned(count * block), out(depth * block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t matrix = task / blocks, first = task % blocks * block, length = least(block, count - first);
    const float *weights = of.weights + matrix * count * count, *grads = of.grad_products + matrix * count * count;
    transpose(weights + first * count, count, right.data(), block, length, count);
    multiply({of.grad_output + matrix * depth * count, count, 1}, right.data(), block, out.data(), block, depth,
             count, block, false);
    transpose(grads + first * count, count, turned.data(), block, length, count);
    read_columns(grads, count, count, first, length, 1, right.data(), block);
    for (int64_t i = 0; i < count * block; i += WIDTH) store(&right[i], load(&right[i]) + load(&turned[i]));
    multiply({of.positions + matrix * depth * count, count, 1}, right.data(), block, out.data(), block, depth,
             count, block, true);
    write_columns(out.data(), count, depth, first, length, of.out + matrix * depth * count, block);
  }
}

}  // namespace

extern const Products PRODUCTS_OF(LEVEL);
const Products PRODUCTS_OF(LEVEL){
    &summarize, &respond, &respond_gradient, &summarize_gradient, &attend, &gradient_of_products, &attend_gradient};

}  // namespace farfield
