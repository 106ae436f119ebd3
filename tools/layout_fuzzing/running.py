"""One case on its ranks: three steps in fp64 beside those of one process, then the optimizer's and what follows."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layout_fuzzing.configuration import config_of
from layout_fuzzing.drawing import Drawn
from layout_fuzzing.options import NUM_IDS, STEPS
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.errors import UserError
from lightscale.exchange.files.weights import exported_tensors, shape_of, stored_parts
from lightscale.exchange.imported import model_of
from lightscale.exchange.plain.model import CausalModel
from lightscale.models.accounting import rank_parameters, rank_parameters_by_name
from lightscale.models.adapters import ADAPTERS, rank_adapter_parameters
from lightscale.models.low_rank import begin_adapters, merge_adapters
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import named_parameters, shard, unpadded_rows
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.tasks.interface import task_of
from lightscale.tasks.preference import PreferenceConfig
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.health.copies import check_copies
from lightscale.training.health.gradients import GradientCheck
from lightscale.training.optimizer.registry import full_checkpoint_bytes, optimizer_spec
from lightscale.training.preference import PreferenceObjective, build_reference

FP64_LIMIT, FP32_LIMIT = 1e-7, 1e-3
_NOTHING = 1e-30
_STEP = 0.05
"""Of the gradient in units of its norm: weights move far enough that a wrong one shows in the next step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is asked to do."""

    drawn: Drawn
    stores: str
    """The folder of ``write_stores``."""
    scratch: str
    """A folder for what the jobs of a case leave each other."""
    what: str
    """reference, compare, optimize, resume, move, follow: see ``run``."""


def on_one(drawn: Drawn) -> Drawn:
    """The same model on one process."""
    keys = {key: value for key, value in drawn.keys.items() if not key.startswith("parallel.")}
    return Drawn(world_size=1, keys=keys)


def run(rank: int, world_size: int, init_method: str, job: Job, timeout_s: float) -> dict[str, float]:
    """Errors by name, on this rank. ``timeout_s``: of a collective.

    reference: leaves losses, gradients and weights of one process. compare: those of the layout beside it, fp64.
    optimize: three steps of the optimizer in fp32, one of which data ranks compare, behind which copies are equal and
    the bytes of the optimizer and of a checkpoint are as counted; leaves a checkpoint. resume: one process reads that
    checkpoint, and its next losses are theirs. move: the same of as many ranks on other axes. follow: of one process,
    the logits of the plain form, its weights imported again, and the logits of prompts in pieces.
    """
    drawn = job.drawn if job.what in ("compare", "optimize", "move") else on_one(job.drawn)
    config = config_of(drawn, job.stores)
    parallel = config.parallel
    with start_mesh(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        virtual_stages=parallel.virtual_stages,
        exchange=parallel.exchange,
        attention=parallel.attention,
        ranks_per_node=parallel.ranks_per_node or world_size,
        device="cpu",
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        timeout_s=timeout_s,
    ) as mesh:
        case = _Case(config, drawn, mesh, Path(job.scratch), wide=job.what not in ("optimize", "resume", "move"))
        return {
            "reference": case.record,
            "compare": case.compare,
            "optimize": case.optimize,
            "resume": case.resume,
            "move": case.resume,
            "follow": case.follow,
        }[job.what]()


class _Case:
    def __init__(self, config: RunConfig, drawn: Drawn, mesh: Mesh, folder: Path, *, wide: bool) -> None:
        self.config, self.drawn, self.mesh, self.folder = config, drawn, mesh, folder
        store = open_stores(config.data)
        targets = task_of(config).targets(store, validation=False)
        # Uneven segments are cut here, of whole rows.
        whole = drawn.cuts is not None
        layout = LoaderLayout(
            data_rank=mesh.data_rank,
            data_size=mesh.data,
            sequence_rank=0 if whole else mesh.sequence_rank,
            sequence_size=1 if whole else mesh.sequence,
        )
        # "whole" writes an index of the store.
        index = Path(tempfile.mkdtemp(dir=folder))
        self.loader = TokenLoader.of(config, store, layout=layout, index_dir=index, targets=targets)
        dtype, vocab_size = torch.float64 if wide else torch.float32, store.tokenizer.vocab_size
        objective = None
        if isinstance(config.task, PreferenceConfig):
            reference = build_reference(config, mesh, vocab_size=vocab_size, dtype=dtype)
            objective = PreferenceObjective(config.task, mesh, reference)
        self.engine = build_engine(
            config,
            mesh,
            vocab_size=vocab_size,
            trainable=True,
            num_sources=len(self.loader.mixture.names),
            dtype=dtype,
            objective=objective,
        )
        if config.adapters is not None:
            begin_adapters(self.engine.chunks)
        check_copies(self.engine)

    def batches(self) -> list[Any]:
        found: list[Any] = [batch.to(self.mesh.device) for batch in self.loader.next_step()]
        if self.drawn.cuts is None:
            return found
        edges = self.drawn.edges(found[0].labels.size(1))
        own = slice(edges[self.mesh.sequence_rank], edges[self.mesh.sequence_rank + 1])
        lengths = tuple(stop - start for start, stop in itertools.pairwise(edges))
        return [
            GivenMicroBatch(
                tokens=batch.tokens[:, own],
                labels=batch.labels[:, own],
                loss_mask=batch.loss_mask[:, own],
                positions=batch.positions[:, own],
                sources=batch.sources,
                soft_labels=batch.soft_labels,
                conditions=batch.conditions,
                wanted=None if batch.wanted is None else batch.wanted[:, own],
                label_values=None if batch.label_values is None else batch.label_values[:, own],
                places=batch.places,
                lengths=lengths,
            )
            for batch in found
        ]

    def record(self) -> dict[str, float]:
        steps = []
        for _ in range(STEPS):
            sums = self.engine.forward_backward(self.batches())
            gradients = {name: gradient.clone() for name, _, gradient in _gradients(self.engine)}
            steps.append((sums, gradients))
            _descend(self.engine, _total(gradients))
        weights = {name: parameter.detach().clone() for name, parameter in _parameters(self.engine)}
        torch.save((steps, weights), self.folder / "reference.pt")
        return {}

    def compare(self) -> dict[str, float]:
        steps, weights = torch.load(self.folder / "reference.pt", weights_only=False)
        errors: dict[str, float] = {}
        for expected, gradients in steps:
            sums = self.engine.forward_backward(self.batches())
            _raise(errors, "loss", abs(sums.mean - expected.mean) / (abs(expected.mean) + 1e-12))
            pairs = zip((*sums.by_bucket, *sums.by_source), (*expected.by_bucket, *expected.by_source), strict=True)
            for (loss, count), (expected_loss, expected_count) in pairs:
                _raise(errors, "tokens", abs(count - expected_count))
                _raise(errors, "loss of a bucket or source", abs(loss - expected_loss) / max(1, expected_count))
            total = _total(gradients)
            for name, parameter, gradient in _gradients(self.engine):
                own = self._own(gradients[name], parameter)
                # What is zero but for rounding has no size of its own; without a label that counts, all is zero.
                size = own.norm() + max(1e-6 * total, _NOTHING)
                _raise(errors, f"gradient of {name}", float((gradient - own).norm() / size))
            _descend(self.engine, total)
        for name, parameter in _parameters(self.engine):
            own = self._own(weights[name], parameter)
            _raise(errors, f"weight {name}", float((parameter.detach() - own).norm() / (own.norm() + 1e-6)))
        check_copies(self.engine)
        stage = self.mesh.groups.pp.rank()
        if self.config.parallel.virtual_stages == 1:
            held = sum(parameter.numel() for chunk in self.engine.chunks for parameter in chunk.parameters())
            axes = {"tensor": self.mesh.tensor, "pipeline": self.mesh.pipeline}
            counted = rank_parameters(self.config.model, **axes)[stage]
            if self.config.adapters is not None:
                counted += sum(rank_adapter_parameters(self.config.model, self.config.adapters, **axes)[stage].values())
            errors["parameters that plan counts"] = abs(held - counted)
        return errors

    def optimize(self) -> dict[str, float]:
        losses = []
        # Of the second step: whatever the model is, another data rank computes the same bits, and the step its own.
        check = GradientCheck(self.engine, every=2)
        check.begin(0)
        for step in range(STEPS):
            losses.append(check.forward_backward(step + 1, self.batches()).mean)
            self.engine.step(1e-3)
            if step == 0:
                saver = Saver(self.folder / "checkpoints", self.mesh)
                saver.save(
                    self.engine, step=1, common={"data": self.loader.state_dict()}, facts={"tokens": self.loader.tokens}
                )
        self.engine.gather_weights()
        check_copies(self.engine)
        if self.mesh.rank == 0:
            torch.save(losses, self.folder / "losses.pt")
        errors = {} if all(map(_is_finite, losses)) else {"losses that are not finite": 1.0}
        saved = self._of_all_ranks(sum(shard.data.nbytes for shard in self.engine.owned_shards()))
        errors["bytes of a checkpoint that preflight counts"] = abs(saved - full_checkpoint_bytes(self.config))
        if self.config.parallel.virtual_stages == 1:
            errors["optimizer bytes that plan counts"] = abs(self._optimizer_bytes() - self._planned_bytes())
        return errors

    def _optimizer_bytes(self) -> int:
        """Of all ranks."""
        optimizer = self.engine.optimizer
        assert optimizer is not None, "fp32"
        states = [(parameter, optimizer.owned(parameter)) for _, parameter in _parameters(self.engine)]
        # In fp32 the model's weights are those of the steps.
        own = sum(state.bytes_beside(parameter) for parameter, state in states if state is not None)
        return self._of_all_ranks(own + sum(shard.data.nbytes for shard in optimizer.whole_shards()))

    def _of_all_ranks(self, num_bytes: int) -> int:
        total = torch.tensor(num_bytes)
        torch.distributed.all_reduce(total)
        return int(total)

    def _planned_bytes(self) -> int:
        axes = {"tensor": self.mesh.tensor, "pipeline": self.mesh.pipeline}
        spec = optimizer_spec(self.config)
        model, adapters = self.config.model, self.config.adapters
        stages = (
            rank_parameters_by_name(model, **axes)
            if adapters is None
            else rank_adapter_parameters(model, adapters, **axes)
        )
        held = sum(spec.state_bytes(name) * count for stage in stages for name, count in stage.items())
        return held * self.mesh.tensor + sum(spec.whole_bytes(name) for stage in stages for name in stage)

    def resume(self) -> dict[str, float]:
        expected = torch.load(self.folder / "losses.pt")
        self.loader.next_step()
        restored = Checkpoints(self.folder / "checkpoints", self.mesh).restore(self.engine)
        assert restored is not None, "the checkpoint is there"
        found = []
        for _ in range(STEPS - 1):
            found.append(self.engine.forward_backward(self.batches()).mean)
            self.engine.step(1e-3)
        return {
            "loss behind a checkpoint of the layout": max(
                abs(a - b) / (abs(b) + 1e-3) for a, b in zip(found, expected[1:], strict=True)
            )
        }

    def follow(self) -> dict[str, float]:
        model, errors = self.config.model, dict[str, float]()
        if not task_class(self.config.task.name).writes_text:
            return errors
        (module,) = self.engine.chunks
        # Nothing but training rounds to 8 bits.
        module.eval()
        generator = torch.Generator().manual_seed(0)
        # A document that is a grid is not longer.
        whole_tokens = 40 if model.grid is None else min(40, model.grid.document_tokens)
        tokens = torch.randint(1, NUM_IDS, (1, whole_tokens), generator=generator)
        positions = torch.arange(whole_tokens)[None]
        with torch.no_grad():
            for _, parameter in named_parameters(module):
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.02 * noise)
            if self.config.adapters is not None:
                # What is exported and imported.
                merge_adapters(self.engine.chunks)
            whole = module(tokens, positions)[..., :NUM_IDS]
            for parts in ([7, 1, 13, whole_tokens - 21], [1] * whole_tokens):
                states: dict[str, Any] = {}
                pieces = zip(tokens.split(parts, 1), positions.split(parts, 1), strict=True)
                found = torch.cat([module(ids, own, states=states) for ids, own in pieces], 1)[..., :NUM_IDS]
                _raise(errors, f"logits in {len(parts)} pieces", _error(found, whole))
            try:
                shape = shape_of(model, vocab_size=NUM_IDS)
            except UserError:
                return errors
            weights = {name: one for name, one in named_parameters(module) if f".{ADAPTERS}." not in name}
            plain = CausalModel(shape).double()
            taken = exported_tensors(model, vocab_size=NUM_IDS)
            plain.load_state_dict({name: _rows(weights[rows.key], rows.ranges) for name, rows in taken.items()})
            errors["logits of the export"] = _error(plain(tokens)[0], whole)
            exported = plain.state_dict()
            stored = stored_parts(model, vocab_size=NUM_IDS)
            errors["parameters that an import lacks"] = len(weights.keys() ^ stored.keys())
            for key, held in stored.items():
                # Padding of the vocabulary has no name.
                for part in held:
                    if part.name is None:
                        continue
                    imported = exported[part.name][part.first : part.first + len(part.rows)]
                    own = weights[key][part.rows.start : part.rows.stop]
                    _raise(errors, f"{key} of the import", float((imported - own).abs().max()))
            found_shape = shape_of(model_of(shape), vocab_size=NUM_IDS)
            errors["the import's model is another"] = float(found_shape != shape)
        return errors

    def _own(self, whole: Tensor, parameter: torch.nn.Parameter) -> Tensor:
        rows, size = unpadded_rows(parameter), self.mesh.tensor
        if rows is not None and size > 1:
            missing = parameter.size(0) * size - rows
            whole = torch.nn.functional.pad(whole, (0, 0) * (whole.dim() - 1) + (0, missing))
        return shard(whole, parameter, self.mesh.groups.tp.rank(), size)


def _gradients(engine: Engine) -> list[tuple[str, Any, Tensor]]:
    names = {id(parameter): name for name, parameter in _parameters(engine)}
    return [(names[id(parameter)], parameter, gradient) for _, parameter, gradient in engine.gradients()]


def _parameters(engine: Engine) -> list[tuple[str, Any]]:
    return [pair for chunk in engine.chunks for pair in named_parameters(chunk)]


def _total(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([one.norm() for one in gradients.values()]).norm())


@torch.no_grad()
def _descend(engine: Engine, norm: float) -> None:
    """A step of plain descent, of gradients of the global ``norm``: fp64 engines have no optimizer."""
    step = _STEP / max(norm, 1e-12)
    for _, parameter, gradient in engine.gradients():
        parameter.sub_(step * gradient)


def _raise(errors: dict[str, float], name: str, value: float) -> None:
    # What is not a number is the worst.
    errors[name] = max(errors.get(name, 0.0), value if _is_finite(value) else float("inf"))


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _rows(weight: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return weight if ranges is None else torch.cat([weight[first:last] for first, last in ranges])
