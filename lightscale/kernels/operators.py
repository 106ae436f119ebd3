"""Descriptions of all operators of models: their back-ends, chunks, costs and states.

An operator has the name of its folder beside this file. The run's log, the planner, FLOP counts and the tests on GPUs
read its description here. A new operator needs its folder and one entry of the table at the end, or, from another
package, a call of ``register``. This module does not import torch, so that planning works without it. It names the
modules that compute; ``common/backends.py`` imports them at their first use.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from lightscale.errors import UserError

BackendName = Literal["triton", "chunked", "reference"]

PYTORCH = "PyTorch"
"""Name of the back-end of an operator without back-ends."""

LOGITS_WORKSPACE_BYTES = 512 * 2**20
"""Memory for the logits that cross_entropy holds at a time."""


def loss_chunk_tokens(tokens: int, logits_bytes: int, room: int = LOGITS_WORKSPACE_BYTES) -> int:
    """Number of ``tokens`` that cross_entropy computes at a time; a token has ``logits_bytes`` bytes of logits."""
    # At least 128 tokens: smaller products would not fill a GPU.
    chunks = -(-tokens // max(128, room // logits_bytes))
    # Equal chunks: a short last one would cost nearly as much as a full one.
    return max(1, -(-tokens // max(1, chunks)))


class CostClass(Enum):
    """Bottleneck of an operator, which selects the speed of ``planning.hardware.Hardware`` in a prediction."""

    SCAN = "scan"
    """Matrix products in chunks around a state whose decay is per head, per mode, or none."""
    GATED_SCAN = "gated_scan"
    """The same with a decay per key channel and token, whose products use smaller tiles."""
    SOFTMAX = "softmax"
    """Each token with all tokens before it: grows with the square of the sequence."""
    MEMORY = "memory"
    """Element by element: the bytes read and written count, not the operations."""
    LOSS = "loss"
    """Matrix products with the output layer's weight, whose results are not kept."""


class StateAlgebra(Enum):
    """Effect of the tokens of a segment on the state that enters it."""

    DIAGONAL = "diagonal"
    """S_out = D ⊙ S_in + S_loc."""
    LOG_SUM_EXP = "log_sum_exp"
    """z_out = logaddexp(z_in, z_loc); S_out is the average of S_in and S_loc by exp of z_in and z_loc."""
    AFFINE = "affine"
    """S_out = M S_in + S_loc, with a matrix M (K, K) of each head."""
    LOG_SUM = "log_sum"
    """z_out = logaddexp(z_in, z_loc) alone."""
    CONCATENATION = "concatenation"
    """The tokens themselves, behind the earlier tokens."""


