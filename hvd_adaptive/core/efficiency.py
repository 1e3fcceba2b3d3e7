"""The tuning rule: send the T coordinates that improve the objective most per unit of cost.

For an objective with L-Lipschitz gradient g, a step along a compressed gradient Q_T(g) with
the step size ``step_scale / L`` lowers the objective by at least ``improvement / (2 L) |g|^2``
(in expectation for stochastic sparsification).  The efficiency of T is improvement / cost, and
the rule takes the T that maximises it.

============== ======================================= ======================= ===============
family         Q_T(g)_j on the support                 improvement             step_scale
============== ======================================= ======================= ===============
``sparsify``   g_j, the T largest                      alpha = |g_T|^2/|g|^2   1
``sign``       |g| sign(g_j), the T largest            beta =                  sqrt(beta / T)
                                                       |g_T|_1^2 / (T |g|^2)
``stochastic`` g_j / p_j with probability p_j,         omega =                 omega
               sum of p_j = T                          |g|^2 / sum(g_j^2/p_j)
============== ======================================= ======================= ===============

Here ``g_T`` is g on its T largest magnitudes, |.| the Euclidean norm and |.|_1 the sum of
magnitudes.  T is whole for the first two; for the third it is an expected count, and real.
Source: the CAT paper (arXiv 2003.06377), its descent lemmas and its rule.

Everything here is exact, in float64 on the CPU, after one sort.  A gradient of zeros has
improvement 0 at every T; T = 1 is then returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .backend import backend_of
from .compressors import top_mask
from .cost import CostModel, Floats, Packets
from .errors import ConfigurationError

Family = Literal["sparsify", "sign", "stochastic"]


@dataclass(frozen=True)
class Choice:
    """One T and what it brings; see the module for the quantities.

    ``sparsity`` is an int, and a float for the stochastic family.

    ``cost`` has the unit of the cost model, and ``efficiency`` is improvement per that unit.
    ``step_scale`` times 1/L is the step size that the improvement is guaranteed for.
    """

    sparsity: float
    improvement: float
    cost: float
    efficiency: float
    step_scale: float


@dataclass(frozen=True)
class Curve:
    """The quantities of `Choice` for many T: arrays of one shape, float64 but for whole T (int64)."""

    sparsity: Floats | NDArray[np.int64]
    improvement: Floats
    cost: Floats
    efficiency: Floats
    step_scale: Floats

    def __getitem__(self, position: int) -> Choice:
        return Choice(*(getattr(self, field.name)[position].item() for field in fields(Choice)))


def best(gradient: Any, cost: CostModel, family: Family = "sparsify") -> Choice:
    """The T in 1 .. d that maximises improvement / cost, exactly.

    Of several such T the smallest is returned, but for the stochastic family: its efficiency
    can be flat at the start, and the end of the flat stretch takes fewer steps.  (Over a payload
    that is not affine, that family is searched at the whole T and where a p_j reaches 1.)

    Parameters
    ----------
    gradient: NumPy array, torch.Tensor or eager tf.Tensor of d elements, any shape and real dtype.
    cost: a model of `core.cost` for dimension d.
    family: ``"sparsify"``, ``"sign"`` or ``"stochastic"``.

    Raises
    ------
    ConfigurationError: non-finite, complex or empty gradient; unknown family; a cost that is not
        a cost model or is for another dimension.
    """
    spectrum = _spectrum(gradient, cost, family)
    counts = spectrum.candidates(cost) if spectrum.nonzero else np.array([1], spectrum.kind)
    found = spectrum.curve(counts, cost)
    return found[int(np.argmax(found.efficiency))]


def curve(
    gradient: Any, cost: CostModel, family: Family = "sparsify", sparsity: NDArray[Any] | None = None
) -> Curve:
    """Improvement, cost and efficiency at each T of ``sparsity`` (default: every whole T, 1 .. d).

    Parameters and errors are those of `best`; ``sparsity`` must lie in 1 .. d, and be whole
    but for the stochastic family.
    """
    spectrum = _spectrum(gradient, cost, family)
    if sparsity is None:
        counts = np.arange(1, spectrum.dimension + 1, dtype=spectrum.kind)
    else:
        counts = _valid_sparsity(np.asarray(sparsity, dtype=np.float64), spectrum)
    return spectrum.curve(counts, cost)


def at(gradient: Any, cost: CostModel, sparsity: float, family: Family = "sparsify") -> Choice:
    """What a given T brings.  Parameters and errors are those of `curve`."""
    return curve(gradient, cost, family, np.array([sparsity]))[0]


def probabilities(gradient: Any, sparsity: float) -> Floats:
    """Inclusion probabilities of least variance for an expected count of ``sparsity``.

    They minimise sum(g_j^2 / p_j) subject to sum(p_j) = T and p_j <= 1, by water-filling:
    ``p_j = min(1, lambda |g_j|)``.  Coordinates that are zero get probability 0, so the sum is
    the number of nonzero ones where ``sparsity`` exceeds it.

    Returns float64 of the gradient's shape.  Source: the CAT paper; the same p as in
    Wangni et al. 2018.

    Raises ConfigurationError for a gradient that `best` refuses or a sparsity outside 1 .. d.
    """
    values = as_float64(gradient)
    spectrum = _Stochastic(values)
    counts = _valid_sparsity(np.array([float(sparsity)]), spectrum)
    if not spectrum.nonzero:
        return np.zeros_like(values)
    magnitudes = np.abs(values) / spectrum.largest
    if counts[0] >= spectrum.nonzero:
        return np.sign(magnitudes)
    saturated = spectrum.saturated(counts)
    level = (counts - saturated) / spectrum.tails[saturated]
    return np.minimum(1.0, magnitudes * level)


def compressed(
    gradient: Any, sparsity: float, family: Family, generator: np.random.Generator | None = None
) -> Floats:
    """Q_T(g) of the table above, for T = ``sparsity``: float64 of the gradient's shape.

    A step is ``x - step_scale / L * Q_T(g)``.  Among equal magnitudes the lowest index is sent.
    ``generator`` draws the support of the stochastic family, and is needed for that one alone.

    Raises ConfigurationError for a gradient that `best` refuses, an unknown family, a sparsity
    outside 1 .. d or (where T is a count) not whole, or a missing generator.
    """
    values = as_float64(gradient)
    spectrum = _family(family)(values)
    (count,) = _valid_sparsity(np.array([float(sparsity)]), spectrum)
    sent = np.zeros_like(values)
    if isinstance(spectrum, _Stochastic):
        if generator is None:
            raise ConfigurationError(
                "generator must be given for the stochastic family, which draws at random"
            )
        chance = probabilities(values, count)
        drawn = generator.random(values.shape) < chance
        sent[drawn] = values[drawn] / chance[drawn]
        return sent
    support = top_mask(values.reshape(1, -1), int(count)).reshape(values.shape)
    sent[support] = values[support]
    if isinstance(spectrum, _Sign):
        sent = np.sign(sent) * (spectrum.largest * np.sqrt(spectrum.energy))
    return sent


def dynamic_sign_sparsity(gradient: Any) -> int:
    """The smallest T with ``|g_T|_1 >= |g|``: the older, cost-blind rule for the sign family.

    At this T, beta >= 1/T and T <= ceil(sqrt(d)).  Source: the dynamic rule of QSGD
    (Alistarh et al. 2017), a baseline of the CAT paper.

    Raises ConfigurationError for a gradient that `best` refuses.
    """
    spectrum = _Sign(as_float64(gradient))
    reached = spectrum.sums >= np.sqrt(spectrum.energy)
    return int(np.argmax(reached)) + 1 if reached.any() else spectrum.dimension


def as_float64(gradient: Any) -> Floats:
    """The gradient as a float64 NumPy array of its own shape.

    Raises ConfigurationError where it is empty, not finite or not real numbers.
    """
    if hasattr(gradient, "detach"):  # torch: NumPy knows neither its bfloat16 nor tracked tensors
        gradient = backend_of(gradient).cast(gradient.detach(), "float64").cpu()
    try:
        values = np.asarray(gradient)
        if np.issubdtype(values.dtype, np.complexfloating):
            raise TypeError("it is complex")
        values = values.astype(np.float64)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"gradient must be a dense array or an eager tensor of real numbers; "
            f"{type(gradient).__name__} cannot be used: {error}"
        ) from error
    if not values.size:
        raise ConfigurationError("gradient has no elements; leave empty tensors out")
    if not np.isfinite(values).all():
        raise ConfigurationError(
            f"gradient has {np.count_nonzero(~np.isfinite(values))} elements that are NaN or infinite; "
            "skip the step, or lower the learning rate or loss scale"
        )
    return values


class _Spectrum(ABC):
    """The sorted magnitudes of a gradient, and what each T makes of them.

    Magnitudes are divided by the largest, so that no square overflows; one that then is below
    the smallest float counts as zero.
    """

    kind: type[np.generic] = np.int64
    """dtype of T."""

    def __init__(self, values: Floats) -> None:
        magnitudes = np.abs(values).reshape(-1)
        self.dimension = magnitudes.size
        self.largest = float(magnitudes.max())
        if self.largest > 0:
            magnitudes = magnitudes / self.largest
        self.magnitudes: Floats = np.sort(magnitudes)[::-1]
        self.nonzero = int(np.count_nonzero(self.magnitudes))
        self.energies: Floats = np.cumsum(self.magnitudes**2)
        self.energy = float(self.energies[-1])

    def curve(self, counts: NDArray[Any], cost: CostModel) -> Curve:
        improvement = np.zeros(counts.shape)
        if self.nonzero:
            improvement = np.minimum(self.improvement(counts), 1.0)  # rounding may pass 1
        charged = cost(counts)
        scale = self.step_scale(counts, improvement)
        return Curve(counts, improvement, charged, improvement / charged, scale)

    @abstractmethod
    def improvement(self, counts: NDArray[Any]) -> Floats: ...

    @abstractmethod
    def step_scale(self, counts: NDArray[Any], improvement: Floats) -> Floats: ...

    @abstractmethod
    def candidates(self, cost: CostModel) -> NDArray[Any]:
        """Some T, ascending, among them the best of all."""


class _Sparsify(_Spectrum):
    def improvement(self, counts: NDArray[Any]) -> Floats:
        alpha: Floats = self.energies[counts - 1] / self.energy
        return alpha

    def step_scale(self, counts: NDArray[Any], improvement: Floats) -> Floats:
        return np.ones(counts.shape)

    def candidates(self, cost: CostModel) -> NDArray[Any]:
        if cost.affine:
            # One coordinate more raises the efficiency while its gain / marginal cost exceeds the
            # efficiency so far.  The gain falls with T, so this holds up to the best T and never
            # after it, on a plateau too.
            start, slope = cost.fixed + cost.head, cost.marginal()
            falls = _first(
                self.nonzero - 1,
                lambda i: self.magnitudes[i + 1] ** 2 * (start + slope * (i + 1)) <= slope * self.energies[i],
            )
            return np.array([falls + 1])
        full = _full_packets(cost)
        if full is None:
            return np.arange(1, self.nonzero + 1)
        # The T after a whole one is taken along in case the division into packets rounded down.
        whole = np.unique(np.minimum(np.concatenate((full, full + 1)).astype(np.int64), self.nonzero))
        return whole[whole >= 1]


class _Sign(_Spectrum):
    def __init__(self, values: Floats) -> None:
        super().__init__(values)
        self.sums: Floats = np.cumsum(self.magnitudes)

    def improvement(self, counts: NDArray[Any]) -> Floats:
        beta: Floats = self.sums[counts - 1] ** 2 / (counts * self.energy)
        return beta

    def step_scale(self, counts: NDArray[Any], improvement: Floats) -> Floats:
        scale: Floats = np.sqrt(improvement / counts)
        return scale

    def candidates(self, cost: CostModel) -> NDArray[Any]:
        # beta / cost can have many peaks, so nothing less than every T will do.
        return np.arange(1, self.nonzero + 1)


class _Stochastic(_Spectrum):
    """With k coordinates saturated (p = 1), the others share T - k in proportion to magnitude:
    sum(g^2 / p) = (energy of the first k) + (sum of the others)^2 / (T - k)."""

    kind = np.float64

    def __init__(self, values: Floats) -> None:
        super().__init__(values)
        ascending = self.magnitudes[::-1]
        self.tails: Floats = np.cumsum(ascending)[::-1]  # sum of magnitudes k, k+1, ...
        present = slice(0, self.nonzero)
        edges = np.arange(self.nonzero) + self.tails[present] / self.magnitudes[present]
        # Up to edge k, k coordinates are saturated.  Rounding must not disorder the edges.
        self.edges: Floats = np.minimum(np.maximum.accumulate(edges), self.nonzero)

    def saturated(self, counts: Floats) -> NDArray[np.int64]:
        return np.minimum(np.searchsorted(self.edges, counts), self.nonzero - 1)

    def energy_of(self, first: NDArray[np.int64]) -> Floats:
        return np.where(first > 0, self.energies[first - 1], 0.0)

    def improvement(self, counts: NDArray[Any]) -> Floats:
        inside = np.minimum(counts, self.nonzero)  # beyond, zeros would be sent
        k = self.saturated(inside)
        omega: Floats = self.energy / (self.energy_of(k) + self.tails[k] ** 2 / (inside - k))
        return omega

    def step_scale(self, counts: NDArray[Any], improvement: Floats) -> Floats:
        return improvement

    def candidates(self, cost: CostModel) -> NDArray[Any]:
        if cost.affine:
            return np.array([self._peak(cost.fixed + cost.head, cost.marginal())])
        full = _full_packets(cost)
        if full is None:
            return np.union1d(np.arange(1.0, self.nonzero + 1), self.edges)
        # omega grows inside a packet, whose cost is flat: the best T fills its last packet.
        return np.append(full[(full >= 1) & (full < self.nonzero)], self.nonzero)

    def _peak(self, start: float, slope: float) -> float:
        """Where omega / (start + slope T) peaks.

        omega is concave with a continuous derivative, so the quotient has one peak (or is flat
        up to edge 0): find the stretch between edges that holds it, by the sign of the
        derivative at the edges, then the stationary point in closed form.
        """
        if slope == 0:
            return float(self.nonzero)

        def past(k: int) -> bool:
            top = self.magnitudes[k]
            spread = (self.energies[k - 1] if k else 0.0) + self.tails[k] * top
            return bool((start + slope * self.edges[k]) * top**2 <= slope * spread)

        k = _first(self.nonzero, past)
        if k == 0 or k == self.nonzero:
            return float(self.edges[min(k, self.nonzero - 1)])
        stationary = k + self.tails[k] * np.sqrt((start + slope * k) / (slope * self.energies[k - 1]))
        return float(np.clip(stationary, self.edges[k - 1], self.edges[k]))


_FAMILIES: dict[str, type[_Spectrum]] = {
    "sparsify": _Sparsify,
    "sign": _Sign,
    "stochastic": _Stochastic,
}


def _first(length: int, holds: Callable[[int], Any]) -> int:
    """The first of 0 .. length - 1 for which the monotone ``holds`` is true, or length."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _full_packets(cost: CostModel) -> Floats | None:
    """The T that fill their packets, where the cost is of that kind."""
    return cost.full() if isinstance(cost, Packets) and cost.payload.affine else None


