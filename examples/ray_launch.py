"""Run a Horovod script, unchanged, on the workers of a Ray cluster.

    python examples/ray_launch.py --np 2 examples/torch/digits.py --recipe adaptive

Inside a Ray job, or with RAY_ADDRESS set, it uses that cluster; elsewhere Ray is started on this machine.
Needs: pip install ray
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import click
import ray
from horovod.ray import RayExecutor


def run(script: str, words: list[str]) -> None:
    """On each rank: the script as ``__main__``, as horovodrun would start it."""
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # click ends so; Ray would take it for a crash
        if end.code not in (None, 0):
            raise RuntimeError(f"{script} ended with {end.code}") from end


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--np", "ranks", default=2, show_default=True, help="Ranks.")
@click.option("--cpus", default=1, show_default=True, help="Cores that Ray reserves for each rank.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def main(ranks: int, cpus: int, script: Path, words: tuple[str, ...]) -> None:
    """Run SCRIPT with WORDS on every rank."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=ranks * cpus, include_dashboard=False, _node_ip_address="127.0.0.1")
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=120), num_workers=ranks, cpus_per_worker=cpus
    )
    executor.start()
    try:
        executor.run(run, args=[str(script.resolve()), list(words)])
    finally:
        executor.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
