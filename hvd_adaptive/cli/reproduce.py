"""``hvd-adaptive reproduce``: the papers' experiments, one command each."""

from __future__ import annotations

import click

from .reproduce_cat import cat
from .reproduce_eclk import eclk


@click.group()
def reproduce() -> None:
    """Run the experiments of the papers behind this package."""


reproduce.add_command(cat)
reproduce.add_command(eclk)
