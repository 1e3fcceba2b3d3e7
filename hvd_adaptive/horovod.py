"""The one place where Horovod is imported, late and with a sentence if it is missing."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .core.errors import MissingDependencyError


@cache
def load(framework: str) -> Any:
    """The module ``horovod.torch`` or ``horovod.tensorflow``.

    Raises MissingDependencyError where Horovod is missing or was built without that framework.
    """
    try:
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise MissingDependencyError(
            f"horovod.{framework} cannot be imported ({error}); build Horovod for this environment with: "
            "hvd-adaptive horovod install"
        ) from error
