"""The image, built for real, and a cluster of containers of it: no Docker engine is needed, root is.

The first build takes minutes, so these tests run only where one has been made:

    python docker/without_engine.py build && python -m pytest tests/parallel/test_docker.py
"""

import contextlib
import json
import re
import subprocess
import time

import hosts
import pytest
import without_engine as images

WORKERS = 4


def lack():
    """Why these tests cannot run here, or None."""
    if found := hosts.missing() or images.missing():
        return found
    if not images.built():
        return "No image of these pins is in the cache: build it with: python docker/without_engine.py build"
    return None


pytestmark = [pytest.mark.skipif(bool(lack()), reason=lack() or ""), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def image():
    """The image of the code as it is; what is cached of it is not built again."""
    return images.build()


@pytest.fixture(scope="module")
def config(image):
    told = json.loads(images.buildah("inspect", "--type", "image", image, output=True))
    return told["Docker"]["config"]


def test_what_is_in_the_image(image, config):
    assert config["User"] == "hvd"
    assert config["Healthcheck"]["Test"] == ["CMD", "hvd-healthcheck"]
    assert config["Entrypoint"][-1] == "hvd-entrypoint"
    with images.mounted(image) as root:
        assert (root / "etc" / "debian_version").read_text().startswith("12")
        assert (root / "usr" / "bin" / "python3").resolve().name == "python3.11"
        for tool in ("gcc", "g++", "cc", "make", "cmake"):
            assert not (root / "usr" / "bin" / tool).exists() and not (root / "opt/hvd/bin" / tool).exists()
        keys = [*root.glob("etc/ssh/ssh_host_*"), *root.glob("keys/*"), *root.glob("home/hvd/.ssh*")]
        assert keys == []
        shadow = (root / "etc" / "shadow").read_text()
        assert re.search(r"^hvd:\*:", shadow, re.MULTILINE)
        assert (root / "home" / "hvd").stat().st_uid == 1000


@pytest.mark.parametrize(
    ("frameworks", "bound"), [(("torch", "tensorflow"), 3.0e9), (("torch",), 1.5e9), (("tensorflow",), 1.5e9)]
)
def test_size(frameworks, bound, image):
    if not images.built(frameworks):
        pytest.skip(f"not built: python docker/without_engine.py build {' '.join(frameworks)}")
    size = images.size(frameworks)
    print(f"{' and '.join(frameworks)}: {size / 1e9:.2f} GB")
    assert size < bound


class Cluster:
    """A launcher on h1 and a worker on every other host, as docker/compose.yaml has them."""

    def __init__(self, machines, image, config, folder):
        self.machines = machines
        self.image = image
        self.config = config
        self.keys, self.runs = folder / "keys", folder / "runs"
        for volume in (self.keys, self.runs):
            volume.mkdir()
            volume.chmod(0o777)
        self.logs = folder
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self._containers = [
            self._stack.enter_context(images.container(self.image)) for _ in range(len(self.machines))
        ]
        for index in range(1, len(self.machines)):
            log = self._stack.enter_context((self.logs / f"worker-{index}.log").open("w"))
            self.start(index, self.config["Cmd"], stdout=log, stderr=log)
        return self

    def __exit__(self, *_):
        self.machines.end_processes()
        self._stack.close()

    def words(self, index, words, *options):
        host = self.machines[index]
        names = hosts.NETNS / host.namespace / "hosts"
        return host.command(
            images.buildah_command(
                *("run", "--isolation", "chroot", "--user", self.config["User"], "--hostname", host.name),
                *("--volume", f"{self.keys}:/keys", "--volume", f"{self.runs}:/home/hvd/runs"),
                *("--volume", f"{names}:/etc/hosts:ro", *options, self._containers[index], "--", *words),
            )
        )

    def start(self, index, words, *options, **streams):
        command = self.words(index, [*self.config["Entrypoint"], *words], *options)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams
        )

    def wait_until_healthy(self, seconds=120):
        until = time.monotonic() + seconds
        for index in range(1, len(self.machines)):
            # buildah cannot enter a container while it is being started
            while "listening" not in (self.logs / f"worker-{index}.log").read_text():
                assert time.monotonic() < until, (self.logs / f"worker-{index}.log").read_text()
                time.sleep(0.2)
            check = self.words(index, self.config["Healthcheck"]["Test"][1:])
            while subprocess.run(check, capture_output=True, stdin=subprocess.DEVNULL).returncode != 0:
                assert time.monotonic() < until, (self.logs / f"worker-{index}.log").read_text()
                time.sleep(0.5)

    def launch(self, *words):
        workers = ",".join(f"{host.name}:1" for host in self.machines if host is not self.machines[0])
        return self.start(
            0,
            ["launcher", *words],
            *("--env", f"HVD_HOSTS={workers}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def cluster(image, config, tmp_path):
    tmp_path.chmod(0o755)
    with hosts.Hosts(1 + WORKERS, sshd=False) as machines, Cluster(machines, image, config, tmp_path) as made:
        made.wait_until_healthy()
        yield made


def test_the_demo_over_four_containers(cluster):
    """What `docker compose up --scale worker=4` does, for a few steps."""
    process = cluster.launch("demo", "--out", "runs/demo", "--framework", "torch", "--steps", "6")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-5000:]
    assert "4 ranks on h2:1,h3:1,h4:1,h5:1" in output
    assert "Handwritten digits, 4 processes" in output
    for title in ("dense", "fp16", "top-k 1 %", "adaptive"):
        assert re.search(rf"torch\s+{title}\s+\d+\.\d%", output), output
    summary = json.loads((cluster.runs / "demo" / "summary.json").read_text())
    assert [run["recipe"] for run in summary["runs"]] == ["dense", "fp16", "topk", "adaptive"]
    assert (cluster.runs / "demo" / "loss.png").stat().st_size > 1000
    # a key of this cluster's own, that its user alone may read
    (key,) = cluster.keys.glob("id_ed25519")
    assert key.stat().st_uid == 1000 and key.stat().st_mode & 0o077 == 0
    # and the tensorflow of the image, over the same containers
    process = cluster.launch(
        *("--network-interfaces", "eth0", "python", "/opt/hvd/examples/tf/digits.py"),
        *("--recipe", "topk", "--steps", "4"),
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]


def test_the_demo_where_tensorflow_is_alone(tmp_path):
    if not images.built(["tensorflow"]):
        pytest.skip("not built: python docker/without_engine.py build tensorflow")
    image = images.build(["tensorflow"])
    told = json.loads(images.buildah("inspect", "--type", "image", image, output=True))
    tmp_path.chmod(0o755)
    with (
        hosts.Hosts(3, sshd=False) as machines,
        Cluster(machines, image, told["Docker"]["config"], tmp_path) as made,
    ):
        made.wait_until_healthy()
        process = made.launch("demo", "--out", "runs/demo", "--framework", "tensorflow", "--steps", "4")
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-5000:]
        for title in ("dense", "fp16", "top-k 1 %", "adaptive"):
            assert re.search(rf"tensorflow\s+{title}\s+\d+\.\d%", output), output


def test_a_container_that_is_cut_off_ends_the_training_on_every_other(cluster):
    process = cluster.launch(
        *("--network-interfaces", "eth0", "--gloo-timeout-seconds", "10"),
        *("python", "/opt/hvd/examples/torch/digits.py", "--recipe", "adaptive", "--steps", "100000"),
    )
    lines = []
    while not any(re.search(r"step \d+/100000", line) for line in lines):
        line = process.stdout.readline()
        assert line, "".join(lines)[-5000:]
        lines.append(line)
    cluster.machines.cut(WORKERS)
    output, _ = process.communicate(timeout=200)
    output = "".join(lines) + output
    assert process.returncode != 0
    assert "processes exited with non-zero status" in output
    until = time.monotonic() + 60
    for host in cluster.machines:  # no rank is left; the sshds wait for the next launch
        while any("digits.py" in _command_line(pid) for pid in host.processes()):
            assert time.monotonic() < until, f"a rank is left on {host.name}"
            time.sleep(0.2)
    cluster.machines.mend(WORKERS)
    cluster.wait_until_healthy()


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
