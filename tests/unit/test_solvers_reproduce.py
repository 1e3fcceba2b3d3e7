"""The tuner and ``reproduce eclk``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from hvd_adaptive.cli.main import main
from hvd_adaptive.core.compressors import TopK
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.solvers.comparison import FAMILIES, compressor_of
from hvd_adaptive.solvers.ef21 import EF21
from hvd_adaptive.solvers.gradient_descent import GradientDescent
from hvd_adaptive.solvers.problems import Ridge
from hvd_adaptive.solvers.tuning import attempt, walk


def problem() -> Ridge:
    rng = np.random.default_rng(0)
    return Ridge(rng.normal(size=(80, 10)), rng.normal(size=80), l2=0.1, workers=4)


def test_the_walk_ends_at_the_best_power_of_two_of_the_whole_grid():
    one = problem()
    L = one.smoothness.mean

    def build(settings):
        return EF21(settings["scale"] / L, TopK(4))

    tuned = walk(build, {"scale": 0.125}, {"scale": (2.0, 0.5)}, one, 2000, 1e-8)
    grid = {scale: attempt(build({"scale": scale}), one, 2000, 1e-8)[1] for scale in 2.0 ** np.arange(-3, 4)}
    assert not tuned.score.missed
    assert tuned.score.cost == min(score.cost for score in grid.values() if not score.missed)
    assert any(score.missed for score in grid.values())


def test_the_walk_passes_over_settings_that_the_method_refuses():
    one = problem()
    start = {"momentum": 0.6}
    tuned = walk(
        lambda s: GradientDescent(1 / one.smoothness.mean, s["momentum"]), start, {"momentum": (2.0, 0.5)},
        one, 500, 1e-8,
    )  # fmt: skip
    assert tuned.settings["momentum"] <= 1


def test_compressors_by_name():
    for family in FAMILIES:
        assert compressor_of(family, 3, 40, "float32").contraction(40) > 0
    with pytest.raises(ConfigurationError, match="top-k"):
        compressor_of("top-k", 3, 40, "float32")


def test_reproduce_eclk_writes_runs_and_plots(tmp_path):
    """T81."""
    arguments = "reproduce eclk --data breast_cancer --workers 4 --k 5 --l2 0.05 --rounds 400"
    arguments += " --target 1e-6 --budget 3"
    out = [*arguments.split(), "--json", str(tmp_path / "run.json"), "--plots", str(tmp_path)]
    result = CliRunner().invoke(main, out)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run.json").read_text())
    runs = {run["method"]: run for run in report["runs"]}
    expected = {"GD", "AGD", "L-Katyusha", "ECLK", "ECLK second compressor", "EF21", "EC-GD", "EC-GD-DIANA"}
    assert expected | {"EC-LSVRG-DIANA", "ADEF", "EF21 compressed start"} == set(runs)
    for run in runs.values():
        assert set(run) >= {
            *("method", "compressor", "k", "rounds_to", "bits_per_worker_to", "best_gap", "parameters")
        }
        assert list(run["rounds_to"]) == list(run["bits_per_worker_to"]) == ["1e-4", "1e-6"]
        assert (run["rounds_to"]["1e-6"] is None) == (run["best_gap"] > 1e-6)
    eclk = runs["ECLK"]
    assert eclk["rounds_to"]["1e-4"] < eclk["rounds_to"]["1e-6"]
    assert eclk["bits_per_worker_to"]["1e-6"] < runs["L-Katyusha"]["bits_per_worker_to"]["1e-6"]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "breast_cancer-topk-5-bits.png", "breast_cancer-topk-5-rounds.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--data nowhere", "nowhere"),
        ("--data digits --l2 0", "--l2"),
        ("--data digits --workers 3000", "workers=3000"),
        ("--data digits --method Nesterov", "Nesterov"),
        ("--data digits --k 0", "k=0"),
        ("--data digits --p 1.5", "--p 1.5"),
    ],
)
def test_wrong_settings_end_in_a_sentence(arguments, word):
    result = CliRunner().invoke(main, ["reproduce", "eclk", *arguments.split()])
    assert result.exit_code == 1 and word in result.output and "Traceback" not in result.output
