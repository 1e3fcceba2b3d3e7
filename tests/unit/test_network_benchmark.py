"""The network benchmark's plan, tasks and clocks, and how overlap.py reads Horovod's timeline."""

import importlib.util
import json
from pathlib import Path

import contestants
import pytest
import run
import tasks
import torch
from click.testing import CliRunner

from hvd_adaptive.core.errors import ConfigurationError, MissingDependencyError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATES = (None, 1e9, 1e8)
HERE = tasks.FOLDER.exists()
needs_fashion = pytest.mark.skipif(not HERE, reason="apt-get install dataset-fashion-mnist")


def load_overlap():
    spec = importlib.util.spec_from_file_location("overlap", BENCHMARKS / "overlap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(**changes):
    settings = {
        "tasks": ["mlp"],
        "entries": list(contestants.CONTESTANTS.values()),
        "rates": RATES,
        "count": 4,
        "seeds": 3,
        "full": False,
        "also_hosts": (),
        **changes,
    }
    return run.plan(**settings)


def identities(launches, kind):
    return {
        (one["contestant"], one["rate"], one["seed"], one["ranks"])
        for launch in launches
        for one in launch.heads()
        if one["kind"] == kind
    }


def test_fixed_curves_are_trained_once_and_those_of_the_link_everywhere():
    trained, timed = identities(planned(), "train"), identities(planned(), "pace")
    for name, one in contestants.CONTESTANTS.items():
        for rate in RATES:
            whole = {(name, rate, seed, 4) for seed in range(3)}
            if one.by_link or rate is None:
                assert whole <= trained and not whole & timed
            else:
                assert not whole & trained and (name, rate, 0, 4) in timed


def test_full_trains_everything_everywhere():
    launches = planned(full=True)
    assert not identities(launches, "pace")
    assert len(identities(launches, "train")) == 3 * 3 * len(contestants.CONTESTANTS)


def test_without_an_unlimited_link_curves_are_trained_over_the_fastest():
    trained = identities(planned(rates=(1e8, 1e9)), "train")
    assert ("dense", 1e9, 0, 4) in trained and ("dense", 1e8, 0, 4) not in trained


def test_more_numbers_of_hosts_are_only_timed():
    timed = identities(planned(also_hosts=(2, 4)), "pace")
    assert ("dense", 1e8, 0, 2) in timed
    assert {ranks for *_, ranks in identities(planned(also_hosts=(2,)), "train")} == {4}


def test_a_launch_has_one_launcher_and_every_run_its_own_file():
    launches = planned(also_hosts=(2,), tasks=["mlp", "language"])
    names = [run.run_name(one) for launch in launches for one in launch.heads()]
    assert len(set(names)) == len(names)
    for launch in launches:
        assert {one.launcher for one in launch.contestants} == {launch.launcher}


@pytest.mark.parametrize(("text", "rate"), [("none", None), ("100M", 1e8), ("1G", 1e9), ("2.5e8", 2.5e8)])
def test_rates_are_read(text, rate):
    assert run._Rate().convert(text, None, None) == rate


@pytest.mark.parametrize("text", ["fast", "-1G", "12", ""])
def test_what_is_no_rate_is_refused(tmp_path, text):
    answer = CliRunner().invoke(run.main, ["--out", str(tmp_path / "x"), "--rate", text])
    assert answer.exit_code == 2 and "100M, 1G or none" in answer.output


def test_runs_of_other_settings_are_not_mixed(tmp_path):
    run._same_settings(tmp_path, {"steps": 10, "target": None})
    run._same_settings(tmp_path, {"steps": 10, "target": None})
    with pytest.raises(Exception, match="--steps 10, not 20"):
        run._same_settings(tmp_path, {"steps": 20, "target": None})


def test_wrong_names_are_refused():
    with pytest.raises(ConfigurationError, match="powersgd4"):
        contestants.contestant("powersgd9")
    with pytest.raises(ConfigurationError, match="language"):
        tasks.task("imagenet")


def test_a_missing_data_set_names_its_package(tmp_path):
    with pytest.raises(MissingDependencyError, match="apt-get install dataset-fashion-mnist"):
        tasks.fashion(tmp_path)


@needs_fashion
def test_fashion_is_read_whole_and_standardised():
    x, y, test_x, test_y = tasks.fashion()
    assert x.shape == (60_000, 1, 28, 28) and test_x.shape == (10_000, 1, 28, 28)
    assert torch.bincount(y).tolist() == [6000] * 10 and torch.bincount(test_y).tolist() == [1000] * 10
    assert abs(x.mean().item()) < 1e-3 and abs(x.std().item() - 1) < 1e-3


@needs_fashion
def test_the_tasks_are_of_the_sizes_promised():
    sizes = {n: [p.numel() for p in tasks.task(n).model().parameters()] for n in ("mlp", "resnet")}
    assert sum(sizes["mlp"]) >= 2_000_000
    # ResNet-20 has 0.27 million parameters
    assert 265_000 < sum(sizes["resnet"]) < 275_000


def test_the_language_model_has_five_million_embeddings_and_no_future():
    task = tasks.task("language")
    model = task.model()
    assert model.embedding.weight.numel() >= 5_000_000
    inputs, targets = next(task.batches(0, 0))
    assert inputs.shape == (64, tasks.CONTEXT) and targets.shape == (64,)
    held_inputs, held_targets = task.held_out
    assert torch.equal(held_inputs[1:, -1], held_targets[:-1])
    assert torch.isfinite(task.loss(model, (inputs, targets)))


def test_ranks_and_seeds_draw_different_batches_and_repeat_them():
    task = tasks.task("language")
    first = {key: next(task.batches(*key))[1] for key in ((0, 0), (1, 0), (0, 1))}
    assert torch.equal(first[0, 0], next(task.batches(0, 0))[1])
    assert not torch.equal(first[0, 0], first[1, 0]) and not torch.equal(first[0, 0], first[0, 1])


def test_a_timed_compressor_counts_what_is_handed_over():
    class Half:
        @staticmethod
        def compress(tensor):
            return tensor.half(), tensor.dtype

        @staticmethod
        def decompress(tensor, context):
            return tensor.to(context)

    timed = contestants._Timed(Half)
    sent, context = timed.compress(torch.ones(10))
    assert timed.bits == 160 and sent.dtype == torch.float16
    assert timed.decompress(sent, context).dtype == torch.float32
    assert timed.compress_seconds > 0 and timed.decompress_seconds > 0


# --- overlap.py


def event(ph, ts, pid=1, **more):
    return {"ph": ph, "ts": ts, "pid": pid, **more}


def test_collectives_are_found_in_a_timeline(tmp_path):
    events = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": 0,
            "args": {"start_time_since_epoch_in_micros": 10_000_000},
        },
        event("B", 0, name="ALLREDUCE"),
        event("B", 100, pid=2, name="ALLGATHER"),
        event("B", 200, name="GLOO_ALLREDUCE"),
        event("B", 300, pid=2, name="GLOO_ALLGATHER"),
        event("E", 500),
        event("E", 600),
        event("E", 900, pid=2),
        event("E", 950, pid=2),
    ]
    path = tmp_path / "timeline.json"
    found = [("GLOO_ALLREDUCE", 10.0002, 10.0005), ("GLOO_ALLGATHER", 10.0003, 10.0009)]
    for text in (
        json.dumps(events),
        json.dumps(events)[:-1] + ",\n",
    ):  # as Horovod ends, and when it is killed
        path.write_text(text)
        assert load_overlap().read_timeline(path) == found


def test_what_the_backward_pass_hides():
    overlap = load_overlap()
    mark = {"began": 0.0, "forward": 1.0, "backward": 3.0, "averaged": 5.0, "ended": 6.0, "compression": []}
    # two fused tensors in one collective, half of it after the backward pass; one is of another step
    collectives = [("GLOO_ALLREDUCE", 2.0, 4.0), ("GLOO_ALLREDUCE", 2.0, 4.0), ("GLOO_ALLREDUCE", 5.5, 9.0)]
    step = overlap.Step(mark, collectives)
    assert step.communication == 2.0 and step.hidden == 0.5
    assert overlap.Step(mark, []).hidden == 1.0
    assert overlap.union([(3, 4), (1, 2), (1.5, 3.5)]) == [(1, 4)]
