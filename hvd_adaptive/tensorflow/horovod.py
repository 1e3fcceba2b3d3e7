"""Horovod for TensorFlow, looked up when it is needed."""

from functools import partial

from ..horovod import load as _load

load = partial(_load, "tensorflow")
