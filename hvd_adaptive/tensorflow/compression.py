"""The recipes by name, as Horovod's users know ``hvd.Compression``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core import recipe as recipes
from .compressor import Compressor
from .horovod import load

Variables = Iterable[Any] | None


class _Stock:
    """One of Horovod's own compressors, looked up when it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        return getattr(load().Compression, self._name)


class Compression:
    """What to pass as ``compression=`` to Horovod's tapes and optimizers, and to
    :func:`hvd_adaptive.keras.DistributedOptimizer`.

    Each recipe takes, if you like, the model's trainable variables, for names and checks, and
    keyword options; ``overrides=``, ``process_set=`` and ``name=`` are those of :class:`Compressor`.  The
    options are those of the function of the same name in :mod:`hvd_adaptive.core.recipe`; an unknown one is
    an error that names the nearest known one.
    """

    none = _Stock("none")
    """Horovod's own: no compression."""

    fp16 = _Stock("fp16")
    """Horovod's own: a cast to float16.  It overflows at 65504; gradients below 6e-8 vanish."""

    @staticmethod
    def topk(variables: Variables = None, ratio: float = 0.01, **options: Any) -> Compressor:
        """The largest magnitudes, ``ratio`` of each tensor; see :func:`hvd_adaptive.core.recipe.topk`."""
        return _make("topk", variables, {"ratio": ratio, **options})

    @staticmethod
    def randk(variables: Variables = None, ratio: float = 0.01, **options: Any) -> Compressor:
        """Shared random coordinates on the ring; see :func:`hvd_adaptive.core.recipe.randk`."""
        return _make("randk", variables, {"ratio": ratio, **options})

    @staticmethod
    def lowrank(variables: Variables = None, rank: int = 4, **options: Any) -> Compressor:
        """A few directions of each matrix on the ring; see :func:`hvd_adaptive.core.recipe.lowrank`."""
        return _make("lowrank", variables, {"rank": rank, **options})

    @staticmethod
    def sign(variables: Variables = None, ratio: float = 1.0, **options: Any) -> Compressor:
        """Signs and one magnitude per tensor; see :func:`hvd_adaptive.core.recipe.sign`."""
        return _make("sign", variables, {"ratio": ratio, **options})

    @staticmethod
    def adaptive(variables: Variables = None, **options: Any) -> Compressor:
        """As many coordinates as pay for their cost; see :func:`hvd_adaptive.core.recipe.adaptive`."""
        return _make("adaptive", variables, options)

    @staticmethod
    def from_config(config: str | Mapping[str, Any], variables: Variables = None) -> Compressor:
        """A recipe named by a string or by a mapping ``{"recipe": name, option: value, ...}``."""
        settings = {"recipe": config} if isinstance(config, str) else dict(config)
        return _make(settings.pop("recipe", ""), variables, settings)


def _make(recipe: str, variables: Variables, options: dict[str, Any]) -> Compressor:
    own = {key: options.pop(key) for key in ("overrides", "process_set", "name") if key in options}
    return Compressor(recipes.build(recipe, options), variables, **own)
