"""Set-up: keys, edits, the wheel store, the stamp, and the sentence for everything that can be missing."""

import contextlib
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

from hvd_adaptive.setup import command, horovod, machine, venv
from hvd_adaptive.setup.horovod import EDITS, Target, WheelStore
from hvd_adaptive.setup.machine import SetupError

ROOT = Path(__file__).parents[2]


class Silent:
    """A reporter that remembers what it was told to say."""

    def __init__(self):
        self.said = []

    def phase(self, name):
        return contextlib.nullcontext()

    def say(self, sentence):
        self.said.append(sentence)

    def progress(self, percent):
        pass


# --- imports ---------------------------------------------------------------------------------------------


def python(code, *flags, env=None):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env, timeout=120
    )


def test_package_and_command_import_without_frameworks():
    """T9, T10."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "tensorflow", "tf_keras", "keras", "horovod"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Block())
import hvd_adaptive, hvd_adaptive.core
import hvd_adaptive.cli.main, hvd_adaptive.cli.doctor, hvd_adaptive.cli.horovod
print(hvd_adaptive.__version__)
"""
    answer = python(code)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_setup_needs_only_the_standard_library():
    answer = python("import hvd_adaptive.setup.__main__", "-S", "-E")
    assert answer.returncode == 0, answer.stderr


# --- the wheel's key -------------------------------------------------------------------------------------

TARGET = Target("python", "cpython-311", "linux-x86_64", torch="2.13.0+cpu", tensorflow="2.21.0")


@pytest.mark.parametrize(
    "other",
    [
        Target("python", "cpython-312", "linux-x86_64", "2.13.0+cpu", "2.21.0"),
        Target("python", "cpython-311", "linux-aarch64", "2.13.0+cpu", "2.21.0"),
        Target("python", "cpython-311", "linux-x86_64", "2.13.0", "2.21.0"),
        Target("python", "cpython-311", "linux-x86_64", "2.13.0+cpu", "2.20.0"),
        Target("python", "cpython-311", "linux-x86_64", "2.13.0+cpu", None),
        Target("python", "cpython-311", "linux-x86_64", None, "2.21.0"),
    ],
)
def test_key_changes_with_what_the_wheel_depends_on(other):
    assert other.key != TARGET.key


def test_key_is_the_same_for_another_place_of_the_same_python():
    assert (
        Target("/elsewhere/python", *("cpython-311", "linux-x86_64", "2.13.0+cpu", "2.21.0")).key
        == TARGET.key
    )


def test_key_changes_with_build_settings_only(monkeypatch):
    plain = TARGET.key
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")  # a setting of runs
    assert TARGET.key == plain
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert TARGET.key != plain


def test_key_changes_with_the_edits(monkeypatch):
    plain = TARGET.key
    monkeypatch.setattr(horovod, "EDITS", EDITS[:2])
    assert TARGET.key != plain


def test_inspect_reads_this_python():
    target = Target.inspect(sys.executable)
    assert target.tag == sys.implementation.cache_tag
    assert target.torch is not None and target.torch.startswith("2.")


# --- the source ------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    for edit in EDITS:
        file = tmp_path / edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"before\n    {edit.old.strip()}\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n")
    return tmp_path


