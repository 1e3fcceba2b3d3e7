"""Train the same small network under several compressions, and compare: `make demo`.

Every run is a `horovodrun -np 2` of an example's script.  What came of the runs goes to `runs/demo`:
`summary.json`, one JSON file per run, and three plots.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

EXAMPLES = Path(__file__).resolve().parent
LINK = 100.0
"""Mbit/s: the link that `adaptive` is told of, and that the table computes with."""


@dataclass(frozen=True)
class Leg:
    """One run: a script that takes --recipe, --link, --steps and --json, and one of its recipes."""

    framework: str
    script: str
    recipe: str
    title: str

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.recipe}"


LEGS = [
    Leg("torch", "torch/digits.py", "dense", "dense"),
    Leg("torch", "torch/digits.py", "fp16", "fp16"),
    Leg("torch", "torch/digits.py", "topk", "top-k 1 %"),
    Leg("torch", "torch/digits.py", "adaptive", "adaptive"),
    Leg("tensorflow", "tf/digits.py", "dense", "dense"),
    Leg("tensorflow", "tf/digits.py", "fp16", "fp16"),
    Leg("tensorflow", "tf/digits.py", "topk", "top-k 1 %"),
    Leg("tensorflow", "tf/digits.py", "adaptive", "adaptive"),
]

STEP = re.compile(r"step (\d+)/(\d+)")  # what the scripts print as they go


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option(
    "--framework", type=click.Choice(sorted({leg.framework for leg in LEGS})), help="Only this one's."
)
@click.option(
    "--steps", type=click.IntRange(2), help="Steps of each run, instead of the scripts' own number."
)
@click.option("--np", "ranks", default=2, show_default=True, help="Processes of each run.")
@click.option("--hosts", help="Run them on these hosts, a:1,b:1, instead of this one; --out is to be shared.")
@click.option("--link", default=LINK, show_default=True, help="The link that adaptive is for, in Mbit/s.")
def main(
    out: Path, framework: str | None, steps: int | None, ranks: int, hosts: str | None, link: float
) -> None:
    """Run every leg, print a table, draw the plots."""
    legs = [leg for leg in LEGS if framework in (None, leg.framework) and find_spec(leg.framework)]
    if not legs:
        raise click.ClickException(f"{framework or 'Neither torch nor TensorFlow'} is not installed.")
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: list[tuple[Leg, dict[str, Any]]] = []
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(f"{leg.framework} {leg.title}", start=False, total=None) for leg in legs]
        for leg, task in zip(legs, tasks, strict=True):
            progress.start_task(task)
            path = out / f"{leg.name}.json"
            path.unlink(missing_ok=True)
            words = ["--recipe", leg.recipe, "--link", str(link), "--json", str(path)]
            words += ["--steps", str(steps)] if steps else []
            launch(
                [sys.executable, str(EXAMPLES / leg.script), *words],
                ranks,
                hosts or f"localhost:{ranks}",
                lambda done, total, task=task: progress.update(task, completed=done, total=total),
            )
            runs.append((leg, json.loads(path.read_text())))

    console.print(table(runs, link))
    keys = ("framework", "recipe", "accuracy", "bits_per_rank", "seconds")
    summary = {"runs": [{key: run[key] for key in keys} for _, run in runs]}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, draw in {"loss": plot_loss, "sparsity": plot_sparsity, "time": plot_time}.items():
        figure = draw(runs)
        figure.savefig(out / f"{name}.png", dpi=90)
        plt.close(figure)
    console.print(f"The plots and the numbers are in {out}/")


def launch(command: list[str], ranks: int, hosts: str, progressed: Any) -> None:
    """Run a command on some ranks of the hosts; ends the demo, with its output, if it fails."""
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
    process = subprocess.Popen(
        [*horovodrun, "-H", hosts, *command],
        # One thread for each rank: the ranks share the machine's cores.
        env={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    output = []
    try:
        for line in process.stdout or ():
            output.append(line)
            if found := STEP.search(line):
                progressed(int(found[1]), int(found[2]))
        if process.wait():
            raise click.ClickException(f"{' '.join(command)} failed:\n\n{''.join(output[-60:])}")
    finally:
        if process.poll() is None:  # interrupted; horovodrun ends its ranks
            process.terminate()
            process.wait()


def table(runs: list[tuple[Leg, dict[str, Any]]], link: float) -> Table:
    """The runs side by side.  Bits are what one rank hands to Horovod; seconds are those of the steps."""
    dense = {leg.framework: run["bits_per_rank"] for leg, run in runs if leg.recipe == "dense"}
    title = f"Handwritten digits, {runs[0][1]['ranks']} processes"
    found = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False)
    found.add_column("\nframework")
    found.add_column("\ncompression")
    headings = (
        "test\naccuracy",
        "MB per\nrank",
        "less than\ndense",
        "\nseconds",
        f"at {link:g}\nMbit/s*",
    )
    for heading in headings:
        found.add_column(heading, justify="right")
    for position, (leg, run) in enumerate(runs):
        bits = run["bits_per_rank"]
        after = runs[position + 1][0] if position + 1 < len(runs) else leg
        found.add_row(
            leg.framework,
            leg.title,
            f"{run['accuracy']:.1%}",
            f"{bits / 8e6:.1f}",
            f"{dense[leg.framework] / bits:.1f} ×",
            f"{run['seconds']:.1f}",
            f"{run['seconds'] + bits / (link * 1e6):.0f}",
            end_section=after.framework != leg.framework,
        )
    found.caption = f"* computed: seconds + bits per rank / {link:g} Mbit/s"
    return found


COLOURS = {"dense": "#555555", "fp16": "#E69F00", "topk": "#0072B2", "adaptive": "#D55E00"}
DASHES = ["-", "--", ":"]  # one for each framework
PARTS = {
    "compute": ("forward and backward", "#B8B8B8"),
    "update": ("update", "#8C8C8C"),
    "compress": ("compress", "#0072B2"),
    "decompress": ("decompress", "#56B4E9"),
    "communicate": ("communicate and wait", "#D55E00"),
}


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def plot_loss(runs: list[tuple[Leg, dict[str, Any]]]) -> Any:
    """Training loss against the bits that one rank has sent."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    frameworks = list(dict.fromkeys(leg.framework for leg, _ in runs))
    for leg, run in runs:
        bits, loss = zip(*run["loss"], strict=True)
        smooth = [np.mean(loss[max(0, i - 4) : i + 1]) for i in range(len(loss))]
        label = leg.title if len(frameworks) == 1 else f"{leg.framework}, {leg.title}"
        dashes = DASHES[frameworks.index(leg.framework) % len(DASHES)]
        megabytes = [b / 8e6 for b in bits]
        axes.plot(megabytes, smooth, dashes, color=COLOURS.get(leg.recipe), linewidth=2, label=label)
        axes.plot(megabytes[-1], smooth[-1], "o", color=COLOURS.get(leg.recipe), markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="MB sent by each rank", ylabel="training loss")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_title("Loss against what was sent", loc="left")
    axes.legend(frameon=False)
    _style(axes)
    return figure


