"""The one place where ``horovod.torch`` is imported, late and with a sentence if it is missing."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..core.errors import MissingDependencyError


@cache
def load() -> Any:
    """The module ``horovod.torch``.

    Raises MissingDependencyError where Horovod is missing or was built without PyTorch.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise MissingDependencyError(
            f"horovod.torch cannot be imported ({error}); build Horovod for this environment with: "
            "hvd-adaptive horovod install"
        ) from error
    return hvd
