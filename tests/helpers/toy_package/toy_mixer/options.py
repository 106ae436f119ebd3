from typing import Annotated, Self

from pydantic import Field, model_validator

from lightscale.config.section import Count, Section


class ToyOptions(Section):
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of a sum that is left one token later."""
    half_life: Count | None = None
    """Tokens after which half is left; none: as decay says."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.half_life is not None and "decay" in self.model_fields_set:
            raise ValueError("decay and half_life say one thing twice; use one of them")
        return self

    @property
    def share(self) -> float:
        return self.decay if self.half_life is None else 0.5 ** (1 / self.half_life)
