// Numbers of a grid in memory, in one of the formats that the kernels take. The loops compute in float.

#pragma once

#include <cstdint>

namespace farfield {

enum class Format { FLOAT, BFLOAT16, HALF };

inline int64_t bytes_of(Format format) { return format == Format::FLOAT ? 4 : 2; }

struct Numbers {
  void* start;  // null if they are not wanted
  Format format;

  Numbers from(int64_t place) const { return {static_cast<char*>(start) + place * bytes_of(format), format}; }
};

}  // namespace farfield
