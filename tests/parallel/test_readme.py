"""Every Python snippet of the README and of the recipes' pages runs on two ranks (TensorFlow's are compiled
only); the README's diff makes one working program of another."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
RECIPES = sorted((README.parent / "docs" / "recipes").glob("*.md"))


def _blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _program(diff, drop, keep):
    lines = [line for line in diff.splitlines() if not line.startswith(drop)]
    return "\n".join(line.removeprefix(keep)[not line.startswith(keep) :] for line in lines)


def _given():
    """What a reader has before a snippet: a model, its optimizer, a batch."""
    import horovod.torch as hvd
    import torch
    from torch.nn import functional as F

    hvd.init()
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(1000, 16)
            self.head = torch.nn.Linear(128, 10)

        def forward(self, x):
            return self.head(self.embedding(x).flatten(1))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(hvd.rank())
    x, y = torch.randint(1000, (16, 8)), torch.randint(10, (16,))
    return {
        **{"hvd": hvd, "torch": torch, "F": F},
        **{"model": model, "optimizer": optimizer, "x": x, "y": y},
    }


def _step(given):
    given["optimizer"].zero_grad()
    given["F"].cross_entropy(given["model"](given["x"]), given["y"]).backward()
    given["optimizer"].step()
    return given["model"].head.weight.detach().numpy().copy()


def run_programs(programs):
    """The weights after two steps of each program, which makes the optimizer."""
    weights = []
    for program in programs:
        given = _given()
        exec(program, given)
        _step(given)
        weights.append(_step(given))
    return weights


def test_diff(horovodrun):
    (diff,) = _blocks("diff")
    assert sum(line.startswith(("+", "-")) for line in diff.splitlines()) <= 5
    programs = [_program(diff, "+", "-"), _program(diff, "-", "+")]
    first, second = horovodrun(run_programs, programs, timeout=280).results
    for mine, other in zip(first, second, strict=True):
        assert mine.tobytes() == other.tobytes()
    assert first[0].tobytes() != first[1].tobytes()  # what was compressed differs a little


def run_snippets(snippets):
    """The weights after two steps, with a snippet before them (where it makes the compressor) or between
    them; all in one folder, each with a model of its own."""
    from hvd_adaptive.torch import Compression

    weights = []
    for snippet in snippets:
        given = {**_given(), "Compression": Compression}
        makes = re.search(r"^compression =", snippet, flags=re.MULTILINE)
        exec(snippet if makes else "compression = Compression.topk(model.named_parameters())", given)
        if "DistributedOptimizer(" not in snippet:
            given["optimizer"] = given["hvd"].DistributedOptimizer(
                given["optimizer"],
                named_parameters=given["model"].named_parameters(),
                compression=given["compression"],
            )
        _step(given)
        if not makes:
            exec(snippet, given)
        weights.append(_step(given))
    return weights


def test_snippets(horovodrun, tmp_path, monkeypatch):
    """T23, T81."""
    monkeypatch.chdir(tmp_path)
    snippets = _blocks("python")
    assert len(snippets) >= 5
    run = horovodrun(run_snippets, snippets, timeout=280)
    for mine, other in zip(*run.results, strict=True):
        assert mine.tobytes() == other.tobytes()
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint-0.pt", "checkpoint-1.pt"]
    assert "MB sent" in run.output_of(0)


def test_snippets_of_recipes(horovodrun):
    snippets = []
    for page in RECIPES:
        for block in _blocks("python", page):
            compile(block, str(page), "exec")
            if not re.search(r"hvd_adaptive\.(tensorflow|keras)", block):
                snippets.append(block)
    assert len(snippets) >= len(RECIPES) >= 7
    run = horovodrun(run_snippets, snippets, timeout=280, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    for mine, other in zip(*run.results, strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README.read_text()))
def test_links(target):
    assert (README.parent / target).exists()