class StateScope(Enum):
    """The other tokens that a token's states depend on."""

    PREFIX = "prefix"
    """Earlier tokens: one state."""
    BOTH = "both"
    """Earlier and later tokens: two states, with the same decays."""
    ALL = "all"
    """All tokens of the document: one state, the sum of the segment's own state and the states from both sides."""


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of a state."""

    name: str
    shape: tuple[str, ...]
    """Symbols: B rows, T tokens, H heads, K width of keys (R with LRPE), V width of values (W with the normaliser's
    column, U with one such column per value), D channels, E modes."""


@dataclass(frozen=True, kw_only=True)
class StateDescription:
    """State that an operator keeps of earlier tokens."""

    tensors: tuple[StateTensor, ...]
    algebra: StateAlgebra
    scope: StateScope = StateScope.PREFIX
    dtype: Literal["fp32", "inputs"] = "fp32"
    """"fp32": also for half-precision inputs, and fp64 for those of fp64; "inputs": that of the inputs."""

    @property
    def grows(self) -> bool:
        """Whether the state's size depends on the number of tokens."""
        return any("T" in tensor.shape for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of an operator."""

    name: BackendName
    """Name in ``train.kernels`` and in the argument ``backend``."""
    module: str
    """Full name of its module, imported at the first use. Passes (``state_fwd``, ``out_fwd``, ``state_bwd``,
    ``grad_bwd``, ``recurrent_step``) have the same signature in all back-ends of an operator."""
    chunk_size: int | None = None
    """Tokens of a chunk for half-precision inputs; None where there are no chunks."""
    fp32_chunk_size: int | None = None
    """Tokens of a chunk for fp32 inputs; None: ``chunk_size``."""
    max_width: int | None = None
    """Most elements of the inputs' last dimension; None for any."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator.

    The call sets the back-end, or else ``train.kernels``. "auto" is the first of ``backends`` that supports the inputs:
    Triton on a GPU for fp16, bf16 and fp32 up to its width, else the next.

    Raises:
        UserError: two back-ends of one name, or one that ``train.kernels`` cannot name.
    """

    name: str
    """Name in ``MixerSpec.operator``; the name of the operator's folder, if it has one."""
    cost: CostClass
    backends: tuple[Backend, ...] = ()
    """In the order of preference; empty for an operator that PyTorch always computes."""
    state: StateDescription | None = None
    """None for an operator whose tokens are independent of each other."""

    def __post_init__(self) -> None:
        names = [backend.name for backend in self.backends]
        known = BackendName.__args__  # type: ignore[attr-defined]
        if not self.name or len(set(names)) < len(names) or not set(names) <= set(known):
            raise UserError(
                f"operator {self.name!r}: back-ends {', '.join(names) or 'none'}; set a name, and list each back-end "
                f"once, out of {', '.join(known)}"
            )

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Names of ``backends``, in their order."""
        return tuple(backend.name for backend in self.backends)

    def backend(self, name: str) -> Backend:
        """The back-end ``name``; ``UserError`` lists the available ones."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise UserError(f"{self.name} has no backend {name!r}; use {', '.join(self.backend_names) or PYTORCH}")

    @property
    def chunk_size(self) -> int:
        """The chunk for FLOP counts: the chunk of the first back-end that has one, in half precision.

        Raises:
            UserError: no back-end has chunks.
        """
        for backend in self.backends:
            if backend.chunk_size is not None:
                return backend.chunk_size
        raise UserError(f"operator {self.name!r} has no back-end with a chunk_size to count FLOPs")


_OPERATORS: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Register an operator in this process, and return the registered one: the first of equal descriptions.

    Raises:
        UserError: another operator has the same name.
    """
    known = _OPERATORS.setdefault(operator.name, operator)
    if known != operator:
        raise UserError(f"operator {operator.name!r} is already registered with a different description: {known}")
    return known


def get_operator(name: str) -> Operator:
    """The operator ``name``; ``UserError`` lists the known ones."""
    if name not in _OPERATORS:
        raise UserError(
            f"no operator {name!r}; use one of {', '.join(sorted(_OPERATORS))}, or add one with "
            "lightscale.kernels.operators.register"
        )
    return _OPERATORS[name]


def state_grows(name: str) -> bool:
    """Whether the state of operator ``name`` grows with the number of tokens."""
    state = get_operator(name).state
    return state is not None and state.grows


def operator_names() -> tuple[str, ...]:
    """Names of all operators, in the order of registration."""
    return tuple(_OPERATORS)


def _backends(
    folder: str,
    *,
    triton_chunk: int | None = None,
    triton_fp32_chunk: int | None = None,
    chunk: int | None = None,
    chunked: str = "chunked",
    max_width: int | None = None,
) -> tuple[Backend, ...]:
    """Triton, PyTorch in chunks, and the reference, the three back-ends of a folder."""
    module = f"{__name__.rpartition('.')[0]}.{folder}"
    return (
        Backend(
            name="triton",
            module=f"{module}.triton",
            chunk_size=triton_chunk,
            fp32_chunk_size=triton_fp32_chunk,
            max_width=max_width,
        ),
        Backend(name="chunked", module=f"{module}.{chunked}", chunk_size=chunk),
        Backend(name="reference", module=f"{module}.reference"),
    )


def _state(algebra: StateAlgebra, dtype: Literal["fp32", "inputs"] = "fp32", **shapes: str) -> StateDescription:
    """A state of tensors whose symbols are written together."""
    tensors = tuple(StateTensor(name=name, shape=tuple(shape)) for name, shape in shapes.items())
    return StateDescription(tensors=tensors, algebra=algebra, dtype=dtype)


register(
    Operator(
        name="lightning",
        cost=CostClass.SCAN,
        backends=_backends("lightning", triton_chunk=128, triton_fp32_chunk=64, chunk=64),
        state=_state(StateAlgebra.DIAGONAL, S="BHRV"),
    )
)
register(
    Operator(
        name="gla",
        cost=CostClass.GATED_SCAN,
        backends=_backends("gla", triton_chunk=64, triton_fp32_chunk=32, chunk=16),
        state=_state(StateAlgebra.DIAGONAL, S="BHKV"),
    )
)
register(
    Operator(
        name="delta_rule",
        cost=CostClass.GATED_SCAN,
        backends=_backends("delta_rule", triton_chunk=32, chunk=16, max_width=256),
        state=_state(StateAlgebra.AFFINE, S="BHKV"),
    )
)
register(
    Operator(
        name="lightnet",
        cost=CostClass.SCAN,
        backends=_backends("lightnet", triton_chunk=128, triton_fp32_chunk=64, chunk=64),
        state=_state(StateAlgebra.LOG_SUM_EXP, z="BHK", S="BHRV"),
    )
)
# A separate form in the folder of lightnet; its chunks are whole documents.
_LIGHTNET = f"{__name__.rpartition('.')[0]}.lightnet"
register(
    Operator(
        name="lightnet_noncausal",
        cost=CostClass.SCAN,
        backends=(
            Backend(name="triton", module=f"{_LIGHTNET}.triton.whole"),
            Backend(name="chunked", module=f"{_LIGHTNET}.noncausal_chunked"),
            Backend(name="reference", module=f"{_LIGHTNET}.reference"),
        ),
        state=replace(_state(StateAlgebra.LOG_SUM_EXP, z="BHK", S="BHRV"), scope=StateScope.ALL),
    )
)
register(
    Operator(
        name="lion",
        cost=CostClass.SCAN,
        backends=_backends("lion", triton_chunk=128, triton_fp32_chunk=64, chunk=64),
        state=replace(_state(StateAlgebra.DIAGONAL, prefix="BHKW", suffix="BHKW"), scope=StateScope.BOTH),
    )
)
# The vector gate: the passes of gla in both directions, see lion/vector.py.
register(
    Operator(
        name="lion_vector",
        cost=CostClass.GATED_SCAN,
        backends=(
            *get_operator("gla").backends[:2],
            get_operator("lion").backend("reference"),
        ),
        state=replace(_state(StateAlgebra.DIAGONAL, prefix="BHUK", suffix="BHUK"), scope=StateScope.BOTH),
    )
)
register(
    Operator(
        name="tpe",
        cost=CostClass.SCAN,
        backends=_backends("tpe", triton_chunk=16, chunk=64),
        state=_state(StateAlgebra.DIAGONAL, u="BDE"),
    )
)
register(
    Operator(
        name="log_sum",
        cost=CostClass.SCAN,
        backends=_backends("log_sum", triton_chunk=64, chunk=64),
        state=_state(StateAlgebra.LOG_SUM, z="BD"),
    )
)
# Sums in the folder of log_sum, which PyTorch computes on all devices.
register(
    Operator(
        name="log_sum_whole",
        cost=CostClass.SCAN,
        state=replace(_state(StateAlgebra.LOG_SUM, z="BD"), scope=StateScope.ALL),
    )
)
register(
    Operator(
        name="relation",
        cost=CostClass.SOFTMAX,
        backends=_backends("relation", chunked="tiled"),
        state=_state(StateAlgebra.CONCATENATION, "inputs", b="BTD"),
    )
)
register(
    Operator(
        name="SDPA",
        cost=CostClass.SOFTMAX,
        state=_state(StateAlgebra.CONCATENATION, "inputs", k="BTHK", v="BTHV"),
    )
)
register(Operator(name="norm", cost=CostClass.MEMORY, backends=_backends("norm", chunked="eager", max_width=4096)))
register(Operator(name="glu", cost=CostClass.MEMORY, backends=_backends("glu", chunked="eager")))
register(Operator(name="heads", cost=CostClass.MEMORY, backends=_backends("heads", chunked="eager")))
register(Operator(name="forget_gate", cost=CostClass.MEMORY, backends=_backends("forget_gate", chunked="eager")))
register(Operator(name="cross_entropy", cost=CostClass.LOSS, backends=_backends("cross_entropy")))
