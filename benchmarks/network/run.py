"""Trains tasks over real links, four hosts of one machine, under Horovod's launcher and PyTorch's own.

    sudo python benchmarks/network/run.py --out runs/network --task mlp
    hvd-adaptive report runs/network

Needs root, for hosts that are network namespaces (see hosts.py).  What is finished is not repeated: the
same command goes on where it was interrupted.

The loss curve of a contestant with fixed settings does not depend on the link.  It is trained once, over
unlimited links, and over the other rates only the seconds of some steps are measured.  Contestants that
choose by the link are trained over every rate.  ``--full`` trains everything everywhere.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from contestants import CONTESTANTS, Contestant, contestant, head
from hosts import Hosts, missing
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvd_adaptive.cli.report_runs import rate_name, read, run_name, summarise

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = 29500


@dataclass(frozen=True)
class Launch:
    """What is started at once: the runs of one launcher on one number of hosts at one rate."""

    launcher: str
    kind: str
    task: str
    ranks: int
    rate: float | None
    contestants: tuple[Contestant, ...]
    seeds: tuple[int, ...]

    def heads(self) -> Iterator[dict[str, Any]]:
        """The identities of its runs, in the order in which train.py takes them."""
        for seed, one in itertools.product(self.seeds, self.contestants):
            yield head(self.kind, self.task, one, seed, self.ranks, self.rate)


class _Rate(click.ParamType):
    name = "rate"

    def convert(self, value: Any, param: Any, ctx: Any) -> float | None:
        if value == "none":
            return None
        units = {"K": 1e3, "M": 1e6, "G": 1e9}
        try:
            rate = float(value[:-1]) * units[value[-1]] if value[-1:] in units else float(value)
        except ValueError:
            rate = 0.0
        if not rate >= 1e5:
            self.fail(f"{value!r} is not a rate; write 100M, 1G or none (unlimited)", param, ctx)
        return rate


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--task", "tasks", multiple=True, default=("mlp",), show_default=True)
@click.option("--contestant", "names", multiple=True, default=tuple(CONTESTANTS), show_default=True)
@click.option(
    "--rate", "rates", multiple=True, type=_Rate(), default=("none", "1G", "100M"), show_default=True
)
@click.option("--hosts", "count", default=4, show_default=True, type=click.IntRange(2, 64))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=400, show_default=True, type=click.IntRange(2), help="Of a run, at most.")
@click.option("--check-every", default=10, show_default=True, type=click.IntRange(1))
@click.option("--target", type=float, help="Held-out loss; by default each task's own.")
@click.option("--pace", default=12, show_default=True, type=click.IntRange(3), help="Steps timed at a rate.")
@click.option("--full", is_flag=True, help="Train every contestant at every rate.")
@click.option(
    "--also-hosts", multiple=True, type=click.IntRange(2, 64), help="Only time steps on these, too."
)
@click.option("--limit", default=1800, show_default=True, help="Seconds after which a launch is ended.")
def main(
    out: Path,
    tasks: tuple[str, ...],
    names: tuple[str, ...],
    rates: tuple[float | None, ...],
    count: int,
    seeds: int,
    steps: int,
    check_every: int,
    target: float | None,
    pace: int,
    full: bool,
    also_hosts: tuple[int, ...],
    limit: int,
) -> None:
    """Train over links of several rates, and write what came of it."""
    lack = missing()
    if lack is not None:
        raise click.ClickException(lack)
    entries = tuple(contestant(name) for name in names)
    settings = {"steps": steps, "check_every": check_every, "target": target}
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out, settings | {"pace": pace})
    launches = plan(tasks, entries, rates, count, seeds, full, also_hosts)
    driver = Driver(out.resolve(), settings | {"pace": pace}, limit)
    driver.go(launches)
    summary = summarise(read(out))
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _show(summary)
    if driver.troubles:
        raise click.ClickException(
            "some contestants failed (remove their files from runs/ to try again):\n"
            + "\n".join(driver.troubles)
        )


def plan(
    tasks: Sequence[str],
    entries: Sequence[Contestant],
    rates: Sequence[float | None],
    count: int,
    seeds: int,
    full: bool,
    also_hosts: Sequence[int],
) -> list[Launch]:
    """What to start, those that share hosts and rate one after the other."""
    # Fixed curves are trained over the fastest link at hand.
    fastest = max(rates, key=lambda rate: float("inf") if rate is None else rate)
    launches = []
    for rate, task in itertools.product(rates, tasks):
        everywhere = full or rate == fastest
        for launcher in ("horovod", "gloo"):
            own = [one for one in entries if one.launcher == launcher]
            train = tuple(one for one in own if everywhere or one.by_link)
            timed = tuple(one for one in own if one not in train)
            launches.append(Launch(launcher, "train", task, count, rate, train, tuple(range(seeds))))
            launches.append(Launch(launcher, "pace", task, count, rate, timed, (0,)))
    for number, rate, task, launcher in itertools.product(also_hosts, rates, tasks, ("horovod", "gloo")):
        own = tuple(one for one in entries if one.launcher == launcher and not one.by_link)
        if number != count:
            launches.append(Launch(launcher, "pace", task, number, rate, own, (0,)))
    return [launch for launch in launches if launch.contestants]


def _same_settings(out: Path, settings: dict[str, Any]) -> None:
    """Refuses a directory of runs that were made with other settings."""
    path = out / "settings.json"
    if path.exists():
        before = json.loads(path.read_text())
        for name, value in settings.items():
            if before.get(name) != value:
                raise click.ClickException(
                    f"{out} holds runs with --{name.replace('_', '-')} {before.get(name)}, not {value}; give "
                    "another --out, or the same settings"
                )
    path.write_text(json.dumps(settings, indent=1) + "\n")


@dataclass
class Driver:
    """Starts launches, each until all of its runs are there or have failed."""

    out: Path
    settings: dict[str, Any]
    limit: int
    troubles: list[str] = field(default_factory=list)
    broken: set[tuple[str, str]] = field(default_factory=set)

    def go(self, launches: Sequence[Launch]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._note_failed()
        total = sum(1 for launch in launches for _ in launch.heads())
        with Progress(*columns) as progress:
            bar = progress.add_task("runs", total=total)
            done = 0
            for (ranks, rate), group in itertools.groupby(launches, lambda one: (one.ranks, one.rate)):
                ours = list(group)
                if any(self._left(launch) for launch in ours):
                    progress.update(bar, description=f"{ranks} hosts, {rate_name(rate)}")
                    with Hosts(ranks, rate) as hosts:
                        for launch in ours:
                            self._finish(
                                hosts, launch, lambda n, done=done: progress.update(bar, completed=done + n)
                            )
                            done += sum(1 for _ in launch.heads())
                else:
                    done += sum(1 for launch in ours for _ in launch.heads())
                progress.update(bar, completed=done)

    def _left(self, launch: Launch) -> list[dict[str, Any]]:
        """What is still to be done; a contestant that has failed at a task is not tried at it again."""
        return [
            one
            for one in launch.heads()
            if (one["task"], one["contestant"]) not in self.broken and not self._path(one).exists()
        ]

    def _path(self, one: dict[str, Any]) -> Path:
        return self.out / "runs" / run_name(one)

    def _finish(self, hosts: Hosts, launch: Launch, tell: Any) -> None:
        """Launches until nothing is left; a run that ends its launch without a file is marked as failed."""
        total = sum(1 for _ in launch.heads())
        while left := self._left(launch):
            command = self._command(hosts, launch)
            start = {"horovod": _horovod, "gloo": _gloo}[launch.launcher]
            with start(hosts, command) as processes, ThreadPoolExecutor(len(processes)) as readers:
                outputs = [readers.submit(process.stdout.read) for process in processes]  # lest a pipe fills
                until = time.monotonic() + self.limit
                while any(process.poll() is None for process in processes):
                    tell(total - len(self._left(launch)))
                    if time.monotonic() > until or any(process.poll() for process in processes):
                        time.sleep(2)  # the others may end by themselves
                        break
                    time.sleep(0.5)
                hosts.end_processes()
                output = "".join(future.result() for future in outputs)
                codes = [process.wait() for process in processes]
            name = (
                f"{launch.kind}-{launch.task}-{launch.ranks}ranks-{rate_name(launch.rate)}-{launch.launcher}"
            )
            log = self.out / "logs" / (name.replace(" ", "").replace("/", "") + ".log")
            log.parent.mkdir(exist_ok=True)
            log.write_text(output)
            now = self._left(launch)
            if now and not any(codes):
                raise click.ClickException(f"a launch ended well but left runs out; see {log}")
            if now == left:  # the first of them brought the launch down
                last = [line for line in output.splitlines() if line.strip()][-1:] or ["it said nothing"]
                path = self._path(now[0])
                path.parent.mkdir(exist_ok=True)
                path.write_text(
                    json.dumps(now[0] | {"target": 0.0, "failed": f"{last[0]} (see {log.name})"}, indent=1)
                    + "\n"
                )
            self._note_failed()

    def _note_failed(self) -> None:
        for path in sorted((self.out / "runs").glob("*.json")):
            one = json.loads(path.read_text())
            if "failed" in one and (one["task"], one["contestant"]) not in self.broken:
                self.broken.add((one["task"], one["contestant"]))
                self.troubles.append(f"{one['task']}, {one['label']}: {one['failed']}")

    def _command(self, hosts: Hosts, launch: Launch) -> list[str]:
        words = [
            sys.executable,
            str(HERE / "train.py"),
            "--out",
            str(self.out / "runs"),
            "--task",
            launch.task,
        ]
        words += ["--interface", "eth0"]
        for one in launch.contestants:
            if (launch.task, one.name) not in self.broken:
                words += ["--contestant", one.name]
        for seed in launch.seeds:
            words += ["--seed", str(seed)]
        words += ["--steps", str(self.settings["steps"]), "--check-every", str(self.settings["check_every"])]
        if self.settings["target"] is not None:
            words += ["--target", str(self.settings["target"])]
        if launch.kind == "pace":
            words += ["--pace", str(self.settings["pace"])]
        if launch.rate is not None:
            words += ["--rate", str(launch.rate)]
        if "calibrated" in words:
            words += ["--calibrated", str(self._calibrated(hosts, launch))]
        return words

    def _calibrated(self, hosts: Hosts, launch: Launch) -> Path:
        """The link's calibration, by the command for it."""
        rate = rate_name(launch.rate).replace(" ", "").replace("/", "")
        path = self.out / f"calibrated-{launch.ranks}ranks-{rate}.json"
        if not path.exists():
            words = [sys.executable, "-m", "hvd_adaptive.cli.main", "calibrate", "--json", str(path)]
            run = hosts.horovodrun(words, env=_environment())
            if run.returncode != 0:
                raise click.ClickException(f"hvd-adaptive calibrate failed:\n{run.output}")
        return path


