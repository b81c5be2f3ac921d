"""The ``fused`` backend: NEP in Triton kernels, from packed host arrays to packed host arrays, on CUDA and HIP."""
