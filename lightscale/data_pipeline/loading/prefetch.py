"""Reads the next steps in a thread while the model works on the present one."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from lightscale.data_pipeline.loading.curriculum import SkippedRanges
from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.loading.windows import Batch

DEFAULT_DEPTH = 2

_DataPosition = tuple[int, SkippedRanges]


class Prefetcher:
    """The steps of ``loader``, read up to ``depth`` steps ahead. A context manager: leaving it ends the thread.

    The loader's ``tokens`` count only steps that ``next_step`` returned, so that its state is that of the trained
    steps. If its position changes, because a state was loaded or data skipped, the steps read ahead are dropped. An
    error in the thread is raised by the ``next_step`` of the same step, with the thread's traceback.
    """

    def __init__(self, loader: TokenLoader, *, depth: int = DEFAULT_DEPTH, device: torch.device | None = None) -> None:
        """Start the thread.

        Args:
            loader: reads the steps.
            depth: as many steps of this rank, at least 1, are held in memory at most, beside the present one.
            device: where the steps go; for a GPU the thread puts them into pinned memory.
        """
        if depth < 1:
            raise ValueError(f"depth {depth}: use at least 1")
        self._loader = loader
        self._depth = depth
        self._device = device
        self._reader = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="prefetch", initializer=self._take_device if self._for_gpu else None
        )
        self._ahead: deque[tuple[_DataPosition, Future[list[Batch]]]] = deque()
        self._pinned_shapes: list[torch.Size] = []

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; moves the loader's ``tokens`` on."""
        loader = self._loader
        # Steps that were read ahead are of use only while the loader stands where it stood when they were asked for.
        if self._ahead and self._ahead[0][0] != (loader.tokens, loader.skips):
            self._drop()
        if not self._ahead:
            self._read(loader.tokens)
        _, batches = self._ahead.popleft()
        found = batches.result()
        # Only now: a checkpoint taken in between holds the steps that were trained on, not those that were read.
        loader.tokens = loader.step_tokens.after(1, loader.tokens)
        # After the wait, not before: at most ``depth`` steps are then in memory beside the one that is handed out.
        while len(self._ahead) < self._depth:
            self._read(loader.step_tokens.after(len(self._ahead), loader.tokens))
        return found

    def close(self) -> None:
        """End the thread when it has read the step that it is at."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _for_gpu(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _take_device(self) -> None:
        # Of each thread: pinning would otherwise start GPU 0 for every rank.
        torch.cuda.set_device(self._device)

    def _batches_after(self, tokens: int) -> list[Batch]:
        batches = self._loader.batches_after(tokens)
        return self._pinned(batches) if self._for_gpu else batches

    def _pinned(self, batches: list[Batch]) -> list[Batch]:
        """The same in pinned memory, which PyTorch uses again when it is let go."""
        shapes = [batch.tokens.shape for batch in batches]
        if shapes != self._pinned_shapes:
            self._pinned_shapes = shapes
            # As many as are ever held at once, all of them now: where reading is slow at first, memory would else be
            # taken in the middle of a later step, and to pin memory holds the device up.
            held = [[batch.pinned() for batch in batches] for _ in range(self._depth + 1)]
            return held[0]
        return [batch.pinned() for batch in batches]

    def _read(self, tokens: int) -> None:
        batches = self._reader.submit(self._batches_after, tokens)
        self._ahead.append(((tokens, self._loader.skips), batches))

    def _drop(self) -> None:
        # A step that is being read cannot be cancelled: it is read to its end, and nobody takes it.
        for _, batches in self._ahead:
            batches.cancel()
        self._ahead.clear()
