"""How much of the communication of a step the backward pass hides: dense Horovod against adaptive.

    sudo python benchmarks/overlap.py --out runs/overlap            # two hosts, links of 100 Mbit/s
    python benchmarks/overlap.py --out runs/overlap --local         # two processes of this machine

Horovod's own timeline (HOROVOD_TIMELINE) says when its thread was in a collective; the training loop says
when it was in the backward pass.  Prints the share of the seconds in collectives that fall into the
backward pass, medians over steps, and draws one step of each: overlap.png.  The timeline, timeline.json, is
kept; chrome://tracing and Perfetto show it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "network"))

from hosts import Hosts, missing  # noqa: E402

WARM_UP = 40  # steps in which adaptive finds out what to send
Interval = tuple[float, float]
COLLECTIVES = ("GLOO_", "MPI_", "NCCL_")
CONTESTANTS = ("dense", "adaptive")


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--hosts", "count", default=2, show_default=True, type=click.IntRange(2, 16))
@click.option("--rate", default=1e8, show_default=True, help="Of each host's link, in bits per second.")
@click.option("--local", is_flag=True, help="Processes of this machine; adaptive is told of the rate.")
@click.option("--task", "task_name", default="resnet", show_default=True, help="mlp, resnet or language.")
@click.option("--steps", default=12, show_default=True, type=click.IntRange(1))
@click.option("--worker", is_flag=True, hidden=True)
def main(out: Path, count: int, rate: float, local: bool, task_name: str, steps: int, worker: bool) -> None:
    """Run both, read Horovod's timeline, and say what the backward pass hides."""
    if worker:
        _work(out, task_name, steps, rate if local else None)
        return
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    timeline = out / "timeline.json"
    timeline.unlink(missing_ok=True)
    words = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        "--out",
        str(out),
        "--task",
        task_name,
    ]
    words += ["--steps", str(steps), "--rate", str(rate), *(["--local"] if local else [])]
    env = {"HOROVOD_TIMELINE": str(timeline), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    if local:
        launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(count)]
        done = subprocess.run(
            [*launcher, *words], env={**os.environ, **env}, capture_output=True, text=True, timeout=600
        )
        code, output = done.returncode, done.stdout + done.stderr
    else:
        lack = missing()
        if lack is not None:
            raise click.ClickException(f"{lack} Or give --local.")
        with Hosts(count, rate) as hosts:
            run = hosts.horovodrun(words, env=env, timeout=600)
        code, output = run.returncode, run.output
    if code != 0:
        raise click.ClickException(f"the launch failed:\n{output}")
    collectives = read_timeline(timeline)
    marks = {name: json.loads((out / f"{name}.json").read_text()) for name in CONTESTANTS}
    steps_of = {name: [Step(one, collectives) for one in marks[name]["steps"]] for name in CONTESTANTS}
    _show(steps_of)
    click.echo(f"adaptive is {marks['adaptive']['reason']}")
    where = f"{count} processes of one machine" if local else f"{count} hosts, {rate / 1e6:g} Mbit/s"
    _draw(out / "overlap.png", f"{task_name}, {where}", steps_of)
    click.echo(f"written to {out / 'overlap.png'}")


# -- a rank


