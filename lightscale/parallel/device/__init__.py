"""What a rank sets on its device, and fused kernels that it may use."""
