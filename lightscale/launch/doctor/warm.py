"""Filling Triton's cache of a node with the kernels of a run, before its ranks start.

The launches of a rank's micro-batch are traced on PyTorch's device "meta", forward and backward, so that neither data,
nor weights, nor other ranks are needed. Each distinct variant is compiled once, in several processes.
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.progress import track

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.kernels.common.backends import HAS_TRITON, default_backend, set_default_backend
from lightscale.models.kernel_check import launch_checked
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.models.registry import check_model
from lightscale.output.terminal import PlainConsole
from lightscale.parallel.mesh import Mesh, shape_mesh
from lightscale.runs.teacher import computed_models
from lightscale.training.build import weight_dtype

# Of an H100 and an H200, where there is no GPU to ask. Rows are cut into as many splits as these can take.
_NUM_MULTIPROCESSORS = 132
# In fork's children: a compiled function of Triton's cannot be sent.
_launches: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """GPUs that kernels are compiled for."""

    capability: int
    """90 for sm_90."""
    num_multiprocessors: int


@dataclass(frozen=True, kw_only=True)
class WarmReport:
    """Kernels of a rank in Triton's cache."""

    arch: str
    cache: str
    """Folder of the cache."""
    kernels: int
    """Distinct kernels."""
    variants: int
    """Distinct compiled variants of these kernels."""
    compiled: int
    """Variants compiled now."""
    from_cache: int
    """Variants that the cache had."""
    failed: dict[str, str]
    """Kernel to error."""
    seconds: float

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return UserError.EXIT_CODE if self.failed else 0

    def record(self) -> dict[str, Any]:
        """The report, for JSON."""
        return {**asdict(self), "exit_code": self.exit_code}


def architecture(name: str | None) -> Architecture:
    """The architecture ``name``, such as sm_90; None: that of this machine's first GPU.

    Raises UserError if the name is wrong, or there is neither name nor GPU.
    """
    if name is not None:
        digits = name.removeprefix("sm_").removesuffix("a")
        if not name.startswith("sm_") or not digits.isdecimal():
            raise UserError(f"--arch {name}: unknown architecture; use sm_ and the compute capability, such as sm_90")
        return Architecture(capability=int(digits), num_multiprocessors=_NUM_MULTIPROCESSORS)
    if not torch.cuda.is_available():
        raise UserError(
            "--warm: PyTorch finds no GPU on this machine; name the GPUs' architecture, such as --arch sm_90"
        )
    found = torch.cuda.get_device_properties(0)
    return Architecture(capability=10 * found.major + found.minor, num_multiprocessors=found.multi_processor_count)


