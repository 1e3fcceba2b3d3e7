"""What hierarchical mode needs of Horovod's process sets, alike in every framework."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .core.errors import ConfigurationError
from .horovod import load

PATIENCE = 10.0
"""Seconds for which a rank that is done waits for the others."""

_made: dict[tuple[str, tuple[int, ...]], Any] = {}
"""The process sets made here, by framework and ranks: Horovod wants each made once, and tells of none that
it has."""

_leaving: dict[str, _Leave] = {}
"""What is done at the end of the program, by framework."""


def own(framework: str, groups: Sequence[tuple[int, ...]]) -> Any:
    """The process set of this rank among ``groups``; every rank makes all of them, in one order.

    ``framework``: "torch" or "tensorflow".  Raises ConfigurationError where Horovod was
    started without dynamic process sets, or has one of the same ranks already.
    """
    hvd, sets = load(framework), {}
    for ranks in groups:
        key = framework, ranks
        if list(ranks) == list(range(hvd.size())):
            _made[key] = hvd.global_process_set
        else:
            try:
                _made[key] = hvd.add_process_set(list(ranks))
            except Exception as error:
                if not ("duplicate" in str(error) and key in _made):
                    raise ConfigurationError(
                        f"hierarchical mode cannot make the process set {list(ranks)}: start with "
                        f'hvd.init(process_sets="dynamic"), and make none of the same ranks before ({error})'
                    ) from error
        sets[ranks] = _made[key]
    return next(sets[ranks] for ranks in groups if hvd.rank() in ranks)


def leave_together(framework: str, meet: Callable[[], Any]) -> None:
    """At the end of the program, before Horovod's own: who leaves first shuts Horovod down for all, and the
    last step of another host may be under way, in a process set of its own.

    ``meet``: a collective of all ranks, which this rank waits for, but not for long.
    """
    leave = _leaving.get(framework)
    if leave is None:
        leave = _leaving[framework] = _Leave(framework, meet)
    atexit.unregister(leave)  # Horovod may have been started anew since
    atexit.register(leave)


class _Leave:
    def __init__(self, framework: str, meet: Callable[[], Any]) -> None:
        self._hvd = load(framework)
        self._meet = meet
        self._time = threading.Event()
        # started now: at the end of the program none can be
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._time.wait()
        with contextlib.suppress(Exception):  # another rank is gone: there is nothing to wait for
            self._meet()

    def __call__(self) -> None:
        if hasattr(sys, "last_value") or not self._hvd.is_initialized():  # an error is to be seen at once
            return
        self._time.set()
        self._thread.join(PATIENCE)
