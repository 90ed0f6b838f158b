#pragma once

// Marks functions that are compiled for the GPU as well, when nvcc compiles.
// The one place that asks which compiler it is.
#ifdef __CUDACC__
#define MEMSCALE_DEVICE __host__ __device__
#else
#define MEMSCALE_DEVICE
#endif
