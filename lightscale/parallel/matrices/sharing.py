"""Which rank computes a matrix; without torch, as plans count by it."""

from collections.abc import Iterable, Mapping

from lightscale.parallel.optimizer_spec import MatrixSpec, OptimizerSpec


def shared_out(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    """The rank of each tensor: the dearest first, each on the rank with the least so far."""
    load, found = [0.0] * ranks, {}
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        found[key] = min(range(ranks), key=load.__getitem__)
        load[found[key]] += costs[key]
    return found


def whole_state_bytes(spec: OptimizerSpec, parameters: Iterable[str], ranks: int) -> list[int]:
    """Bytes of the state of whole matrices on each of the ``ranks`` of a stage that has ``parameters``."""
    found = [0] * ranks
    if isinstance(spec, MatrixSpec):
        own = {name: spec.step_flops(name) for name in parameters if name in spec.matrices}
        for name, rank in shared_out(own, ranks).items():
            found[rank] += spec.whole_bytes(name)
    return found
