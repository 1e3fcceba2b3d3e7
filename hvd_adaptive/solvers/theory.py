"""Parameters without tuning, from the problem's constants and the compressor's promise.

Sources: papers.md 2.3, 2.4 and 2.7.  ``scale`` multiplies the step that theory gives (and divides
L1), for grids around it.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.compressors import Compressor, Identity
from ..core.errors import ConfigurationError
from .adef import ADEF
from .eclk import ECLK, Schedule
from .ef21 import EF21
from .error_compensated import ErrorCompensated
from .gradient_descent import GradientDescent
from .problems import Smoothness


def ratio(compressor: Compressor, dimension: int) -> float:
    """r(Q): bits of a message over those of the vector in float32, at most 1."""
    sample = np.random.default_rng(0).normal(size=dimension)
    bits = compressor.compress(sample, np.random.default_rng(0)).bits
    return min(1.0, bits / (32.0 * dimension))


def safe_L1(constants: Smoothness, delta: float, batch: int | None = None, c: float = 1.0) -> float:
    """``max(L_f, c L sqrt(1 - delta) / delta)`` with the L of the compressed differences: L-bar, or
    the rows' for mini-batches, interpolated by the batch size (papers.md 2.4; c = 0.5 ... 1 never
    diverged there).  It is a bound for any contraction; top-k on real data mostly allows L_f."""
    differences = constants.worker
    if batch is not None:
        differences += (constants.row - constants.worker) / batch
    noise = 0.0 if batch is None else constants.row / batch
    return max(constants.mean, noise, c * differences * math.sqrt(max(0.0, 1.0 - delta)) / delta)


def eclk(
    constants: Smoothness,
    compressor: Compressor,
    dimension: int,
    p: float | None = None,
    snapshot: Compressor | None = None,
    refresh_only: bool | None = None,
    batch: int | None = None,
    L1: float | None = None,
    theta_scale: float = 1.0,
    theta2: float = 0.5,
    schedule: Schedule = "coin",
) -> ECLK:
    """ECLK with theta2 = 1/2, theta1 = min(sqrt(mu / (L1 p)), 1) theta2, sigma1 = mu / L1.

    p defaults to r(Q) (papers.md 2.4).  A second compressor as ``snapshot`` is used every round
    unless ``refresh_only`` says otherwise.  ``theta_scale`` multiplies theta1.
    """
    mu = strong(constants)
    p = ratio(compressor, dimension) if p is None else p
    L1 = safe_L1(constants, compressor.contraction(dimension), batch) if L1 is None else L1
    theta1 = min(theta_scale * math.sqrt(mu / (L1 * p)), 1.0) * theta2
    theta1 = min(theta1, 1.0 - theta2)
    refresh_only = snapshot is None if refresh_only is None else refresh_only
    return ECLK(
        compressor, L1, theta1, mu / L1, p, theta2, snapshot or Identity(), refresh_only, batch, schedule
    )


def katyusha(
    constants: Smoothness,
    p: float,
    batch: int | None = None,
    L1: float | None = None,
    theta_scale: float = 1.0,
    schedule: Schedule = "coin",
) -> ECLK:
    """Uncompressed L-Katyusha: ECLK with the identity (float32 messages)."""
    return eclk(constants, Identity(), 1, p, batch=batch, L1=L1, theta_scale=theta_scale, schedule=schedule)


def ef21(constants: Smoothness, compressor: Compressor, dimension: int, scale: float = 1.0) -> EF21:
    """``gamma = 1 / (L + Ltil sqrt(beta / theta))`` with theta = 1 - sqrt(1 - alpha) and
    beta = (1 - alpha) / (1 - sqrt(1 - alpha)); L-bar stands for the root mean square Ltil."""
    root = math.sqrt(1.0 - compressor.contraction(dimension))
    quotient = root / (1.0 - root) if root < 1 else math.inf
    return EF21(scale / (constants.mean + constants.worker * quotient), compressor)


def error_compensated(
    constants: Smoothness,
    compressor: Compressor,
    dimension: int,
    shift: Compressor | None = None,
    batch: int | None = None,
    p: float | None = None,
    scale: float = 1.0,
) -> ErrorCompensated:
    """gamma = delta / (4 L), L being the rows' for mini-batches: the order of the proven steps."""
    smooth = constants.mean if batch is None else constants.row
    gamma = scale * compressor.contraction(dimension) / (4.0 * smooth)
    return ErrorCompensated(gamma, compressor, shift, batch, p)


def gradient_descent(constants: Smoothness) -> GradientDescent:
    """GD with gamma = 1 / L_f."""
    return GradientDescent(1.0 / constants.mean)


def accelerated_gradient_descent(constants: Smoothness) -> GradientDescent:
    """AGD with gamma = 1 / L_f and the constant momentum of strongly convex objectives."""
    root = math.sqrt(constants.mean / strong(constants))
    return GradientDescent(1.0 / constants.mean, (root - 1.0) / (root + 1.0))


def adef(constants: Smoothness, compressor: Compressor, dimension: int, scale: float = 1.0) -> ADEF:
    """L = L_f / delta^2 over ``scale`` and a restart every 4 sqrt(L / mu) rounds (a choice)."""
    smooth = constants.mean / compressor.contraction(dimension) ** 2 / scale
    return ADEF(smooth, compressor, math.ceil(4.0 * math.sqrt(smooth / strong(constants))))


def strong(constants: Smoothness) -> float:
    """mu, which every rule here needs to be positive."""
    if constants.strong <= 0:
        raise ConfigurationError(
            "the problem is not strongly convex (l2=0); give l2 > 0, or set theta1 and sigma1 yourself"
        )
    return constants.strong
