"""``hvd-adaptive reproduce cat`` through its command, and the experiment behind it."""

import json
import lzma

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("sklearn")

from hvd_adaptive.cli.main import main
from hvd_adaptive.core.cost import Affine, Packets, PayloadBits, SignPayloadBits
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.solvers import data
from hvd_adaptive.solvers.cat import Experiment, compare
from hvd_adaptive.solvers.problems import LogisticRegression

QUICK = ["--data", "breast_cancer", "--target-steps", "30", "--iterations", "120"]


def invoke(*arguments):
    return CliRunner().invoke(main, ["reproduce", "cat", *map(str, arguments)])


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "deep" / "cat.json"
    result = invoke(*QUICK, "--json", path)
    assert result.exit_code == 0, result.output
    assert "breast_cancer (569 x 30)" in result.output
    return json.loads(path.read_text())


def problem(name, **settings):
    dataset = data.load(name)
    return LogisticRegression(dataset.features, dataset.targets, l2=1e-4, **settings)


def test_json_holds_every_run(summary):
    """T81."""
    assert summary["data"] == "breast_cancer"
    assert (summary["rows"], summary["dimension"], summary["workers"]) == (569, 30, 1)
    runs = {(r["family"], r["rule"], r["sparsity"], r["cost_model"]): r for r in summary["runs"]}
    assert len(runs) == len(summary["runs"])
    costs = ["payload", "affine", "packets", "time"]
    expected = {("sparsify", "full", None, cost) for cost in costs}
    for family in ("sparsify", "sign", "stochastic"):
        for cost in costs:
            expected.add((family, "tuned", None, cost))
            expected.update((family, "fixed", count, cost) for count in (1, 3, 30))
            if family == "sign":
                expected.add((family, "dynamic", None, cost))
    assert set(runs) == expected
    for run in runs.values():
        history = run["history"]
        assert len(history["iteration"]) == len(history["cost"]) == len(history["loss"])
        assert len(history["sparsity"]) == len(history["loss"]) - 1
        assert (history["iteration"][0], history["cost"][0]) == (0, 0)
        assert history["iteration"][-1] == run["iterations"] <= 120
        assert history["cost"][-1] == run["cost"]
        assert history["loss"][-1] == run["final_loss"]
        assert run["reached"] == (run["final_loss"] <= summary["target_loss"])
        assert run["reached"] or run["iterations"] == 120
        assert np.all(np.diff(history["cost"]) >= 0)
        if run["family"] != "stochastic":  # each step is a descent step
            assert np.all(np.diff(history["cost"]) > 0)
            assert np.all(np.diff(history["loss"]) < 0)
        assert 1 <= run["least_sparsity"] <= run["mean_sparsity"] <= run["most_sparsity"] <= 30
    assert runs["sparsify", "full", None, "payload"]["iterations"] == 30
    assert runs["sparsify", "full", None, "payload"]["cost"] == 30 * 30 * 32
    fixed = runs["sign", "fixed", 3, "packets"]
    assert fixed["cost"] == pytest.approx(fixed["iterations"] * Packets(SignPayloadBits(30))(3))
    assert runs["sparsify", "tuned", None, "payload"]["most_sparsity"] == 1  # as the theory says


def test_comparisons_follow_from_the_runs(summary):
    assert len(summary["comparisons"]) == 12
    for row in summary["comparisons"]:
        here = [r for r in summary["runs"] if r["cost_model"] == row["cost_model"] and r["reached"]]
        fixed = [r["cost"] for r in here if r["family"] == row["family"] and r["rule"] == "fixed"]
        tuned = [r["cost"] for r in here if r["family"] == row["family"] and r["rule"] == "tuned"]
        assert row["best_fixed_cost"] == min(fixed, default=None)
        assert row["tuned_cost"] == (tuned[0] if tuned else None)
        assert row["quotient"] == (pytest.approx(tuned[0] / min(fixed)) if tuned and fixed else None)


