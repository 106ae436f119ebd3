"""Suggested layouts as overrides to paste, for `lightscale plan` and for errors of divisibility."""

from collections.abc import Sequence
from dataclasses import replace

from lightscale.config.layout import LayoutError
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError, counted
from lightscale.planning.hardware import H100, Hardware
from lightscale.planning.prediction import Prediction
from lightscale.planning.search import Fixed, best_layouts


def with_advice(error: LayoutError, config: RunConfig, world_size: int) -> UserError:
    """`error` of `check_layout`, with the layout that `lightscale plan` chooses for `world_size` ranks."""
    advice = _advice(config, world_size)
    # Without one, its own: the nearest value of a single key.
    return UserError(str(error) if advice is None else f"{error.fault}; {advice}")


def layout_overrides(config: RunConfig, one: Prediction, hardware: Hardware) -> list[str]:
    """The overrides `section.key=value` that give `config` the layout of `one`; those of the batch only if it changes.

    With them, `check_layout` accepts `config` on `one.layout.world_size` ranks and returns `one.layout`.
    """
    layout, parallel = one.layout, config.parallel
    chosen: dict[str, object] = {
        f"parallel.{axis}": getattr(layout, axis) for axis in ("tensor", "pipeline", "sequence")
    }
    if parallel.data not in (None, layout.data):
        chosen["parallel.data"] = layout.data
    if parallel.virtual_stages > 1:
        chosen["parallel.virtual_stages"] = 1
    if layout.sequence > 1:
        chosen["parallel.exchange"] = one.exchange
        if one.attention != parallel.attention:
            chosen["parallel.attention"] = one.attention
    if parallel.ranks_per_node not in (None, hardware.gpus_per_node):
        chosen["parallel.ranks_per_node"] = hardware.gpus_per_node
    chosen |= {"train.micro_batch_size": layout.micro_batch_size, "train.recompute": one.recompute}
    if one.recompute_layers != config.train.recompute_layers:
        chosen["train.recompute_layers"] = one.recompute_layers or "none"
    if one.sequence_length != config.data.sequence_length:
        chosen["data.sequence_length"] = one.sequence_length
    if one.global_batch_size != config.train.global_batch_size:
        chosen["train.global_batch_size"] = one.global_batch_size
    return [f"{key}={value}" for key, value in chosen.items()]


def attention_reason(found: Sequence[Prediction]) -> str | None:
    """Why the first of `found` has its way of softmax attention: what the others take on the same ranks, in words.

    None where no other way was possible, or none is needed.
    """
    best = found[0]
    axes = replace(best.layout, micro_batch_size=1, num_microbatches=1)
    like: dict[str, Prediction] = {}
    for one in found:
        if replace(one.layout, micro_batch_size=1, num_microbatches=1) == axes:
            like.setdefault(one.attention, one)
    if len(like) < 2:
        return None
    taken = [
        f"{name} {one.step_s:.3g} s a step and {one.memory.total_bytes / 2**30:.1f} GiB with recompute={one.recompute}"
        + ("" if one.fits else ", which does not fit")
        for name, one in like.items()
    ]
    missing = "" if "all_to_all" in like else "; heads do not divide for all_to_all"
    return f"parallel.attention={best.attention} on {best.layout.sequence} sequence ranks: {'; '.join(taken)}{missing}"


def changed_batch(config: RunConfig, one: Prediction) -> str | None:
    """The change of batch in `one`, in words; None if the tokens per step stay the same."""
    change = one.tokens_per_step / config.tokens_per_step - 1
    if not change:
        return None
    ranks, length = one.layout.world_size, one.sequence_length
    own_length = length == config.data.sequence_length
    why = (
        f"no fitting layout of {ranks} ranks keeps" if own_length else f"on sequences of {length:,} tokens, instead of"
    )
    batch = config.train.global_batch_size
    return (
        f"{why} train.global_batch_size={batch} ({config.tokens_per_step:,} tokens per step): "
        f"train.global_batch_size={one.global_batch_size} gives {one.tokens_per_step:,}, {change:+.1%}"
    )


def _advice(config: RunConfig, world_size: int) -> str | None:
    """The layout for so many ranks, in words; None where there is none."""
    most = config.parallel.ranks_per_node or H100.gpus_per_node
    node = max(ranks for ranks in range(1, most + 1) if world_size % ranks == 0)
    hardware = replace(H100, gpus_per_node=node)
    length = config.data.sequence_length
    try:
        found = best_layouts(config, nodes=world_size // node, sequence_length=length, hardware=hardware, fixed=Fixed())
    except UserError:
        # A mixer whose speed cannot be predicted, as another package may bring.
        return None
    if not found:
        return None
    best = found[0]
    notes = [changed_batch(config, best), None if best.fits else "which is predicted not to fit in 80 GB GPUs"]
    use = f"on {counted(world_size, 'rank')} use {' '.join(layout_overrides(config, best, hardware))}"
    return "; ".join([use, *(note for note in notes if note)])