def warm(config: RunConfig, arch: Architecture, *, processes: int, quiet: bool) -> WarmReport:
    """Compile into Triton's cache what a rank of ``config`` launches, with a progress bar on stderr unless ``quiet``.

    Raises UserError where Triton is missing or interprets kernels.
    """
    if not HAS_TRITON:
        raise UserError("--warm: the package triton is missing; install lightscale on Linux, where it comes with it")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET = 1: Triton compiles nothing; unset it")
    start = time.perf_counter()
    check_model(config.model, config.parallel)
    _launches[:] = distinct_launches(config, arch.num_multiprocessors)
    compiled, from_cache, failed = 0, 0, {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        work = pool.imap_unordered(_compile, [(number, arch.capability) for number in range(len(_launches))])
        shown = track(work, "compiling", len(_launches), console=PlainConsole(stderr=True), disable=quiet)
        for name, hit, error in shown:
            if error is not None:
                failed[name] = error
            elif hit:
                from_cache += 1
            else:
                compiled += 1
    from triton import knobs  # noqa: PLC0415 - optional

    return WarmReport(
        arch=f"sm_{arch.capability}",
        cache=str(knobs.cache.dir),
        kernels=len({one.name for one in _launches}),
        variants=len(_launches),
        compiled=compiled,
        from_cache=from_cache,
        failed=failed,
        seconds=round(time.perf_counter() - start, 1),
    )


def _compile(task: tuple[int, int]) -> tuple[str, bool, str | None]:
    """Name of a launch's kernel, whether the cache had its variant, and the error of its compilation."""
    from lightscale.kernels.common.triton.tracing import compile_launch  # noqa: PLC0415 - optional

    number, capability = task
    one = _launches[number]
    try:
        # Triton's warnings about its own defaults, which launches do not use.
        with warnings.catch_warnings(action="ignore"):
            return one.name, compile_launch(one, capability), None
    except UserError as error:
        return one.name, False, str(error)
    except Exception as error:  # noqa: BLE001 - a compiler raises what it likes, and the other kernels are still useful
        reason = str(error).strip().splitlines() or [""]
        return one.name, False, f"{type(error).__name__}: {reason[0]}"


def distinct_launches(config: RunConfig, num_multiprocessors: int) -> list[Any]:
    """One ``KernelLaunch`` of each compiled variant that a rank of ``config`` launches, from its start to its end."""
    from lightscale.kernels.common.triton.tracing import traced  # noqa: PLC0415 - optional

    parallel, chosen = config.parallel, default_backend()
    found: dict[str, Any] = {}
    set_default_backend(config.train.kernels)
    try:
        # The first, the last and a rank between them differ in the states that enter and leave.
        for rank in sorted({0, min(1, parallel.sequence - 1), parallel.sequence - 1}):
            mesh = shape_mesh(
                tensor=parallel.tensor,
                sequence=parallel.sequence,
                sequence_rank=rank,
                exchange=parallel.exchange,
                ranks_per_node=None,
            )
            with mesh as alone, traced(num_multiprocessors) as launches, warnings.catch_warnings(action="ignore"):
                for model in computed_models(config):
                    for _ in _passes(config.model_copy(update={"model": model}), alone):
                        found.update((one.variant, one) for one in launches)
                        launches.clear()
    finally:
        set_default_backend(chosen)
    return list(found.values())


def _passes(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """The passes of a model of ``config`` on ``mesh``, one by one."""
    model, train, data = config.model, config.train, config.data
    dtype = weight_dtype(train, torch.device("cuda"))
    megatron = transformer_config(
        model, mesh, dtype, recompute=train.recompute, recompute_layers=train.recompute_layers
    )
    with mesh.device:
        module = LanguageModel(megatron, model, vocab_size=model.vocab_size, mesh=mesh)
    lengths = {data.sequence_length, *(stage.sequence_length for stage in data.curriculum)}
    for length, documents in product(sorted(lengths), (1, 3)):
        # Tokens of a micro-batch are the same in all stages of a curriculum.
        rows = train.micro_batch_size * data.sequence_length // length
        batch = _batch(mesh, rows, length // mesh.sequence, documents)
        module.train()
        module(**batch).sum().backward()
        yield
        with torch.no_grad():
            module.eval()(**batch)
        yield
    if train.kernels == "auto":
        # At the start of training they are compared with their chunked forms, at shapes of their own.
        launch_checked(model, dtype, mesh.device, tokens=data.sequence_length // mesh.sequence, tensor=mesh.tensor)
        yield


def _batch(mesh: Mesh, rows: int, tokens: int, documents: int) -> dict[str, Any]:
    """A micro-batch of one rank, every row with so many documents, where it is long enough."""
    ids, mask = (torch.empty(rows, tokens, dtype=dtype, device=mesh.device) for dtype in (torch.int64, torch.float32))
    inside = torch.arange(min(documents, tokens)) * tokens // documents
    slots = (torch.arange(rows)[:, None] * tokens + inside).flatten()
    positions, after = torch.zeros_like(slots), torch.zeros(rows, dtype=torch.int64)
    starts = slots, positions, after
    return {"tokens": ids, "positions": ids, "labels": ids, "loss_mask": mask, "document_starts": starts}
