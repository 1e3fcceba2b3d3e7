"""The command: lazy subcommands, doctor's verdicts, and install where there is nothing to build for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_adaptive.cli import doctor
from hvd_adaptive.cli import main as cli
from hvd_adaptive.setup import allreduce
from hvd_adaptive.setup.horovod import VERSION, Target
from hvd_adaptive.setup.machine import SetupError

ROOT = Path(__file__).parents[2]
TARGET = Target(sys.executable, "cpython-311", "linux-x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")


@pytest.fixture
def bare(tmp_path):
    """Runs the command in a new environment that has what the command line needs, and no more."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=120)
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("click", "rich", "markdown_it", "mdurl", "pygments", "hvd_adaptive"):
        (packages / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)

    def run(*words, **environment):
        environment = {
            **os.environ,
            "PYTHONPATH": str(packages),
            "XDG_CACHE_HOME": str(tmp_path),
            **environment,
        }
        return subprocess.run(
            [tmp_path / "env" / "bin" / "python", "-m", "hvd_adaptive.cli.main", *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    run.python = tmp_path / "env" / "bin" / "python"
    return run


# --- the group -------------------------------------------------------------------------------------------


def test_every_command_is_there():
    answer = CliRunner().invoke(cli.main, ["--help"])
    assert answer.exit_code == 0
    for name, (_, about) in cli.COMMANDS.items():
        assert name in answer.output and about in answer.output
        assert CliRunner().invoke(cli.main, [name, "--help"]).exit_code == 0


def test_an_unknown_command_is_named():
    answer = CliRunner().invoke(cli.main, ["cure"])
    assert answer.exit_code == 2 and "cure" in answer.output


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Adds a command whose module, or whose body, is the code given."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(at_import="pass", at_call="pass"):
        (tmp_path / "command_under_test.py").write_text(
            f"import click\n{at_import}\n@click.command()\ndef command():\n    {at_call}\n"
        )
        sys.modules.pop("command_under_test", None)
        monkeypatch.setitem(cli.COMMANDS, "tried", ("command_under_test:command", "Tried."))
        return CliRunner().invoke(cli.main, ["tried"])

    return add


@pytest.mark.parametrize("where", ["at_import", "at_call"])
@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("matplotlib", "pip install 'hvd-adaptive[plots]'"),
        ("scipy.optimize", "pip install 'hvd-adaptive[solvers]'"),
        ("torch.nn", "pip install 'hvd-adaptive[torch]'"),
        ("horovod.torch", "hvd-adaptive horovod install"),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(command, where, module, remedy):
    answer = command(**{where: f"raise ModuleNotFoundError('No module', name={module!r})"})
    assert answer.exit_code == 1
    assert f"needs {module.partition('.')[0]}, which is not installed. Run: {remedy}" in answer.output


def test_another_missing_module_is_a_bug_and_stays_one(command):
    answer = command(at_import="import hvd_adaptive.no_such_module")
    assert isinstance(answer.exception, ModuleNotFoundError)


def test_our_errors_are_sentences(command):
    answer = command(at_call="import hvd_adaptive.core.errors as e; raise e.ConfigurationError('ratio is 2')")
    assert answer.exit_code == 1 and answer.output.strip() == "Error: ratio is 2"


# --- doctor ----------------------------------------------------------------------------------------------


def test_doctor_where_nothing_is(bare):
    answer = bare("doctor", "--json")
    assert answer.returncode == 1, answer.stderr
    report = json.loads(answer.stdout)
    assert report["healthy"] is False
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["Python"]["state"] == "ok"
    remedies = {name: finding["remedy"] for name, finding in found.items() if finding["state"] == "missing"}
    assert remedies == {
        "NumPy": "pip install 'numpy>=2'",
        "torch": "pip install 'hvd-adaptive[torch]'",
        "TensorFlow": "pip install 'hvd-adaptive[tensorflow]'",
        "Horovod": "hvd-adaptive horovod install",
    }


def test_doctor_prints_a_table(bare):
    answer = bare("doctor", COLUMNS="160", PATH="")
    assert answer.returncode == 1
    assert "hvd-adaptive horovod install" in answer.stdout
    assert "build-essential" in answer.stdout, "Horovod must be compiled, and there is no compiler"


def states(findings):
    return {finding.name: finding.state for finding in findings}


def test_doctor_refuses_another_horovod():
    """T8."""
    (finding,) = doctor._horovod(TARGET, doctor.InstalledHorovod("0.27.0", "2.13.0+cpu", "2.21.0"))
    assert finding.state == "missing" and f"{VERSION} is the supported one" in finding.found


@pytest.mark.parametrize(
    ("built", "sentence"),
    [(None, "built without torch"), ("2.12.0", "built with torch 2.12.0, 2.13.0+cpu is installed")],
)
def test_doctor_compares_what_horovod_was_built_with(built, sentence):
    findings = doctor._horovod(
        Target(sys.executable, "t", "p", "2.13.0+cpu", None), doctor.InstalledHorovod(VERSION, built, None)
    )
    assert states(findings)["horovod.torch"] == "missing"
    (finding,) = (finding for finding in findings if finding.name == "horovod.torch")
    assert sentence in finding.found and finding.remedy == "hvd-adaptive horovod install --yes"


def test_fits_only_what_is_installed():
    both = doctor.InstalledHorovod(VERSION, "2.13.0+cpu", "2.21.0")
    assert both.fits(TARGET)
    assert both.fits(Target("p", "t", "p", "2.13.0+cpu", None)), "more than is needed"
    assert not doctor.InstalledHorovod(VERSION, "2.13.0+cpu", None).fits(TARGET)
    assert not both.fits(Target("p", "t", "p", "2.13.0", "2.21.0")), "CUDA and CPU builds differ"


@pytest.mark.parametrize(
    ("address", "state"), [("127.0.1.1", "note"), ("127.0.0.1", "note"), ("10.0.0.7", "ok")]
)
def test_doctor_sees_a_hostname_that_is_loopback(address, state):
    finding = doctor.hostname(resolve=lambda name: address, own_name=lambda: "worker-1")
    assert finding.state == state and f"worker-1 resolves to {address}" in finding.found
    assert ("/etc/hosts, give worker-1" in finding.remedy) == (state == "note")


def test_doctor_sees_a_hostname_that_does_not_resolve():
    def fail(name):
        raise OSError

    assert doctor.hostname(resolve=fail, own_name=lambda: "worker-1").state == "note"


# --- horovod install -------------------------------------------------------------------------------------


def test_install_without_a_framework(bare):
    answer = bare("horovod", "install")
    assert answer.returncode == 1
    assert "Neither torch nor TensorFlow is installed for this Python: install one first" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_check_fails_where_horovod_is_missing(bare):
    with pytest.raises(SetupError, match=r"could not agree on a sum: .*horovod"):
        allreduce.check(bare.python, ["torch"], {"PATH": os.environ["PATH"]})
