"""The scaling-law study of linear-complexity language models (arXiv 2406.16690): its counts, and its Table 7.

Its scaling laws are fitted to these counts: parameters without the embedding, and training FLOPs per step without the
logits. They are not a model's actual FLOPs: MFU uses `lightscale.models.flops`. As in the study, a multiplication and
an addition count 2, forward and backward together 3, and kernels compute chunks of B = d/h tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.accounting import LRPE_ANGLES, NORM_WEIGHTS
from lightscale.models.specs.gated import gate_rank
from lightscale.models.specs.options import GatedMixerOptions, LightNetOptions, LLaMAOptions
from lightscale.models.specs.tpe import DECAYS_TERM, tpe_modes

_NOT_STUDIED = ("causal", "num_key_value_heads", "head_dim", "attention_bias")
_NOT_COUNTED = (NORM_WEIGHTS, LRPE_ANGLES, DECAYS_TERM)


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """The study's notation; l and b have full names."""

    layers: int
    d: int
    h: int
    g: int
    t: int
    """Rank of the output gate; 0: no gate."""
    e: int
    """Decays of the Toeplitz positional encoding."""
    chunk: int
    """Tokens per chunk of a kernel; B in the study."""
    n: int = 0
    """Tokens per sequence."""
    batch: int = 0
    """Sequences per step."""

    @staticmethod
    def of(model: ModelConfig, *, n: int = 0, batch: int = 0) -> "Symbols":
        """The symbols of `model`."""
        return Symbols(
            layers=model.num_layers,
            d=model.hidden_size,
            h=model.num_heads,
            g=model.intermediate_size,
            t=gate_rank(model, 0) if isinstance(model.layer_options(0), GatedMixerOptions) else 0,
            e=tpe_modes(model),
            chunk=model.head_dim,
            n=n,
            batch=batch,
        )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The study's counts of one architecture."""

    parameters: Callable[[Symbols], int]
    """Parameters beyond projections and GLUs, 4 l d² + 3 l d g."""
    mixer_flops: Callable[[Symbols], float] | None = None
    """Forward FLOPs of one layer's mixer on one sequence; None: not in the study."""
    more_flops: Callable[[Symbols], float] = lambda s: 0.0
    """Training FLOPs of a step outside the layers."""


def _nothing(s: Symbols) -> int:
    return 0


def _gates(s: Symbols) -> int:
    return 2 * s.layers * s.d * s.t


def _gates_and_tpe(s: Symbols) -> int:
    return _gates(s) + s.d * s.e


def _llama_flops(s: Symbols) -> float:
    return 8 * s.n * s.d**2 + 4 * s.n**2 * s.d + 3 * s.n**2 * s.h + 4 * s.n * s.d


def _tnl_flops(s: Symbols) -> float:
    projections_and_states = 8 * s.n * s.d**2 + 4 * s.n * s.d**2 / s.h + s.n * s.d**2 / (s.chunk * s.h)
    within_chunks = 4 * s.n * s.chunk * s.d + s.n * s.chunk * s.h
    return projections_and_states + within_chunks + 4 * s.n * s.t * s.d + 2 * s.n * s.d


def _hgrn2_flops(s: Symbols) -> float:
    projections_and_states = 8 * s.n * s.d**2 + 4 * s.n * s.d**2 / s.h + s.n * s.d**2 / (s.chunk * s.h)
    return projections_and_states + 4 * s.n * s.chunk * s.d + s.n * s.chunk * s.h + 5 * s.n * s.d


def _cosformer2_flops(s: Symbols) -> float:
    projections_and_states = 8 * s.n * s.d**2 + 8 * s.n * s.d**2 / s.h + 2 * s.n * s.d**2 / (s.chunk * s.h)
    within_chunks = 6 * s.n * s.chunk * s.d + s.n * s.chunk * s.h
    return projections_and_states + within_chunks + 4 * s.n * s.t * s.d + 2 * s.n * s.d


