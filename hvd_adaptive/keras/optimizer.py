"""A Keras 3 optimizer that reduces gradients over all ranks before it applies them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ..core.errors import ConfigurationError
from ..tensorflow.graphs import refuse_xla
from ..tensorflow.horovod import load

hvd = load()
_serial = itertools.count()


def DistributedOptimizer(
    optimizer: Any,
    compression: Any = hvd.Compression.none,
    *,
    op: Any = hvd.Average,
    process_set: Any = hvd.global_process_set,
    groups: int | Sequence[Sequence[Any]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """``optimizer`` itself, which from now on reduces gradients over the ranks before it applies them.

    Its class, configuration, variables and state stay as they were: ``model.save`` writes a file
    that loads with a plain optimizer, which can be made distributed again.  Clipping acts on the
    reduced gradients.  A ``LossScaleOptimizer`` must be the one that is given here, not what it
    wraps; then gradients are reduced without their scale, and all ranks skip the same steps.

    Args:
        optimizer: a Keras 3 optimizer, built or not, or its name.
        compression: an object with ``compress`` and ``decompress``, as Horovod takes it.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the Horovod process set that trains together.
        groups: a number of groups, or lists of variables, whose gradients are reduced together.
        backward_passes_per_step: gradients of so many batches are summed on each rank, then
            reduced and applied once; ``optimizer.iterations`` counts what was applied.
        average_aggregated_gradients: divide that sum by ``backward_passes_per_step``.
        sparse_as_dense: turn ``tf.IndexedSlices`` (of embeddings) into dense gradients first.
        gradient_predivide_factor: for ``hvd.Average``: divide by this before the sum and by the
            rest after it.

    Raises:
        ConfigurationError: a setting is wrong (here), or the model was compiled with
            ``jit_compile=True`` (at its first step): XLA cannot compile Horovod's operations.
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}; pass a Keras 3 "
            "optimizer (for legacy Keras there is horovod.tensorflow.keras.DistributedOptimizer)"
        )
    if isinstance(optimizer, _Distributed):
        raise ConfigurationError("optimizer is distributed already; pass it to model.compile as it is")
    reduction = _Reduction(
        compression, op, process_set, groups, sparse_as_dense, gradient_predivide_factor, next(_serial)
    )
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(
            f"backward_passes_per_step must be a whole number of at least 1, not {passes!r}"
        )
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (_Distributed, plain), {"__module__": plain.__module__})
    optimizer._distribution = _Distribution(reduction, passes, average_aggregated_gradients)
    return optimizer


