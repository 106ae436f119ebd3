"""The models in plain PyTorch: no Megatron, no Triton, no process groups. Exports are made of these files."""
