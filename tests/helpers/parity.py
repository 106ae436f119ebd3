"""One rank against several: models, batches, and what a layout must reproduce. Loaded by path, on every rank."""

import faulthandler
import itertools
import runpy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightscale.config.files import load
from lightscale.config.mixers import reading
from lightscale.config.model import ModelConfig
from lightscale.config.schedules.registry import learning_rate
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, shard
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.training.optimizer.adamw import AdamW

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny_engine.py"))))
named, whole, error = tiny.named, tiny.whole, tiny.error
forms = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("llama_forms.py"))))
collectives = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("collectives.py"))))

TOKENS = 96
STACKS: dict[str, str | list[str]] = {
    **{name: name for name in reading("causal")},
    "hybrid": ["hgrn2", "llama"],
    "lion-s": "lion-s",
    "lion-fixed": ["lion-lit", "lion-retnet"],
    "lion-vector": "lion-s",
    "mamba2": "decay-attention",
    "bi-rn": "bi-rn",
}
DELTA = ("delta-net", "gated-delta-net", "kimi-delta")
DECAYS = ("lion-s", "lion-fixed", "lion-vector", "decay-attention", "mamba2")
RMSNORM = ("llama", "llama-local", *DECAYS, "causal-rn", "bi-rn", *DELTA)
# One of LION's with a norm over the heads of all tensor ranks, instead of sums of its own scores.
OPTIONS: dict[str, Any] = {
    "lion-fixed": {"lion-lit": {"scale": False}},
    "lion-vector": {"lion-s": {"vector_decay": True}},
    # More heads of values than of keys, of another width, in states that may change their sign.
    "delta-net": {"delta-net": {"num_value_heads": 16, "value_head_dim": 6, "negative_eigenvalues": True}},
    "kimi-delta": {"kimi-delta": {"key_head_dim": 12, "short_convolution": 0}},
    # Tokens of other ranks for its convolution, and learned angles beside decays of tokens.
    "mamba2": {
        "decay-attention": {
            "decay": "softplus",
            "input_gate": True,
            "feature_map": "none",
            "scale": False,
            "positions": "lrpe",
            "short_convolution": 4,
            "output": "gated",
        }
    },
}
# Divided by their sum, features that are almost equal (of small weights) leave gradients of the queries that are what
# remains of sums that cancel: with the usual 0.02 one process is 2e-5 from fp64 there, as the plain formula is.
INIT_STD = {"lion-fixed": 0.1, "decay-attention": 0.1}
MODELS = {
    name: ModelConfig(
        mixer=mixer,
        # Five layers do not divide by two stages.
        num_layers=5 if name == "hgrn2" else 4,
        hidden_size=64,
        num_heads=8,
        intermediate_size=96,
        vocab_size=128,
        norm="rmsnorm" if name in RMSNORM else "srmsnorm",
        mixer_options=OPTIONS.get(name, {}),
        init_std=INIT_STD.get(name, 0.02),
    )
    for name, mixer in STACKS.items()
}
MODELS["grouped"] = ModelConfig.model_validate(
    {
        **MODELS["llama"].model_dump(exclude={"mixer_options"}),
        "tie_word_embeddings": False,
        "mixer_options": {"llama": forms.GROUPED},
    }
)
# LLaMA that reads both ways, as BERT does.
MODELS["bidirectional"] = ModelConfig.model_validate(
    {**MODELS["llama"].model_dump(exclude={"mixer_options"}), "mixer_options": {"llama": {"causal": False}}}
)
# Two scans each, whose states come from both sides, with angles in the first layer.
MODELS["two-scans"] = ModelConfig.model_validate(
    {
        **MODELS["hgrn2"].model_dump(exclude={"mixer_options", "mixer", "num_layers"}),
        "mixer": ["tnl", "hgrn2"],
        "num_layers": 4,
        "mixer_options": {"tnl": {"causal": False}, "hgrn2": {"causal": False}},
    }
)
# LightNet whose tokens read all of their document, in one state, with learned angles.
WHOLE = {"causal": False, "learned_angles": True}
MODELS["noncausal"] = ModelConfig.model_validate(
    {**MODELS["lightnet"].model_dump(exclude={"mixer_options"}), "mixer_options": {"lightnet": WHOLE}}
)
# What papers print in other ways than the defaults, where it moves tensors or states: a gate from the raw input, no W_o
# (an all-to-all over tensor ranks), other layers with angles, bounds up to 1, and no norm at the end.
PRINTED: dict[str, dict[str, Any]] = {
    "printed": {
        "mixer": ["tnl", "hgrn2", "cosformer2", "hgrn2"],
        "final_norm": False,
        "tpe": {"form": "printed", "modes": 5},
        "mixer_options": {
            "tnl": {"gate_input": "raw", "output_projection": False, "lrpe": "none", "decay": "minimax"},
            "hgrn2": {"query_activation": "none", "lower_bounds": "to_one", "output_projection": False},
            "cosformer2": {"gate_input": "raw", "output_projection": False},
        },
    },
    "ablated": {
        "mixer": ["lightnet", "tnl"],
        "mixer_options": {
            "lightnet": {"decay": False, "tpe": False, "full_rank_gate": True, "output_norm": False},
            "tnl": {"lrpe": "all", "decay": "linear"},
        },
    },
    # Log-sums in an exchange of their own before that of the states.
    "apart": {
        "mixer": "lightnet",
        "mixer_options": {"lightnet": {"shared_decay": False, "learned_angles": True, "gate_input": "raw"}},
    },
}
# Images, whose tokens stand in rows of 4: states of lines along both axes, and heads for each axis.
ROTATED = {"positions": "lrpe", "decay": "fixed", "scale": False, "feature_map": "silu"}
PRINTED["grid"] = {
    "mixer": ["lightnet", "tnl", "cosformer2", "decay-attention"],
    "grid": {"shape": [5, 4]},
    "mixer_options": {"lightnet": {"learned_angles": True}, "decay-attention": ROTATED},
}
PRINTED["grid-whole"] = {
    "mixer": "lightnet",
    "grid": {"shape": [3, 2, 3, 4]},
    "mixer_options": {"lightnet": {"causal": False, "learned_angles": True}},
}
for name, fields in PRINTED.items():
    shape = MODELS["tnl"].model_dump(exclude={"mixer", "mixer_options"})
    MODELS[name] = ModelConfig.model_validate({**shape, **fields})
