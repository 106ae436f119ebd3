"""The optimizer of a ``MatrixSpec``: Megatron's distributed optimizer, with directions of whole matrices."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightscale.parallel.matrices.exchange import MatrixExchange
from lightscale.parallel.megatron import DistributedDataParallel, TransformerConfig, parallel_state
from lightscale.parallel.megatron_optimizer import ElementwiseSteps, MegatronOptimizer, main_weights, widened
from lightscale.parallel.model_shards import OwnedBox, owned_boxes
from lightscale.parallel.optimizer_spec import WHOLE, MatrixSpec, StepScale
from lightscale.parallel.shards import Box, Shape, TensorShard

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MatrixOptimizer(MegatronOptimizer):
    """Every rank keeps the weights and the state of its elements, as with an ``ElementwiseSpec``; matrices are whole
    only while their directions are computed. State of a whole matrix is kept by the rank that computes them.
    """

    spec: MatrixSpec

    def __init__(
        self, spec: MatrixSpec, models: Sequence[DistributedDataParallel], config: TransformerConfig, *, on_gpu: bool
    ) -> None:
        super().__init__(spec, models, config, on_gpu=on_gpu)
        self._dtype = _DTYPES[spec.product_precision]
        boxes = owned_boxes([model.module for model in models], self)
        self._boxes: list[OwnedBox] = [one for one in boxes if one.box.key in spec.matrices]
        self._exchange = MatrixExchange(
            [(one.box, one.is_copy) for one in self._boxes],
            # All ranks of the pipeline stage: what they hold together are its whole parameters.
            parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            lambda name, _: spec.step_flops(name),
            dtype=self._dtype,
            device=self._device,
        )
        self._done_steps = 0
        self._whole = {name: self._zeros(name) for name in self._exchange.computed}
        self._of_matrices = {name: self._constants(name) for name in self._exchange.computed}
        # (rows, 1) for each box: the factors of the matrices that its rows are of.
        scales = {one.box.key: self._scales(one.box.key, one.box.shape) for one in self._boxes}
        self._box_scales = [
            scales[box.key][box.offset[0] :][: box.sizes[0]] for box in (one.box for one in self._boxes)
        ]

    def _zeros(self, name: str) -> dict[str, Tensor]:
        """By name, the state of all matrices in a parameter, one behind the other; (n,) each."""
        sizes: dict[str, int] = {}
        for shape in self.spec.matrix_shapes(name):
            for what, (rows, columns) in self.spec.whole_state(*shape).items():
                sizes[what] = sizes.get(what, 0) + rows * columns
        narrow = self.spec.whole_moments if self.spec.moments_dtype == "bf16" else ()
        return {
            what: torch.zeros(size, dtype=torch.bfloat16 if what in narrow else torch.float32, device=self._device)
            for what, size in sizes.items()
        }

    def _constants(self, name: str) -> MatrixSpec:
        """Those of the parameter's group and scale."""
        group = next(iter(self.spec.groups_of(name)), None)
        return self.spec.of_group(group).scaled(self.spec.scales.get(name, StepScale()))

    def whole_shards(self) -> Iterator[TensorShard]:
        """See ``Optimizer``."""
        for name, state in self._whole.items():
            for what, tensor in state.items():
                shape = tuple(tensor.shape)
                box = Box(key=f"{WHOLE}{what}.{name}", shape=shape, offset=(0,), sizes=shape)
                yield TensorShard(box=box, data=tensor)

    def _zero_state(self) -> None:
        super()._zero_state()
        for shard in self.whole_shards():
            shard.data.zero_()

    def _set_steps(self, steps: int) -> None:
        super()._set_steps(steps)
        # A rank that owns no element of a parameter counts too: it may compute matrices.
        self._done_steps = steps

    def _scales(self, name: str, shape: Shape) -> Tensor:
        found = torch.empty(shape[0], 1, dtype=torch.float32, device=self._device)
        for ranges, (rows, columns) in zip(self.spec.matrices[name], self.spec.matrix_shapes(name), strict=True):
            for first, last in ranges:
                found[first:last] = self.spec.matrix_scale(rows, columns)
        return found

    @torch.no_grad()
    def _find_directions(self) -> None:
        """See ``MegatronOptimizer``."""
        self._done_steps += 1
        means: dict[nn.Parameter, Tensor] = {}
        steppers: list[tuple[nn.Parameter, ElementwiseSteps, Tensor]] = []
        for part in self.megatron.chained_optimizers:
            for parameter, weights in main_weights(part):
                if self._names[parameter] in self.spec.matrices:
                    assert weights.grad is not None, "the engine has a gradient of every parameter"
                    with part.optimizer.wide_state(weights) as state:
                        mean = self.spec.matrix_mean(weights.grad, state)
                    means[parameter] = mean.to(self._dtype)
                    steppers.append((parameter, part.optimizer, weights))
        found = self._exchange.compute([means[one.parameter][one.own] for one in self._boxes], self._direction)
        del means
        directions = {parameter: torch.zeros_like(weights) for parameter, _, weights in steppers}
        for one, block, scale in zip(self._boxes, found, self._box_scales, strict=True):
            rows = block.view(one.box.sizes[0], -1) * scale
            directions[one.parameter][one.own] = rows.view(-1)
        for parameter, stepper, weights in steppers:
            stepper.directions[weights] = directions[parameter]

    def _direction(self, name: str, tensor: Tensor) -> Tensor:
        """Of all matrices in the tensor, each by itself."""
        found = torch.empty_like(tensor)
        spec = self._of_matrices[name]
        begins = dict.fromkeys(self._whole[name], 0)
        for ranges in spec.matrices[name]:
            matrix = torch.cat([tensor[first:last] for first, last in ranges])
            own = {}
            for what, shape in spec.whole_state(*matrix.shape).items():
                size = shape[0] * shape[1]
                own[what] = self._whole[name][what][begins[what] :][:size].view(shape)
                begins[what] += size
            with widened(own) as state:
                direction = spec.matrix_direction(matrix, state, self._done_steps)
            blocks = direction.split([last - first for first, last in ranges])
            for (first, last), block in zip(ranges, blocks, strict=True):
                found[first:last] = block
        return found
