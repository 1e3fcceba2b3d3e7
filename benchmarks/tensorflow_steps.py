"""Steps per second of Keras 3 ``fit`` on a model of 5 million parameters, compressed and dense.

    horovodrun -np 2 python benchmarks/tensorflow_steps.py

The batch is small, so that a step is mostly communication: on one machine compression can only cost
time, and this says how much.  The first steps, in which graphs are made, are not counted.
"""

from __future__ import annotations

import statistics
import time

import click
import horovod.tensorflow as hvd
import keras
import numpy as np

from hvd_adaptive.keras import BroadcastInitialState, Compression, DistributedOptimizer

RECIPES = {
    "dense": lambda: Compression.none,
    "fp16": lambda: Compression.fp16,
    "topk 1 %": lambda: Compression.topk(ratio=0.01),
    "topk 1 %, sampled": lambda: Compression.topk(ratio=0.01, exact=False),
}
WIDTHS = (1024, 2048, 1152, 512)


class Stopwatch(keras.callbacks.Callback):
    """Seconds of each batch."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.began)


@click.command()
@click.option("--steps", default=40, show_default=True)
@click.option("--batch", default=8, show_default=True)
def main(steps: int, batch: int) -> None:
    """Print steps per second under each compression, and how that compares with dense."""
    hvd.init()
    rng = np.random.default_rng(hvd.rank())
    x = rng.normal(size=(steps * batch, WIDTHS[0])).astype(np.float32)
    y = rng.normal(size=(steps * batch, 10)).astype(np.float32)
    rates = {}
    for name, make in RECIPES.items():
        keras.utils.set_random_seed(0)
        body = [keras.layers.Dense(width, "relu") for width in WIDTHS[1:]]
        model = keras.Sequential([keras.Input((WIDTHS[0],)), *body, keras.layers.Dense(10)])
        model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.01), make()), loss="mse")
        watch = Stopwatch()
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[BroadcastInitialState(), watch])
        rates[name] = 1 / statistics.median(watch.seconds[steps // 4 :])
        if hvd.rank() == 0:
            parameters = model.count_params()
            print(
                f"{parameters:,} parameters, {name}: {rates[name]:.2f} steps/s, "
                f"{rates[name] / rates['dense']:.2f} of dense",
                flush=True,
            )


if __name__ == "__main__":
    main()
