"""The examples and the demo, run as a user runs them, for a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYERS = {"conv1.weight", "conv2.weight", "conv3.weight", "dense1.weight", "dense2.weight"}


@pytest.mark.parametrize("recipe", ["randk", "sign"])
def test_digits(horovodrun, tmp_path, recipe):
    path = tmp_path / "run.json"
    run = horovodrun(
        EXAMPLES / "torch/digits.py", "--recipe", recipe, "--steps", 4, "--json", path, timeout=280
    )
    assert "step 4/4" in run.output_of(0)
    assert "step" not in run.output_of(1)
    _check(json.loads(path.read_text()), recipe, steps=4)


def _check(found, recipe, steps):
    """The JSON of one run, as the demo and its plots read it."""
    dense = 32 * sum(found["dimensions"].values()) * steps
    assert (found["framework"], found["recipe"], found["steps"], found["ranks"]) == (
        "torch",
        recipe,
        steps,
        2,
    )
    assert 0 <= found["accuracy"] <= 1
    assert found["loss"][-1][0] == found["bits_per_rank"]
    assert [step for step, _ in found["sparsity"]] == list(range(1, steps + 1))
    assert set(found["parts"]) >= {"compute", "communicate", "update"}
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    if recipe in ("dense", "fp16"):
        assert found["bits_per_rank"] == dense // (1 if recipe == "dense" else 2)
    else:
        assert 0 < found["bits_per_rank"] < dense / 2
        for _, T in found["sparsity"]:
            assert set(T) >= LAYERS
            assert all(0 <= T[name] <= found["dimensions"][name] for name in T)


@pytest.mark.timeout(900)
def test_demo(tmp_path):
    out = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--framework", "torch", "--steps", "5", "--out", out],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("accuracy", "MB per", "seconds", "dense", "fp16", "top-k 1 %", "adaptive"):
        assert words in done.stdout
    runs = json.loads((out / "summary.json").read_text())["runs"]
    assert [(run["framework"], run["recipe"]) for run in runs] == [
        ("torch", recipe) for recipe in ("dense", "fp16", "topk", "adaptive")
    ]
    for run in runs:
        assert set(run) == {"framework", "recipe", "accuracy", "bits_per_rank", "seconds"}
        _check(json.loads((out / f"torch-{run['recipe']}.json").read_text()), run["recipe"], steps=5)
    for name in ("loss", "sparsity", "time"):
        image = (out / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) < 100_000


def test_language_model_resumes_as_if_never_stopped(horovodrun, tmp_path):
    """T23."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    script = EXAMPLES / "torch/language_model.py"
    common = ("--text", text, "--recipe", "topk", "--batch", 4, "--checkpoint")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run = horovodrun(script, *common, straight, "--steps", 4, timeout=280)
    assert "bits per character" in run.output_of(0)
    assert "MB sent per rank" in run.output_of(0)
    horovodrun(script, *common, stopped, "--steps", 2, timeout=280)
    assert "step 2/4" not in horovodrun(script, *common, stopped, "--steps", 4, timeout=280).output_of(0)
    ranks = [_states(straight / f"rank-{rank}.pt", stopped / f"rank-{rank}.pt") for rank in range(2)]
    assert not torch.equal(*(residuals["head.weight"] for _, residuals in ranks))  # every rank's own


def _states(*files):
    """Weights and residuals of a file, which are those of the other file bit for bit."""
    (weights, residuals), other = (
        (state["model"], state["compression"]["residuals"]) for state in map(torch.load, files)
    )
    for mine, its in zip((weights, residuals), other, strict=True):
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    return weights, residuals


def test_language_model_refuses_files_of_other_steps(horovodrun, tmp_path):
    """T25."""
    for rank in range(2):
        torch.save({"step": rank, "ranks": 2}, tmp_path / f"rank-{rank}.pt")
    run = horovodrun(EXAMPLES / "torch/language_model.py", "--checkpoint", tmp_path, check=False, timeout=280)
    assert run.returncode != 0
    assert "are of other steps" in run.output
