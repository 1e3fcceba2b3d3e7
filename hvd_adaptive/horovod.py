"""The one place where Horovod is imported, late and with a sentence if it is missing."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .core.errors import MissingDependencyError
from .setup.horovod import VERSION


@cache
def load(framework: str) -> Any:
    """The module ``horovod.torch`` or ``horovod.tensorflow``.

    Raises MissingDependencyError where Horovod is missing, of another version, or was built without
    that framework.
    """
    try:
        version = importlib.import_module("horovod").__version__
        if version.split(".")[:2] != VERSION.split(".")[:2]:  # another patch release is let through
            raise ImportError(f"it is Horovod {version}")
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise MissingDependencyError(
            f"horovod.{framework} of version {VERSION} cannot be imported ({error}); build it for this "
            "environment with: hvd-adaptive horovod install"
        ) from error
