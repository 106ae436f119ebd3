"""On the ranks of an MPI program, over one file system (``mpi4py.futures``): rank 0 hands tasks to the others.

Rank 0 alone runs the preparation. Where a rank dies, MPI ends the whole program; the same command goes on from the
finished files.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from lightscale.data_pipeline.executors.interface import ExecutorFactory
from lightscale.data_pipeline.executors.processes import FuturesExecutor, InProcess
from lightscale.errors import UserError


@contextmanager
def ranks() -> Iterator[ExecutorFactory | None]:
    """Entered by all ranks. Rank 0 gets the factory of the executor; the others get None after the last task.

    Raises ``UserError`` without mpi4py or an MPI library.
    """
    try:
        # An optional package, which starts MPI when it is imported.
        from mpi4py import MPI  # noqa: PLC0415
        from mpi4py.futures import MPICommExecutor  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--executor mpi needs mpi4py and an MPI library ({error}); pip install 'lightscale[mpi]' and, without an "
            "MPI on this machine, pip install mpich"
        ) from error
    if MPI.COMM_WORLD.size == 1:
        yield InProcess
        return
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as pool:
        # The other ranks come here when rank 0 has left.
        yield None if pool is None else functools.partial(FuturesExecutor, pool=pool)
