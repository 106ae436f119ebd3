import pytest

from lightscale.errors import UserError
from lightscale.launch.environment import RankEnvironment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def read(environ: dict[str, str]) -> RankEnvironment:
    environment = RankEnvironment.read(environ)
    assert environment is not None
    return environment


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "gpu03", "WORLD_SIZE": "8"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_started_by_hand_is_no_rank(environ: dict[str, str]) -> None:
    assert RankEnvironment.read(environ) is None


def test_torchrun() -> None:
    environment = read(TORCHRUN)
    assert environment == RankEnvironment(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_address="gpu03",
        master_port=29500,
    )
    assert environment.variables() == TORCHRUN
    # Ranks of one host meet on its loopback interface, whatever the name of the host.
    alone = read({**TORCHRUN, "WORLD_SIZE": "4", "RANK": "1"})
    assert (alone.master_address, alone.variables()["MASTER_ADDR"]) == ("gpu03", "127.0.0.1")


def test_torchrun_inside_a_job_counts() -> None:
    assert read({**OPEN_MPI, **TORCHRUN}).rank == 5


def test_what_is_said_of_the_master_counts() -> None:
    for environ in (OPEN_MPI, PMI):
        environment = read({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
        assert (environment.master_address, environment.master_port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize(("environ", "launcher"), [(OPEN_MPI, "Open MPI"), (PMI, "PMI")])
def test_mpi_on_one_machine(environ: dict[str, str], launcher: str) -> None:
    environment = read(environ)
    found = (environment.launcher, environment.rank, environment.world_size, environment.local_rank)
    assert found == (launcher, 1, 2, 1)
    assert environment.master_address == "127.0.0.1"


def test_jobs_of_one_machine_get_ports_of_their_own_and_all_ranks_the_same() -> None:
    port = read(OPEN_MPI).master_port
    assert read({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port == port
    assert read({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-2@1"}).master_port != port


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "unset RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE = 'eight'; it must be a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK = '-1'"),
        (
            {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"},
            "LOCAL_WORLD_SIZE is not",
        ),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 is not one of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is not one of the 4"),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "3"}, "local rank 3 of 4 does not fit rank 0 of 8"),
        ({**TORCHRUN, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "7"}, "does not fit rank 5 of 6"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "70000 is not a port"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "need MASTER_ADDR"),
        ({**PMI, "MPI_LOCALNRANKS": ""}, "MPI_LOCALNRANKS = ''"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        RankEnvironment.read(environ)
    assert message in str(caught.value)
