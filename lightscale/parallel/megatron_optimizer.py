"""Megatron's distributed optimizer behind ``Optimizer``; the one file that calls private methods of Megatron.

Written for megatron-core 0.16 (read in 0.16.1). Each private method has a comment that says why; who raises the bound
in pyproject.toml reads them again there. The structure they reach into: ``get_megatron_optimizer`` gives a
``ChainedOptimizer`` of one ``DistributedOptimizer`` per kind of buffer; each has the fused or PyTorch optimizer as
``.optimizer``, whose parameters are this rank's parts of the model's, flat and in fp32.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.parallel.adaptive_clip import AdaptiveClip
from lightscale.parallel.attention_logits import QKClip
from lightscale.parallel.initialization import named_parameters
from lightscale.parallel.megatron import (
    ChainedOptimizer,
    DistributedDataParallel,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    TransformerConfig,
    get_megatron_optimizer,
)
from lightscale.parallel.model_shards import owned_boxes
from lightscale.parallel.optimizer_interface import Clipping, Optimizer, OwnedState
from lightscale.parallel.optimizer_spec import CLIP, ElementwiseSpec, MegatronSpec, StepScale, average_state

# Of Megatron's distributed optimizer, which takes no other: what an elementwise optimizer replaces before it has state.
_PLACEHOLDER = {"optimizer": "adam"}
# The key of Megatron's groups with the name of ours.
GROUP = "lightscale_group"
# And with the factors of its steps.
SCALE = "lightscale_scale"
_ONE = StepScale()


def _decays_no_weight(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 1 or getattr(parameter, "no_weight_decay", False)


def _key_of(group: str, group_of: Mapping[int, str]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=f"group {group}", fn=lambda one: group_of.get(id(one)) == group))


def _label(scale: StepScale) -> str:
    """Megatron sorts groups by what differs in them, which a data class cannot be."""
    return f"lr {scale.lr!r} eps {scale.eps!r}"


def _scale_key(label: str, label_of: Mapping[int, str]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=label, fn=lambda one: label_of.get(id(one)) == label))


@contextmanager
def widened(kept: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """State in fp32; what is left in it is kept, rounded."""
    # Without a copy where it is fp32 already.
    wide = {name: tensor.float() for name, tensor in kept.items()}
    yield wide
    for name, tensor in kept.items():
        if tensor is not wide[name]:
            tensor.copy_(wide[name])


class ElementwiseSteps:
    """The steps of ``spec`` on this rank's parts, flat and in fp32, in the place of Megatron's Adam.

    It has what Megatron asks of PyTorch's optimizers, whose own class refuses parts of the model's fp32 weights.

    ``names``: of the parameter of each part.
    """

    def __init__(self, spec: ElementwiseSpec, param_groups: list[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        self.spec, self.param_groups = spec, param_groups
        self.scales = {_label(scale): scale for scale in spec.scales.values()}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.directions: dict[Tensor, Tensor] = {}
        """(n,) of the parts whose next step is known already; the step takes them out."""
        self._behind: list[Callable[..., None]] = []
        dtype = torch.bfloat16 if spec.moments_dtype == "bf16" else torch.float32
        for group in param_groups:
            group["step"] = 0
            for weights in group["params"]:
                self.state[weights] = {
                    name: torch.zeros_like(weights, dtype=dtype) for name in spec.step_state_of(names[weights])
                }

    @torch.no_grad()
    def step(self) -> None:
        """One step of every part that has a gradient."""
        for group in self.param_groups:
            spec = self.spec.of_group(group.get(GROUP)).scaled(self.scales.get(group.get(SCALE, ""), _ONE))
            group["step"] += 1
            for weights in group["params"]:
                if weights.grad is not None:
                    direction = self.directions.pop(weights, None)
                    if direction is None:
                        with self.wide_state(weights) as state:
                            direction = spec.direction(weights.grad, state, group["step"])
                    self.apply(weights, direction, lr=group["lr"], weight_decay=group["weight_decay"])
        for hook in self._behind:
            hook(self, (), {})

    def wide_state(self, weights: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
        """The state of a part, ``widened``."""
        return widened(self.state[weights])

    def apply(self, weights: Tensor, direction: Tensor, *, lr: float, weight_decay: float) -> None:
        """Step ``weights`` (n,), in place."""
        weights.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        """As PyTorch's."""
        self._behind.append(hook)