def test_patch_makes_the_three_edits_and_no_other(source):
    horovod.patch(source)
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        lines = (source / path).read_text().split("\n")
        assert lines == [
            "before",
            "    set(CMAKE_CXX_STANDARD 17)",
            "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
            "",
        ]
    text = (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "xla_mpi_ops" not in text
    assert text.split() == ["before", "set(CMAKE_CXX_STANDARD_REQUIRED", "ON)"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.path)
@pytest.mark.parametrize("damage", [lambda text, old: text.replace(old, ""), lambda text, old: text + old])
def test_patch_refuses_another_source(source, edit, damage):
    file = source / edit.path
    file.write_text(damage(file.read_text(), edit.old))
    with pytest.raises(SetupError, match=f"{edit.path} .*not the source of Horovod 0.28.1"):
        horovod.patch(source)


def test_patch_refuses_a_missing_file(source):
    (source / "CMakeLists.txt").unlink()
    with pytest.raises(SetupError, match=r"CMakeLists\.txt"):
        horovod.patch(source)


def test_another_archive_is_refused(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(SetupError, match="not the one released"):
        horovod.check_hash(archive)


@pytest.mark.parametrize("base", ["with+plus", "with space", "(c)"])
def test_horovod_is_not_compiled_in_a_path_that_its_build_mistakes(tmp_path, base):
    plain = horovod._working_folder(Path("/plain/wheels"), TARGET)
    assert plain.parent == Path("/plain/wheels")
    assert "+" not in plain.name, "as there is in the name of torch's CPU build"
    assert horovod._working_folder(tmp_path / base, TARGET) == Path(tempfile.gettempdir(), plain.name)


def test_no_path_to_compile_in(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/a b")
    with pytest.raises(SetupError, match="set TMPDIR to a folder without them"):
        horovod._working_folder(tmp_path / "a+b", TARGET)


def test_a_wheel_without_its_libraries_is_refused(tmp_path):
    wheel = tmp_path / "horovod.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", "")
        file.writestr("home/user/c++/horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so", "")
    horovod.check_wheel(wheel, ["torch"])
    with pytest.raises(SetupError, match="without its library for tensorflow"):
        horovod.check_wheel(wheel, ["torch", "tensorflow"])


# --- the wheel store -------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(os.urandom(5000))
    return path


def test_store_keeps_a_wheel(tmp_path, wheel):
    store = WheelStore(tmp_path / "wheels")
    assert store.find("key") is None
    kept = store.add("key", wheel)
    assert store.find("key") == kept and kept.name == wheel.name
    assert kept.read_bytes() == wheel.read_bytes()
    assert store.find("other") is None
    assert sorted(path.name for path in store.folder.iterdir()) == ["key"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder, name: os.truncate(folder / name, 100),
        lambda folder, name: (folder / name).unlink(),
        lambda folder, name: (folder / "wheel.json").unlink(),
        lambda folder, name: (folder / "wheel.json").write_text("{"),
        lambda folder, name: (folder / "wheel.json").write_text("[]"),
    ],
)
def test_a_damaged_wheel_is_not_trusted_and_is_replaced(tmp_path, wheel, damage):
    store = WheelStore(tmp_path / "wheels")
    store.add("key", wheel)
    damage(store.folder / "key", wheel.name)
    assert store.find("key") is None
    assert store.find("key") is None and store.add("key", wheel) == store.find("key")


def test_a_stored_wheel_is_used_without_a_compiler(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    store = WheelStore(tmp_path / "wheels")
    kept = store.add(TARGET.key, wheel)
    assert horovod.wheel_for(TARGET, store, tmp_path / "log") == kept


def test_no_framework_is_refused(tmp_path):
    with pytest.raises(SetupError, match="Neither torch nor TensorFlow is installed"):
        horovod.wheel_for(Target("python", "t", "p", None, None), WheelStore(tmp_path), tmp_path / "log")


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert horovod.cache_folder() == tmp_path / "hvd-adaptive"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert horovod.cache_folder() == Path.home() / ".cache" / "hvd-adaptive"


def test_build_settings_name_what_is_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " --jobserver-auth=3,4")
    monkeypatch.setenv("HVD_ADAPTIVE_BUILD_JOBS", "3")
    settings = horovod._horovod_settings(Target("python", "t", "p", "2.13.0", None), tmp_path)
    assert settings["HOROVOD_WITH_PYTORCH"] == settings["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITHOUT_PYTORCH" not in settings and "HOROVOD_WITH_TENSORFLOW" not in settings
    assert settings["MAKEFLAGS"] == "-j3"
    monkeypatch.setenv("HVD_ADAPTIVE_BUILD_JOBS", "many")
    with pytest.raises(SetupError, match="HVD_ADAPTIVE_BUILD_JOBS=many"):
        machine.build_jobs()


# --- the stamp -------------------------------------------------------------------------------------------


def test_an_environment_is_ours_only_with_the_stamp_and_ready_only_with_its_key(tmp_path):
    folder = tmp_path / ".venv"
    folder.mkdir()
    stamp = venv.Stamp(folder)
    assert stamp.read() is None
    stamp.write()
    assert stamp.read() == ""
    stamp.write("key")
    assert stamp.read() == "key"
    assert not venv.is_ready(folder, "key"), "there is no Python in it"
    (folder / venv.STAMP).write_text("{")
    assert stamp.read() is None


def test_ready_needs_the_key_and_a_python_that_runs(tmp_path):
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    venv.Stamp(folder).write("key")
    (folder / "bin" / "python").unlink()
    # a launcher, since a link would leave this environment's packages behind
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    assert venv.is_ready(folder, "key")
    assert not venv.is_ready(folder, "another key")
    venv.Stamp(folder).write()
    assert not venv.is_ready(folder, "key")


def test_only_our_environment_is_removed(tmp_path):
    folder = tmp_path / ".venv"
    venv.remove(folder)  # nothing there
    folder.mkdir()
    (folder / "work").write_text("precious")
    with pytest.raises(SetupError, match="was not made by this set-up: move it away"):
        venv.remove(folder)
    assert (folder / "work").exists()
    link = tmp_path / "link"
    link.symlink_to(folder)
    venv.Stamp(folder).write()
    with pytest.raises(SetupError, match="was not made by this set-up"):
        venv.remove(link)
    venv.remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_environment_key_changes_with_the_pins(tmp_path, name):
    for file in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    before = venv.environment_key(tmp_path)
    assert before == venv.environment_key(tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    assert venv.environment_key(tmp_path) != before


# --- what can be missing ---------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up starts from, in a folder of their own."""
    root = tmp_path / "a checkout"
    (root / "hvd_adaptive").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "hvd_adaptive/__init__.py"):
        shutil.copy(ROOT / name, root / name)
    for name in ("setup", "core"):
        shutil.copytree(ROOT / "hvd_adaptive" / name, root / "hvd_adaptive" / name)
    return root


def set_up(checkout, **environment):
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "CXX"
        },
        "XDG_CACHE_HOME": str(checkout / "cache"),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "hvd_adaptive.setup"],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_no_compiler(checkout, tmp_path):
    (tmp_path / "empty").mkdir()
    answer = set_up(checkout, PATH=str(tmp_path / "empty"))
    assert answer.returncode == 1
    assert "No C++ compiler was found" in answer.stderr
    assert "sudo apt-get install build-essential" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (checkout / ".venv").exists()


