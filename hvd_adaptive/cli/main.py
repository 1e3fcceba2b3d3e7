"""The ``hvd-adaptive`` command: a group whose subcommands are imported when they are called."""

from __future__ import annotations

import importlib

import click

from .. import __version__
from ..core.errors import HvdAdaptiveError

# name: (where it is, what --help says about it)
COMMANDS = {
    "bench": ("hvd_adaptive.cli.bench:bench", "Measure kernels, and adaptive against hindsight."),
    "calibrate": (
        "hvd_adaptive.cli.calibrate:calibrate",
        "Measure what the link charges (run it under horovodrun).",
    ),
    "doctor": (
        "hvd_adaptive.cli.doctor:doctor",
        "Say what is installed, what is missing, and what mends it.",
    ),
    "horovod": ("hvd_adaptive.cli.horovod:horovod", "Build and install Horovod for the frameworks you have."),
    "simulate": ("hvd_adaptive.cli.simulate:simulate", "Train by simulated workers over a modelled link."),
    "report": (
        "hvd_adaptive.cli.report:report",
        "Draw what benchmarks/network measured: plots and one page.",
    ),
    "reproduce": ("hvd_adaptive.cli.reproduce:reproduce", "Run the experiments of the papers."),
}

# the module that is missing: the command that brings it
_INSTALL = {
    "torch": "pip install 'hvd-adaptive[torch]'",
    "tensorflow": "pip install 'hvd-adaptive[tensorflow]'",
    "tf_keras": "pip install 'hvd-adaptive[tensorflow]'",
    "scipy": "pip install 'hvd-adaptive[solvers]'",
    "sklearn": "pip install 'hvd-adaptive[solvers]'",
    "matplotlib": "pip install 'hvd-adaptive[plots]'",
    "horovod": "hvd-adaptive horovod install",
}


class LazyGroup(click.Group):
    """Imports a subcommand when it is called, and says what to install where something is missing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        except HvdAdaptiveError as error:
            raise click.ClickException(str(error)) from error


def _missing(error: ModuleNotFoundError) -> Exception:
    """A sentence for a missing module that an extra brings; any other is a bug and stays as it is."""
    name = (error.name or "").partition(".")[0]
    if name not in _INSTALL:
        return error
    return click.ClickException(f"This command needs {name}, which is not installed. Run: {_INSTALL[name]}")


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hvd-adaptive")
def main() -> None:
    """Communication-adaptive gradient compression behind unmodified Horovod."""


if __name__ == "__main__":
    main()
