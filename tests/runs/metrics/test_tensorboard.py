"""What TensorBoard is told beside the curves, and that nothing is there twice."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata
from tensorboard.util import tensor_util

from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.runs.metrics.sink import Measurement, RunFacts
from lightscale.runs.metrics.tensorboard import TensorboardSink, final_metrics
from lightscale.runs.run_directory import timestamp

Config = Callable[..., RunConfig]
# The groups of all curves, as the trainer names them.
TAGS = [
    *(f"train/{name}" for name in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens", "mfu")),
    *("validation/held", "validation/other", "validation_by_position/held/0", "validation_by_position/held/1"),
    *("validation_by_position/other/0", "loss_by_source/a", "loss_by_source/b", "gradient_norm/glu"),
    *("update_ratio/glu", "memory_gib/peak", "memory_gib/planned", "goodput/effective_time_ratio"),
]


@pytest.fixture
def config(tiny_config: Config) -> RunConfig:
    sets = [f'data.validation.{name}.source="{name}"' for name in ("held", "other")]
    return tiny_config(*sets, "train.validate_every=2")


def at(step: int, value: float = 1.0, tag: str = "train/loss") -> Measurement:
    return Measurement(step=step, attempt=1, time=timestamp(), scalars={tag: value})


def read(folder: Path) -> Any:
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return board.Reload()


def text(board: Any, tag: str) -> list[tuple[int, str]]:
    events = board.Tensors(f"{tag}/text_summary")
    return [(event.step, tensor_util.make_ndarray(event.tensor_proto)[0].decode()) for event in events]


def test_texts_show_configuration_and_command_of_each_attempt(
    tmp_path: Path, config: RunConfig, tiny_config: Config
) -> None:
    changed = tiny_config("checkpoint.keep=7")
    for first_step, of, command in ((1, config, "lightscale train a.toml"), (5, changed, "lightscale train b.toml")):
        sink = TensorboardSink(RunFacts(directory=tmp_path, config=of, command=command, first_step=first_step))
        sink.write(at(first_step))
        sink.close()
    board = read(tmp_path)
    assert text(board, "command") == [(1, "    lightscale train a.toml\n"), (5, "    lightscale train b.toml\n")]
    shown = [content.replace("\n    ", "\n").removeprefix("    ") for _, content in text(board, "configuration")]
    assert [one.replace("    \n", "\n") for one in shown] == [to_toml(config), to_toml(changed)]


@pytest.mark.parametrize("optional", [None, "train/z_loss"])
def test_every_chart_of_the_layout_has_the_curves_that_it_names(
    tmp_path: Path, config: RunConfig, optional: str | None
) -> None:
    if optional:
        config = config.model_copy(update={"train": config.train.model_copy(update={"z_loss_multiplier": 1e-4})})
    TensorboardSink(RunFacts(directory=tmp_path, config=config)).close()
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    charts = [(chart.title, list(chart.multiline.tag)) for one in layout.category for chart in one.chart]
    assert charts[0][0] == "training loss"
    written = [*TAGS, optional] if optional else TAGS
    matched = {title: [tag for tag in written if any(re.match(one, tag) for one in tags)] for title, tags in charts}
    assert all(matched.values())
    assert [tags for title, tags in matched.items() if "z-loss" in title] == ([[optional]] if optional else [])
    assert matched["training loss"] == ["train/loss"]
    assert matched["validation loss, all sets"] == ["validation/held", "validation/other"]
    by_position = matched["validation loss of held by position in the sequence"]
    assert by_position == ["validation_by_position/held/0", "validation_by_position/held/1"]
    assert matched["memory of rank 0, GiB"] == ["memory_gib/peak", "memory_gib/planned"]


def test_hparams_are_the_configuration_and_the_metrics_are_curves(tmp_path: Path, config: RunConfig) -> None:
    sink = TensorboardSink(RunFacts(directory=tmp_path, config=config))
    for tag in final_metrics(config):
        sink.write(at(1, 2.5, tag))
    sink.close()
    board = read(tmp_path)
    contents = board.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["optimizer.lr"].number_value == 1e-3
    assert start.hparams["model.mixer"].string_value == "tnl"
    assert start.hparams["train.global_batch_size"].number_value == 4
    experiment = metadata.parse_experiment_plugin_data(contents[metadata.EXPERIMENT_TAG])
    assert {info.name for info in experiment.hparam_infos} == set(start.hparams)
    assert len([info.name for info in experiment.hparam_infos if info.differs]) == 5
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags[:3] == ["train/loss", "validation/held", "validation/other"]
    assert set(tags) <= set(board.Tags()["scalars"])


def test_a_measurement_that_was_half_written_is_taken_back(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written when the sink is opened again is the only one of its step."""
    facts = RunFacts(directory=tmp_path, config=config)
    sink = TensorboardSink(facts)
    for step in (1, 2):
        sink.write(at(step))
    real = sink._events._file

    class FullDisk:
        """Accepts half a record, without an error, as file systems do."""

        is_full = False

        def write(self, data: bytes) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.is_full = True
            return real.write(data[: len(data) // 2])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(sink._events, "_file", FullDisk())
    with pytest.raises(OSError, match="No space"):
        sink.write(at(3))
    monkeypatch.setattr(sink._events, "_file", real)
    sink.write(at(3))
    sink.close()
    again = TensorboardSink(RunFacts(directory=tmp_path, config=config, first_step=None))
    again.write(at(4))
    again.close()
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("train/loss")] == [
        (step, 1.0) for step in (1, 2, 3, 4)
    ]
