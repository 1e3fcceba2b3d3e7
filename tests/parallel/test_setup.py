"""The commands where all is well: doctor finds nothing missing, and install finds nothing to do."""

import json
import subprocess
import sys


def hvd_adaptive(*words):
    return subprocess.run(
        [sys.executable, "-m", "hvd_adaptive.cli.main", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_doctor():
    answer = hvd_adaptive("doctor", "--json")
    report = json.loads(answer.stdout)
    assert answer.returncode == 0, report
    assert report["healthy"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    for name in ("Horovod", "horovod.torch", "horovod.tensorflow", "horovodrun"):
        assert found[name]["state"] == "ok"
    assert "built with torch 2." in found["Horovod"]["found"]


def test_install_finds_a_working_horovod():
    answer = hvd_adaptive("horovod", "install")
    assert answer.returncode == 0, answer.stderr
    assert "is installed and works" in answer.stderr
