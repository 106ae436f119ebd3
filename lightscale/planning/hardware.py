"""Hardware of the predictions: every number with its meaning and source."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightscale.errors import UserError

_ASSUMED = "assumed"
_SHEET = "NVIDIA data sheet"
_ROOFLINE = "assumed: half of the speed that memory traffic allows a two-pass kernel at heads of 128 channels"


def _number(default: float, means: str, source: str = _ASSUMED) -> Any:
    return field(default=default, metadata={"means": means, "source": source})


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of GPUs, and the shares of their speed that software reaches. Gbytes are 10^9 bytes."""

    name: str = "H100"
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of non-default values, by field."""

    gpus_per_node: int = _number(8, "GPUs per node, each with its own NIC", _SHEET)
    peak_tflops: float = _number(989, "dense bf16 matrix products of a GPU, TFLOP/s", _SHEET)
    fp32_tflops: float = _number(67, "fp32 matrix products of a GPU, TFLOP/s", _SHEET)
    memory_gib: float = _number(79.6, "memory of a GPU, GiB", "nvidia-smi, H100 SXM")
    reserved_gib: float = _number(6, "reserved for CUDA, NCCL and fragmentation, GiB")
    memory_gbytes_s: float = _number(3350, "memory bandwidth of a GPU, Gbytes/s", _SHEET)
    memory_share: float = _number(0.8, "share of the memory bandwidth that kernels reach")
    product_share: float = _number(0.65, "share of the peak that large matrix products reach")
    fp8_speedup: float = _number(
        2, "speed of matrix products in fp8, as a multiple of bf16; 1: the GPU has none", _SHEET
    )
    softmax_share: float = _number(
        0.5, "share of the peak that softmax attention reaches", "between FlashAttention 2 and 3, published"
    )
    scan_share: float = _number(
        0.11, "share of the peak that linear attention reaches, decay per head or none", _ROOFLINE
    )
    gated_slowdown: float = _number(4, "slowdown factor of a decay per channel", "published GLA kernels on A100")
    forward_passes: float = _number(2, "reads and writes per kept activation in elementwise work, forward")
    backward_passes: float = _number(4, "reads and writes per kept activation, backward")
    layer_launch_us: float = _number(200, "least time of a layer's kernel launches, forward, µs; twice backward")
    nvlink_gbytes_s: float = _number(450, "NVLink bandwidth of a GPU in one direction, Gbytes/s", _SHEET)
    nvlink_pair_share: float = _number(0.45, "share of NVLink bandwidth between two ranks")
    nvlink_collective_share: float = _number(0.67, "share of NVLink bandwidth in collectives within a node")
    nic_gbytes_s: float = _number(50, "bandwidth of a NIC in one direction, Gbytes/s", "400 Gbit/s, data sheet")
    nic_pair_share: float = _number(0.8, "share of NIC bandwidth between two ranks")
    nic_state_share: float = _number(0.375, "share of a node's NIC bandwidth in flat collectives on states (MB)")
    nic_bulk_share: float = _number(0.75, "share of it in collectives on gradients, weights, keys and values")
    hop_us: float = _number(10, "latency of a message between two ranks, µs")
    collective_us: float = _number(35, "latency of a collective, µs")
    exchange_overlap: float = _number(0.5, "share of an operator's time that overlaps the exchange of states")

    def __post_init__(self) -> None:
        """UserError for a value that nothing can be worked out with."""
        for number in _numbers():
            value = getattr(self, number.name)
            share = number.name.endswith("_share") or number.name == "exchange_overlap"
            zero = number.name in ("exchange_overlap", "reserved_gib", "layer_launch_us", "hop_us", "collective_us")
            if not math.isfinite(value) or value < 0 or (value == 0 and not zero) or (share and value > 1):
                rule = "a share between 0 and 1" if share else "at least 0" if zero else "finite and greater than 0"
                raise UserError(f"--set {number.name}={value:g}: must be {rule} ({number.metadata['means']})")

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a GPU."""
        return self.peak_tflops * 1e12

    @property
    def memory_bytes_s(self) -> float:
        """Memory bandwidth of kernels, bytes/s."""
        return self.memory_gbytes_s * 1e9 * self.memory_share

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU available to a run."""
        return (self.memory_gib - self.reserved_gib) * 2**30

    def assumptions(self) -> list[tuple[str, float, str, str]]:
        """(name, value, meaning, source) of every number."""
        rows = []
        for number in _numbers():
            source = self.sources.get(number.name, number.metadata["source"])
            rows.append((number.name, getattr(self, number.name), number.metadata["means"], source))
        return rows


def _numbers() -> list[dataclasses.Field[Any]]:
    return [number for number in dataclasses.fields(Hardware) if "means" in number.metadata]


H100 = Hardware()
A100 = Hardware(
    name="A100",
    sources={"memory_gib": "nvidia-smi, A100 SXM 80 GB", "nic_gbytes_s": "assumed: 200 Gbit/s"},
    peak_tflops=312,
    fp32_tflops=19.5,
    fp8_speedup=1,
    memory_gib=80,
    memory_gbytes_s=2039,
    nvlink_gbytes_s=300,
    nic_gbytes_s=25,
)
HARDWARE = {"h100": H100, "a100": A100}


def with_settings(hardware: Hardware, settings: Iterable[str]) -> Hardware:
    """`hardware` with NAME=VALUE `settings`.

    Raises UserError for a name that is no number of `Hardware`, and for an invalid value.
    """
    known = {number.name: number for number in _numbers()}
    values: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"--set {setting}: unknown hardware number; {hint}")
        values[name] = _value(setting, text, whole=known[name].type is int)
    given = dict.fromkeys(values, "given by --set")
    return dataclasses.replace(hardware, sources={**hardware.sources, **given}, **values)  # type: ignore[arg-type]


def _value(setting: str, text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise UserError(f"--set {setting}: {text!r} is not {kind}; use NAME=NUMBER, such as nic_gbytes_s=50") from None