# Relations of all pairs, in both directions in one stack, with learned positions.
MODELS["quadratic"] = ModelConfig.model_validate(
    {
        **MODELS["bi-rn"].model_dump(exclude={"mixer_options"}),
        "mixer": ["causal-rn", "bi-rn"],
        "norm": "layernorm",
        "mixer_options": {
            "causal-rn": {"form": "quadratic", "expansion": 2, "positions": TOKENS},
            "bi-rn": {"form": "quadratic", "activation": "elu", "pre_norm": "approximate"},
        },
    }
)
WRITING = [*reading("causal"), "hybrid", "grouped", "mamba2"]
"""Those that read what stands before alone, and so can score and write text."""
VOCAB_SIZE = 120  # the last 8 rows are padding
ROWS = 2  # of a micro-batch
CASE_TIMEOUT_S = 120
SHIPPED = load(Path(__file__).parents[2] / "configs" / "tnl-tiny.toml")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout, written as "tnl tensor=2 sequence=2 exchange=ring"; data is the rest."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    virtual_stages: int = 1
    exchange: str = "gather"
    ranks_per_node: int | None = None
    recompute: str = "none"
    overlap: bool = False
    """What only GPUs switch on: reducing and gathering beside the computation, here in buckets of a few parameters."""
    recompute_layers: int | None = None
    cuts: str = ""
    """Where sequence ranks begin, like "0,50,51,51"; empty: equal segments."""

    @staticmethod
    def of(text: str) -> "Case":
        name, *options = text.split()
        values: dict[str, Any] = dict(option.split("=") for option in options)
        return Case(model=name, **{key: int(value) if value.isdigit() else value for key, value in values.items()})

    def mesh(self) -> dict[str, Any]:
        """What ``start_mesh`` is told."""
        names = ("tensor", "pipeline", "sequence", "virtual_stages", "exchange", "ranks_per_node")
        return {name: getattr(self, name) for name in names}

    def edges(self) -> list[int]:
        if self.cuts:
            return [*map(int, str(self.cuts).split(",")), TOKENS]
        return [TOKENS * rank // self.sequence for rank in range(self.sequence + 1)]


def whole_batches(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, loss mask, positions) of the micro-batches of a step, each with documents that end anywhere."""
    generator = torch.Generator().manual_seed(step)
    edge = TOKENS // 2
    # On, before and behind the edge of sequence ranks; and many.
    ends = [[{edge}, {edge - 1, TOKENS // 4}], [{edge + 1, 5, 6, 7, 30, 31, 60}, set()]]
    batches = []
    for ends_of_rows in ends:
        tokens = torch.randint(0, VOCAB_SIZE, (ROWS, TOKENS + 1), generator=generator)
        positions = torch.arange(TOKENS).repeat(ROWS, 1)
        for row, ends_of_row in zip(positions, ends_of_rows, strict=True):
            anywhere = int(torch.randint(1, TOKENS, (1,), generator=generator))
            for cut in sorted({anywhere, *ends_of_row}):
                row[cut:] = torch.arange(TOKENS - cut)
        mask = (torch.rand(ROWS, TOKENS, generator=generator) > 0.2).float()
        batches.append((tokens, mask, positions))
    return batches


def step_batches(step: int, mesh: Mesh, case: Case) -> list[Any]:
    """This rank's share of a global batch of 4 sequences."""
    edges = case.edges()
    own = slice(edges[mesh.sequence_rank], edges[mesh.sequence_rank + 1])
    lengths = tuple(stop - start for start, stop in itertools.pairwise(edges)) if case.cuts else None
    return [
        GivenMicroBatch(
            tokens=tokens[:, :-1][:, own],
            labels=tokens[:, 1:][:, own],
            loss_mask=mask[:, own],
            positions=positions[:, own],
            lengths=lengths,
        )
        for tokens, mask, positions in whole_batches(step)[mesh.data_rank :: mesh.data]
    ]


@contextmanager
def mesh_of(case: Case, rank: int, world_size: int, init_method: str) -> Iterator[Mesh]:
    with start_mesh(
        **case.mesh(), device="cpu", rank=rank, world_size=world_size, init_method=init_method, timeout_s=60
    ) as mesh:
        yield mesh


@contextmanager
def engine_in(mesh: Mesh, case: Case, dtype: torch.dtype) -> Iterator[Engine]:
    model = MODELS[case.model]
    config = transformer_config(model, mesh, dtype, recompute=case.recompute, recompute_layers=case.recompute_layers)
    chunks = language_model_chunks(config, model, vocab_size=VOCAB_SIZE, mesh=mesh)
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    buckets = {"overlap": True, "bucket_size": 2000} if case.overlap else {}
    engine = Engine(chunks, config, mesh, optimizer=AdamW(), position_buckets=4, **buckets)
    if case.overlap:
        assert all(len(buffer.buckets) > 2 for model in engine.models for buffer in model.buffers)
    with warnings.catch_warnings():
        # Megatron's, that weights are used in another order than they are gathered: it then waits for them.
        warnings.filterwarnings("error", message="The next bucket's parameter all-gather")
        yield engine


@contextmanager
def engine_on(case: Case, rank: int, world_size: int, init_method: str, dtype: torch.dtype) -> Iterator[Engine]:
    with mesh_of(case, rank, world_size, init_method) as mesh, engine_in(mesh, case, dtype) as engine:
        yield engine


def on_meshes(cases: Iterable[str], rank: int, world_size: int, init_method: str) -> Iterator[tuple[str, Case, Mesh]]:
    """The cases, those of one mesh together: its groups are made once, and ranks wait for each other meanwhile."""
    of_mesh: dict[str, list[tuple[str, Case]]] = {}
    for text in cases:
        case = Case.of(text)
        of_mesh.setdefault(str(case.mesh()), []).append((text, case))
    for number, same in enumerate(of_mesh.values()):
        with mesh_of(same[0][1], rank, world_size, f"{init_method}-{number}") as mesh:
            for text, case in same:
                yield text, case, mesh


def settle(engine: Engine) -> None:
    """Weights that are gathered beside the next forward pass are gathered now."""
    for model in engine.models:
        if model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def weights(engine: Engine) -> dict[str, Tensor]:
    settle(engine)
    return {name: whole(p, p.detach(), engine.mesh) for name, p in named(engine)}


def gradients(engine: Engine) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in named(engine)}
    return {names[id(p)]: whole(p, gradient, engine.mesh) for _, p, gradient in engine.gradients()}


