"""The frozen teacher of a run (``task.name = "distill"``): read once, and asked about every micro-batch.

    build_teacher     the teacher's weights on the axes of the run, in evaluation, without optimizer
    Teacher           the engine's ``teach``: a micro-batch to what the student learns of it

The teacher is no part of the run's checkpoints: an event has the hash of its checkpoint, which every start compares.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig, RunConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.kernels.cross_entropy.divergence import SoftTargets
from lightscale.models.language_model import LanguageModel
from lightscale.models.layers.blocks import whole
from lightscale.models.layers.transfer import LayerTarget
from lightscale.models.registry import check_model
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine, MicroBatch
from lightscale.parallel.mesh import Mesh
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.runs.teacher import teacher_config, teacher_run
from lightscale.tasks.distill import DistillConfig
from lightscale.training.branch import parent_of
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.directories import list_checkpoints
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import hash_file
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.health.heartbeat import Heartbeat
from lightscale.training.teacher import converted_layers


class Teacher:
    """A frozen model, and what a student learns of it.

    Args:
        engine: without optimizer and pipeline ranks; tokens and rows are split as the student's.
        task: the stage and the weights of the losses.
        student: the shape of the model that learns.
    """

    def __init__(self, engine: Engine, task: DistillConfig, student: ModelConfig) -> None:
        model = engine.module
        assert isinstance(model, LanguageModel)
        self.engine, self.model, self.task = engine, model.eval().requires_grad_(False), task
        self.trained_mixers = converted_layers(student, model.model) if task.stage == "layers" else None
        """Layers whose mixers learn the teacher's; None: the whole model learns its distributions."""
        # Of the last pass.
        self._streams: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        for number in self.trained_mixers or ():
            layer = model.decoder.layers[number]
            layer.register_forward_pre_hook(partial(self._keep_stream, number), with_kwargs=True)
            layer.self_attention.register_forward_hook(partial(self._keep_output, number))

    def _keep_stream(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._streams[number] = whole((args[0] if args else kwargs["hidden_states"], kwargs.get("added")))

    def _keep_output(self, number: int, _: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, None]) -> None:
        self._outputs[number] = output[0]

    # Not in inference mode: autograd keeps no such tensors for a backward pass.
    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Mapping[str, Any]:
        """Arguments of the student's forward pass; see ``parallel.engine.Teaching``."""
        hidden = self.model(
            batch.tokens,
            batch.positions,
            document_starts=batch.document_starts,
            lengths=batch.lengths,
            hidden_only=True,
        )
        if self.trained_mixers is not None:
            layers = self.trained_mixers
            # Taken out: the batch's backward pass is the last that needs them.
            return {"transfer": [LayerTarget(n, self._streams.pop(n), self._outputs.pop(n)) for n in layers]}
        targets = SoftTargets(
            hidden,
            self.model.output_rows,
            cap=self.model.model.final_logit_cap,
            temperature=self.task.temperature,
            cross_entropy_weight=self.task.cross_entropy_weight,
        )
        return {"targets": targets}

    def sensitivities(self, student: nn.Module, batches: Sequence[MicroBatch]) -> Iterator[tuple[int | None, float]]:
        """Mean cross entropy of the teacher, then with one of its mixers replaced by the student's, for each layer.

        (None, loss) first, then (layer from 0, loss). All ranks iterate together. The layers whose replacement costs
        most are those to keep as they are.
        """
        assert isinstance(student, LanguageModel)
        yield None, self.engine.forward_only(batches).mean
        for number in self.trained_mixers or ():
            with self._replaced(student, number):
                loss = self.engine.forward_only(batches).mean
            yield number, loss
        # The last pass has left what no student asks for.
        self._streams.clear()
        self._outputs.clear()

    @contextmanager
    def _replaced(self, student: LanguageModel, number: int) -> Iterator[None]:
        """Within, the layer ``number`` has the student's mixer and its norm, and the model the parts that it reads."""
        own, other = (model.decoder.layers[number] for model in (self.model, student))
        before = own.input_layernorm, own.self_attention
        parts = [name for name in student.stage_parts if name not in self.model.stage_parts]
        own.input_layernorm, own.self_attention = other.input_layernorm, other.self_attention
        for name in parts:
            self.model.add_module(name, student.get_submodule(name))
        self.model.stage_parts += tuple(parts)
        try:
            yield
        finally:
            own.input_layernorm, own.self_attention = before
            for name in parts:
                delattr(self.model, name)
            self.model.stage_parts = self.model.stage_parts[: len(self.model.stage_parts) - len(parts)]


