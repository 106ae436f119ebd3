"""The token mixers that ``model.mixer`` can name, and the modules that implement them.

A mixer's class needs torch, and neither reading a configuration nor planning a run must wait for torch. So entries are
import strings. The type of the options is imported where a configuration is checked, the spec where a model is counted
(``lightscale.models.registry``), and the class where it is built (``lightscale.models.classes``): only the
last of these modules may import torch.

Other packages add mixers without a change here, by entry points of the group ``lightscale.mixers``::

    [project.entry-points."lightscale.mixers"]
    mymixer = "mypackage:ENTRY"  # a MixerEntry; mypackage itself must not import torch either
"""

import difflib
import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel

from lightscale.errors import UserError

ENTRY_POINT_GROUP = "lightscale.mixers"


AXES = frozenset({"tensor", "pipeline", "sequence", "data"})
Direction = Literal["causal", "bidirectional"]
"""Tokens of its document that a token can read: those up to itself, or all."""
CAUSAL: frozenset[Direction] = frozenset({"causal"})
BIDIRECTIONAL: frozenset[Direction] = frozenset({"bidirectional"})


@dataclass(frozen=True, kw_only=True)
class MixerEntry:
    """Import strings ("module:name") of a mixer, and its properties that need no torch."""

    cls: str
    """A subclass of ``lightscale.models.mixers.interface.Mixer``."""
    spec: str
    """A subclass of ``lightscale.models.specs.interface.MixerSpec``, in a module without torch."""
    options: str | None = None
    """A subclass of ``lightscale.config.section.Section``, the keys of [model.mixer_options.NAME]; None: no options."""
    axes: frozenset[str] = AXES
    """Axes along which its layers can be split."""
    directions: frozenset[Direction] = CAUSAL
    """Directions it supports. A mixer with both has an option ``causal``, true or false."""
    check: str | None = None
    """A function of a ``ModelConfig``, in a module without torch: UserError for shapes that the mixer cannot have."""


def _built_in(module: str, name: str, **more: Any) -> MixerEntry:
    """The entry of the mixer whose class is ``name`` in ``mixers/module.py``, and its spec in ``specs/module.py``."""
    models = "lightscale.models"
    return MixerEntry(cls=f"{models}.mixers.{module}:{name}", spec=f"{models}.specs.{module}:{name}Spec", **more)


_OPTIONS = "lightscale.models.specs.options"
_GATED = f"{_OPTIONS}:GatedMixerOptions"
_DECAY_ATTENTION = "lightscale.models.specs.decay_attention"
_DELTA_NET = "lightscale.models.specs.delta_net"
_CHECK_DELTA_NET = f"{_DELTA_NET}:check_delta_net"
_CHECK_LION = f"{_OPTIONS}:check_lion"
_CHECK_RELATION = "lightscale.models.specs.relation:check_relation"
_LLAMA = _built_in(
    "llama",
    "LLaMA",
    options=f"{_OPTIONS}:LLaMAOptions",
    directions=CAUSAL | BIDIRECTIONAL,
    check=f"{_OPTIONS}:check_llama",
)

