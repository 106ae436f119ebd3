"""``lightscale train --nodes N …``: the options for one run by a command on each of several hosts."""

import argparse

from lightscale.launch.commands.checks import WrongUse
from lightscale.launch.launcher.rendezvous import Rendezvous

# As torchrun's.
_PORT = 29500


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; torchrun's names are accepted too."""
    group = parser.add_argument_group(
        "several hosts, without a scheduler",
        "Start the same command on each host, with the number of that host. All hosts must share the run directory. "
        "Ranks are not restarted after a failure; run the same commands again to resume.",
    )
    group.add_argument("--nodes", "--nnodes", type=int, metavar="N", help="number of hosts")
    group.add_argument("--node-rank", type=int, metavar="R", help="number of this host, from 0")
    group.add_argument("--master-addr", metavar="HOST", help="name or address of host 0, valid on all hosts")
    group.add_argument(
        "--master-port", type=int, metavar="PORT", help=f"free port of host 0, the same on all hosts (default: {_PORT})"
    )


def read_rendezvous(args: argparse.Namespace) -> Rendezvous | None:
    """Read the rendezvous of the ranks of all hosts; None for a single host. Raises WrongUse."""
    words = {"--node-rank": args.node_rank, "--master-addr": args.master_addr, "--master-port": args.master_port}
    given = {name: value for name, value in words.items() if value is not None}
    if args.nodes is None:
        if given:
            name, value = next(iter(given.items()))
            raise WrongUse(f"{name} {value}: needs --nodes, the number of hosts")
        return None
    if args.scheduler is not None:
        raise WrongUse(f"--nodes {args.nodes} and --scheduler {args.scheduler}: remove --nodes, the job sets it")
    if args.nodes < 1:
        raise WrongUse(f"--nodes {args.nodes}: must be at least 1")
    if args.nodes > 1 and (missing := [name for name in ("--node-rank", "--master-addr") if name not in given]):
        raise WrongUse(
            f"--nodes {args.nodes}: set {' and '.join(missing)} too (number of this host, address of host 0)"
        )
    node = args.node_rank or 0
    if not 0 <= node < args.nodes:
        raise WrongUse(f"--node-rank {node}: must be from 0 to {args.nodes - 1} (--nodes minus 1)")
    port = _PORT if args.master_port is None else args.master_port
    if not 0 < port < 1 << 16:
        raise WrongUse(f"--master-port {port}: must be from 1 to 65535")
    # With one, whatever starts it, the run is one of this machine.
    if args.nodes == 1:
        return None
    return Rendezvous(address=args.master_addr, port=port, node=node, num_nodes=args.nodes, of_agents=False)


def refuse_within_rank(args: argparse.Namespace, launcher: str) -> None:
    """Raise WrongUse if this process should start ranks but is itself a rank started by `launcher`."""
    if args.nodes is not None:
        raise WrongUse(f"--nodes {args.nodes}: {launcher} has already started this process as a rank; remove --nodes")


def words_of(args: argparse.Namespace) -> list[str]:
    """The given options, as words."""
    values = (args.nodes, args.node_rank, args.master_addr, args.master_port)
    names = ("--nodes", "--node-rank", "--master-addr", "--master-port")
    return [word for name, value in zip(names, values, strict=True) if value is not None for word in (name, str(value))]