class MegatronOptimizer(Optimizer):
    """Megatron's distributed optimizer, for fp32, bf16 and fp16 weights; it refuses fp64."""

    spec: MegatronSpec | ElementwiseSpec
    steps_type: ClassVar[Any] = ElementwiseSteps
    """What takes the steps of an ``ElementwiseSpec``."""

    def __init__(
        self,
        spec: MegatronSpec | ElementwiseSpec,
        models: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        *,
        on_gpu: bool,
    ) -> None:
        super().__init__(spec, models, config, on_gpu=on_gpu)
        # Not by the names of the modules, which the copies of one parameter on two stages do not share.
        self._names = {parameter: name for model in models for name, parameter in named_parameters(model.module)}
        self._group_of = {
            id(parameter): group
            for parameter, name in self._names.items()
            if not getattr(parameter, "keeps_its_values", False)
            for group in spec.groups_of(name)
        }
        self._step_scales = {_label(scale): scale for scale in spec.scales.values() if scale != _ONE}
        labels = {
            id(parameter): _label(spec.scales[name]) for parameter, name in self._names.items() if name in spec.scales
        }
        self._device = next(models[0].parameters()).device
        self._modules = [model.module for model in models]
        self.megatron: ChainedOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=0.0,
                weight_decay=spec.weight_decay,
                clip_grad=spec.grad_clip,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=models[0].ddp_config.overlap_param_gather,
                **(spec.megatron_options() if isinstance(spec, MegatronSpec) else _PLACEHOLDER),
            ),
            list(models),
            config_overrides={
                ParamKey(predicate=ParamPredicate(name="no_weight_decay", fn=_decays_no_weight)): {"wd_mult": 0.0},
                **{_key_of(name, self._group_of): {GROUP: name} for name in spec.groups},
                **{_scale_key(label, labels): {SCALE: label} for label in self._step_scales},
            },
            use_gloo_process_groups=on_gpu,
        )
        for part in self.megatron.chained_optimizers:
            _number_in_order(part)
            groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
            self.mixes_dtypes |= any(full and half for full, half in groups)
        # By group, None: of all that have no limit of their own.
        self._limits: dict[str | None, float] = {None: spec.grad_clip}
        self._limits |= {name: one.grad_clip for name, one in spec.groups.items() if one.grad_clip is not None}
        clip = spec.adaptive_clip
        self._adaptive = {} if clip is None else {name: AdaptiveClip(clip) for name in self._limits}
        self._norms = [0.0] * len(self._limits)
        self._averages = Averages(spec.ema, self.megatron.chained_optimizers)
        if isinstance(spec, ElementwiseSpec):
            for part in self.megatron.chained_optimizers:
                names = {weights: self._names[parameter] for parameter, weights in main_weights(part)}
                part.optimizer = self.steps_type(spec, part.optimizer.param_groups, names)
            self._clip_behind_steps()
            return
        for group in self.megatron.param_groups:
            own = spec.groups.get(group.get(GROUP))
            if own is not None and own.betas is not None:
                group["betas"] = tuple(own.betas)
            group["eps"] *= self._step_scales.get(group.get(SCALE), _ONE).eps
        if on_gpu:
            self.fuse()
        for part in self.megatron.chained_optimizers:
            # Optimizers make their state in the first step, and a checkpoint may be read before it. Megatron's own
            # loading does the same: a step on zero gradients, which at lr 0 changes no weight. It counts as one, and
            # weight decay that is part of the gradient writes state, so it is undone.
            part._init_optimizer_states_with_dummy_values()
        self._zero_state()
        self._clip_behind_steps()

    def _clip_behind_steps(self) -> None:
        """Let QK-clip scale the fp32 weights before the model's become copies of them."""
        if self.spec.qk_clip is None:
            return
        boxes = [
            one
            for one in owned_boxes(self._modules, self)
            if one.box.key in self.spec.clipped_rows and self._is_stepped(one.parameter)
        ]
        clip = QKClip(self.spec, boxes)

        def scale(part: Any, *_: object) -> None:
            if self.head_shares is not None:
                clip.scale(self.head_shares, part.model_param_group_index_map)

        for part in self.megatron.chained_optimizers:
            part.optimizer.register_step_post_hook(partial(scale, part))

    def _is_stepped(self, parameter: nn.Parameter) -> bool:
        group = self._group_of.get(id(parameter))
        is_held = getattr(parameter, "keeps_its_values", False)
        return not is_held and (group is None or self.spec.groups[group].lr_factor > 0)

    def fuse(self) -> None:
        """One kernel for many tensors where Megatron found neither apex's nor Transformer Engine's.

        Before the first step. Not on CPUs, where it rounds differently than the loop that checkpoints so far came from.
        """
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                for group in (part.optimizer.defaults, *part.optimizer.param_groups):
                    group["fused"] = True

    def zero_grad(self) -> None:
        """See ``Optimizer``."""
        self.megatron.zero_grad()

    def gradient_norm(self) -> float:
        """See ``Optimizer``."""
        # Where losses are scaled, Megatron looks for what is not finite itself and answers True.
        if self.megatron.prepare_grads():
            self._norms = [math.inf] * len(self._limits)
            return math.inf
        # Megatron's own norm sums squares in fp32 where apex is missing, 4e-4 too small for ten million elements, and
        # waits for the device once a tensor. This one waits once.
        squares = torch.zeros(len(self._limits), dtype=torch.float64, device=self._device)
        # Each element of the model on one rank: those that tensor ranks or stages hold copies of count once.
        parts = self.megatron.chained_optimizers
        counted = {id(gradient) for part in parts for gradient in part.get_main_grads_for_grad_norm()}
        for index, gradients in enumerate(self._clipped_together()):
            if gradients := [gradient for gradient in gradients if id(gradient) in counted]:
                squares[index] += torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum()
        dist.all_reduce(squares, group=self.megatron.get_grad_stats_parallel_group())
        self._norms = [math.sqrt(square) for square in squares.tolist()]
        return math.hypot(*self._norms)

    def apply(self, lr: float) -> None:
        """See ``Optimizer``.

        Megatron's ``step()`` is one call from the norm to the new weights. Here it is two, so that the guard can judge
        the norm and skip a step of which nothing has changed yet.
        """
        for group in self.megatron.param_groups:
            own = self.spec.groups.get(group.get(GROUP))
            group["lr"] = lr if own is None else lr * own.lr_factor
            # Megatron only notes the override; its scheduler, which is not used here, would apply it.
            group["weight_decay"] = self.spec.weight_decay * group["wd_mult"]
            if own is not None and own.weight_decay is not None:
                group["weight_decay"] = own.weight_decay
            scale = self._step_scales.get(group.get(SCALE), _ONE)
            group["lr"] *= scale.lr
            if self.spec.is_decoupled:
                group["weight_decay"] /= scale.lr
        for name, norm, gradients in zip(self._limits, self._norms, self._clipped_together(), strict=True):
            # As Megatron's clipping, bit by bit, which without apex makes two launches for each tensor.
            share = self._clipped(name, norm) / (norm + 1e-6)
            if share < 1 and gradients:
                torch._foreach_mul_(gradients, share)
        self._find_directions()
        self._averages.begin()
        self.megatron.step_with_ready_grads()
        self._averages.step()

    def _clipped(self, name: str | None, norm: float) -> float:
        """The norm to scale to, which is smaller than that of a step to clip; the statistics take the step in."""
        limit = self._limits[name] or math.inf
        target, adaptive = limit, self._adaptive.get(name)
        if adaptive is not None:
            limit = min(limit, adaptive.limit)
            remaining = adaptive.clipped(norm)
            if remaining < norm:
                target = min(target, remaining)
            # Not what the fixed limit leaves of it: norms that are all cut to one value have no deviation.
            adaptive.take_in(norm)
        self.clippings[name] = Clipping(limit=limit, is_clipped=norm > limit)
        return target

    def _clipped_together(self) -> list[list[Tensor]]:
        """This rank's gradients of each of ``_limits``."""
        found: dict[str | None, list[Tensor]] = {name: [] for name in self._limits}
        for group in self.megatron.param_groups:
            name = group.get(GROUP)
            found[name if name in found else None] += [p.grad for p in group["params"] if p.grad is not None]
        return list(found.values())

    def _find_directions(self) -> None:
        """Between clipping and the steps: directions of elements that depend on others."""

    def reset(self) -> None:
        """See ``Optimizer``."""
        self.copy_from_model()
        self._zero_state()

    def copy_from_model(self) -> None:
        """See ``Optimizer``."""
        self.megatron.reload_model_params()

    def copy_to_model(self) -> None:
        """See ``Optimizer``."""
        for part in self.megatron.chained_optimizers:
            # Public methods copy them only as the end of a step.
            part._copy_main_params_to_model_params()

    def owned(self, parameter: nn.Parameter) -> OwnedState | None:
        """See ``Optimizer``."""
        for part in self.megatron.chained_optimizers:
            # Public, but only DistributedOptimizer has it: the parameters of which this rank has a part.
            if parameter not in part.model_param_group_index_map:
                continue
            # Which elements of the flattened parameter this rank owns. Megatron's sharded_state_dict says it too, but
            # gathers the whole optimizer on one rank for the format that any layout can read.
            own = part._get_model_param_range_map(parameter)["param"]
            # The fp32 weights and the state by name, as they are, wherever the optimizer keeps them.
            tensors = part._get_main_param_and_optimizer_states(parameter)
            return OwnedState(
                first=own.start,
                last=own.end,
                weights=_flat(tensors["param"]),
                state={
                    **{name: _flat(tensors[name]) for name in self.spec.step_state_of(self._names[parameter])},
                    **{name: _flat(average) for name, average in self._averages.of(parameter).items()},
                },
            )
        return None

    def counters(self) -> dict[str, float]:
        """See ``Optimizer``. A rank without parameters has taken 0 steps."""
        clips = {
            f"{_clip_key(name)}{key}": value
            for name, one in self._adaptive.items()
            for key, value in one.state().items()
        }
        return {self.spec.step_counter: int(next(self._steps(), 0)), **clips}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """See ``Optimizer``. Limits that ``counters`` has not, of a run or a group that had none, begin anew."""
        self._set_steps(int(counters[self.spec.step_counter]))
        for name, one in self._adaptive.items():
            keys = {key: f"{_clip_key(name)}{key}" for key in one.state()}
            one.load({key: counters[full] for key, full in keys.items() if full in counters})
        self._averages.have_begun = counters[self.spec.step_counter] > 0

    def _zero_state(self) -> None:
        """The state before the first step, to which Megatron itself has no way back."""
        for part in self.megatron.chained_optimizers:
            for state in part.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self._set_steps(0)
        self._averages.have_begun = False
        for one in self._adaptive.values():
            one.load({})

    def _steps(self) -> Iterator[float]:
        """PyTorch's optimizers count for each parameter, fused ones for each group."""
        for part in self.megatron.chained_optimizers:
            for holder in (*part.optimizer.state.values(), *part.optimizer.param_groups):
                if "step" in holder:
                    yield float(holder["step"])

    def _set_steps(self, steps: int) -> None:
        # Megatron restores the number only with all of its own state dict, which checkpoints here do not have.
        for part in self.megatron.chained_optimizers:
            states = [state for state in part.optimizer.state.values() if "step" in state]
            for state in states:
                # A tensor of its own for each: PyTorch adds to them one by one. On the GPU where steps are fused.
                state["step"] = torch.full_like(state["step"], steps, dtype=torch.float32)
            if not states:
                for group in part.optimizer.param_groups:
                    group["step"] = steps


