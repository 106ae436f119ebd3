"""The inputs of a rank's training, and their comparison over all ranks.

Ranks started by another program (torchrun, srun, mpirun) each read their own CONFIG, store and installation, on hosts
that may differ. All inputs that decide the numbers of a run are recorded here as text by key. So ranks can compare them
before anything is built, and report each difference.
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self, get_args

import torch
import xxhash

import lightscale
from lightscale.config.files import flat
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import Contents, directory_name
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.health.check_result import where
from lightscale.training.health.machine import host_name, package_versions

# Variables that change what is computed, or how ranks exchange it. Paths, interfaces and numbers of threads may differ
# between hosts, and LIGHTSCALE_FAULT is for the failure of one rank.
VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_F32_DEFAULT",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_NONE = "none"
# Of a message.
_MOST_RANKS, _MOST_KEYS = 8, 20


# Compared by identity: two ranks are two, whatever they say.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RankFacts:
    """The facts of one rank."""

    rank: int
    world_size: int
    host: str
    process: int
    values: Mapping[str, str]
    """Values that must be equal on all ranks, by key; only those read before `error`."""
    error: str | None = None
    """Reason why this rank cannot train, independent of the others."""
    is_mistake: bool = True
    """Whether `error` is a mistake of the user; if not, another start may succeed."""

    def to_json(self) -> str:
        """The facts as JSON, for other ranks."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


class FactReader:
    """Reads the inputs of this rank's training step by step; an error ends it and becomes a fact."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.values: dict[str, str] = {}
        self.error: Exception | None = None
        self._rank, self._world_size = rank, world_size

    def read(self, load: Callable[[], RunConfig], directory: RunDirectory, allow: Collection[str]) -> RunConfig | None:
        """Read the configuration; None after an error, which `error` keeps."""
        try:
            self.values |= installation()
            self.values["--run"] = str(directory.path.absolute())
            self.values["--allow-change"] = ", ".join(sorted(allow)) or _NONE
            config = load()
            self.values |= {key: json.dumps(value) for key, value in flat(config).items()}
            self.values |= contents(config)
            if directory.path.exists() and any(directory.path.iterdir()):
                # Refuses another configuration than the run's: on all ranks, not on rank 0 while the others wait.
                directory.changes(config, allow)
        except Exception as error:  # noqa: BLE001 - every rank hears of it, and this one raises it
            self.error = error
            return None
        return config

    def facts(self) -> RankFacts:
        """The facts read so far."""
        is_mistake = isinstance(self.error, UserError)
        text = str(self.error) if is_mistake else f"{type(self.error).__name__}: {self.error}"
        return RankFacts(
            rank=self._rank,
            world_size=self._world_size,
            host=host_name(),
            process=os.getpid(),
            values=self.values,
            error=None if self.error is None else text,
            is_mistake=self.error is None or is_mistake,
        )


def installation() -> dict[str, str]:
    """This rank's programs, their kind of device, and the variables that change their results."""
    return {
        **{f"version of {name}": version for name, version in package_versions().items()},
        "lightscale's code": code_digest(Path(lightscale.__file__).parent),
        "byte order": sys.byteorder,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        **{f"${name}": os.environ.get(name, _NONE) for name in VARIABLES},
    }


def code_digest(package: Path) -> str:
    """xxh3-128 of the names and contents of all Python files in `package`."""
    digest = xxhash.xxh3_128()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def contents(config: RunConfig) -> dict[str, str]:
    """Hashes of the files named by the configuration: stores, their tokenizers, the initial weights, the teacher."""
    stores = config.data.store_paths
    stores |= {f"data.validation.{name}.store": one.store for name, one in config.data.validation.items() if one.store}
    found = {}
    for key, path in stores.items():
        store = TokenStore(path)
        one = store.tokenizer
        found[f"tokenizer of {key}"] = f"{one.name}, {one.vocab_size} tokens, sha256 {one.sha256[:16]}"
        found[f"content of {key}"] = f"sha256 {store.fingerprint()[:16]}"
    checkpoints = {
        "train.init_from": config.train.init_from,
        "train.branch_from": config.train.branch_from,
        "task.teacher": config.teacher,
    }
    for key, checkpoint in checkpoints.items():
        if checkpoint is None:
            continue
        name, _, step = checkpoint.rpartition("@")
        for kind in get_args(Contents):
            manifest = RunDirectory(name).checkpoints / directory_name(int(step), kind) / MANIFEST
            # One that is nowhere is an error with advice, which the restoring gives.
            digest = xxhash.xxh3_128(manifest.read_bytes()).hexdigest() if manifest.exists() else _NONE
            found[f"{kind} checkpoint {key}"] = digest
    return found


def wrong_numbers(ranks: Sequence[RankFacts]) -> str | None:
    """The fault in the rank numbers of the arrived ranks; None: no fault."""
    sizes = Counter(one.world_size for one in ranks)
    if len(sizes) > 1:
        return _difference("WORLD_SIZE", {one: str(one.world_size) for one in ranks})
    for rank, count in Counter(one.rank for one in ranks).items():
        if count > 1:
            same = ", ".join(f"process {one.process} on {one.host}" for one in ranks if one.rank == rank)
            return f"rank {rank} is assigned to {same}; give each its own number (RANK, torchrun's --node-rank)"
    return None


def disagreement(ranks: Sequence[RankFacts]) -> str | None:
    """The reasons why `ranks` cannot train one run together, one line per key; None: no reason."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    lines = []
    for key in dict.fromkeys(key for one in ranks for key in one.values):
        # A rank with an error has not read everything.
        values = {one: one.values.get(key, _NONE) for one in ranks if one.error is None or key in one.values}
        if len(set(values.values())) > 1:
            lines.append(_difference(key, values))
    more = len(lines) - _MOST_KEYS
    lines[_MOST_KEYS:] = [f"and {more} more keys"] if more > 0 else []
    errors: dict[str, list[RankFacts]] = {}
    for one in ranks:
        if one.error is not None:
            errors.setdefault(one.error, []).append(one)
    if not lines and [len(same) for same in errors.values()] == [len(ranks)]:
        # Nothing about ranks: the same mistake for all of them.
        return next(iter(errors))
    lines += [f"{_who(same)}: {text}" for text, same in errors.items()]
    if not lines:
        return None
    return "\n".join(["the ranks cannot train one run together; nothing was started:", *lines])


def _difference(key: str, values: Mapping[RankFacts, str]) -> str:
    """key: 0.002 on node-b (rank 1), 0.001 on node-a (rank 0)"""
    # No value is right by itself: the most common one, or rank 0's, is usual, and who differs from it comes first.
    usual = Counter(values.values()).most_common(1)[0][0]
    others = sorted(set(values.values()) - {usual})
    parts = [f"{value} on {_who([one for one in values if values[one] == value])}" for value in others[:_MOST_RANKS]]
    if len(others) > _MOST_RANKS:
        parts.append(f"{len(others) - _MOST_RANKS} more values")
    same = [one for one in values if values[one] == usual]
    parts.append(f"{usual} on {_who(same) if len(same) <= _MOST_RANKS else f'the other {len(same)} ranks'}")
    return f"{key}: {', '.join(parts)}"


def _who(ranks: Sequence[RankFacts]) -> str:
    hosts = {one.rank: one.host for one in ranks}
    shown = sorted(hosts)[:_MOST_RANKS]
    more = f" and {len(hosts) - len(shown)} more ranks" if len(hosts) > len(shown) else ""
    # By rank number, with empty names for those that are not shown.
    return where(shown, [hosts.get(rank, "") for rank in range(max(shown) + 1)]) + more