def _spectrum(gradient: Any, cost: CostModel, family: str) -> _Spectrum:
    kind = _family(family)
    if not isinstance(cost, CostModel):
        raise ConfigurationError(
            f"cost must be a cost model, such as PayloadBits(dimension) or one over it, not {cost!r}"
        )
    values = as_float64(gradient)
    if values.size != cost.dimension:
        raise ConfigurationError(
            f"cost is for dimension {cost.dimension}, but the gradient has {values.size} elements; "
            f"use cost.for_dimension({values.size})"
        )
    return kind(values)


def _family(name: str) -> type[_Spectrum]:
    if name not in _FAMILIES:
        raise ConfigurationError(f"family must be one of {', '.join(map(repr, _FAMILIES))}, not {name!r}")
    return _FAMILIES[name]


def _valid_sparsity(counts: Floats, spectrum: _Spectrum) -> NDArray[Any]:
    if counts.size and not (counts.min() >= 1 and counts.max() <= spectrum.dimension):
        raise ConfigurationError(
            f"sparsity must lie between 1 and the gradient's {spectrum.dimension} elements, "
            f"but ranges over {counts.min():g} .. {counts.max():g}"
        )
    kept: NDArray[Any] = counts.astype(spectrum.kind)
    if not np.array_equal(kept, counts):
        raise ConfigurationError("sparsity must be whole, but for the stochastic family")
    return kept
