// Every block reduces its share of the input to one value: launch with BLOCK threads.
#include <rowops/block.cuh>
#include <rowops/operations.cuh>

template <class Operation, class T>
__global__ void reduce(const T* in, T* out, int count) {
  T mine = Operation::template identity<T>();
  for (int i = blockIdx.x * BLOCK + threadIdx.x; i < count; i += gridDim.x * BLOCK) {
    mine = Operation::apply(mine, in[i]);
  }
  mine = rowops::over_block<Operation, BLOCK>(mine);
  if (threadIdx.x == 0) out[blockIdx.x] = mine;
}
