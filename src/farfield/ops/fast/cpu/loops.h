// What the loops of the CPU kernels take: plain pointers and sizes. `loops.cpp` is compiled once for each instruction set
// and `library.cpp`, which has the tensors, takes the table of the best one that the processor has.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace farfield {

constexpr int64_t CHUNK = 1024;     // contiguous numbers that are summed in float
constexpr int64_t ROWS = 64;        // consecutive rows that are summed in float
constexpr int64_t MOST_AXES = 16;   // spatial dims of a grid

// The axes of a grid `(batch, channels, *size)`: the last, `width`, is contiguous; the last two, `height` and `width`,
// make a slab; the other axes count slabs.
struct Axes {
  int64_t size[MOST_AXES], count, width, height, slabs = 1, total = 0;

  Axes(const int64_t* sizes, int64_t axes) : count(axes), width(sizes[axes - 1]), height(sizes[axes - 2]) {
    for (int64_t axis = 0; axis < axes; ++axis) {
      size[axis] = sizes[axis];
      total += sizes[axis];
      if (axis < axes - 2) slabs *= sizes[axis];
    }
  }

  int64_t plane() const { return slabs * height * width; }

  // The share of a plane that an index of an axis has.
  double share(int64_t axis) const { return static_cast<double>(size[axis]) / static_cast<double>(plane()); }

  // Calls `each` with the place of each index of a slab in the concatenated axes.
  template <class Each>
  void places(int64_t slab, const Each& each) const {
    int64_t behind = slabs, before = 0;
    for (int64_t axis = 0; axis < count - 2; ++axis) {
      behind /= size[axis];
      each(before + slab / behind % size[axis]);
      before += size[axis];
    }
  }
};

// Each loop runs over tasks `begin` to `end`; a task is a plane `(b, c)` where nothing else is said. The loops in `wide`
// take grids in channels-last format, `(b, *size, c)` in memory, vectors `(b, Σ size, c)` and other tasks.
constexpr int64_t SOME_CHANNELS = 64;  // of a task of the wide sums along axes

struct SumAxes {  // wide: a task is a sample and SOME_CHANNELS channels; out is as of a contiguous grid
  Axes axes;
  int64_t channels;
  Numbers grid;  // (b, c, *size)
  float* out;    // (b, c, Σ size)
  bool means;
};

struct OuterSum {  // wide: a task is a sample and a part of its rows
  Axes axes;
  int64_t channels, parts;
  const float* vectors;  // (b, c, Σ size)
  Numbers out;           // (b, c, *size)
  bool means, past;      // past: written past the caches
};

struct ProjectAndSum {  // a task is a sample and a block of its positions
  int64_t batch, channels, count, rows, slots, blocks;
  Numbers positions;                       // (b, c, n)
  const float *matrix, *offset, *weights;  // (b, r, c), (b, r, n), (b, s - 1, n)
  float* out;                              // (b, r, n)
  double* sums;                            // (blocks, b, s, c)
};

struct RespondToScores {  // wide: a task is a sample and a part of its positions
  int64_t channels, count, heads, parts;
  const float *scores, *sums;  // (b, h, n), (b, 1 + h, c)
  Numbers out;                 // (b, c, n)
  bool both, past;
};

struct SpreadGradients {  // wide: a task is a sample and a part of its positions
  int64_t channels, count, heads, parts;
  const float *scores, *rows, *matrix, *sums, *halves;  // (b, h, n), (b, h, n), (h, c), (b, 1 + h, c), (b, h, c)
  Numbers out;                                          // (b, c, n)
  bool past;
};

struct NormGradient {  // a task is a channel, and the only part; wide: a part of the positions of all samples
  int64_t batch, channels, count, parts;
  const float *grid, *grad_output;        // (b, c, n)
  const float *means, *factors, *shifts;  // (c): a number x is normed to factor · x + shift
  float low, high;                        // bounds of the clamp
  double* sums;                           // (parts, 2, c): of the gradients g of what is not clamped, and of g · (x - mean)
  const float *starts, *slopes;           // (c): the gradient of a number is factor · g + start + slope · (x - mean)
  float* out;                             // (b, c, n)
};

struct Loops {
  const char* name;
  void (*sum_axes)(const SumAxes&, int64_t begin, int64_t end);
  void (*outer_sum)(const OuterSum&, int64_t begin, int64_t end);
  void (*project_and_sum)(const ProjectAndSum&, int64_t begin, int64_t end);
  void (*respond_to_scores)(const RespondToScores&, int64_t begin, int64_t end);
  void (*spread_gradients)(const SpreadGradients&, int64_t begin, int64_t end);
  void (*sum_norm_gradient)(const NormGradient&, int64_t begin, int64_t end);
  void (*spread_norm_gradient)(const NormGradient&, int64_t begin, int64_t end);
  struct Wide {
    void (*sum_axes)(const SumAxes&, int64_t begin, int64_t end);
    void (*outer_sum)(const OuterSum&, int64_t begin, int64_t end);
    void (*project_and_sum)(const ProjectAndSum&, int64_t begin, int64_t end);
    void (*respond_to_scores)(const RespondToScores&, int64_t begin, int64_t end);
    void (*spread_gradients)(const SpreadGradients&, int64_t begin, int64_t end);
    void (*sum_norm_gradient)(const NormGradient&, int64_t begin, int64_t end);
    void (*spread_norm_gradient)(const NormGradient&, int64_t begin, int64_t end);
  } wide;
};

}  // namespace farfield
