"""Compression for ``horovod.torch``: ``from hvd_adaptive.torch import Compression``."""

from ..core.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "hvd_adaptive.torch needs PyTorch; install it with: pip install 'hvd-adaptive[torch]'"
    ) from error

from .compression import Compression
from .compressor import Compressor
from .hierarchical import Hierarchical
from .replicas import ReplicasDifferError, assert_replicas_equal

__all__ = ["Compression", "Compressor", "Hierarchical", "ReplicasDifferError", "assert_replicas_equal"]
