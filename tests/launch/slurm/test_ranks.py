"""Ranks that srun itself starts, by the variables that it gives them."""

import pytest

from lightscale.errors import UserError
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.scheduler import adopt_job
from lightscale.runs.job_environment import job_id, node_name, submit_host

# What `srun --nodes=3 --ntasks=5` gives the fourth of its tasks.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
}


def read(environ: dict[str, str]) -> RankEnvironment:
    environment = RankEnvironment.read(environ)
    assert environment is not None
    return environment


@pytest.mark.parametrize(
    "environ",
    [
        # A batch script, in which `lightscale train` is a launcher; and a task that is alone.
        {name: value for name, value in SLURM.items() if "STEP" not in name},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_started_by_hand_is_no_rank(environ: dict[str, str]) -> None:
    assert RankEnvironment.read(environ) is None


def test_a_task_of_srun() -> None:
    assert read(SLURM) == RankEnvironment(
        launcher="SLURM",
        rank=3,
        world_size=5,
        local_rank=1,
        local_world_size=2,
        master_address="gpu03",
        master_port=15000 + 4711,
    )


def test_torchrun_inside_a_job_counts() -> None:
    assert read({**SLURM, **TORCHRUN}).rank == 5


def test_what_is_said_of_the_master_counts() -> None:
    environment = read({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (environment.master_address, environment.master_port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"),
        ("a1,b2", "a1"),
        ("gpu[007-012]", "gpu007"),
        ("r[1-2]n[3,5],x", "r1n3"),
        ("g[5],h", "g5"),
    ],
)
def test_first_host_of_a_list(nodes: str, host: str) -> None:
    assert read({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_address == host


def test_steps_of_one_job_get_ports_of_their_own() -> None:
    assert read({**SLURM, "SLURM_STEP_ID": "1"}).master_port != read(SLURM).master_port


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "does not fit 5 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE = 'two'"),
        ({"SLURM_NODEID": "3"}, "this one on node 3"),
        ({"SLURM_STEP_NODELIST": ""}, "names no host"),
        ({"SLURM_PROCID": "x"}, "SLURM: the variable SLURM_PROCID = 'x'"),
        ({"SLURM_PROCID": "5"}, "SLURM: rank 5 is not one of 5 processes"),
        ({"MASTER_PORT": "70000"}, "SLURM: MASTER_PORT = 70000 is not a port"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        RankEnvironment.read({**SLURM, **environ})
    assert message in str(caught.value)


def test_the_job_has_the_names_of_every_scheduler() -> None:
    environ = {**SLURM, "SLURMD_NODENAME": "gpu03", "SLURM_SUBMIT_HOST": "login2"}
    inherited = {**environ, "LIGHTSCALE_NODE_NAME": "gpu01"}
    adopt_job(inherited)
    assert (job_id(inherited), node_name(inherited), submit_host(inherited)) == ("4711", "gpu03", "login2")
    outside = {"PATH": "/usr/bin"}
    adopt_job(outside)
    assert outside == {"PATH": "/usr/bin"}