_COUNTS = {
    "llama": Counts(parameters=_nothing, mixer_flops=_llama_flops),
    "tnl": Counts(parameters=_gates, mixer_flops=_tnl_flops),
    "hgrn2": Counts(
        parameters=lambda s: s.layers * s.d,
        mixer_flops=_hgrn2_flops,
        more_flops=lambda s: 12 * s.d * s.layers,
    ),
    "cosformer2": Counts(
        parameters=_gates_and_tpe,
        mixer_flops=_cosformer2_flops,
        more_flops=lambda s: 12 * s.batch * s.n * s.d * s.e,
    ),
    # Not of the study; its parameters are counted in the same way.
    "lightnet": Counts(parameters=_gates_and_tpe),
}


def _counts(model: ModelConfig) -> Counts | None:
    """The study knows no stacks of several mixers, and LLaMA only causal, with heads of one kind and without biases."""
    first, *others = dict.fromkeys(model.layers)
    options = model.layer_options(0)
    if isinstance(options, LightNetOptions) and (options.full_rank_gate or not options.tpe):
        return None
    if isinstance(options, LLaMAOptions):
        others += [key for key in _NOT_STUDIED if getattr(options, key) != LLaMAOptions.model_fields[key].default]
    return None if others else _COUNTS.get(first)


def study_parameters(model: ModelConfig) -> int | None:
    """Parameters without the embedding, as counted in the study; None for models outside it."""
    counts = _counts(model)
    if counts is None:
        return None
    s = Symbols.of(model)
    return 4 * s.layers * s.d**2 + 3 * s.layers * s.d * s.g + counts.parameters(s)


def exact_only(terms: dict[str, int]) -> dict[str, int]:
    """Terms of a model's exact `terms` that the study does not count."""
    return {name: count for name, count in terms.items() if name in _NOT_COUNTED}


def study_training_flops(model: ModelConfig, *, sequence_length: int, batch_size: int) -> float | None:
    """Training FLOPs per step without the logits, as counted in the study; None for models outside it."""
    counts = _counts(model)
    if counts is None or counts.mixer_flops is None:
        return None
    s = Symbols.of(model, n=sequence_length, batch=batch_size)
    glu = 18 * s.n * s.d * s.g + 3 * s.n * s.g
    return s.batch * s.layers * (3 * counts.mixer_flops(s) + glu) + counts.more_flops(s)


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Table 1 of the study for one architecture, with g = 8/3 d and chunks of d/h, without the embedding."""

    parameters: str
    training_flops: str
    """Per step of b sequences of n tokens."""
    count_parameters: Callable[[Symbols], float]
    count_flops: Callable[[Symbols], float]


def _products(s: Symbols) -> float:
    return 72 * s.batch * s.n * s.layers * s.d**2


TABLE_1: dict[str, ClosedForm] = {
    "llama": ClosedForm(
        parameters="12 l d²",
        training_flops="72 b n l d² (1 + n/(6d) + 5/(18d))",
        count_parameters=lambda s: 12 * s.layers * s.d**2,
        count_flops=lambda s: _products(s) * (1 + s.n / (6 * s.d) + 5 / (18 * s.d)),
    ),
    "tnl": ClosedForm(
        parameters="12 l d² + 2 l d²/h",
        training_flops="72 b n l d² (1 + 1/(2h) + 5/(18d))",
        count_parameters=lambda s: 12 * s.layers * s.d**2 + 2 * s.layers * s.d**2 / s.h,
        count_flops=lambda s: _products(s) * (1 + 1 / (2 * s.h) + 5 / (18 * s.d)),
    ),
    "hgrn2": ClosedForm(
        parameters="12 l d² + l d",
        training_flops="72 b n l d² (1 + 1/(3h) + 29/(72d))",
        count_parameters=lambda s: 12 * s.layers * s.d**2 + s.layers * s.d,
        count_flops=lambda s: _products(s) * (1 + 1 / (3 * s.h) + 29 / (72 * s.d)),
    ),
    "cosformer2": ClosedForm(
        parameters="12 l d² + 2 l d²/h + d²/h",
        training_flops="72 b n l d² (1 + 3/(4h) + 23/(72d))",
        count_parameters=lambda s: 12 * s.layers * s.d**2 + (2 * s.layers + 1) * s.d**2 / s.h,
        count_flops=lambda s: _products(s) * (1 + 3 / (4 * s.h) + 23 / (72 * s.d)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of Table 7."""

    parameters_millions: float
    step_petaflops: float


