"""The rank of this process, from the environment variables of torchrun, a scheduler or an MPI launcher.

MPI itself is never initialised: training processes only read the variables of its launcher.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from lightscale.config.schedulers import SCHEDULERS
from lightscale.errors import UserError
from lightscale.launch.scheduler import get_scheduler
from lightscale.parallel.rendezvous.sockets import LOOPBACK

# Below the ports that Linux hands out by itself (32768 and up).
_FIRST_PORT, _NUM_PORTS = 15000, 15000


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The rank of this process among all processes of the run, and their rendezvous."""

    launcher: str
    """Launcher of the processes, for messages."""
    rank: int
    """Rank among all processes, from 0."""
    world_size: int
    local_rank: int
    """Rank among the processes on this machine, from 0: index of the GPU."""
    local_world_size: int
    master_address: str
    """Host of rank 0."""
    master_port: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"{self.launcher}: rank {self.rank} is not one of {self.world_size} processes")
        if not 0 <= self.local_rank < self.local_world_size:
            raise UserError(
                f"{self.launcher}: local rank {self.local_rank} is not one of the "
                f"{self.local_world_size} processes on this machine"
            )
        if self.local_rank > self.rank or self.local_world_size > self.world_size:
            raise UserError(
                f"{self.launcher}: local rank {self.local_rank} of {self.local_world_size} does not fit "
                f"rank {self.rank} of {self.world_size}"
            )
        if not 0 < self.master_port < 1 << 16:
            raise UserError(f"{self.launcher}: MASTER_PORT = {self.master_port} is not a port number")

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host: they meet, and listen, on its loopback interface."""
        return self.local_world_size == self.world_size

    @property
    def address(self) -> str:
        """Where this rank reaches rank 0."""
        return LOOPBACK if self.is_one_host else self.master_address

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self | None:
        """Read the rank from `environ`; None: no launcher started this process as a rank.

        torchrun's variables come first, because torchrun may run inside a scheduler's or MPI job. The scheduler's come
        next, because a scheduler that starts an MPI program sets both. Raises UserError for variables that are missing,
        no numbers, or contradictory.
        """
        if "RANK" in environ:
            return cls._from_variables("torchrun", environ)
        for scheduler in map(get_scheduler, SCHEDULERS):
            variables = scheduler.rank_variables(environ)
            if variables is not None:
                return cls._from_variables(scheduler.title, variables)
        if "OMPI_COMM_WORLD_RANK" in environ:
            names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
            return cls._mpi("Open MPI", environ, names, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
        if "PMI_RANK" in environ:
            names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
            return cls._mpi("PMI", environ, names, ("PMI_JOBID", "PMI_KVS"))
        return None

    def variables(self) -> dict[str, str]:
        """torchrun's variables for this rank, which torch.distributed and Megatron read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.master_port),
        }

    @classmethod
    def _from_variables(cls, launcher: str, environ: Mapping[str, str]) -> Self:
        """The inverse of `variables`."""
        number = number_reader(launcher, environ)
        if not environ.get("MASTER_ADDR"):
            raise UserError(f"{launcher}: RANK is set but MASTER_ADDR is not; unset RANK to start a separate run")
        return cls(
            launcher=launcher,
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            master_address=environ["MASTER_ADDR"],
            master_port=number("MASTER_PORT"),
        )

    @classmethod
    def _mpi(
        cls,
        launcher: str,
        environ: Mapping[str, str],
        names: list[str],
        job_names: tuple[str, ...],
    ) -> Self | None:
        number = number_reader(launcher, environ)
        rank, world_size, local_rank, local_world_size = map(number, names)
        # `mpirun -n 1`, or a shell within an MPI job: the process starts ranks of its own, as if by hand.
        if world_size == 1:
            return None
        address = environ.get("MASTER_ADDR") or (LOOPBACK if local_world_size == world_size else None)
        if address is None:
            raise UserError(
                f"{launcher}: {world_size} processes on several machines need MASTER_ADDR, rank 0's host; "
                "set it with mpirun -x MASTER_ADDR=…"
            )
        # All ranks of a job, and no other job, have this name.
        job = next((environ[name] for name in job_names if environ.get(name)), "")
        # Not `hash`, which differs between processes: all ranks must arrive at the same port without asking one
        # another.
        port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
        return cls(
            launcher=launcher,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_address=address,
            master_port=number("MASTER_PORT") if "MASTER_PORT" in environ else port,
        )


def job_port(job: int, number: int) -> int:
    """A port common to all processes of a scheduler's `job`, for its step or start `number`."""
    return _FIRST_PORT + (job + number) % _NUM_PORTS


def number_reader(launcher: str, environ: Mapping[str, str]) -> Callable[[str], int]:
    """Make a function from a variable's name to its value, a whole number >= 0."""

    def number(name: str) -> int:
        text = environ.get(name)
        if text is None or not re.fullmatch(r"[0-9]+", text):
            found = "is not set" if text is None else f"= {text!r}"
            raise UserError(f"{launcher}: the variable {name} {found}; it must be a whole number")
        return int(text)

    return number