def test_no_network_leaves_nothing_that_is_trusted(checkout):
    half_made = checkout / ".venv"
    half_made.mkdir()
    venv.Stamp(half_made).write()
    (half_made / "left over").touch()
    # the discard port of this machine: nothing listens there
    index = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    answer = set_up(checkout, **index)
    assert answer.returncode == 1
    assert "the package index could not be reached. Check the network" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (half_made / "left over").exists(), "it began anew"
    assert venv.Stamp(half_made).read() == "", "ours, and not ready"


def test_full_disk(checkout, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "cache"))
    monkeypatch.setattr(machine, "free_bytes", lambda path: 300_000_000)
    with pytest.raises(
        SetupError, match=r"is full: .* needs \d\.\d GB and 0\.3 GB are free\. Free some space"
    ):
        venv.prepare(checkout, Silent())
    assert not (checkout / ".venv").exists()


def test_free_bytes_of_a_path_to_be_made(tmp_path):
    assert machine.free_bytes(tmp_path / "not" / "yet") > 0


def test_another_environment_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    answer = set_up(checkout)
    assert answer.returncode == 1 and "move it away" in answer.stderr
    assert list((checkout / ".venv").iterdir()) == []


def test_old_python():
    machine.check_python((3, 10, 0))
    with pytest.raises(SetupError, match=r"Python 3\.9 is too old: install Python 3.10 or newer"):
        machine.check_python((3, 9, 18))


def test_no_venv_module(monkeypatch):
    machine.check_venv_module((3, 11))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"sudo apt-get install python3\.11-venv"):
        machine.check_venv_module((3, 11))


def test_a_compiler_without_cxx17(tmp_path, monkeypatch):
    compiler = tmp_path / "old-c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(SetupError, match=r"cannot compile C\+\+17: install g\+\+ 9 or newer"):
        machine.check_compiler()


