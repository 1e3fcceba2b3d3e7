"""The one place where ``horovod.tensorflow`` is imported, with a sentence if it is missing."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..core.errors import MissingDependencyError


@cache
def load() -> Any:
    """The module ``horovod.tensorflow``.

    Raises MissingDependencyError where Horovod is missing or was built without TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise MissingDependencyError(
            f"horovod.tensorflow cannot be imported ({error}); build Horovod for this environment with: "
            "hvd-adaptive horovod install"
        ) from error
    return hvd
