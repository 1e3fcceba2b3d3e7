"""The tasks of the network benchmark: two on Fashion-MNIST, and a word language model.

Fashion-MNIST is read from where Debian's package dataset-fashion-mnist puts it; the text is that of
Python's own help.
"""

from __future__ import annotations

import gzip
import pydoc_data.topics
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hvd_adaptive.core.errors import ConfigurationError, MissingDependencyError
from hvd_adaptive.simulation.tasks import Batch, Task

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10


@cache
def fashion(folder: Path = FOLDER) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, and those of the test set: (N, 1, 28, 28) with mean 0 and deviation 1.

    Raises MissingDependencyError where the files are not there.
    """
    names = [
        f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    if not all((folder / name).exists() for name in names):
        raise MissingDependencyError(
            f"Fashion-MNIST is not in {folder}; on Debian or Ubuntu run: "
            "apt-get install dataset-fashion-mnist"
        )
    arrays = [_idx(folder / name) for name in names]
    images = [torch.from_numpy(array).float().div(255).unsqueeze(1) for array in arrays[::2]]
    mean, deviation = images[0].mean(), images[0].std()
    x, test_x = ((image - mean) / deviation for image in images)
    y, test_y = (torch.from_numpy(array).long() for array in arrays[1::2])
    return x, y, test_x, test_y


def _idx(path: Path) -> np.ndarray:
    """An array in MNIST's own format: two zeros, the type, the number of axes, the axes, the bytes."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def _fashion_batches(size: int) -> Callable[[int, int], Iterator[Batch]]:
    def batches(rank: int, seed: int) -> Iterator[Batch]:
        x, y, _, _ = fashion()
        g = torch.Generator().manual_seed(seed * 1009 + rank)
        while True:
            chosen = torch.randint(len(y), (size,), generator=g)
            yield x[chosen], y[chosen]

    return batches


def _mlp() -> Task:
    _, _, x, y = fashion()
    return Task(
        name="mlp",
        model=lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 1100),
            nn.ReLU(),
            nn.Linear(1100, 1100),
            nn.ReLU(),
            nn.Linear(1100, 10),
        ),
        batches=_fashion_batches(32),
        held_out=(x[:2000], y[:2000]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        target=0.5,
    )


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; the shortcut of a block that narrows is subsampled and padded."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(8, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(8, outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(inner + shortcut)


def _resnet20() -> nn.Module:
    """He et al. (2016), section 4.2, n = 3.  Group instead of batch normalisation: the ranks' models are
    then equal in all that they hold, so that it does not matter which rank measures the loss."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(_Block(inputs, outputs, 2 if block == 0 and outputs > 16 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def _resnet() -> Task:
    _, _, x, y = fashion()
    return Task(
        name="resnet",
        model=_resnet20,
        batches=_fashion_batches(16),
        held_out=(x[:1000], y[:1000]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        target=1.0,
    )


VOCABULARY = 4200  # the text has 4,195 different ones under Python 3.11
CONTEXT = 5


@cache
def words() -> torch.Tensor:
    """The words and signs of Python's help as numbers, the most frequent first."""
    found = re.findall(r"\w+|[^\w\s]|\n", "".join(pydoc_data.topics.topics.values()))
    rank = {word: i for i, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1))}
    return torch.tensor([rank.get(word, VOCABULARY - 1) for word in found])


class _NextWord(nn.Module):
    """Embeddings (5.04 million parameters) of the last words, one hidden layer, logits of the next."""

    def __init__(self, width: int = 1200, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.hidden = nn.Linear(CONTEXT * width, hidden)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(codes).flatten(-2))))


def _language() -> Task:
    codes, held_out = words(), 2048

    def at(starts: torch.Tensor) -> Batch:
        rows = codes[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, -1]

    def batches(rank: int, seed: int) -> Iterator[Batch]:
        g = torch.Generator().manual_seed(seed * 1009 + rank)
        while True:
            yield at(torch.randint(len(codes) - held_out - CONTEXT - 1, (64,), generator=g))

    return Task(
        name="language",
        model=_NextWord,
        batches=batches,
        held_out=at(torch.arange(len(codes) - held_out, len(codes) - CONTEXT)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        target=4.25,
    )


TASKS: dict[str, Callable[[], Task]] = {"mlp": _mlp, "resnet": _resnet, "language": _language}


def task(name: str) -> Task:
    """The task of that name; ConfigurationError naming the known ones otherwise."""
    if name not in TASKS:
        raise ConfigurationError(f"there is no task {name!r}; choose one of {', '.join(TASKS)}")
    return TASKS[name]()