def test_no_headers(tmp_path):
    folder = tmp_path / "python3.12"
    folder.mkdir()
    with pytest.raises(SetupError, match=r"sudo apt-get install python3\.12-dev"):
        machine.check_headers(str(folder))
    (folder / "Python.h").touch()
    machine.check_headers(str(folder))


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("error: externally-managed-environment", "Make a virtual environment"),
        ("/usr/bin/python3: No module named pip", "has no pip"),
        ("x.cc:1:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "HVD_ADAPTIVE_BUILD_JOBS=1"),
        (
            "WARNING: Retrying after NewConnectionError('[Errno -3] Temporary failure in name resolution')\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "the package index could not be reached",
        ),
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "pip finds no torch==2.13.0 for this Python",
        ),
        (
            "a.cc:3:1: error: no such type\na.cc:9:9: error: more\nmake: *** Error 1",
            "a.cc:3:1: error: no such type",
        ),
        ("Traceback:\n  File x\nValueError: a bad value\n", "it said: ValueError: a bad value"),
        ("", "it said: nothing."),
    ],
)
def test_failures_become_sentences(output, sentence):
    assert sentence in command.diagnose(output)


def test_a_failing_program_names_its_log(tmp_path):
    log = tmp_path / "logs" / "build.log"
    seen = []
    code = "print('one'); print('two'); raise SystemExit(3)"
    with pytest.raises(SetupError, match=rf"^Building failed: it said: two The whole output is in {log}"):
        command.run([sys.executable, "-c", code], "Building", log, on_line=seen.append)
    assert seen == ["one\n", "two\n"]
    assert log.read_text().endswith("one\ntwo\n")
    with pytest.raises(SetupError, match=r"^Building was ended by SIGTERM: run the same command again"):
        command.run(["sh", "-c", "kill -TERM $$"], "Building", log)
    with pytest.raises(SetupError, match=r"Building failed: .*No such file"):
        command.run([tmp_path / "absent"], "Building", log)


def test_settings_of_the_caller_do_not_leak(tmp_path, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", "--jobserver-auth=3,4")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    environment = command.clean_environment(tmp_path / "tmp")
    assert not {"MAKEFLAGS", "PYTHONPATH", "PIP_TARGET"} & set(environment)
    assert Path(environment["TMPDIR"]).is_dir()


# --- the CPU build of torch ------------------------------------------------------------------------------


def small_wheel(folder, version):
    """A wheel named torch with nothing in it but its version."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("offered", "installed", "said"),
    [
        (["2.13.0", "2.13.0+cpu"], "2.13.0+cpu", None),
        (["2.13.0"], "2.13.0", "Installing the CUDA build instead"),
    ],
)
def test_the_cpu_build_comes_first(tmp_path, monkeypatch, offered, installed, said):
    for version in offered:
        small_wheel(tmp_path, version)
    monkeypatch.setattr(venv, "_answers", lambda url: False)
    monkeypatch.setattr(venv.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "free_bytes", lambda path: 10**12)
    target = tmp_path / "target"
    reporter = Silent()
    # only this folder, whatever pip is told elsewhere
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    environment["PIP_FIND_LINKS"] = str(tmp_path)
    install = [sys.executable, "-m", "pip", "install", "--target", target]
    venv._install_torch(tmp_path, install, tmp_path / "log", environment, reporter)
    assert [path.name for path in target.iterdir()] == [f"torch-{installed}.dist-info"]
    assert [said in sentence for sentence in reporter.said] == ([True] if said else [])


def test_an_index_is_asked_only_if_it_answers():
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/whl"
        assert venv._answers(url)
        server.shutdown()
        thread.join()
    assert not venv._answers(url)
    assert not venv._answers("http://no-such-host.invalid/whl")


# --- the constraints agree with the project ---------------------------------------------------------------


def test_every_tool_of_the_project_is_pinned():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(x for extra in project["optional-dependencies"].values() for x in extra),
    ]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins[canonicalize_name(pin.name)] = pin
    elsewhere = {"hvd-adaptive", "torch", "tensorflow", "tf-keras"}  # pinned by set-up itself
    for requirement in map(Requirement, wanted):
        if requirement.name not in elsewhere:
            (pin,) = pins[canonicalize_name(requirement.name)].specifier
            assert requirement.specifier.contains(pin.version), requirement
    for name, version in (
        ("torch", venv.TORCH),
        ("tensorflow", venv.TENSORFLOW),
        ("tf-keras", venv.TENSORFLOW),
    ):
        (extra,) = (r for r in map(Requirement, wanted) if r.name == name)
        assert extra.specifier.contains(version), name