class _Watched:
    """A compressor, and the intervals in which it was at work."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.intervals: list[Interval] = []

    def compress(self, tensor: Any) -> Any:
        return self._watch(self._inner.compress, tensor)

    def decompress(self, tensor: Any, context: Any) -> Any:
        return self._watch(self._inner.decompress, tensor, context)

    def _watch(self, work: Any, *given: Any) -> Any:
        began = time.time()
        result = work(*given)
        self.intervals.append((began, time.time()))
        return result


def _work(out: Path, task_name: str, steps: int, told: float | None) -> None:
    """Trains under each contestant; rank 0 writes when it did what, in seconds since the epoch."""
    import horovod.torch as hvd
    import torch
    from tasks import task

    from hvd_adaptive.core.cost import LinkTime, PayloadBits
    from hvd_adaptive.torch import Compression

    torch.set_num_threads(1)
    hvd.init()
    chosen = task(task_name)
    for name in CONTESTANTS:
        torch.manual_seed(0)
        model = chosen.model()
        cost = {} if told is None else {"cost": LinkTime(PayloadBits(1), bandwidth=told)}
        inner = (
            Compression.none if name == "dense" else Compression.adaptive(model.named_parameters(), **cost)
        )
        watched = _Watched(inner)
        optimizer = hvd.DistributedOptimizer(
            chosen.optimizer(list(model.parameters())),
            named_parameters=model.named_parameters(),
            compression=watched,
        )
        batches = chosen.batches(hvd.rank(), 0)
        marks = []
        for step in range(WARM_UP + steps):
            batch = next(batches)
            hvd.allreduce(torch.zeros(1), name="together")
            watched.intervals.clear()
            began = time.time()
            loss = chosen.loss(model, batch)
            optimizer.zero_grad()
            forward = time.time()
            loss.backward()
            backward = time.time()
            optimizer.synchronize()
            averaged = time.time()
            with optimizer.skip_synchronize():
                optimizer.step()
            if step >= WARM_UP:
                times = {"began": began, "forward": forward, "backward": backward, "averaged": averaged}
                marks.append({**times, "ended": time.time(), "compression": list(watched.intervals)})
        if hvd.rank() == 0:
            reason = "" if name == "dense" else inner.statistics().reason
            (out / f"{name}.json").write_text(json.dumps({"reason": reason, "steps": marks}))
    hvd.shutdown()


# -- the timeline


def read_timeline(path: Path) -> list[tuple[str, float, float]]:
    """The collectives in Horovod's timeline: activity, begin and end, in seconds since the epoch.

    In Chrome's trace format ``B`` and ``E`` open and close what nests, tensor by tensor.
    """
    text = path.read_text()
    events = json.loads(text if text.rstrip().endswith("]") else text.rstrip().rstrip(",") + "]")
    start = next(
        event["args"]["start_time_since_epoch_in_micros"]
        for event in events
        if "start_time_since_epoch_in_micros" in event.get("args", {})
    )
    found: list[tuple[str, float, float]] = []
    open_: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            open_[event["pid"]].append((event["name"], event["ts"]))
        elif event["ph"] == "E" and open_[event["pid"]]:
            name, began = open_[event["pid"]].pop()
            if name.startswith(COLLECTIVES):
                found.append((name, (start + began) / 1e6, (start + event["ts"]) / 1e6))
    return found


class Step:
    """One step's intervals: the training loop's, and those of collectives that began within it."""

    def __init__(self, mark: dict[str, Any], collectives: Sequence[tuple[str, float, float]]) -> None:
        self.began, self.ended = mark["began"], mark["ended"]
        self.forward, self.backward, self.averaged = mark["forward"], mark["backward"], mark["averaged"]
        self.compression = union(tuple(one) for one in mark["compression"])
        inside = [(a, b) for _, a, b in collectives if self.forward <= a < self.averaged]
        self.collectives = union(inside)

    @property
    def communication(self) -> float:
        return length(self.collectives)

    @property
    def hidden(self) -> float:
        """Share of the seconds in collectives during which the backward pass ran."""
        within = [(max(a, self.forward), min(b, self.backward)) for a, b in self.collectives]
        return (
            length([(a, b) for a, b in within if a < b]) / self.communication if self.communication else 1.0
        )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants, without overlaps, in order: fused tensors share one collective."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _show(steps_of: dict[str, list[Step]]) -> None:
    table = Table(title="medians over steps, milliseconds")
    for column in ("", "step", "backward", "compression", "in collectives", "hidden by the backward pass"):
        table.add_column(column, justify="right" if column else "left")
    for name, steps in steps_of.items():
        values = [
            statistics.median(1e3 * (s.ended - s.began) for s in steps),
            statistics.median(1e3 * (s.backward - s.forward) for s in steps),
            statistics.median(1e3 * length(s.compression) for s in steps),
            statistics.median(1e3 * s.communication for s in steps),
        ]
        hidden = statistics.median(s.hidden for s in steps)
        table.add_row(name, *(f"{value:.1f}" for value in values), f"{hidden:.0%}")
    Console().print(table)


def _draw(path: Path, title: str, steps_of: dict[str, list[Step]]) -> None:
    """The step of median length of each contestant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 1.7 * len(steps_of)), layout="constrained")
    axes = figure.subplots(len(steps_of), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axis, (name, steps) in zip(axes, steps_of.items(), strict=True):
        step = sorted(steps, key=lambda s: s.ended - s.began)[len(steps) // 2]

        def bars(
            row: float,
            label: str,
            color: str,
            intervals: Sequence[Interval],
            *,
            height: float = 0.7,
            axis: Any = axis,
            zero: float = step.began,
        ) -> None:
            spans = [(1e3 * (a - zero), 1e3 * (b - a)) for a, b in intervals]
            handle = axis.broken_barh(spans, (row - height / 2, height), facecolors=color, label=label)
            handles.setdefault(label, handle)

        bars(1, "forward", "#56b4e9", [(step.began, step.forward)])
        bars(1, "backward", "#0072b2", [(step.forward, step.backward)])
        bars(1, "waiting for results", "#dddddd", [(step.backward, step.averaged)])
        bars(1, "update", "#009e73", [(step.averaged, step.ended)])
        bars(1, "compress and decompress", "#e69f00", step.compression, height=0.35)
        bars(0, "collectives", "#d55e00", step.collectives)
        axis.set_yticks([0, 1], ["Horovod's thread", "training loop"])
        axis.set_ylim(-0.6, 1.6)
        axis.set_xlim(0, 1e3 * (step.ended - step.began))
        hidden = statistics.median(s.hidden for s in steps)
        axis.set_title(
            f"{name}: the backward pass hides {hidden:.0%} of the time in collectives", fontsize=10
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds since the step began")
    figure.suptitle(title, fontsize=11)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