def set_weights(engine: Engine, new: dict[str, Tensor]) -> None:
    settle(engine)
    with torch.no_grad():
        for name, parameter in named(engine):
            parameter.copy_(shard(new[name], parameter, engine.mesh.groups.tp.rank(), engine.mesh.tensor))
    if engine.optimizer is not None:
        engine.optimizer.copy_from_model()


def disturbed(engine: Engine) -> dict[str, Tensor]:
    """Initial weights of which no two heads, channels or layers have the same."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight + _spread(weight) * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in sorted(weights(engine).items())
    }


def _spread(weight: Tensor) -> float:
    """Biases begin as zeros: with those nobody would see one that is added twice, or on the wrong rank."""
    return 0.1 * float(weight.abs().mean()) if weight.any() else 0.1


@contextmanager
def kept_logits(engine: Engine) -> Iterator[list[Tensor]]:
    """Within it, this rank's logits (n, b, V / tensor) of every micro-batch; none but on the last stage."""
    found: list[Tensor] = []

    @torch.no_grad()
    def keep(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        # The call had labels and gave losses; without them the layer gives logits.
        found.append(layer.forward(*inputs)[0].clone())

    hooks = [chunk.output_layer.register_forward_hook(keep) for chunk in engine.chunks if chunk.post_process]
    yield found
    for hook in hooks:
        hook.remove()


def own_part(logits: Tensor, case: Case, mesh: Mesh) -> Tensor:
    """This rank's tokens and columns of whole logits (n, b, V)."""
    edges, columns = case.edges(), logits.size(2) // mesh.tensor
    tokens = logits[edges[mesh.sequence_rank] : edges[mesh.sequence_rank + 1]]
    first = mesh.groups.tp.rank() * columns
    return tokens[..., first : first + columns]


def record(
    rank: int, world_size: int, init_method: str, path: str, dtype: torch.dtype, names: list[str], steps: int
) -> None:
    """The one-process run of each model: weights before, loss, logits and gradients of every step, and the end."""
    runs = {}
    for name, case, mesh in on_meshes(names, rank, world_size, init_method):
        with engine_in(mesh, case, dtype) as engine:
            set_weights(engine, disturbed(engine))
            trajectory = []
            for step in range(steps):
                before, batches = weights(engine), step_batches(step, mesh, case)
                with kept_logits(engine) as logits:
                    sums = engine.forward_backward(batches)
                trajectory.append((before, sums, logits, gradients(engine)))
                if engine.optimizer is not None:
                    engine.step(learning_rate(SHIPPED.optimizer, step + 1, SHIPPED.total_steps))
            runs[name] = (trajectory, weights(engine))
    torch.save(runs, path)


def follow(
    rank: int, world_size: int, init_method: str, path: str, dtype: torch.dtype, cases: list[str]
) -> dict[str, dict[str, Any]]:
    """For each case: errors along the one-process run, by name; its collectives; and what its exchanges sent."""
    runs = torch.load(path, weights_only=False)
    found = {}
    for text, case, mesh in on_meshes(cases, rank, world_size, init_method):
        print(f"case: {text}", flush=True)  # shown with the traceback when it fails
        faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True)  # of each case, instead of all together
        trajectory, after = runs[case.model]
        with collectives.recorded() as operations, engine_in(mesh, case, dtype) as engine:
            with collectives.begun_beside_computation(mesh.groups.dp_cp) as beside:
                found[text] = _along(engine, case, trajectory)
                if engine.optimizer is not None:
                    found[text]["errors"] |= _freely(engine, case, trajectory, after)
            found[text]["beside"] = beside
        found[text]["collectives"] = dict(operations)
    return found


