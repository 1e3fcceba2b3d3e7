"""``hvd-adaptive horovod install``: Horovod, built for the frameworks of the current environment."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ..setup import allreduce
from ..setup.command import run
from ..setup.horovod import VERSION, Target, WheelStore, cache_folder, wheel_for
from ..setup.machine import SetupError
from .doctor import installed_horovod


@click.group()
def horovod() -> None:
    """Build and install Horovod for the frameworks you have."""


@horovod.command()
@click.option(
    "--wheel-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder in which built wheels are kept, instead of your cache.",
)
@click.option("--force", is_flag=True, help="Compile anew, whatever is kept or installed.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before another Horovod is replaced.")
@click.option("--check/--no-check", default=True, help="Try what was installed with two processes.")
def install(wheel_dir: Path | None, force: bool, yes: bool, check: bool) -> None:
    """Build Horovod against the torch and TensorFlow that are installed here, and install it.

    The wheel is kept, named by the versions of Python, torch and TensorFlow, so that it is compiled once.
    Compiling needs a C++17 compiler and takes minutes.  Horovod's own build settings
    (HOROVOD_GPU_OPERATIONS, HOROVOD_WITH_MPI, ...) are taken from the environment.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    target = Target.inspect(sys.executable, os.environ.get("PYTHONPATH", ""))
    found = installed_horovod()
    if found is not None and not force:
        if found.version == VERSION and found.fits(target):
            with console.status("Checking the installed Horovod"):
                works = not check or _works(target)
            if works:
                console.print(f"Horovod {VERSION} for {_names(target)} is installed and works.")
                return
        question = f"Horovod {found.version}, {found.description}, is installed. Replace it?"
        if not yes and not click.confirm(question, err=True):
            raise SetupError("Nothing was changed.")

    store = WheelStore((wheel_dir or cache_folder() / "wheels").absolute())
    log = cache_folder() / "logs" / f"horovod-{time.strftime('%Y%m%d-%H%M%S')}.log"
    if target.frameworks:
        console.print(f"Horovod {VERSION} for {_names(target)}; the whole output is in {log}")
    with _progress(console) as progress:
        task = progress.add_task("Compiling", total=100)
        wheel = wheel_for(
            target, store, log, lambda percent: progress.update(task, completed=percent), rebuild=force
        )
        progress.update(task, completed=100)
    with console.status("Installing"):
        words = [target.python, "-m", "pip", "install", "--no-input"]
        # without its dependencies first: they are not to be reinstalled with it
        run([*words, "--no-deps", "--force-reinstall", wheel], "Installing Horovod", log)
        run([*words, wheel], "Installing what Horovod needs", log)
    if check:
        with console.status("Checking with two processes under horovodrun"):
            allreduce.check(target.python, target.frameworks, os.environ)
    console.print(f"Horovod {VERSION} is installed for {_names(target)}.")


def _works(target: Target) -> bool:
    try:
        allreduce.check(target.python, target.frameworks, os.environ)
    except SetupError:
        return False
    return True


def _names(target: Target) -> str:
    return " and ".join(f"{name} {getattr(target, name)}" for name in target.frameworks)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress
