"""What every mixer in the registry must hold, alone and all of them in one stack; a new mixer joins by itself.

One process builds all models, because importing torch and Megatron takes seconds.
"""

import itertools
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from lightscale.config.mixers import BIDIRECTIONAL, MIXERS, mixer_entry, reading
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.kernels.operators import get_operator, state_grows
from lightscale.models.accounting import parameter_shapes
from lightscale.models.classes import mixer_class
from lightscale.models.flops import forward_flops_per_token
from lightscale.models.mixers.interface import Mixer
from lightscale.models.registry import check_model, mixer_spec
from lightscale.models.specs.tpe import TPESpec
from lightscale.parallel.initialization import named_parameters
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

# One process measures all models.
pytestmark = pytest.mark.timeout(600)

HYBRID = "all in one stack"
GROUPED = "grouped heads"
CONVOLVED = "mamba-2"
GRID = "images"
CAUSAL: dict[str, list[str]] = {name: [f"{name}*2"] for name in reading("causal")}
# Not CausalRN: under a seventh layer bf16's rounding at first tokens, which TNL's norm magnifies, fills the gradient.
# Nor llama-local, whose class the stack has already.
IN_ONE_STACK = [name for name in reading("causal") if name not in ("causal-rn", "llama-local")]
CAUSAL |= {HYBRID: IN_ONE_STACK, GROUPED: ["tnl", "llama"], CONVOLVED: ["decay-attention*2"]}
CAUSAL[GRID] = ["tnl", "cosformer2", "lightnet", "decay-attention"]
"""Stacks that generate."""
WHOLE = "lightnet of whole documents"
BOTH_WAYS = {name: [f"{name}*2"] for name, entry in MIXERS.items() if entry.directions == BIDIRECTIONAL}
BOTH_WAYS[WHOLE] = ["lightnet*2"]
SCANS = "two scans"
BOTH_WAYS[SCANS] = ["tnl", "hgrn2"]
PATTERNS = CAUSAL | BOTH_WAYS
DRAWN: list[str] = drawing.some("mixers", list(PATTERNS), 6)
# Outputs of heads of 8 channels nearly vanish at some tokens, where the norm of each head magnifies bf16's rounding.
FORGIVING = {name: {"output_norm_eps": 0.1} for name in ("delta-net", "gated-delta-net", "kimi-delta")}
MORE: dict[str, dict[str, Any]] = {
    **{name: {"mixer_options": {name: options}} for name, options in FORGIVING.items()},
    HYBRID: {"mixer_options": FORGIVING},
    WHOLE: {"mixer_options": {"lightnet": {"causal": False}}},
    SCANS: {"mixer_options": {"tnl": {"causal": False}, "hgrn2": {"causal": False}}},
    # The last tokens are in its state too.
    CONVOLVED: {
        "mixer_options": {
            "decay-attention": {
                "decay": "softplus",
                "input_gate": True,
                "feature_map": "none",
                "scale": False,
                "positions": "lrpe",
                "short_convolution": 4,
                "output": "gated",
            }
        }
    },
    # Decays of their own weights, of which the operator takes whole heads; in rows of 3 tokens.
    GRID: {
        "grid": {"shape": [5, 3]},
        "mixer_options": {
            "lightnet": {"shared_decay": False},
            "decay-attention": {"positions": "lrpe", "scale": False, "feature_map": "silu", "short_convolution": 3},
        },
    },
    GROUPED: {
        "tie_word_embeddings": False,
        "mixer_options": {"llama": {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": "all"}},
    },
}
"""What differs from the defaults."""
GROWING = {name for name in MIXERS if state_grows(mixer_spec(name).operator)}
"""Mixers whose state grows with the tokens, and whose operations per token do."""
WITHOUT_PRODUCTS = {"causal-rn", "bi-rn"}
"""Mixers whose linear form has no products of matrices but its projections."""
SHAPE: dict[str, Any] = {"hidden_size": 24, "num_heads": 3, "intermediate_size": 20, "vocab_size": 53}
MODELS = {
    name: ModelConfig(mixer=pattern, num_layers=max(2, len(pattern)), **SHAPE, **MORE.get(name, {}))
    for name, pattern in PATTERNS.items()
}
SEVEN_AND_ONE = ModelConfig(mixer=["tnl*7", "llama"], num_layers=16, **SHAPE)
ONE = (1, 1, 1, 1)
RunRanks = Callable[..., list[Any]]
States = dict[str, dict[str, Tensor]]


# ----- in the process that builds the models --------------------------------------------------------------------------


def measure(rank: int, world_size: int, init_method: str, folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            found[name] = measure_one(name, f"{init_method}-{name}", Path(folder))
        except Exception as error:
            error.add_note(f"with {name}")
            raise
    with plain.built_model(SEVEN_AND_ONE, f"{init_method}-seven") as module:
        found["seven and one"] = {"mixers": [type(layer.self_attention) for layer in module.decoder.layers]}
    return found


def measure_one(name: str, init_method: str, folder: Path) -> dict[str, Any]:
    model = MODELS[name]
    with plain.built_model(model, init_method) as module, torch.no_grad():
        plain.disturb(module)
        found = {
            **(with_own_states(module) if name in CAUSAL else {}),
            "changed": [changed_by(module, row, token) for row, token in PERTURBED],
            "alone": documents_alone(module),
            "shapes": {path: tuple(weight.shape) for path, weight in named_parameters(module)},
            "mixers": [type(layer.self_attention) for layer in module.decoder.layers],
        }
        weights = plain.weights_of(module)
    found["bf16"] = in_half_precision(model, f"{init_method}-half", weights)
    found["restored"] = restored(name, f"{init_method}-engine", folder)
    return found


def with_own_states(module: Any) -> dict[str, Any]:
    return {
        "any parts": in_any_parts(module),
        "steps": one_by_one(module),
        "state bytes": state_bytes(module),
        "wrong states": wrong_states(module),
    }


def with_states(module: Any, tokens: Tensor, positions: Tensor, parts: list[int], states: States) -> Tensor:
    return torch.cat(
        [
            module(ids, own, states=states)
            for ids, own in zip(tokens.split(parts, dim=1), positions.split(parts, dim=1), strict=True)
        ],
        dim=1,
    )


def in_any_parts(module: Any) -> float:
    """Carry states over any cuts, with documents that begin anywhere; the worst error of the logits."""
    errors = []

    @settings(max_examples=12, deadline=None, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 150), label="tokens")
        inside = st.sets(st.integers(1, max(1, n - 1)), max_size=4)
        rows = [sorted({0, n} | {x for x in data.draw(inside, label="starts") if x < n}) for _ in range(2)]
        edges = sorted({0, n} | {x for x in data.draw(inside, label="cuts") if x < n})
        lengths = [[b - a for a, b in itertools.pairwise(row)] for row in rows]
        batch = plain.batch(module.model, lengths, seed=n)
        tokens, positions = batch["tokens"], batch["positions"]
        parts = [b - a for a, b in itertools.pairwise(edges)]
        errors.append(plain.error(with_states(module, tokens, positions, parts, {}), module(tokens, positions)))
        assert errors[-1] < 1e-10

    check()
    return max(errors)


def one_by_one(module: Any) -> float:
    batch = plain.batch(module.model, [[10, 9], [18, 1]])
    tokens, positions = batch["tokens"], batch["positions"]
    return plain.error(with_states(module, tokens, positions, [1] * 19, {}), module(tokens, positions))


DOCUMENTS = [[40, 1, 59], [100]]
PERTURBED = [(0, 0), (0, 39), (0, 40), (0, 70), (1, 64)]


def changed_by(module: Any, row: int, token: int) -> Tensor:
    """(rows, n): by how much the logits change with one token."""
    batch = plain.batch(module.model, DOCUMENTS)
    tokens, positions = batch["tokens"].clone(), batch["positions"]
    before = module(tokens, positions)
    tokens[row, token] = (tokens[row, token] + 1) % module.vocab_size
    return (module(tokens, positions) - before).abs().amax(dim=-1)


def documents_alone(module: Any) -> float:
    batch = plain.batch(module.model, DOCUMENTS)
    tokens, positions = batch["tokens"], batch["positions"]
    alone = [
        torch.cat(
            [module(ids[None], torch.arange(len(ids))[None]) for ids in row.split(lengths)],
            dim=1,
        )
        for row, lengths in zip(tokens, DOCUMENTS, strict=True)
    ]
    return plain.error(torch.cat(alone), module(tokens, positions))


def state_bytes(module: Any) -> dict[int, dict[str, int]]:
    """Bytes of each layer's state after so many tokens of one row."""
    found, states, position = {}, {}, 0
    for tokens in (3, 1, 126, 1, 269):
        positions = torch.arange(position, position + tokens)[None]
        module(torch.zeros_like(positions), positions, states=states)
        position += tokens
        found[position] = {
            layer: sum(tensor.untyped_storage().nbytes() for tensor in state.values())
            for layer, state in states.items()
        }
    return found


def wrong_states(module: Any) -> list[tuple[str, str, str]]:
    """(layer, tensor, message) for every tensor of every state in turn, when it is not what the layer left."""
    states: States = {}
    positions = torch.arange(5).repeat(2, 1)
    module(torch.zeros_like(positions), positions, states=states)
    found = []
    lengths = itertools.cycle((1, 3))
    for layer, state in states.items():
        for key, tensor in state.items():
            for wrong in (tensor[..., :-1], tensor[:1], tensor.flatten(), tensor.float(), None):
                for tokens in (1, 3) if wrong is None else (next(lengths),):
                    given_state = {other: value for other, value in state.items() if other != key}
                    if wrong is not None:
                        given_state[key] = wrong
                    positions = torch.arange(5, 5 + tokens).repeat(2, 1)
                    with pytest.raises(UserError) as caught:
                        module(torch.zeros_like(positions), positions, states={**states, layer: given_state})
                    found.append((layer, key, str(caught.value)))
    return found


def in_half_precision(model: ModelConfig, init_method: str, weights: dict[str, Tensor]) -> dict[str, float]:
    """Errors of bf16 against fp64: of the logits, of steps with states, and of the gradient of the embedding."""
    batch = plain.batch(model, [[40, 30], [70]])
    tokens, positions = batch["tokens"], batch["positions"]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        with plain.built_model(model, f"{init_method}-{dtype}", dtype) as module:
            with torch.no_grad():
                for name, weight in named_parameters(module):
                    weight.copy_(weights[name])
            figures = plain.figures(module, batch)
            gradients = torch.cat([gradient.double().flatten() for gradient in figures["gradients"].values()])
            results.append({"logits": figures["logits"], "gradients": gradients})
            if BIDIRECTIONAL.isdisjoint(map(model.direction, range(model.num_layers))):
                with torch.no_grad():
                    results[-1]["steps"] = with_states(module, tokens, positions, [64, 1, 5], {})
    exact, half = results
    return {name: plain.error(half[name], exact[name]) for name in exact}


def restored(name: str, init_method: str, folder: Path) -> dict[str, Any]:
    """A step, a checkpoint, another model that restores it, and a step of both: what differs."""
    model = {"mixer": PATTERNS[name], "num_layers": MODELS[name].num_layers, **SHAPE, **MORE.get(name, {})}
    task = "causal" if name in CAUSAL else "masked"
    rows = tiny.step_batches(5, SimpleNamespace(sequence=1, sequence_rank=0, data=1, data_rank=0))[0]
    tokens = rows.tokens % 40
    outputs, states, losses = [], [], []
    for number, seed in enumerate((0, 1)):
        with tiny.engine_on(ONE, 0, f"{init_method}-{number}", seed=seed, task=task, **model) as engine:
            checkpoints = Checkpoints(folder / name, engine.mesh)
            batch = SimpleNamespace(**{**vars(rows), "tokens": tokens, "labels": rows.labels % 40})
            if seed == 0:
                engine.forward_backward([batch])
                engine.step(tiny.LR)
                Saver(checkpoints.directory, engine.mesh).save(engine, step=1, common={}, facts={})
            else:
                drawn = plain.weights_of(engine.module)
                checkpoints.restore(engine)
            states.append(tiny.own_state(engine))
            with torch.no_grad():
                outputs.append(engine.module(tokens, rows.positions))
            losses.append([])
            for _ in range(2):
                losses[-1].append(engine.forward_backward([batch]).mean)
                engine.step(tiny.LR)
    return {
        "differing": tiny.differing(*states),
        "outputs are equal": torch.equal(*outputs),
        "losses": losses,
        "drawn alike": [key for key, weight in drawn.items() if torch.equal(weight, states[0][key])],
    }


# ----- tests ----------------------------------------------------------------------------------------------------------

EACH = pytest.mark.parametrize("name", DRAWN)
EACH_CAUSAL = pytest.mark.parametrize("name", [name for name in DRAWN if name in CAUSAL])


@pytest.fixture(scope="module")
def measured(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(measure, 1, str(tmp_path_factory.mktemp("checkpoints")), DRAWN, timeout_s=400)
    return dict(found)


@EACH_CAUSAL
def test_states_carry_over_any_cuts(measured: dict[str, dict[str, Any]], name: str) -> None:
    assert measured[name]["any parts"] < 1e-10


@EACH_CAUSAL
def test_one_token_at_a_time_is_the_parallel_form(measured: dict[str, dict[str, Any]], name: str) -> None:
    assert measured[name]["steps"] < 1e-10


@EACH
def test_a_token_is_seen_from_its_place_to_the_end_of_its_document(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    """Or from the document's start on, where tokens see those behind them."""
    for (row, token), change in zip(PERTURBED, measured[name]["changed"], strict=True):
        starts = torch.tensor([0, *DOCUMENTS[row]]).cumsum(dim=0)
        first, end = int(starts[starts <= token].max()), int(starts[starts > token].min())
        begin = token if name in CAUSAL else first
        seen = torch.zeros_like(change, dtype=torch.bool)
        seen[row, begin:end] = True
        assert change[~seen].max() < 1e-12, (row, token)
        near = slice(max(begin, token - 8), min(token + 8, end))
        assert change[row, near].min() > 1e-6, (row, token)


@EACH
def test_documents_do_not_see_their_row(measured: dict[str, dict[str, Any]], name: str) -> None:
    assert measured[name]["alone"] < 1e-10


@EACH_CAUSAL
def test_the_size_of_a_state(measured: dict[str, dict[str, Any]], name: str) -> None:
    by_position = measured[name]["state bytes"]
    first = by_position[4]
    for position, sizes in by_position.items():
        assert sizes.keys() == first.keys() >= {f"layer-{n}" for n in range(MODELS[name].num_layers)}
        for state, size in sizes.items():
            mixer = MODELS[name].layers[int(state.removeprefix("layer-"))] if state.startswith("layer-") else state
            grown = position / 4 if mixer in GROWING else 1
            assert size == first[state] * grown > 0, (state, position)


@EACH_CAUSAL
def test_a_state_of_another_kind_is_refused(measured: dict[str, dict[str, Any]], name: str) -> None:
    messages = measured[name]["wrong states"]
    assert len(messages) >= 6 * MODELS[name].num_layers
    for layer, key, message in messages:
        assert message.startswith((f"the state of {layer}: ", f"the state of {layer} must hold ")), message
        assert key in message


@EACH
def test_parameters_are_those_that_are_counted(measured: dict[str, dict[str, Any]], name: str) -> None:
    assert measured[name]["shapes"] == parameter_shapes(MODELS[name])
    assert measured[name]["mixers"] == [mixer_class(mixer) for mixer in MODELS[name].layers]


@EACH
def test_half_precision(measured: dict[str, dict[str, Any]], name: str) -> None:
    print(measured[name]["bf16"])
    assert max(measured[name]["bf16"].values()) < 0.1


@EACH
def test_a_checkpoint_is_the_model(measured: dict[str, dict[str, Any]], name: str) -> None:
    found = measured[name]["restored"]
    assert found["differing"] == []
    assert found["outputs are equal"]
    assert found["losses"][0] == found["losses"][1]
    # Or nothing was restored: the other seed draws other projections.
    assert not [key for key in found["drawn alike"] if "_proj" in key or "linear_fc" in key]


@pytest.mark.parametrize("name", MIXERS)
def test_operations_of_linear_mixers_do_not_depend_on_the_length(name: str) -> None:
    mixer, model = mixer_spec(name), MODELS[name]
    # Softmax attention has no chunks.
    chunk = 128 if name in GROWING | WITHOUT_PRODUCTS else get_operator(mixer.operator).chunk_size
    counts = [mixer.forward_flops_per_token(model, 1, chunk * times) for times in (1, 2, 3)]
    assert counts[0] > 0
    if name in GROWING:
        assert counts[2] - counts[1] == counts[1] - counts[0] > 0
    else:
        assert counts[0] == counts[1] == counts[2]
        assert (mixer.forward_flops_per_token(model, 1, chunk // 2) < counts[0]) == (name not in WITHOUT_PRODUCTS)


def test_operations_of_a_stack_are_those_of_its_layers() -> None:
    model = MODELS[HYBRID]
    layers = sum(mixer_spec(name).forward_flops_per_token(model, n, 300) for n, name in enumerate(model.layers))
    units = 6 * model.hidden_size * model.intermediate_size * model.num_layers
    logits = 2 * model.hidden_size * model.vocab_size
    expected = TPESpec.forward_flops_per_token(model) + layers + units + logits
    assert forward_flops_per_token(model, 300) == pytest.approx(expected, rel=1e-15)


def test_an_unknown_mixer_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown mixer hgrn; did you mean hgrn2.* known: .*tnl"):
        mixer_spec("hgrn")
    with pytest.raises(ValidationError, match=r"unknown mixer lama; did you mean llama"):
        ModelConfig(mixer=["tnl", "lama"], num_layers=2, **SHAPE)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "sequence"])
def test_an_axis_that_a_layer_cannot_be_split_on_is_refused(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = frozenset({"tensor", "pipeline", "sequence", "data"}) - {axis}
    monkeypatch.setitem(MIXERS, "stiff", replace(MIXERS["tnl"], axes=others))
    model = ModelConfig(mixer=["tnl", "stiff"], num_layers=4, **SHAPE)
    able = ", ".join(sorted(others - {"data"}))
    message = (
        rf"^parallel\.{axis} = 2: layer 1 \(stiff\) cannot be split along {axis} yet; "
        rf"use parallel\.{axis} = 1, with more data ranks or another axis of: {able}$"
    )
    with pytest.raises(UserError, match=message):
        check_model(model, ParallelConfig(**{axis: 2}))
    check_model(model, ParallelConfig(**dict.fromkeys(others, 2)))


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_says_what_it_is(name: str) -> None:
    mixer = mixer_class(name)
    assert issubclass(mixer, Mixer)
    axes = mixer_entry(name).axes
    assert axes <= {"tensor", "pipeline", "sequence", "data"}
    for axis in ("tensor", "pipeline", "sequence"):
        parallel = ParallelConfig(**{axis: 2})
        if axis in axes:
            check_model(MODELS[name], parallel)
        else:
            with pytest.raises(UserError, match=rf"layer 0 \({name}\) cannot be split along {axis}"):
                check_model(MODELS[name], parallel)


def test_seven_and_one(measured: dict[str, dict[str, Any]]) -> None:
    assert SEVEN_AND_ONE.layers == (*["tnl"] * 7, "llama", *["tnl"] * 7, "llama")
    assert measured["seven and one"]["mixers"] == [mixer_class(name) for name in SEVEN_AND_ONE.layers]
