"""The configuration of a case, as a run would have it; without torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from layout_fuzzing.drawing import Drawer, Drawn, nested
from layout_fuzzing.options import STEPS, TOKENS
from lightscale.config.layout import check_layout, check_mixers
from lightscale.config.model import GridConfig, PatchesConfig
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.errors import UserError
from lightscale.launch.commands.checks import check_lines
from lightscale.models.registry import check_model, shared_specs
from lightscale.models.specs.tpe import TPESpec
from lightscale.training.optimizer.registry import optimizer_spec


def config_of(drawn: Drawn, stores: str) -> RunConfig:
    """The run of a case. UserError or ValueError where it is none."""
    tables = nested(drawn.keys)
    micro = drawn.keys.get("train.micro_batch_size", 1)
    task = tables["task"]
    is_frozen = "adapter" in tables or (task["name"] == "preference" and task.get("loss") != "simpo")
    config = RunConfig.model_validate(
        {
            **tables,
            "data": {"store": f"{stores}/{store_of(tables)}", "sequence_length": TOKENS, **tables.get("data", {})},
            "optimizer": {"lr": 1e-3, **tables.get("optimizer", {})},
            # Cases that were kept before the batch was drawn had four micro-batches.
            "train": {
                "steps": STEPS,
                "device": "cpu",
                "global_batch_size": 4 * micro,
                # Never read: frozen weights are those that the layout draws, the same on every one.
                **({"init_from": "base@1"} if is_frozen else {}),
                **tables.get("train", {}),
            },
        }
    )
    check_model(config.model, config.parallel)
    check_mixers(config.model, config.parallel)
    check_layout(config, drawn.world_size)
    check_lines(config)
    optimizer_spec(config)
    _check_cuts(config, drawn)
    return config


def refusal(drawn: Drawn, stores: str) -> str | None:
    """The fault that validation finds in a case, without its remedy; None where it takes it."""
    try:
        config_of(drawn, stores)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = first["msg"].removeprefix("Value error, ")
        # Faults of a whole section name their keys.
        where = [".".join(map(str, first["loc"]))] if first["loc"] and "=" not in text else []
        return ": ".join([*where, text]).partition("; ")[0]
    except (UserError, ValueError) as error:
        return str(error).partition("; ")[0]
    return None


def draw_valid(drawer: Drawer, stores: str, mixers: frozenset[str] = frozenset()) -> Drawn:
    """A case that validation takes; with ``mixers``, one that has any of them."""
    while True:
        drawn = drawer.draw()
        if (not mixers or mixers & drawn.mixers) and refusal(drawn, stores) is None:
            return drawn


def store_of(tables: Mapping[str, Any]) -> str:
    """The store of ``write_stores`` that a case of ``tables`` reads."""
    model, task = tables["model"], tables["task"]["name"]
    grid = GridConfig(**model["grid"]) if model.get("grid") else None
    if task_class(task).reads_images and grid is not None:
        patches = PatchesConfig(**model.get("patches", {}))
        sides = [number * size for number, size in zip(grid.shape, patches.size, strict=False)]
        return "images-" + "x".join(map(str, [*sides, patches.channels]))
    if grid is not None:
        return f"grids-{grid.document_tokens}"
    if (model.get("head") or {}).get("pairs"):
        return "matches"
    return {"classify": "labelled", "preference": "pairs", "sft": "answers"}.get(task, "text")


def _check_cuts(config: RunConfig, drawn: Drawn) -> None:
    """Refuse uneven segments that ``check_lines`` would, if the configuration had such."""
    grid = config.model.grid
    if drawn.cuts is None or grid is None or grid.axes == 1 or TPESpec not in shared_specs(config.model):
        return
    stride = grid.strides[0]
    for length in (config.data.sequence_length, *(stage.sequence_length for stage in config.data.curriculum)):
        if any(edge % stride for edge in drawn.edges(length)):
            raise UserError(
                f"uneven segments inside the slices of {stride} tokens of model.grid, which TPE needs whole"
            )
