"""Triton kernels and their launchers, one file for each operation. Imported by `backend` where they can run."""