MIXERS: dict[str, MixerEntry] = {
    "tnl": _built_in("tnl", "TNL", options=f"{_OPTIONS}:TNLOptions", directions=CAUSAL | BIDIRECTIONAL),
    "hgrn2": _built_in("hgrn2", "HGRN2", options=f"{_OPTIONS}:HGRN2Options", directions=CAUSAL | BIDIRECTIONAL),
    "cosformer2": _built_in("cosformer2", "CosFormer2", options=_GATED),
    "lightnet": _built_in(
        "lightnet", "LightNet", options=f"{_OPTIONS}:LightNetOptions", directions=CAUSAL | BIDIRECTIONAL
    ),
    "llama": _LLAMA,
    # A second kind of softmax attention, for stacks of local and global layers: options are by name.
    "llama-local": _LLAMA,
    "lion-lit": _built_in(
        "lion", "LionLIT", options=f"{_OPTIONS}:LionLITOptions", directions=BIDIRECTIONAL, check=_CHECK_LION
    ),
    "lion-retnet": _built_in(
        "lion", "LionRetNet", options=f"{_OPTIONS}:LionOptions", directions=BIDIRECTIONAL, check=_CHECK_LION
    ),
    "lion-s": _built_in(
        "lion", "LionS", options=f"{_OPTIONS}:LionSOptions", directions=BIDIRECTIONAL, check=_CHECK_LION
    ),
    "decay-attention": _built_in(
        "decay_attention",
        "DecayAttention",
        options=f"{_DECAY_ATTENTION}:DecayAttentionOptions",
        check=f"{_DECAY_ATTENTION}:check_decay_attention",
    ),
    "delta-net": _built_in("delta_net", "DeltaNet", options=f"{_DELTA_NET}:DeltaNetOptions", check=_CHECK_DELTA_NET),
    "gated-delta-net": _built_in(
        "delta_net",
        "GatedDeltaNet",
        options=f"{_DELTA_NET}:DeltaNetOptions",
        check=_CHECK_DELTA_NET,
    ),
    "kimi-delta": _built_in("delta_net", "KimiDelta", options=f"{_DELTA_NET}:KimiDeltaOptions", check=_CHECK_DELTA_NET),
    "causal-rn": _built_in("relation", "CausalRN", options=f"{_OPTIONS}:CausalRNOptions", check=_CHECK_RELATION),
    "bi-rn": _built_in(
        "relation",
        "BiRN",
        options=f"{_OPTIONS}:RelationOptions",
        directions=BIDIRECTIONAL,
        check=_CHECK_RELATION,
    ),
}
"""The built-in mixers. An entry point of the same name is ignored."""


def reading(direction: Direction) -> list[str]:
    """Names of the built-in mixers that support ``direction``."""
    return [name for name, entry in MIXERS.items() if direction in entry.directions]


def known_mixers() -> list[str]:
    """Names of all mixers, built in and from installed packages; the packages are not imported."""
    # Importing every package to list its name would be slow, and one that is broken would break the list.
    return [*MIXERS, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - MIXERS.keys())]


def mixer_entry(name: str) -> MixerEntry:
    """The entry of the mixer ``name``.

    Raises UserError for an unknown name (listing the nearest and all known names) and for an entry point that cannot be
    loaded.
    """
    if name in MIXERS:
        return MIXERS[name]
    return package_entry(name)


def mixer_options_type(name: str) -> type[BaseModel] | None:
    """The type of the options of the mixer ``name``; None when it has none.

    Raises UserError as ``mixer_entry`` does, and when the type cannot be imported or is no Section.
    """
    options = mixer_entry(name).options
    if options is None:
        return None
    found = _imported(name, options, "the type of its options")
    if not isinstance(found, type) or not issubclass(found, BaseModel):
        raise UserError(
            f"mixer {name}: the type of its options, {options}, must be a lightscale.config.section.Section"
        )
    return found


def check_shape(name: str, model: object) -> None:
    """Raise UserError when the mixer ``name`` does not support the shape of ``model``, a ``ModelConfig``."""
    check = mixer_entry(name).check
    if check is not None:
        _imported(name, check, "the check of its shape")(model)


def imported_spec(name: str) -> Any:
    """Import the spec of the mixer ``name``, without torch. Raises UserError as ``mixer_entry`` does."""
    return _imported(name, mixer_entry(name).spec, "its spec")


def imported_class(name: str) -> Any:
    """Import the class of the mixer ``name``, which needs torch. Raises UserError as ``mixer_entry`` does."""
    return _imported(name, mixer_entry(name).cls, "its class")


@cache
def package_entry(name: str) -> MixerEntry:
    """The entry of another package's mixer; cached, because the search reads all installed packages."""
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = known_mixers()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"unknown mixer {name}; {hint}known: {', '.join(sorted(known))}")
    if len(points) > 1:
        packages = ", ".join(sorted({_package(point) for point in points}))
        raise UserError(f"several packages provide a mixer {name}: {packages}; uninstall all but one")
    what = f"the entry point of {_package(points[0])}"
    entry = _imported(name, points[0].value, what)
    if not isinstance(entry, MixerEntry):
        raise UserError(
            f"mixer {name}: {what}, {points[0].value}, is a {type(entry).__name__}; "
            "it must be a lightscale.config.mixers.MixerEntry"
        )
    return entry


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def _imported(mixer: str, path: str, what: str) -> Any:
    """What the import string ``path`` names. UserError where it cannot be imported: the package is broken."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    # TypeError: an entry of another version of lightscale, with other fields.
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"mixer {mixer}: {what}, {path}, cannot be imported: {error}") from error
