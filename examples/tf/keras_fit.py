"""Handwritten digits on several processes by ``model.fit`` of Keras 3, with compressed gradients.

    horovodrun -np 2 python examples/tf/keras_fit.py

The lines marked (1) to (4) are what a script for one process lacks.
"""

from __future__ import annotations

from pathlib import Path

import click
import horovod.tensorflow as hvd
import keras
from digits import digits, network

from hvd_adaptive.keras import (
    AverageMetrics,
    BroadcastInitialState,
    Compression,
    DistributedOptimizer,
    LogCompression,
)


@click.command()
@click.option("--ratio", default=0.01, show_default=True, help="Share of the coordinates that is sent.")
@click.option("--epochs", default=5, show_default=True)
@click.option("--batch", default=32, show_default=True, help="Images per process and step.")
@click.option("--logs", type=click.Path(path_type=Path), default=Path("runs/keras"), show_default=True)
def main(ratio: float, epochs: int, batch: int, logs: Path) -> None:
    """Train on the digits, and write what was sent to TensorBoard."""
    hvd.init()  # (1)
    images, labels, test_images, test_labels = digits()
    mine = slice(hvd.rank(), None, hvd.size())  # (2) every process trains on its share

    model = network()
    compression = Compression.topk(model.trainable_variables, ratio=ratio)
    optimizer = DistributedOptimizer(keras.optimizers.Adam(), compression=compression)  # (3)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images[mine],
        labels[mine],
        batch_size=batch,
        epochs=epochs,
        validation_data=(test_images[mine], test_labels[mine]),
        callbacks=[BroadcastInitialState(), AverageMetrics(), LogCompression(logs)],  # (4)
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        sent = compression.statistics().total
        print(f"sent {sent.bits_sent / 8e6:.1f} MB per rank, {1 / sent.ratio:.0f} times less than dense")
        model.save(logs / "digits.keras")  # loads without Horovod


if __name__ == "__main__":
    main()
