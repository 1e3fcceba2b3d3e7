"""Data sets by name or by path, as CSR features and float64 targets.

A *name* is a LIBSVM file (``a9a``, ``mushrooms``, ``phishing``, ``w8a`` or any other
``NAME.svm[.xz|.gz|.bz2]`` of the data folder) or one of scikit-learn's bundled sets.  The data
folder is, in this order: the argument, the environment variable ``HVD_ADAPTIVE_DATA``, and
``../shared/data/libsvm`` beside the checkout.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

from ..core.errors import ConfigurationError

DATA_VARIABLE = "HVD_ADAPTIVE_DATA"
_SUFFIXES = ("", ".svm", ".libsvm", ".txt")
_OPENERS: dict[str, Callable[..., Any]] = {"": open, ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class Dataset:
    """``features``: (rows, d) CSR float64; ``targets``: (rows,) float64, in {-1, +1} when ``binary``."""

    name: str
    features: sp.csr_matrix
    targets: np.ndarray
    binary: bool


def _digits() -> tuple[np.ndarray, np.ndarray]:
    features, digit = datasets.load_digits(return_X_y=True)
    return features / 16.0, np.where(digit >= 5, 1.0, -1.0)


def _breast_cancer() -> tuple[np.ndarray, np.ndarray]:
    features, benign = datasets.load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(features), np.where(benign == 1, 1.0, -1.0)


def _diabetes() -> tuple[np.ndarray, np.ndarray]:
    features, progression = datasets.load_diabetes(return_X_y=True)
    return StandardScaler().fit_transform(features), (progression - progression.mean()) / progression.std()


BUNDLED: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "breast_cancer": _breast_cancer, "digits": _digits, "diabetes": _diabetes,
}  # fmt: skip


def data_folders(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a name is looked up in, first to last."""
    if folder is not None:
        return [Path(folder)]
    folders = [Path(os.environ[DATA_VARIABLE])] if os.environ.get(DATA_VARIABLE) else []
    return [*folders, Path(__file__).resolve().parents[3] / "shared" / "data" / "libsvm"]


def load(name_or_path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Dataset:
    """Read a data set.

    Two distinct targets become -1 and +1 (the larger one is +1); more are left as they are.
    Raises :class:`ConfigurationError` where nothing of that name is found or the file is not
    in svmlight format.
    """
    text = os.fspath(name_or_path)
    path = _find(text, folder)
    if path is not None:
        features, targets = _read(path)
        name = path.name.split(".")[0]
    elif text in BUNDLED:
        features, targets = BUNDLED[text]()
        name = text
    else:
        raise ConfigurationError(
            f"data set {text!r} is neither a file nor a known name; looked in "
            f"{', '.join(map(str, data_folders(folder)))}. Give a path to an svmlight file, set "
            f"{DATA_VARIABLE} or --data-dir to the folder that holds it, or use one of "
            f"{', '.join(sorted(BUNDLED))}"
        )
    values = np.unique(targets)
    if values.size == 2:
        targets = np.where(targets == values[1], 1.0, -1.0)
    matrix = sp.csr_matrix(features, dtype=np.float64)
    matrix.sort_indices()
    return Dataset(name, matrix, np.asarray(targets, dtype=np.float64), binary=bool(values.size == 2))


def _find(text: str, folder: str | os.PathLike[str] | None) -> Path | None:
    if Path(text).is_file():
        return Path(text)
    for place in data_folders(folder):
        for suffix in _SUFFIXES:
            for packing in _OPENERS:
                candidate = place / f"{text}{suffix}{packing}"
                if candidate.is_file():
                    return candidate
    return None


def _read(path: Path) -> tuple[sp.csr_matrix, np.ndarray]:
    opener = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as stream:
            features, targets = datasets.load_svmlight_file(stream)
    except (ValueError, EOFError, lzma.LZMAError, OSError) as error:
        raise ConfigurationError(f"{path} is not a readable svmlight file: {error}") from error
    if features.shape[0] == 0:
        raise ConfigurationError(f"{path} holds no rows; give a file with at least one example")
    return features, targets


def split(rows: int, workers: int) -> np.ndarray:
    """Row offsets (workers + 1,) of contiguous shards whose sizes differ by one at most."""
    if not 1 <= workers <= rows:
        raise ConfigurationError(f"workers={workers} must lie between 1 and the number of rows, {rows}")
    return np.linspace(0, rows, workers + 1).astype(np.int64)


def arrange(dataset: Dataset, order: str = "shuffled", seed: int = 0) -> Dataset:
    """The same rows in the order in which they are dealt to workers.

    ``shuffled`` (workers alike), ``sorted`` by target (workers as unlike as can be) or ``given``.
    """
    if order == "given":
        return dataset
    if order == "shuffled":
        rows = np.random.default_rng(seed).permutation(dataset.targets.size)
    elif order == "sorted":
        rows = np.argsort(dataset.targets, kind="stable")
    else:
        raise ConfigurationError(f"order={order!r} is unknown; use 'shuffled', 'sorted' or 'given'")
    return Dataset(dataset.name, dataset.features[rows], dataset.targets[rows], dataset.binary)