def frozen_engine(config: RunConfig, mesh: Mesh, *, vocab_size: int, dtype: torch.dtype | None = None) -> Engine:
    """The teacher's model with its initial weights, on the axes of ``mesh``; arguments as of ``build_engine``."""
    found = teacher_config(config)
    assert found is not None
    check_model(found.model, config.parallel)
    # Nothing is recomputed where nothing goes back.
    train = config.train.model_copy(update={"recompute": "none", "recompute_layers": None})
    of_teacher = config.model_copy(update={"model": found.model, "train": train, "adapter": AdapterConfig()})
    return build_engine(of_teacher, mesh, vocab_size=vocab_size, trainable=False, dtype=dtype)


def build_teacher(
    config: RunConfig, mesh: Mesh, store: TokenStore, run: RunDirectory, journal: Journal
) -> Teacher | None:
    """The teacher of ``config`` with its weights; None: the run has none. Collective over the ranks of ``mesh``.

    Raises:
        UserError: the checkpoint is missing or damaged, has another tokenizer than ``store``, or is not the one that
            ``run`` began with, or no record says which one that was.
    """
    if not isinstance(config.task, DistillConfig):
        return None
    engine = frozen_engine(config, mesh, vocab_size=store.tokenizer.vocab_size)
    directory, step = teacher_run(config)
    ranks = Agreement(mesh.control)
    try:
        restored = Checkpoints(directory.checkpoints, mesh, parts=["data"]).restore(
            engine, step=step, weights_only=True
        )
        assert restored is not None, "the checkpoint is missing"
        trained, now = restored.common["data"]["fingerprint"]["tokenizer"], store.tokenizer
        if trained != now.sha256:
            raise UserError(
                f"{restored.path} was trained with a different tokenizer (sha256 {trained[:16]}…) than {store.path} "
                f"({now.name}, sha256 {now.sha256[:16]}…); use a store prepared with the tokenizer of the teacher"
            )
        manifest = ranks.on_first(lambda: hash_file(restored.path / MANIFEST).xxh3_128)
        recorded = ranks.on_first(lambda: _recorded(config, run))
        if other := next((one for one in recorded if one["manifest"] != manifest), None):
            raise UserError(
                f"{restored.path} is not the checkpoint that {run.path} began to learn from, {other['checkpoint']}; "
                "restore that one, or start a new run with --run"
            )
    except UserError as error:
        raise UserError(f'task.teacher = "{config.teacher}": {error}') from None
    if ranks.on_first(lambda: not _teachers(run)):
        journal.event("teacher", checkpoint=str(restored.path), manifest=manifest)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    journal.say(f"learning from {restored.path}: {parameters:,} frozen parameters on this rank")
    return Teacher(engine, config.task, config.model)


def _teachers(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] == "teacher"]


def _recorded(config: RunConfig, run: RunDirectory) -> list[dict[str, Any]]:
    """Records of the teacher that ``run`` has learned from, before its first step those of its parent; none: a new run.

    Raises ``UserError`` where steps were made and no record is there.
    """
    parent = parent_of(config)
    for one in (run, *([parent[0]] if parent else ())):
        if records := _teachers(one):
            return records
        if list_checkpoints(one.checkpoints):
            raise UserError(
                f"{one.events} has no readable record of the checkpoint that {one.path} began to learn from; restore "
                "the file, or start a new run with --run"
            )
    return []


def record_sensitivities(
    teacher: Teacher,
    student: Engine,
    batches: Sequence[MicroBatch],
    journal: Journal,
    heartbeat: Heartbeat,
    *,
    name: str,
    step: int,
) -> None:
    """Record the rise of the teacher's loss on the validation set ``name`` by each mixer that learned from it.

    Nothing in the stage ``logits``, whose mixers learn together.
    """
    if teacher.trained_mixers is None:
        return
    assert isinstance(student.module, LanguageModel)
    if both := {*teacher.model.stage_parts} & {*student.module.stage_parts}:
        # Their layers would be measured with the teacher's part.
        journal.say(f"sensitivity on {name}: not measured, as teacher and student both have {', '.join(sorted(both))}")
        return
    losses = {}
    for layer, loss in teacher.sensitivities(student.module, batches):
        losses[layer] = loss
        heartbeat.beat("validation", step=step)
    alone = losses.pop(None)
    rises = {layer: loss - alone for layer, loss in losses.items() if layer is not None}
    journal.event("sensitivity", step=step, set=name, teacher_loss=alone, rises=rises)
    journal.say(
        f"sensitivity on {name}: the teacher's loss of {alone:.4f} nats rises with one mixer replaced, in nats:"
    )
    for layer in sorted(rises, key=lambda layer: -rises[layer]):
        journal.say(f"  layer {layer}: {rises[layer]:+.4f}")