class _Reduction:
    """How a list of gradients becomes the list of their reductions."""

    def __init__(
        self,
        compression: Any,
        op: Any,
        process_set: Any,
        groups: int | Sequence[Sequence[Any]] | None,
        sparse_as_dense: bool,
        predivide: float,
        serial: int,
    ) -> None:
        for method in ("compress", "decompress"):
            if not callable(getattr(compression, method, None)):
                raise ConfigurationError(
                    f"compression has no method {method!r}; pass one of hvd_adaptive.tensorflow.Compression "
                    "or of horovod.tensorflow.Compression"
                )
        if op not in (hvd.Average, hvd.Sum):
            raise ConfigurationError("op must be hvd.Average or hvd.Sum")
        if isinstance(groups, bool) or (isinstance(groups, int) and groups < 1):
            raise ConfigurationError(
                f"groups must be a number of at least 1, or a list of lists of variables, not {groups!r}"
            )
        if not predivide > 0:
            raise ConfigurationError(f"gradient_predivide_factor must be above 0, not {predivide!r}")
        if predivide != 1 and op != hvd.Average:
            raise ConfigurationError("gradient_predivide_factor needs op=hvd.Average")
        self.compression = compression
        self.op = op
        self.process_set = process_set
        self.groups = groups
        self.sparse_as_dense = sparse_as_dense
        self.predivide = predivide
        # hvd.elastic.run tells Horovod's failures from others by the first word.
        self.name = f"HorovodAllreduce_hvd_adaptive_keras_{serial}"
        self._in_graph = tf.function(self._reduce, autograph=False)

    def __call__(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """One reduced gradient for each that is not None."""
        if not (self.process_set.included() and self.process_set.size() > 1):
            return gradients
        groups = self._grouped(gradients, variables)
        if tf.executing_eagerly():  # in a graph the reductions overlap
            return self._in_graph(gradients, groups)
        refuse_xla()
        return self._reduce(gradients, groups)

    def dense(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self.sparse_as_dense else gradient

    def _grouped(self, gradients: list[Any], variables: Sequence[Any]) -> list[list[int]]:
        """Positions that are reduced together; all others are reduced one by one."""
        dense = [
            i
            for i, gradient in enumerate(gradients)
            if gradient is not None and (self.sparse_as_dense or not isinstance(gradient, tf.IndexedSlices))
        ]
        if self.groups is None:
            return []
        if isinstance(self.groups, int):
            size = -(-len(dense) // self.groups)
            wanted = [dense[i : i + size] for i in range(0, len(dense), max(size, 1))]
        else:
            position = {id(variable): i for i, variable in enumerate(variables)}
            wanted = [
                [position[id(v)] for v in group if position.get(id(v)) in dense] for group in self.groups
            ]
        by_type = []  # one Horovod operation holds one dtype
        for group in wanted:
            for dtype in sorted({gradients[i].dtype.name for i in group}):
                by_type.append([i for i in group if gradients[i].dtype.name == dtype])
        return by_type

    def _reduce(self, gradients: list[Any], groups: list[list[int]]) -> list[Any]:
        reduced = [None if g is None else self.dense(g) for g in gradients]
        together: set[int] = set()
        for members in groups:
            together.update(members)
            results = hvd.grouped_allreduce(
                [reduced[i] for i in members],
                **self._options(),
                name=f"{self.name}_group_{members[0]}",
                ignore_name_scope=True,
            )
            for i, result in zip(members, results, strict=True):
                reduced[i] = result
        for i, gradient in enumerate(reduced):
            if gradient is None or i in together:
                continue
            # Horovod divides slices after gathering them and refuses other factors.
            factors = self._options() if not isinstance(gradient, tf.IndexedSlices) else self._plain()
            reduced[i] = hvd.allreduce(gradient, **factors, name=f"{self.name}_{i}", ignore_name_scope=True)
        return reduced

    def _plain(self) -> dict[str, Any]:
        return {"compression": self.compression, "op": self.op, "process_set": self.process_set}

    def _options(self) -> dict[str, Any]:
        factors = {"prescale_factor": 1 / self.predivide, "postscale_factor": self.predivide}
        return {**self._plain(), **(factors if self.predivide != 1 else {})}


class _Distribution:
    """What a distributed optimizer holds beside its own state; never saved with it."""

    def __init__(self, reduction: _Reduction, passes: int, average: bool) -> None:
        self.reduction = reduction
        self.passes = passes
        self.average = average
        self.counter: Any = None
        self.sums: dict[int, Any] = {}

    def apply(
        self, gradients: list[Any], variables: Sequence[Any], scale: Any, update: Callable[[list[Any]], None]
    ) -> None:
        """Reduce ``gradients`` and hand them to ``update``; or only add them up, between steps.

        ``scale``: what gradients are multiplied by on this rank, or None.
        """
        gradients = [_scaled(g, scale, divide=True) for g in gradients]
        if self.passes == 1:
            reduced = self.reduction(gradients, variables)
            return update([_scaled(g, scale) for g in reduced])

        self._add(gradients)

        def step() -> tf.Tensor:
            factor = 1 / self.passes if self.average else 1
            sums = [None if i not in self.sums else self.sums[i] * factor for i in range(len(gradients))]
            reduced = self.reduction(sums, variables)
            update([_scaled(g, scale) for g in reduced])
            for total in self.sums.values():
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(tf.equal(self.counter % self.passes, 0), step, lambda: tf.constant(False))
        return None

    def _add(self, gradients: list[Any]) -> None:
        if self.counter is None:
            with tf.init_scope():
                self.counter = tf.Variable(0, dtype=tf.int64, trainable=False)
                for i, gradient in enumerate(gradients):
                    if gradient is not None:
                        self.sums[i] = tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense:
                raise ConfigurationError(
                    "backward_passes_per_step > 1 adds gradients up, which sparse gradients of embeddings do "
                    "not allow; set sparse_as_dense=True"
                )
            if gradient is not None:
                self.sums[i].assign_add(tf.convert_to_tensor(gradient))
        self.counter.assign_add(1)


class _Distributed:
    """Mixed in before the optimizer's own class."""

    # Keras saves an object under the class that it says it has.
    __class__ = property(lambda self: type(self).__mro__[2])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor":  # a LossScaleOptimizer sets this in what it wraps
            raise ConfigurationError(
                "a distributed optimizer cannot be inside a LossScaleOptimizer (where model.compile puts it "
                "under the mixed_float16 policy): ranks would disagree on which steps to skip.  Distribute "
                "the outer one: DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)"
            )
        super().__setattr__(name, value)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        own: Any = self
        plain: Any = super()
        gradients = list(grads)
        variables = list(own._trainable_variables if trainable_variables is None else trainable_variables)
        if not own.built:  # not inside the branch that updates
            with keras.name_scope(own.name):
                own.build(variables)
        scale = own.dynamic_scale.value if isinstance(own, keras.optimizers.LossScaleOptimizer) else None
        own._distribution.apply(gradients, variables, scale, lambda reduced: plain.apply(reduced, variables))


def _scaled(gradient: Any, scale: Any, divide: bool = False) -> Any:
    """Exact in float32: a dynamic loss scale is a power of two."""
    if gradient is None or scale is None:
        return gradient
    factor = tf.cast(1 / scale if divide else scale, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
