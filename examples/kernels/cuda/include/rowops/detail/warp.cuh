#pragma once

namespace rowops::detail {

inline constexpr int warp = 32;

template <class Operation, class T>
__device__ T over_warp(T value) {
  for (int distance = warp / 2; distance > 0; distance /= 2) {
    value = Operation::apply(value, __shfl_down_sync(0xffffffffu, value, distance));
  }
  return value;
}

}  // namespace rowops::detail
