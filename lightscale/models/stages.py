"""Layers of each pipeline stage: the same for the model, the counts and the planner."""


def layer_stages(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each of ``num_stages`` stages in the order of the model, as even as possible.

    Remaining layers go to the stages in the middle first. The first stage has the embedding beside its layers; the last
    one has the output layer, which costs as much as several layers. With virtual stages, stage s of the model is on
    pipeline rank s % pipeline.
    """
    assert 1 <= num_stages <= num_layers, f"{num_layers} layers cannot be spread over {num_stages} stages"
    per_stage, left_over = divmod(num_layers, num_stages)
    by_preference = [*range(1, num_stages - 1), 0, num_stages - 1]
    sizes = [per_stage + (stage in by_preference[:left_over]) for stage in range(num_stages)]
    firsts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def megatron_layout(num_layers: int, num_stages: int) -> list[list[str]]:
    """The same in Megatron's terms."""
    stages = [["decoder"] * len(layers) for layers in layer_stages(num_layers, num_stages)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
