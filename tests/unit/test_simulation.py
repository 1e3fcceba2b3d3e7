"""Simulated workers: traces, modelled time, and the commands on top of them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from hvd_adaptive.cli.main import main  # noqa: E402
from hvd_adaptive.core.cost import DenseBits, LinkTime  # noqa: E402
from hvd_adaptive.core.errors import ConfigurationError  # noqa: E402
from hvd_adaptive.core.recipe import adaptive, none, topk  # noqa: E402
from hvd_adaptive.simulation.run import Trace, link_of_ratio, step_time, train  # noqa: E402
from hvd_adaptive.simulation.tasks import TASKS, task  # noqa: E402


def last(*arguments, **options):
    trace = Trace()
    for trace in train(*arguments, **options):  # noqa: B007
        pass
    return trace


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_learns(name):
    trace = last(task(name), none(), workers=2, steps=40, check_every=20)
    assert trace.checked[-1][1] < trace.train_loss[0]
    assert all(trace.dense)


def test_the_same_seed_gives_the_same_run():
    one, two = (last(task("mlp"), topk(0.01), workers=2, steps=5, check_every=5) for _ in range(2))
    assert one == two


def test_a_dense_exchange_takes_the_ratio_times_a_step():
    link = link_of_ratio(10.0, dimension=1000, world_size=4, compute=0.5)
    assert step_time(link, 32 * 1000, dense=True) == pytest.approx(0.5 + 5.0)
    # A message of m bits is received from each of three others.
    gathered = LinkTime(DenseBits(1000), link.bandwidth, world_size=4)
    assert step_time(link, 3 * 640, dense=False) == pytest.approx(0.5 + float(gathered(20)))


def test_time_to_a_target_is_interpolated():
    trace = Trace(bits=[100] * 4, dense=[False] * 4, checked=[(2, 3.0), (4, 1.0)])
    link = LinkTime(DenseBits(1), bandwidth=100.0, compute=1.0)
    assert trace.steps_to(2.5) == 3  # the mean of the two checks is 2
    assert trace.time_to(2.5, link) == pytest.approx(6.0)
    assert trace.steps_to(0.5) is None
    assert trace.time_to(0.5, link) is None


def test_adaptive_holds_communication_at_its_share():
    """T75."""
    chosen = task("mlp")
    dimension = sum(p.numel() for p in chosen.model().parameters())
    link = link_of_ratio(30.0, dimension, 2)
    trace = last(chosen, adaptive(cost=link, share=0.2), workers=2, steps=60, check_every=60)
    shares = [1 - 1 / step_time(link, b, d) for b, d in zip(trace.bits[30:], trace.dense[30:], strict=True)]
    assert 0.1 < sum(shares) / len(shares) < 0.35


def test_adaptive_goes_dense_where_dense_is_nearly_free():
    """T72, T79."""
    chosen = task("mlp")
    dimension = sum(p.numel() for p in chosen.model().parameters())
    link = link_of_ratio(0.01, dimension, 2)
    assert all(last(chosen, adaptive(cost=link), workers=2, steps=5, check_every=5).dense[2:])


def test_an_unknown_task_is_named():
    with pytest.raises(ConfigurationError, match=r"no task 'mpl'.*mlp"):
        task("mpl")


def test_simulate_prints_and_writes(tmp_path):
    file, plot = tmp_path / "runs.json", tmp_path / "loss.png"
    words = ["simulate", "--workers", "2", "--steps", "10", "--recipe", "topk", "--recipe", "adaptive"]
    words += ["--option", "ratio=0.05", "--json", str(file), "--plot", str(plot)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "adaptive" in result.output
    runs = json.loads(file.read_text())["runs"]
    assert [run["recipe"] for run in runs] == ["topk", "adaptive"]
    assert all(len(run["bits"]) == len(run["seconds_per_step"]) == 10 for run in runs)
    assert plot.stat().st_size > 1000


def test_simulate_says_what_an_option_looks_like():
    result = CliRunner().invoke(main, ["simulate", "--option", "ratio"])
    assert result.exit_code == 1
    assert "NAME=VALUE" in result.output


def test_bench_kernels_writes_quotients(tmp_path):
    """T73."""
    file = tmp_path / "kernels.json"
    words = ["bench", "kernels", "--dimension", "20000", "--ratio", "0.01", "--repeats", "1"]
    result = CliRunner().invoke(main, [*words, "--json", str(file)])
    assert result.exit_code == 0, result.output
    cases = json.loads(file.read_text())["cases"]
    assert {"topk", "randk", "sign", "torch.topk of abs"} <= {case["recipe"] for case in cases}
    assert all(
        case["quotient"] == pytest.approx(case["seconds"] / case["inplace_add_seconds"]) for case in cases
    )


def test_bench_hindsight_compares_with_the_best_fixed_ratio(tmp_path, monkeypatch):
    from hvd_adaptive.simulation import hindsight

    monkeypatch.setattr(hindsight, "FIXED", (0.1,))
    file = tmp_path / "hindsight.json"
    words = ["bench", "hindsight", "--task", "mlp", "--seeds", "1", "--workers", "2", "--steps", "40"]
    result = CliRunner().invoke(main, [*words, "--r", "10", "--target", "2.2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(file.read_text())["tasks"]
    assert row["r"] == 10
    assert row["best_fixed_ratio"] == 0.1  # dense takes eleven computations a step
    assert row["quotient"] == pytest.approx(
        row["adaptive_time"] / min(row["best_fixed_time"], row["share_time"])
    )
