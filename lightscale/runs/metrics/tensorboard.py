"""The sink for TensorBoard: curves, a layout of the main charts, configuration, command and hparams."""

import datetime
import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_SUCCESS,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, text

from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink
from lightscale.runs.run_directory import RunDirectory

# The sections that people compare runs by.
_COMPARED = ("optimizer", "train", "model", "data", "parallel")
_NOT_COMPARED = frozenset({"train.profile_steps", "train.device", "data.store"})
# TensorBoard shows the first five columns, and first those that are said to differ. A run knows nothing of the others.
_FIRST = frozenset({"optimizer.lr", "train.global_batch_size", "model.mixer", "model.hidden_size", "model.num_layers"})


class TensorboardSink(Sink):
    """Event files in RUN/tensorboard.

    A measurement is one record of the file. It is written when ``write`` returns, or removed if the write fails, so
    that a retry never stores it twice. TensorBoard's own writer does neither: it writes from a thread, which an error
    ends.
    """

    def __init__(self, run: RunFacts) -> None:
        self._events = EventFile(RunDirectory(run.directory).tensorboard)
        if run.first_step is not None:
            self.go_back(run.first_step - 1)
            self._describe(run, run.first_step)

    def write(self, measurement: Measurement) -> None:
        """See ``Sink``."""
        if measurement.scalars:
            step = measurement.step if measurement.scalars_step is None else measurement.scalars_step
            seconds = datetime.datetime.fromisoformat(measurement.time).timestamp()
            self._events.scalars(step, measurement.scalars, seconds)

    def go_back(self, step: int) -> None:
        """See ``Sink``."""
        # What TensorBoard calls a restart: it hides what came before of this step and of later ones.
        self._events.add(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """See ``Sink``."""
        self._events.close()

    def _describe(self, run: RunFacts, step: int) -> None:
        """What does not change in an attempt: texts, layout, hparams."""
        texts = {
            "configuration": to_toml(run.config),
            "command": run.command,
            "parent": run.config.train.branch_from or "",
        }
        # Four spaces: Markdown shows the lines as they are.
        parts = [text(tag, _as_code(content)) for tag, content in texts.items() if content]
        for part in (*parts, custom_scalars(layout(run.config)), hparams(run.config)):
            self._events.add(Event(wall_time=time.time(), step=step, summary=part))


class EventFile:
    """A new event file in ``directory``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names; this one begins with the time, as its own do.
        now = f"{time.time():017.6f}"
        self._path = directory / f"events.out.tfevents.{now}.{socket.gethostname()}.{os.getpid()}"
        self._file = self._path.open("wb", buffering=0)
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, scalars: Mapping[str, float], wall_time_s: float | None = None) -> None:
        """A point of each curve, as one record."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self.add(Event(wall_time=wall_time_s or time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, event: Any) -> None:
        """Write a record in full or not at all."""
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        data, size = record.getbuffer(), self._file.tell()
        try:
            # A full disk takes a part of it, without an error.
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            # Of half a record the reader would make nothing, nor of what follows it.
            self._file.truncate(size)
            self._file.seek(size)
            raise


def layout(config: RunConfig) -> dict[str, dict[str, list[Any]]]:
    """The charts of the tab Custom Scalars, by category; their lines are named by regular expressions."""
    buckets = {
        f"validation loss of {name} by position in the sequence": [rf"^validation_by_position/{name}/"]
        for name in config.data.validation
    }
    has_logits = config.metrics.attention_logits_every or config.optimizer.qk_clip is not None
    limit = ["^train/grad_clip_limit$", "^grad_clip_limit_by_group/"] if config.optimizer.adaptive_clip else []
    chosen = {
        "loss": {
            "training loss": ["^train/loss$"],
            "validation loss, all sets": ["^validation/"],
            "training loss by source": ["^loss_by_source/"],
            **({"z-loss (train.z_loss_multiplier)": ["^train/z_loss$"]} if config.train.z_loss_multiplier else {}),
            **buckets,
        },
        "optimization": {
            "gradient norm": ["^train/grad_norm$", *limit],
            "learning rate": ["^train/lr$"],
            "gradient norm by parameters": ["^gradient_norm/"],
            "update ratio |Δw| / |w| by parameters": ["^update_ratio/"],
            **({"largest attention logit by layer": ["^largest_logit/"]} if has_logits else {}),
            **({"gradient noise": ["^gradient_noise/"]} if config.metrics.gradient_noise_every else {}),
        },
        "speed and memory": {
            "tokens per second": ["^train/tokens_per_s$"],
            "MFU": ["^train/mfu$"],
            "memory of rank 0, GiB": ["^memory_gib/"],
            "goodput": ["^goodput/effective_time_ratio$"],
        },
    }
    return {
        category: {title: ["Multiline", tags] for title, tags in charts.items()} for category, charts in chosen.items()
    }


def hparams(config: RunConfig) -> Any:
    """Content of the tab HParams for a run; its metrics are the last values of the curves."""
    values = compared(config)
    columns = [
        HParamInfo(
            name=key,
            type=DATA_TYPE_STRING if isinstance(value, str) else DATA_TYPE_FLOAT64,
            differs=key in _FIRST,
        )
        for key, value in values.items()
    ]
    metrics = [MetricInfo(name=MetricName(tag=tag)) for tag in final_metrics(config)]
    start = SessionStartInfo()
    for key, value in values.items():
        setattr(start.hparams[key], "string_value" if isinstance(value, str) else "number_value", value)
    said = {
        metadata.EXPERIMENT_TAG: HParamsPluginData(experiment=Experiment(hparam_infos=columns, metric_infos=metrics)),
        metadata.SESSION_START_INFO_TAG: HParamsPluginData(session_start_info=start),
        # From the start: without an end TensorBoard counts a run as unknown, also one that was killed.
        metadata.SESSION_END_INFO_TAG: HParamsPluginData(session_end_info=SessionEndInfo(status=STATUS_SUCCESS)),
    }
    return Summary(
        value=[Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data)) for tag, data in said.items()]
    )


def compared(config: RunConfig) -> dict[str, float | str]:
    """The values to compare runs by, by key."""
    whole = config.model_dump(mode="json")
    return {
        key: value if isinstance(value, (int, float)) and not isinstance(value, bool) else _shown(value)
        for section in _COMPARED
        for key, value in _leaves(section, whole[section])
        if value is not None
        and value != []
        and key not in _NOT_COMPARED
        and not key.startswith(("data.validation.", "data.stores."))
    }


def final_metrics(config: RunConfig) -> list[str]:
    """The curves whose last values are shown beside the values of ``compared``."""
    validation = [f"validation/{name}" for name in config.data.validation]
    return ["train/loss", *validation, "train/tokens_per_s", "train/tokens"]


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]
    return [(key, value)]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _as_code(content: str) -> str:
    return "".join(f"    {line}\n" for line in content.splitlines())
