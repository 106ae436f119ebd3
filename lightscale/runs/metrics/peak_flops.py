"""Peak FLOP/s of GPUs for MFU: dense bf16 without sparsity, from NVIDIA's data sheets.

Keys are the driver's full names. Parts of names are not enough: boards of one chip differ (PCIe, NVL), and MIG
instances and chips for one customer begin with the same words.
"""

import re

_PEAK_FLOPS = {
    r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe": 312e12,
    r"H100 80GB HBM3": 989e12,  # SXM5
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H200": 989e12,  # SXM5
    r"H200 NVL": 835e12,
    r"B200": 2250e12,
}


def device_peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of the GPU `device_name` (the driver's name, "NVIDIA H100 80GB HBM3"); None: unknown, or a CPU."""
    name = device_name.removeprefix("NVIDIA ")
    return next((peak for pattern, peak in _PEAK_FLOPS.items() if re.fullmatch(pattern, name)), None)
