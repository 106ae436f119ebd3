"""Each sequence rank's contribution to the exchanges of states, by kind of exchange.

The sizes are exact; tests compare them with the ranks' counts. ``gather`` sends a segment's summary once, ``ring``
sends its state from rank to rank. ``two_level`` sends the summary inside the node, this rank's heads of the node's
summary to the other nodes, and its heads of the node's incoming state inside the node. Backward, all are cotangents of
states.
"""

from dataclasses import dataclass

from lightscale.config.schema import Exchange


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a segment, in numbers per row on one rank."""

    heads: int
    """Heads to divide the states by; for the positional encoding, its channels."""
    state: int
    """Numbers of the state; as many cotangents come back."""
    carried: int = 0
    """Numbers that travel forward with the state and have no cotangent."""
    directions: int = 1
    """Directions of the states: 2 for bidirectional mixers. The numbers include both."""
    decays: int = 0
    """Decays divided with the heads."""
    whole: int = 0
    """Decays needed by every head."""

    @staticmethod
    def of_mixer(
        num_heads: int, forward: int, backward: int, *, tensor: int, carried: int = 0, directions: int = 1
    ) -> "Summary":
        """The summary from a mixer's numbers for all `tensor` ranks: those beyond the state are decays."""
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
        """Sum of all numbers."""
        return self.state + self.carried + self.decays + self.whole

    def share(self, numbers: int, ranks: int) -> int:
        """One rank's share of `numbers` that belong to heads, padded to equal heads per rank."""
        return numbers // self.heads * -(-self.heads // ranks)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A rank's contribution to one exchange, forward and backward."""

    forward: int
    """Numbers per row."""
    backward: int
    num_calls: int
    """Collectives or messages per direction."""


def contribution(exchange: Exchange, summary: Summary, ranks_per_node: int) -> Contribution:
    """Contribution of a rank with neighbours on both sides; `ranks_per_node` sequence ranks share a node."""
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
