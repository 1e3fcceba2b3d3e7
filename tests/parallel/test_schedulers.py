"""The same script, unchanged, under SLURM's script and under Ray."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "torch" / "digits.py"


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_the_slurm_script(tmp_path):
    """With SLURM's own command that tells a job's hosts replaced; doctor and horovodrun are real."""
    commands = tmp_path / "bin"
    commands.mkdir()
    executable(commands / "scontrol", '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames list" ] && echo localhost\n')
    executable(commands / "hvd-adaptive", f'#!/bin/sh\nexec {sys.executable} -m hvd_adaptive.cli.main "$@"\n')
    executable(commands / "horovodrun", f'#!/bin/sh\nexec {sys.executable} -m horovod.runner.launch "$@"\n')
    result = tmp_path / "result.json"
    answer = subprocess.run(
        [
            ROOT / "docker" / "slurm.sh",
            sys.executable,
            DIGITS,
            "--recipe",
            "topk",
            "--steps",
            "3",
            "--json",
            result,
        ],
        env={
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_NODELIST": "list",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS_PER_NODE": "2",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "1 hosts answer" in answer.stdout
    assert json.loads(result.read_text())["ranks"] == 2


def running(word):
    """Command lines of processes that have ``word`` in theirs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if word in line:
                found.append(line)
    return found


def test_ray(tmp_path):
    result = tmp_path / "result.json"
    words = ["--recipe", "topk", "--steps", "3", "--json", result]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # pytest's is too long a path for sockets
        answer = subprocess.run(
            [sys.executable, ROOT / "examples" / "ray_launch.py", "--np", "2", DIGITS, *words],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                "RAY_TMPDIR": folder,
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert list(Path(folder).iterdir()) and not running(folder)  # Ray was here, and is gone
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-5000:]
    told = json.loads(result.read_text())
    assert told["ranks"] == 2 and told["recipe"] == "topk"
