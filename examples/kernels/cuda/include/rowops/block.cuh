#pragma once

#include "detail/warp.cuh"

namespace rowops {

// Reduces one value of each of `threads` threads; the result is in thread 0.
template <class Operation, int threads, class T>
__device__ T over_block(T value) {
  static_assert(threads % detail::warp == 0 && threads <= detail::warp * detail::warp);
  __shared__ T of_warps[threads / detail::warp];
  value = detail::over_warp<Operation>(value);
  if (threadIdx.x % detail::warp == 0) of_warps[threadIdx.x / detail::warp] = value;
  __syncthreads();
  if (threadIdx.x < detail::warp) {
    value = threadIdx.x < threads / detail::warp ? of_warps[threadIdx.x]
                                                 : Operation::template identity<T>();
    value = detail::over_warp<Operation>(value);
  }
  return value;
}

}  // namespace rowops
