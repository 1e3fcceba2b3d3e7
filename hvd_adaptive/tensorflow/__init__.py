"""Compression for ``horovod.tensorflow``: ``from hvd_adaptive.tensorflow import Compression``."""

from ..core.errors import MissingDependencyError

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "hvd_adaptive.tensorflow needs TensorFlow; install it with: pip install 'hvd-adaptive[tensorflow]'"
    ) from error

from .compression import Compression
from .compressor import Compressor
from .hierarchical import Hierarchical

__all__ = ["Compression", "Compressor", "Hierarchical"]