def _along(engine: Engine, case: Case, trajectory: list[Any], first_step: int = 0) -> dict[str, Any]:
    """The weights of the one-process run before each step; a rank's own errors, the largest of all steps."""
    mesh, exchange = engine.mesh, engine.mesh.exchange
    errors: dict[str, float] = {}
    calls = (0, 0)
    for step, (before, expected, logits, expected_gradients) in enumerate(trajectory, first_step):
        set_weights(engine, before)
        batches = step_batches(step, mesh, case)
        sent = (exchange.num_calls, exchange.payload_bytes) if exchange else (0, 0)
        with kept_logits(engine) as own:
            sums = engine.forward_backward(batches)
        for number, output in enumerate(own):
            part = own_part(logits[mesh.data_rank + number * mesh.data], case, mesh)
            _raise(errors, "logits", error(output, part) if part.numel() else 0.0)
        calls = (exchange.num_calls - sent[0], exchange.payload_bytes - sent[1]) if exchange else (0, 0)
        _raise(errors, "loss", abs(sums.mean - expected.mean))
        for (loss, count), (expected_loss, expected_count) in zip(sums.by_bucket, expected.by_bucket, strict=True):
            assert count == expected_count
            _raise(errors, "loss", abs(loss - expected_loss) / count)
        for name, gradient in gradients(engine).items():
            _raise(errors, f"gradient of {name}", error(gradient, expected_gradients[name]))
        if engine.optimizer is not None:
            norm = torch.stack([gradient.double().norm() for gradient in expected_gradients.values()]).norm()
            _raise(errors, "gradient norm", error(torch.tensor(engine.step(0.0)), norm))
    return {"errors": errors, "calls": calls[0], "payload_bytes": calls[1], "num_batches": len(batches)}


def _freely(engine: Engine, case: Case, trajectory: list[Any], after: dict[str, Tensor]) -> dict[str, float]:
    """The same steps with this layout's own weights from the first one's on."""
    errors: dict[str, float] = {}
    assert engine.optimizer is not None
    engine.optimizer.reset()
    set_weights(engine, trajectory[0][0])
    for step, (_, expected, _, _) in enumerate(trajectory):
        sums = engine.forward_backward(step_batches(step, engine.mesh, case))
        _raise(errors, "loss of the free run", abs(sums.mean - expected.mean))
        engine.step(learning_rate(SHIPPED.optimizer, step + 1, SHIPPED.total_steps))
    for name, weight in weights(engine).items():
        _raise(errors, f"weight {name}", error(weight, after[name]))
    return errors


def _raise(errors: dict[str, float], name: str, value: float) -> None:
    errors[name] = max(errors.get(name, 0.0), value)
