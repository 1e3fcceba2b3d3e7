"""Where in TensorFlow's graphs a call of ours happens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import tensorflow as tf

from ..core.errors import ConfigurationError

T = TypeVar("T")

_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph")


class Counter:
    """Numbers the calls that happen while one function is traced: 0, 1, 2, ...

    Horovod calls ``compress`` once per gradient and trace, inside the branch of a conditional that
    has a graph of its own; what is counted is calls per function around such branches.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def next(self) -> int:
        """The number of this call.  Raises ConfigurationError outside of any graph."""
        if tf.executing_eagerly():
            raise ConfigurationError(
                "gradients can be compressed in a graph only: hvd.DistributedGradientTape and the optimizers "
                "make one; call hvd.allreduce(..., compression=...) inside a tf.function"
            )
        graph: Any = tf.compat.v1.get_default_graph()
        while type(graph).__name__ in _BRANCHES:
            graph = graph.outer_graph
        number = self._counts.get(graph, 0)
        self._counts[graph] = number + 1
        return number


def refuse_xla() -> None:
    """Raises ConfigurationError while a function with ``jit_compile=True`` is traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise ConfigurationError(
                    "jit_compile=True: XLA cannot compile Horovod's operations; pass jit_compile=False to "
                    "model.compile or tf.function"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def outside(make: Callable[[], T]) -> T:
    """``make()``, run outside of all functions that are being traced; in a graph of TensorFlow 1, in it.

    A function that is traced counts the variables that its thread makes, and refuses new ones in a
    later trace; hence a thread of its own.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return make()
    return _elsewhere(make)


def call(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, where ``function`` is a ``tf.function`` without captures.

    It is never traced as in TensorFlow 1, where ``==`` compares tensors by identity.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        specs = tf.nest.map_structure(
            lambda x: tf.TensorSpec(x.shape, x.dtype) if tf.is_tensor(x) else x, arguments
        )
        concrete = _elsewhere(lambda: function.get_concrete_function(*specs))
        return concrete(*arguments)
    return function(*arguments)


def _elsewhere(make: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
