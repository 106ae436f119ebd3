"""``FusedAdam`` as apex has it: its arguments, its state, and its count of steps, which stands in the group."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam, or with ``adam_w_mode`` AdamW (Loshchilov and Hutter, 2019, algorithm 2), of fp32 parameters."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        assert not amsgrad, "apex's has no AMSGrad either"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As apex, which goes by ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all groups."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        gradient, decay = parameter.grad, group["weight_decay"]
        assert gradient is not None
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * parameter
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        corrections = [1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in (first, second)]
        update = state["exp_avg"] / corrections[0] / ((state["exp_avg_sq"] / corrections[1]).sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update += decay * parameter
        parameter.sub_(update, alpha=group["lr"])


class FusedSGD(torch.optim.SGD):
    """Imported beside the other one, and not used here."""