def test_curves_are_those_of_the_first_gradient(summary):
    assert len(summary["curves"]) == 12
    for curve in summary["curves"]:
        assert curve["sparsity"] == list(range(1, 31))
        np.testing.assert_allclose(
            np.divide(curve["improvement"], curve["cost"]), curve["efficiency"], rtol=1e-12
        )
        assert curve["best_efficiency"] >= max(curve["efficiency"]) * (1 - 1e-12)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [*QUICK, "--family", "sign", "--cost", "packets", "--ratio", "1", "--plots", tmp_path / "new"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert set(written) == {f"cat-breast_cancer-{what}.png" for what in ("loss", "sparsity", "curves")}
    assert all(content.startswith(b"\x89PNG") for content in written.values())


def test_a_packed_file_by_its_path(tmp_path):
    path = tmp_path / "tiny.svm.xz"
    rows = [f"{1 if i % 3 else -1} 1:{i % 5} 2:{i % 7} 4:1\n" for i in range(40)]
    path.write_bytes(lzma.compress("".join(rows).encode()))
    target = tmp_path / "tiny.json"
    result = invoke("--data", path, "--target-steps", 5, "--iterations", 20, "--json", target)
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["dimension"] == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "no_such_set"], "no_such_set"),
        (["--data", "diabetes"], "more than two classes"),
        ([*QUICK, "--ratio", "2"], "ratio must be above 0"),
        ([*QUICK, "--workers", "0"], "--workers must be at least 1"),
        ([*QUICK, "--target-steps", "0"], "target_steps must be at least 1"),
        ([*QUICK, "--l2", "-1"], "l2"),
        ([*QUICK, "--packets", "0", "1", "1"], "packet_bytes"),
        ([*QUICK, "--link", "0", "0", "0"], "bandwidth"),
        ([*QUICK, "--affine", "0", "0"], "per_unit"),
        ([*QUICK, "--value-bits", "0"], "value_bits"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code not in (0, None)
    assert message in " ".join(result.output.split())
    assert not isinstance(result.exception, ConfigurationError)  # a sentence, not a traceback


def test_every_worker_tunes_its_own():
    several = problem("breast_cancer", workers=3)
    experiment = Experiment(
        several, {"affine": lambda p: Affine(p, 1, 100)}, ["sparsify"], target_steps=5, cap=5
    )
    tuned = next(run for _, job in experiment.jobs() for run in job() if run.rule == "tuned")
    assert tuned.trajectory.sparsities.shape == (tuned.trajectory.rounds, 3)
    assert (np.ptp(tuned.trajectory.sparsities, axis=1) > 0).any()
    assert tuned.spent[-1] == pytest.approx(tuned.cost(tuned.trajectory.sent).mean(axis=1).sum())


def test_the_stochastic_family_is_charged_for_what_it_draws():
    experiment = Experiment(problem("breast_cancer"), {"payload": lambda p: p}, ["stochastic"], [0.3], 5, 200)
    tuned, fixed = (run for _, job in experiment.jobs() for run in job() if run.rule in ("tuned", "fixed"))
    assert (fixed.trajectory.sparsities == 9).all()
    assert len(np.unique(fixed.trajectory.sent)) > 1
    assert fixed.spent[-1] == PayloadBits(30)(1) * fixed.trajectory.sent.sum()
    assert tuned.trajectory.rounds > 0


def test_a9a_tuned_messages_cost_less_than_dense_ones():
    try:
        a9a = problem("a9a")
    except ConfigurationError:
        pytest.skip("the LIBSVM set a9a is not beside the checkout; set HVD_ADAPTIVE_DATA to its folder")
    costs = {"packets": lambda p: Packets(p)}
    experiment = Experiment(a9a, costs, ["sparsify"], [1.0], target_steps=60, cap=100)
    (row,) = compare(run for _, job in experiment.jobs() for run in job())
    assert row.tuned.trajectory.reached and row.dense.trajectory.reached
    assert row.dense.trajectory.rounds == 60
    assert row.tuned.spent[-1] < 0.6 * row.dense.spent[-1]
    # One packet holds 105 pairs of index and value, and that is what the rule sends.
    assert (row.tuned.trajectory.sparsities == 105).all()
