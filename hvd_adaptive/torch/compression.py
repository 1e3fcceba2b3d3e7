"""The recipes by name, as Horovod's users know ``hvd.Compression``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core import recipe as recipes
from .compressor import Compressor
from .horovod import load

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class _Stock:
    """One of Horovod's own compressors, looked up when it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        return getattr(load().Compression, self._name)


class Compression:
    """What to pass as ``compression=`` to ``hvd.DistributedOptimizer``.

    Each recipe takes the named parameters whose gradients the optimizer reduces, and keyword
    options; ``overrides=``, ``process_set=``, ``name=`` and ``scaler=`` are those of :class:`Compressor`.
    The options are those of the function of the same name in :mod:`hvd_adaptive.core.recipe`; an unknown
    one is an error that names the nearest known one.
    """

    none = _Stock("none")
    """Horovod's own: no compression."""

    fp16 = _Stock("fp16")
    """Horovod's own: a cast to float16.  It overflows at 65504; gradients below 6e-8 vanish."""

    @staticmethod
    def topk(named_parameters: NamedParameters, ratio: float = 0.01, **options: Any) -> Compressor:
        """The largest magnitudes, ``ratio`` of each tensor; see :func:`hvd_adaptive.core.recipe.topk`."""
        return _make("topk", named_parameters, {"ratio": ratio, **options})

    @staticmethod
    def randk(named_parameters: NamedParameters, ratio: float = 0.01, **options: Any) -> Compressor:
        """Shared random coordinates on the ring; see :func:`hvd_adaptive.core.recipe.randk`."""
        return _make("randk", named_parameters, {"ratio": ratio, **options})

    @staticmethod
    def lowrank(named_parameters: NamedParameters, rank: int = 4, **options: Any) -> Compressor:
        """A few directions of each matrix on the ring; see :func:`hvd_adaptive.core.recipe.lowrank`."""
        return _make("lowrank", named_parameters, {"rank": rank, **options})

    @staticmethod
    def sign(named_parameters: NamedParameters, ratio: float = 1.0, **options: Any) -> Compressor:
        """Signs and one magnitude per tensor; see :func:`hvd_adaptive.core.recipe.sign`."""
        return _make("sign", named_parameters, {"ratio": ratio, **options})

    @staticmethod
    def adaptive(named_parameters: NamedParameters, **options: Any) -> Compressor:
        """As many coordinates as pay for their cost; see :func:`hvd_adaptive.core.recipe.adaptive`."""
        return _make("adaptive", named_parameters, options)

    @staticmethod
    def from_config(named_parameters: NamedParameters, config: str | Mapping[str, Any]) -> Compressor:
        """A recipe named by a string or by a mapping ``{"recipe": name, option: value, ...}``."""
        if isinstance(config, str):
            return Compressor(config, named_parameters)
        own, options = _split(config)
        return Compressor(recipes.from_config(options), named_parameters, **own)


def _make(recipe: str, named_parameters: NamedParameters, options: Mapping[str, Any]) -> Compressor:
    own, rest = _split(options)
    return Compressor(recipes.build(recipe, rest), named_parameters, **own)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a compressor, and those of its recipe."""
    own = {key: options[key] for key in ("overrides", "process_set", "name", "scaler") if key in options}
    return own, {key: value for key, value in options.items() if key not in own}