def _environment() -> dict[str, str]:
    """One thread for each rank, as many ranks share the machine; the package is the one beside us."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def _horovod(hosts: Hosts, words: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    process = hosts.start_horovodrun(words, env=_environment())
    try:
        yield [process]
    finally:
        _end([process])


@contextmanager
def _gloo(hosts: Hosts, words: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = []
    for rank, host in enumerate(hosts):
        env = {
            **os.environ,
            **_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        pipes |= {"stderr": subprocess.STDOUT, "text": True, "errors": "replace", "start_new_session": True}
        processes.append(subprocess.Popen(host.command(words), env=env, **pipes))
    try:
        yield processes
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()


def _show(summary: dict[str, Any]) -> None:
    cells = sorted(summary["cells"], key=lambda c: (c["task"], c["ranks"], -(c["rate"] or 1e15)))
    for key, group in itertools.groupby(cells, lambda c: (c["task"], c["ranks"], c["rate"])):
        task, ranks, rate = key
        table = Table(title=f"{task}, {ranks} ranks, {rate_name(rate)}")
        for column in (
            "contestant",
            "s to target",
            "× faster than dense",
            "steps",
            "Mbit a rank",
            "ms a step",
        ):
            table.add_column(column, justify="left" if column == "contestant" else "right")
        for cell in sorted(group, key=lambda c: c["seconds_median"] or float("inf")):
            steps = [step for step in cell["steps"] if step is not None]
            spread = cell["quotient_range"]
            table.add_row(
                cell["label"],
                f"{cell['seconds_median']:.1f}" if cell["seconds_median"] else "not reached",
                f"{cell['quotient']:.2f} ({spread[0]:.2f} to {spread[1]:.2f})" if cell["quotient"] else "",
                f"{min(steps):.0f} to {max(steps):.0f}" if steps else "",
                f"{cell['bits_per_rank_median'] / 1e6:.1f}" if cell["bits_per_rank_median"] else "",
                f"{1e3 * cell['step_seconds']:.1f}",
            )
        Console().print(table)
    for one in summary["failed"]:
        Console().print(f"{one['label']}: {one['failed']}", markup=False)


if __name__ == "__main__":
    main()
