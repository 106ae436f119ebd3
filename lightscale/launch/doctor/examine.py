"""The checks of `lightscale doctor`, for this machine or for all ranks of a job together."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.doctor import measure
from lightscale.launch.doctor.peers import AbsentRanks, PeerRanks, meet_peers
from lightscale.launch.environment import RankEnvironment
from lightscale.models.kernel_check import check_kernels
from lightscale.models.registry import check_model
from lightscale.runs.teacher import computed_models
from lightscale.training.build import weight_dtype
from lightscale.training.health.check_result import CheckResult, Outcome, merged
from lightscale.training.health.machine import Machine, host_name
from lightscale.training.preflight import check_machine, check_ranks

_SEVERITY: tuple[Outcome, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The results of all checks of one machine or of all ranks."""

    hosts: Sequence[str]
    """By rank."""
    results: Sequence[CheckResult]

    @property
    def result(self) -> Outcome:
        """The worst result."""
        return max((one.result for one in self.results), key=_SEVERITY.index, default="ok")

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        # A warning is no reason for a job script that calls the doctor first to give up its nodes.
        return UserError.EXIT_CODE if self.result == "failed" else 0

    @property
    def exclude(self) -> list[str]:
        """Hosts to exclude from the job."""
        blamed = [one for one in self.results if one.result == "failed" and one.blames_host]
        ranks = [rank for one in blamed for rank in one.ranks or range(len(self.hosts))]
        return sorted({self.hosts[rank] for rank in ranks})

    def record(self) -> dict[str, Any]:
        """The report, for JSON."""
        return {
            "result": self.result,
            "exit_code": self.exit_code,
            "hosts": list(self.hosts),
            "exclude": self.exclude,
            "findings": [dataclasses.asdict(one) for one in self.results],
        }


def examine(
    config: RunConfig | None, directory: Path, environment: RankEnvironment | None, *, full: bool, wait_s: float
) -> DoctorReport:
    """Examine all ranks together if this process is one of them, else this machine. Equal reports on all ranks.

    Raises UserError on a rank that loses the others because one did not answer within `wait_s`; rank 0 reports it.
    """
    if environment is None:
        return examine_machine(config, directory, full=full)
    try:
        with meet_peers(environment, wait_s) as ranks:
            return examine_ranks(config, directory, ranks, environment)
    except AbsentRanks as absent:
        return DoctorReport(hosts=absent.hosts, results=[_absence(absent)])
    except (dist.DistError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"rank {environment.rank} on {host_name()} lost the other ranks: {reason}") from None


def examine_machine(config: RunConfig | None, directory: Path, *, full: bool) -> DoctorReport:
    """Examine this machine alone."""
    results = check_machine(config, directory)
    if full:
        gpus = range(torch.cuda.device_count())
        devices = [torch.device("cuda", index) for index in gpus] or [torch.device("cpu")]
        alone = [
            measure.Peers(rank=0, size=1, device=device, hosts=[host_name()], group=None, barrier=lambda: None)
            for device in devices
        ]
        products = [measure.measure_product(peers) for peers in alone]
        kinds = [torch.cuda.get_device_name(index) for index in gpus] or [measure.processor()]
        # One after the other, and not ranks: which GPU it is must be said.
        results += [
            dataclasses.replace(one, found=f"GPU {', '.join(map(str, one.ranks))}: {one.found}", ranks=())
            if one.ranks
            else one
            for one in measure.judge_products(products, kinds, devices[0].type)
        ]
    if config is not None and torch.cuda.is_available() and config.train.device != "cpu":
        results.append(judge_kernels(config, torch.device("cuda", 0)))
    return DoctorReport(hosts=[host_name()], results=results)


def judge_kernels(config: RunConfig, device: torch.device) -> CheckResult:
    """Compare every Triton kernel of the run with its chunked form, at the run's shapes."""
    check_model(config.model, config.parallel)
    tokens = config.data.sequence_length // config.parallel.sequence
    wrong = [
        one
        for model in computed_models(config)
        for one in check_kernels(
            model,
            weight_dtype(config.train, device),
            device,
            tokens=tokens,
            tensor=config.parallel.tensor,
            backend=config.train.kernels,
        )
    ]
    if not wrong:
        return CheckResult(check="kernels", result="ok", found="Triton's results equal those of the chunked forms")
    # "auto" computes these operators without Triton; what was asked for by name is computed, wrong as it is.
    result: Outcome = "warning" if config.train.kernels == "auto" else "failed"
    right = "results equal to PyTorch's: check the versions of Triton and of the driver"
    return CheckResult(check="kernels", result=result, found="; ".join(map(str, wrong)), right=right)


def examine_ranks(
    config: RunConfig | None, directory: Path, ranks: PeerRanks, environment: RankEnvironment
) -> DoctorReport:
    """Examine all ranks of a job, with measurements. Equal reports on all ranks."""
    results = check_ranks(config, directory, ranks, environment.local_rank)
    machines = ranks.on_all(lambda: Machine.read(environment.local_rank))
    wanted = "auto" if config is None else config.train.device
    # All ranks on GPUs, or none: NCCL needs one on each, and a CPU among GPUs would only be slow. A rank whose GPU is
    # missing is reported by the checks above.
    if wanted != "cpu" and all(machine.gpus for machine in machines):
        device = torch.device("cuda", environment.local_rank)
        # Before the NCCL group is made below, which takes the current device.
        torch.cuda.set_device(device)
        kinds = [machine.gpus[0].name for machine in machines]
    else:
        device = torch.device("cpu")
        kinds = ranks.on_all(measure.processor)
    peers = measure.Peers(
        rank=ranks.rank,
        size=ranks.size,
        device=device,
        hosts=ranks.hosts,
        group=dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD,
        barrier=ranks.barrier,
    )
    if config is not None and device.type == "cuda":
        results += merged(
            [
                dataclasses.replace(one, ranks=(rank,))
                for rank, one in enumerate(ranks.on_all(lambda: judge_kernels(config, device)))
            ],
            ranks.size,
        )
    products = ranks.on_all(lambda: measure.measure_product(peers))
    results += measure.judge_products(products, kinds, device.type)
    if ranks.size > 1:
        results += measure.judge_exchange(ranks.on_all(lambda: measure.measure_exchange(peers)))
        results += measure.judge_all_reduce(ranks.on_all(lambda: measure.measure_all_reduce(peers)))
    return DoctorReport(hosts=ranks.hosts, results=results)


def _absence(absent: AbsentRanks) -> CheckResult:
    return CheckResult(
        check="ranks",
        result="failed",
        found=str(absent),
        right="ranks that start and answer: check these hosts, and the firewall between them",
        ranks=absent.ranks,
        blames_host=True,
    )
