"""The workers as Horovod ranks: one worker per rank, messages through Horovod's allgather."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import numpy as np

from ..core.compressors import Compressor
from ..core.errors import MissingDependencyError, SettingsMismatchError
from .network import Network

_instances = itertools.count()
_FRAMEWORKS = ("torch", "tensorflow")


class HorovodRanks(Network):
    """Every rank holds one worker.

    Create it on all ranks, in the same order relative to other instances.  Uses the collectives
    of ``horovod.torch`` or ``horovod.tensorflow``, whichever can be imported first (or the named
    one), and initialises Horovod where that was not done.

    Raises :class:`MissingDependencyError` where neither can be imported.
    """

    def __init__(self, seed: int = 0, framework: str | None = None) -> None:
        self._hvd, self._tensor = _collectives(framework)
        if not self._hvd.is_initialized():
            self._hvd.init()
        self._rank = self._hvd.rank()
        self._tag = f"hvd_adaptive.solvers.{next(_instances)}"
        super().__init__(self._hvd.size(), [self._rank], seed)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(rows, dtype=np.float64)
        return self._allgather(rows, "exact").reshape(self.size, *rows.shape[1:])

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        found: list[Any] = self._hvd.allgather_object(objects[0], name=f"{self._tag}.objects")
        return found

    def agree(self, **settings: float) -> None:
        for name, values in zip(
            settings, self.gather(np.array([list(settings.values())], dtype=np.float64)).T, strict=True
        ):
            if (values != values[0]).any():
                raise SettingsMismatchError(
                    f"{name} differs between ranks: {', '.join(f'{v:g}' for v in values)}; give all the same"
                )

    def _exchange(self, compressor: Compressor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        dimension = rows.shape[1]
        message = compressor.compress(rows[0], self.generators[0]).message
        stream = self._allgather(message, "messages")
        everything, start = np.empty((self.size, dimension)), 0
        for rank in range(self.size):
            stop = start + compressor.extent(stream[start:], dimension)
            everything[rank] = compressor.decode(stream[start:stop], dimension)
            start = stop
        return everything[self._rank : self._rank + 1], everything, 8 * stream.size

    def _allgather(self, array: np.ndarray, purpose: str) -> np.ndarray:
        found: np.ndarray = self._hvd.allgather(self._tensor(array), name=f"{self._tag}.{purpose}").numpy()
        return found


def launched() -> bool:
    """Whether this process has initialised Horovod through torch or TensorFlow, with several ranks."""
    loaded = [sys.modules[name] for name in map("horovod.{}".format, _FRAMEWORKS) if name in sys.modules]
    return any(hvd.is_initialized() and hvd.size() > 1 for hvd in loaded)


def _collectives(framework: str | None) -> tuple[Any, Any]:
    reasons = []
    for name in _FRAMEWORKS if framework is None else (framework,):
        try:
            hvd = importlib.import_module(f"horovod.{name}")
            library = importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        return hvd, library.from_numpy if name == "torch" else library.constant
    raise MissingDependencyError(
        "Horovod ranks need horovod.torch or horovod.tensorflow; run 'hvd-adaptive horovod install' "
        f"({'; '.join(reasons)})"
    )
