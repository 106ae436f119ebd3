"""How much each sequence rank contributes to the exchanges of states, by the way in which they are exchanged.

Exact, and held to what ranks count: ``gather`` sends a segment's summary once, ``ring`` its state from rank to rank,
``two_level`` the summary inside the node, this rank's heads of the node's summary to the other nodes, and those of the
state that enters the node inside again. Backward, all of it is cotangents of states.
"""

from dataclasses import dataclass

from lightscale.config.schema import Exchange


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What sums up a segment, in numbers per row on one rank."""

    heads: int
    """By which states are shared out; for the positional encoding, its channels."""
    state: int
    """As many come back as cotangents."""
    carried: int = 0
    """That travel with the state forward, and have no cotangent."""
    directions: int = 1
    """In which states travel: 2 where tokens see those behind them too. Their numbers count both."""
    decays: int = 0
    """That are shared out with the heads."""
    whole: int = 0
    """Decays that every head needs."""

    @staticmethod
    def of_mixer(
        num_heads: int, forward: int, backward: int, *, tensor: int, carried: int = 0, directions: int = 1
    ) -> "Summary":
        """Of the numbers that a mixer names for all `tensor` ranks: those beyond the state are decays."""
        decays = forward - backward - carried
        # `backward` counts the gradient of the state alone.
        # LightNet's flag says for all heads at once whether a document begins.
        whole = decays % num_heads
        return Summary(
            heads=num_heads // tensor,
            state=backward // tensor,
            carried=carried // tensor,
            directions=directions,
            decays=(decays - whole) // tensor,
            whole=whole,
        )

    @property
    def numbers(self) -> int:
        """All of them."""
        return self.state + self.carried + self.decays + self.whole

    def share(self, numbers: int, ranks: int) -> int:
        """What one of `ranks` takes of `numbers` that belong to heads, padded to as many heads on each."""
        return numbers // self.heads * -(-self.heads // ranks)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Of a rank to one exchange, there and back."""

    forward: int
    """Numbers per row."""
    backward: int
    num_calls: int
    """Collectives or messages per direction."""


def contribution(exchange: Exchange, summary: Summary, ranks_per_node: int) -> Contribution:
    """Of a rank with others on both sides; `ranks_per_node` of the sequence share a node."""
    if exchange == "ring":
        # In two directions, half of it to each neighbour.
        return Contribution(
            forward=summary.state + summary.carried, backward=summary.state, num_calls=summary.directions
        )
    if exchange == "gather":
        return Contribution(forward=summary.numbers, backward=summary.state, num_calls=1)
    state = summary.share(summary.state, ranks_per_node)
    entering = state + summary.share(summary.carried, ranks_per_node)
    decays = summary.share(summary.decays, ranks_per_node) + summary.whole
    return Contribution(
        forward=summary.numbers + (entering + decays) + entering, backward=summary.state + 2 * state, num_calls=3
    )
