"""What the Triton kernels of all operators share."""