def plot_sparsity(runs: list[tuple[Leg, dict[str, Any]]]) -> Any:
    """T of each layer over the steps of the adaptive runs, as a share of the layer's coordinates."""
    adaptive = [(leg, run) for leg, run in runs if leg.recipe == "adaptive"]
    figure, panels = plt.subplots(
        1, len(adaptive), figsize=(7 * len(adaptive), 4.6), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (leg, run) in zip(panels[0], adaptive, strict=True):
        for name, dimension in run["dimensions"].items():
            steps, shares = zip(*((step, T[name] / dimension) for step, T in run["sparsity"]), strict=True)
            if min(shares) == 1:
                continue  # a small tensor, which always goes dense
            axes.plot(steps, shares, linewidth=1.8, label=f"{name}, d = {dimension:,}")
        axes.set(yscale="log", xlabel="step", ylabel="T / d")
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        axes.set_title(f"{leg.framework}: share of each layer that adaptive sends", loc="left")
        axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        _style(axes)
    return figure


def plot_time(runs: list[tuple[Leg, dict[str, Any]]]) -> Any:
    """The share of a run's time that each part takes."""
    figure, axes = plt.subplots(figsize=(7, 1.6 + 0.45 * len(runs)), layout="constrained")
    names = [f"{leg.framework}, {leg.title}" for leg, _ in runs]
    left = [0.0] * len(runs)
    for part, (label, colour) in PARTS.items():
        widths = [max(0.0, run["parts"].get(part, 0.0)) / run["seconds"] for _, run in runs]
        axes.barh(names, widths, left=left, color=colour, label=label, height=0.65)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Where the time goes, all ranks on this machine", loc="left")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    _style(axes)
    axes.grid(visible=False, axis="y")
    return figure


if __name__ == "__main__":
    main()
