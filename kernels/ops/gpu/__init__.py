"""What runs on NVIDIA GPUs: Triton kernels with their launchers, one file for each operation, and cuBLASLt."""
