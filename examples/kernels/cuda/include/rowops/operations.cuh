#pragma once

struct Sum {
  template <class T> static __device__ constexpr T identity() { return T(0); }
  template <class T> static __device__ constexpr T apply(T a, T b) { return a + b; }
};

struct Max {
  template <class T> static __device__ T identity() { return T(__int_as_float(0xff800000)); }  // -inf
  template <class T> static __device__ constexpr T apply(T a, T b) { return a < b ? b : a; }
};