class Averages:
    """Exponential moving averages of this rank's fp32 weights, a ← decay a + (1 - decay) w after each step.

    They begin at the weights before the first step.

    ``decays``: by name; ``parts``: Megatron's ``DistributedOptimizer``s.
    """

    def __init__(self, decays: Mapping[str, float], parts: Sequence[Any]) -> None:
        self.have_begun = False
        """Whether a step was averaged; a checkpoint may be read before the first one."""
        self._decays = {average_state(name): decay for name, decay in decays.items()}
        self._weights = {
            parameter: weights for part in parts for parameter, weights in main_weights(part) if self._decays
        }
        self._held = {
            name: {parameter: torch.zeros_like(weights) for parameter, weights in self._weights.items()}
            for name in self._decays
        }

    def of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Of this rank's elements of ``parameter``, by the names in the state; not copies."""
        return {name: held[parameter] for name, held in self._held.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Before a step: the averages are the weights, unless they have begun."""
        if self._weights and not self.have_begun:
            for held in self._held.values():
                torch._foreach_copy_(list(held.values()), list(self._weights.values()))
        self.have_begun = True

    @torch.no_grad()
    def step(self) -> None:
        """Behind a step."""
        if self._weights:
            for name, decay in self._decays.items():
                torch._foreach_lerp_(list(self._held[name].values()), list(self._weights.values()), 1 - decay)


def _number_in_order(part: Any) -> None:
    """Let ``part`` find each parameter's fp32 weights where they are.

    Its optimizer has those of fp32 parameters first in every group; Megatron numbers them in the order of buffers, and
    so takes one parameter's state for another's where a group has bf16 ones too.
    """
    for number, parameters in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for place, parameter in enumerate(itertools.chain(*parameters)):
            part.model_param_group_index_map[parameter] = (number, place)


def main_weights(part: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters of which ``part``, a ``DistributedOptimizer``, has elements, and its fp32 weights of these."""
    for parameter, (group, place) in part.model_param_group_index_map.items():
        yield parameter, part.optimizer.param_groups[group]["params"][place]


def _clip_key(group: str | None) -> str:
    """Begins the names of the counters of a limit."""
    return CLIP if group is None else f"{CLIP}{group}."


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
