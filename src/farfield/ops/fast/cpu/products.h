// What the loops of the operators with a basis take: sums of values weighed by features of keys, and responses that
// weigh the sums by features of queries. `products.cpp` is compiled once for each instruction set, as `loops.cpp` is.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace farfield {

constexpr int64_t COLUMNS = 32;     // a tile of a product has so many columns; blocks are multiples of it
constexpr int64_t HELD = 512;      // positions whose products are summed in float
extern const int64_t in_cache;      // numbers of a block, which is read several times; of `library.cpp`

// Positions `(b, c, n)` of either memory order: one of the two strides is 1.
struct Positions {
  Numbers numbers;
  int64_t channels, sample, channel, position;  // sample, channel, position: strides
  bool past = false;                            // written past the caches
};

inline int64_t padded(int64_t count) { return (count + COLUMNS - 1) / COLUMNS * COLUMNS; }

// Positions of a block, of so many positions with so many channels.
inline int64_t block_of(int64_t count, int64_t channels) {
  const int64_t all = padded(count ? count : 1), most = in_cache / (channels ? channels : 1) / COLUMNS * COLUMNS;
  const int64_t some = most < COLUMNS ? COLUMNS : most > HELD ? HELD : most;
  return some < all ? some : all;
}

// What the rows of a head become, its features; `steps.py` has the same numbers. Exponentials are over positions, relative
// to a peak; the softmax is over the rows of a head, the pair is that and the one of their negatives: twice as many.
enum class Map : int64_t { IDENTITY, EXPONENTIALS, SOFTMAX, RELU, ELU_PLUS_ONE, SOFTMAX_PAIR };

inline int64_t features_of(Map map, int64_t rows) { return map == Map::SOFTMAX_PAIR ? 2 * rows : rows; }

// What makes features f of a query its coefficients, with sums u of the head and z = Σ u f. OF_SUM: u f / (z + ε), or u f
// where z is 0. OF_MAGNITUDE: (1 + 1 / (z + ε)) u f, and a last coefficient, -z.
enum class Factor : int64_t { NONE, OF_SUM, OF_MAGNITUDE };

// What makes rows of positions: one matrix `(1, rows, c)`, or one for the channels of each head, `(h, r, c / h)`.
struct Matrix {
  const float *numbers, *bias;  // bias: (all rows); both may be absent
  int64_t pieces, rows, channels;

  int64_t all_rows() const { return pieces * rows; }
  int64_t across() const { return pieces * padded(rows); }
};

// A task of each loop is a sample and a part of its positions. Rows are keys `(h · r)` first and queries last, or both.
// Groups: one if every head has all channels, else each head has channels of its own.
struct Summarize {
  int64_t parts, count, heads, keys, rows, queries, groups;
  Map map;
  bool apart;                   // the values are not the positions
  Positions positions, values;  // (b, c, n), (b, p, n)
  Matrix matrix;
  const float* valid;                  // (b, n), may be absent
  Positions out;                       // (b, queries, n)
  float* peaks;                        // (b, parts, slots)
  double *sums, *weights;              // (b, parts, p, padded(slots / groups)), (b, parts, slots)
  double* totals;                      // (b, parts, p), of the values; may be absent

  int64_t slots() const { return features_of(map, keys); }
};

// How queries become the coefficients of slots.
struct Coefficients {
  int64_t heads, rows;  // rows of all heads
  Map map;
  Factor factor;
  float epsilon;
  const float* sums;  // (b, features); absent without a factor

  int64_t features() const { return features_of(map, rows); }
  int64_t of_head() const { return features() / heads + (factor == Factor::OF_MAGNITUDE); }
  int64_t count() const { return heads * of_head(); }
};

struct Respond {
  int64_t parts, count, groups, slots, channels;  // slots and channels of a group
  Coefficients coefficients;
  const float* slot_values;  // (b, groups, slots, channels): a last slot may be a bias
  Positions queries, out;    // (b, rows, n), (b, groups · channels, n)
};

struct RespondGradient {
  int64_t parts, count, groups, slots, channels;
  Coefficients coefficients;
  const float* slot_values;
  Positions queries, grad_output, grad_queries;
  double* grad_slots;  // (b, parts, groups, channels, padded(coefficients / groups) + 1): the last column is the bias'
  double* grad_sums;   // (b, parts, features); absent without a factor
};

struct SummarizeGradient {
  int64_t parts, count, heads, keys, rows, groups;
  Map map;
  bool same, apart;  // the rows are both keys and queries; the values are not the positions
  Positions positions, values, grad_positions, grad_values, grad_queries;  // grad_positions, grad_queries may be absent
  Matrix matrix;
  const float *valid, *peak;                            // (b, n), (b, slots)
  const float *grad_sums, *grad_weights, *grad_totals;  // (b, slots, p / groups), (b, slots), (b, p) or absent
  double *grad_matrix, *grad_bias;                      // (b, parts, c of the matrix, across), (b, parts, rows), or absent

  int64_t slots() const { return features_of(map, keys); }
};

constexpr int64_t QUERIES = 128;  // of a task of the attention of positions to each other

inline int64_t queries_of(int64_t count) { return padded(count) < QUERIES ? padded(count) : QUERIES; }

inline int64_t query_blocks(int64_t count) { return (count + QUERIES - 1) / QUERIES; }

// Softmax attention of few positions to each other; a task is a sample and head and QUERIES of its positions. Weights
// are transposed: a row belongs to a key.
struct Attend {
  int64_t count, depth, width, heads;
  const float* factors;             // (h), of the products
  const float *positions, *values;  // (b · h, d, n), (b · h, w, n)
  float *out, *weights;             // (b · h, w, n), (b · h, n, n) or absent
};

struct AttendGradient {
  int64_t count, depth;
  float scale;
  const float *positions, *grad_output;  // (b · h, d, n)
  float *weights, *grad_products;        // (b · h, n, n)
  float* out;                            // (b · h, d, n)
  bool kept;                             // whether the weights are there
};

struct Products {
  void (*summarize)(const Summarize&, int64_t begin, int64_t end);
  void (*respond)(const Respond&, int64_t begin, int64_t end);
  void (*respond_gradient)(const RespondGradient&, int64_t begin, int64_t end);
  void (*summarize_gradient)(const SummarizeGradient&, int64_t begin, int64_t end);
  void (*attend)(const Attend&, int64_t begin, int64_t end);
  void (*gradient_of_products)(const AttendGradient&, int64_t begin, int64_t end);
  void (*attend_gradient)(const AttendGradient&, int64_t begin, int64_t end);
};

}  // namespace farfield
