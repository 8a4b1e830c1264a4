// Runs every loop of the CPU kernels on numbers of its own and prints the results, which do not depend on the processor
// but for rounding. The test beside it compiles this for several processors and compares what they print.

#define WIDTH 4  // of lanes.h, whose conversions are used here

#include <cstdio>
#include <vector>

#include "lanes.h"
#include "loops.h"
#include "products.h"

namespace farfield {

extern const int64_t in_cache = 1 << 12;
extern const Loops LEVEL;
#define JOIN(one, other) one##other
#define PRODUCTS_OF(level) JOIN(level, _products)
extern const Products PRODUCTS_OF(LEVEL);

namespace {

// Numbers between -1 and 1, the same in every run.
std::vector<float> draw(int64_t count) {
  static uint32_t state = 1;
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    state = state * 1664525u + 1013904223u;
    number = static_cast<float>(state >> 8) / (1 << 23) - 1;
  }
  return numbers;
}

template <class Number>
void print(const char* name, const std::vector<Number>& numbers) {
  for (const Number number : numbers) std::printf("%s %.9g\n", name, static_cast<double>(number));
}

// A grid in a format: `run` reads or writes its numbers.
struct Grid {
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  Format format;

  Grid(std::vector<float> from, Format format) : floats(from), halves(from.size()), format(format) {
    if (format != Format::FLOAT) narrow(from.data(), static_cast<int64_t>(from.size()), numbers());
  }
  Numbers numbers() {
    return {format == Format::FLOAT ? static_cast<void*>(floats.data()) : static_cast<void*>(halves.data()), format};
  }
  void show(const char* name) {
    if (format != Format::FLOAT) widen(numbers(), static_cast<int64_t>(floats.size()), floats.data());
    print(name, floats);
  }
};

void run_loops(Format format, bool wide, bool past) {
  constexpr int64_t batch = 2, channels = 37, heads = 1, blocks = 3, parts = 2;
  const int64_t size[] = {3, 5, 19};
  const Axes axes(size, 3);
  const int64_t count = axes.plane(), slots = 1 + heads;
  const Loops::Wide& beside = LEVEL.wide;
  Grid grid(draw(batch * channels * count), format), out(std::vector<float>(batch * channels * count), format);
  std::vector<float> vectors(batch * channels * axes.total);
  const SumAxes sums_of{axes, channels, grid.numbers(), vectors.data(), true};
  if (wide) beside.sum_axes(sums_of, 0, batch);
  else LEVEL.sum_axes(sums_of, 0, batch * channels);
  print("sum_axes", vectors);
  const OuterSum outer{axes, channels, parts, vectors.data(), out.numbers(), true, past};
  if (wide) beside.outer_sum(outer, 0, batch * parts);
  else LEVEL.outer_sum(outer, 0, batch * channels);
  out.show("outer_sum");
  const auto matrix = draw(batch * heads * channels), offset = draw(batch * heads * count);
  std::vector<float> rows(batch * heads * count);
  std::vector<double> sums(blocks * batch * slots * channels);
  const ProjectAndSum projected{batch,         channels,      count,   heads,       slots,      blocks, grid.numbers(),
                                matrix.data(), offset.data(), nullptr, rows.data(), sums.data()};
  (wide ? beside.project_and_sum : LEVEL.project_and_sum)(projected, 0, batch * blocks);
  print("project_and_sum", rows);
  print("project_and_sum", sums);
  const auto totals = draw(batch * slots * channels), halves = draw(batch * heads * channels);
  const RespondToScores response{channels, count, heads, parts, rows.data(), totals.data(), out.numbers(), true, past};
  if (wide) beside.respond_to_scores(response, 0, batch * parts);
  else LEVEL.respond_to_scores(response, 0, batch * channels);
  out.show("respond_to_scores");
  const SpreadGradients spread{channels,      count,         heads,         parts,         rows.data(), offset.data(),
                               matrix.data(), totals.data(), halves.data(), out.numbers(), past};
  if (wide) beside.spread_gradients(spread, 0, batch * parts);
  else LEVEL.spread_gradients(spread, 0, batch * channels);
  out.show("spread_gradients");
}

void run_products(Format format, bool wide, Map of_keys, Map of_queries, Factor factor) {
  constexpr int64_t batch = 2, channels = 36, count = 333, keys = 18, heads = 2, groups = 2, parts = 2;
  const Products& products = PRODUCTS_OF(LEVEL);
  const auto view = [&](Grid& grid, int64_t across) {
    return wide ? Positions{grid.numbers(), across, across * count, 1, across}
                : Positions{grid.numbers(), across, across * count, count, 1};
  };
  const int64_t rows = 2 * keys, group = keys / groups, own = channels / groups, width = padded(group);
  Grid grid(draw(batch * channels * count), format), queries(std::vector<float>(batch * keys * count), format);
  const auto matrix = draw(rows * channels), bias = draw(rows);
  const Matrix whole{matrix.data(), bias.data(), 1, rows, channels};
  std::vector<float> valid(batch * count), peaks(batch * parts * keys);
  for (int64_t i = 0; i < batch * count; ++i) valid[i] = i % 7 != 3;
  std::vector<double> values(batch * parts * channels * groups * width), weights(batch * parts * keys);
  products.summarize(
      {parts, count, heads, keys, rows, keys, groups, of_keys, false, view(grid, channels), view(grid, channels),
       whole, valid.data(), view(queries, keys), peaks.data(), values.data(), weights.data(), nullptr},
      0, batch * parts);
  queries.show("summarize");
  print("summarize", values);
  print("summarize", weights);
  auto sums = draw(batch * keys);
  for (float& each : sums) each = 1 + each * each;
  const Coefficients coefficients{heads, keys, of_queries, factor, 1e-6f, factor == Factor::NONE ? nullptr : sums.data()};
  const auto slots = draw(batch * groups * (group + 1) * own);
  Grid out(std::vector<float>(batch * channels * count), format);
  products.respond(
      {parts, count, groups, group + 1, own, coefficients, slots.data(), view(queries, keys), view(out, channels)},
      0, batch * parts);
  out.show("respond");
  Grid grad_queries(std::vector<float>(batch * keys * count), format);
  std::vector<double> grad_slots(batch * parts * groups * own * (width + 1)), grad_sums(batch * parts * keys);
  products.respond_gradient(
      {parts, count, groups, group + 1, own, coefficients, slots.data(), view(queries, keys), view(grid, channels),
       view(grad_queries, keys), grad_slots.data(), factor == Factor::NONE ? nullptr : grad_sums.data()},
      0, batch * parts);
  grad_queries.show("respond_gradient");
  print("respond_gradient", grad_slots);
  print("respond_gradient", grad_sums);
  const std::vector<float> peak(batch * keys, 9.0f);
  const auto grad_values = draw(batch * keys * own), grad_weights = draw(batch * keys);
  std::vector<double> grad_matrix(batch * parts * channels * padded(rows)), grad_bias(batch * parts * rows);
  products.summarize_gradient(
      {parts, count, heads, keys, rows, groups, of_keys, false, false, view(grid, channels), view(grid, channels),
       view(out, channels), Positions{}, view(grad_queries, keys), whole, valid.data(),
       of_keys == Map::EXPONENTIALS ? peak.data() : nullptr, grad_values.data(), grad_weights.data(), nullptr,
       grad_matrix.data(), grad_bias.data()},
      0, batch * parts);
  out.show("summarize_gradient");
  print("summarize_gradient", grad_matrix);
  print("summarize_gradient", grad_bias);
}

void run_attention() {
  constexpr int64_t count = 141, depth = 9, matrices = 2;
  const Products& products = PRODUCTS_OF(LEVEL);
  const auto positions = draw(matrices * depth * count), grad_output = draw(matrices * depth * count);
  std::vector<float> out(matrices * depth * count), weights(matrices * count * count), grads(weights.size());
  const int64_t tasks = matrices * query_blocks(count);
  const float factor = 0.5f;
  const float* given = positions.data();
  products.attend({count, depth, depth, 1, &factor, given, given, out.data(), weights.data()}, 0, tasks);
  print("attend", out);
  const AttendGradient job{count, depth, 0.5f, positions.data(), grad_output.data(), weights.data(), grads.data(), out.data(), true};
  products.gradient_of_products(job, 0, tasks);
  products.attend_gradient(job, 0, tasks);
  print("attend_gradient", out);
}

}  // namespace
}  // namespace farfield

int main() {
  using namespace farfield;
  for (const Format format : {Format::FLOAT, Format::BFLOAT16, Format::HALF})
    for (const bool wide : {false, true})
      for (const bool other : {false, true}) {
        run_loops(format, wide, other);
        if (other) run_products(format, wide, Map::EXPONENTIALS, Map::SOFTMAX, Factor::NONE);
        else run_products(format, wide, Map::IDENTITY, Map::IDENTITY, Factor::NONE);
      }
  for (const Map map : {Map::RELU, Map::ELU_PLUS_ONE}) run_products(Format::FLOAT, true, map, map, Factor::OF_SUM);
  run_attention();
}
