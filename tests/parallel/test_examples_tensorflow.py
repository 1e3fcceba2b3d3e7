"""The TensorFlow examples, run as a user runs them, for a few steps."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
EXAMPLES = Path(__file__).parents[2] / "examples"
KERNELS = {"conv2/kernel", "conv3/kernel", "dense1/kernel", "dense2/kernel"}


@pytest.mark.parametrize("recipe", ["fp16", "adaptive"])
def test_digits(horovodrun, tmp_path, recipe):
    path = tmp_path / "run.json"
    words = ("--recipe", recipe, "--steps", 4, "--json", path)
    run = horovodrun(EXAMPLES / "tf/digits.py", *words, timeout=900)
    assert "step 4/4" in run.output_of(0)
    assert "step" not in run.output_of(1)
    found = json.loads(path.read_text())
    dense = 32 * sum(found["dimensions"].values()) * 4
    assert (found["framework"], found["recipe"], found["steps"], found["ranks"]) == (
        *("tensorflow", recipe),
        *(4, 2),
    )
    assert sum(found["dimensions"].values()) == 173_578
    assert 0 <= found["accuracy"] <= 1
    assert found["loss"][-1][0] == found["bits_per_rank"]
    assert [step for step, _ in found["sparsity"]] == [1, 2, 3, 4]
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    if recipe == "fp16":
        assert found["bits_per_rank"] == dense // 2
    else:
        assert 0 < found["bits_per_rank"] < dense / 2
        for _, T in found["sparsity"]:
            assert {"/".join(name.split("/")[-2:]) for name in T} >= KERNELS
            assert all(0 <= T[name] <= found["dimensions"][name] for name in T)


def test_keras_fit(horovodrun, tmp_path):
    words = ("--epochs", 1, "--batch", 250, "--logs", tmp_path)
    run = horovodrun(EXAMPLES / "tf/keras_fit.py", *words, timeout=900)
    assert "times less than dense" in run.output_of(0)
    assert (tmp_path / "digits.keras").stat().st_size > 100_000
    assert list(tmp_path.glob("events*"))
