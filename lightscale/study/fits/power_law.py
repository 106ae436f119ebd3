"""y = coefficient · x^exponent, fitted by least squares in logarithms."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.study.fits.bootstrap import FittedNumber


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """A fitted power law; `residual` is the RMS of log y minus its fit: 0.01 is 1 %."""

    coefficient: float
    exponent: float
    residual: float

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """y at `x`."""
        return np.asarray(self.coefficient * x**self.exponent)


@dataclass(frozen=True, kw_only=True)
class PowerLawEstimate:
    """A power law with intervals."""

    coefficient: FittedNumber
    exponent: FittedNumber
    residual: float

    def to_json(self) -> dict[str, object]:
        """For reports."""
        return {
            "coefficient": self.coefficient.to_json(),
            "exponent": self.exponent.to_json(),
            "residual": self.residual,
        }


def fit_power_law(x: NDArray[np.float64], y: NDArray[np.float64]) -> PowerLaw:
    """Fit the law of (n,) `y` by (n,) `x`, both above 0; needs at least two different x."""
    log_x, log_y = np.log(x), np.log(y)
    # About the middle: a sum of squares about 0 would lose digits where C is 1e-9 PFLOP-days.
    centre = log_x.mean()
    exponent = float(((log_x - centre) * log_y).sum() / ((log_x - centre) ** 2).sum())
    at_centre = float(log_y.mean())
    residuals = log_y - at_centre - exponent * (log_x - centre)
    return PowerLaw(
        coefficient=float(np.exp(at_centre - exponent * centre)),
        exponent=exponent,
        residual=float(np.sqrt((residuals**2).mean())),
    )