def _published(*rows: tuple[float, float]) -> dict[str, Published]:
    sizes = ("70m", "160m", "410m", "1b", "3b", "7b")
    return {
        size: Published(parameters_millions=parameters, step_petaflops=flops)
        for size, (parameters, flops) in zip(sizes, rows, strict=True)
    }


# The study prints g = 5632 and h = 16 at 1B, which give none of its numbers; g = 4096 and h = 12 give all.
TABLE_7: dict[str, dict[str, Published]] = {
    "llama": _published((20.5, 1.6), (85.0, 5.6), (334.1, 18.0), (906.2, 40.4), (2775.8, 99.6), (6476.5, 202.7)),
    "tnl": _published((21.2, 0.5), (87.3, 2.2), (327.7, 7.9), (918.6, 22.3), (2798.4, 66.6), (6509.6, 154.4)),
    "hgrn2": _published((20.5, 0.5), (84.9, 2.1), (334.0, 8.0), (906.0, 22.0), (2775.5, 66.0), (6476.1, 153.6)),
    "cosformer2": _published((21.3, 0.5), (87.5, 2.3), (328.0, 8.1), (919.1, 22.7), (2799.0, 67.4), (6511.0, 155.6)),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A number computed here and the published one, which has one decimal."""

    computed: float
    published: float
    tolerance: float

    @property
    def difference(self) -> float:
        """Computed minus published."""
        return self.computed - self.published

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One architecture at one size."""

    architecture: str
    size: str
    model: ModelConfig
    parameters_millions: Comparison
    """Tolerance: 0.15 % or 0.06 million."""
    step_petaflops: Comparison
    """Tolerance: 3 % or 0.08 petaFLOPs."""
    closed_parameters_millions: float
    """By the closed form of Table 1, with g = 8/3 d."""
    closed_step_petaflops: float

    @property
    def agrees(self) -> bool:
        """Whether both numbers agree."""
        return self.parameters_millions.agrees and self.step_petaflops.agrees


def study_table(configs: Path) -> list[StudyRow]:
    """Compute Table 7 from the run files ARCHITECTURE-SIZE.toml in the folder `configs`, size by size.

    Raises UserError if one of them is missing.
    """
    if not configs.is_dir():
        raise UserError(f"{configs}: no such folder; use configs of the repository, which has the study's run files")
    by_architecture = {
        name: [_study_row(configs, name, size, row) for size, row in rows.items()] for name, rows in TABLE_7.items()
    }
    return [row for rows in zip(*by_architecture.values(), strict=True) for row in rows]


def _study_row(configs: Path, architecture: str, size: str, published: Published) -> StudyRow:
    config = load(configs / f"{architecture}-{size}.toml")
    model = config.model
    parameters = study_parameters(model)
    flops = study_training_flops(
        model, sequence_length=config.data.sequence_length, batch_size=config.train.global_batch_size
    )
    if parameters is None or flops is None:
        raise UserError(
            f"{configs / f'{architecture}-{size}.toml'}: model.mixer = {model.mixer!r} is not in the study; "
            f'use "{architecture}"'
        )
    symbols = Symbols.of(model, n=config.data.sequence_length, batch=config.train.global_batch_size)
    closed = TABLE_1[architecture]
    return StudyRow(
        architecture=architecture,
        size=size,
        model=model,
        closed_parameters_millions=closed.count_parameters(symbols) / 1e6,
        closed_step_petaflops=closed.count_flops(symbols) / 1e15,
        parameters_millions=_compare(parameters / 1e6, published.parameters_millions, share=0.0015, least=0.06),
        step_petaflops=_compare(flops / 1e15, published.step_petaflops, share=0.03, least=0.08),
    )


def _compare(computed: float, published: float, *, share: float, least: float) -> Comparison:
    return Comparison(computed=computed, published=published, tolerance=max(share * published, least))
