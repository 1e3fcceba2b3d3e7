"""What is asked of Horovod: its public interface, late, and in the version that was tried."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hvd_adaptive"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_interface_is_that_of_the_installed_horovod():
    """T7."""
    hvd = pytest.importorskip("horovod.torch")
    from hvd_adaptive.torch import Compressor

    for method in ("compress", "decompress"):
        theirs = list(inspect.signature(getattr(hvd.Compression.none, method)).parameters)
        ours = list(inspect.signature(getattr(Compressor, method)).parameters)
        assert ours == ["self", *theirs]
    assert {"compression", "op", "groups", "process_set", "gradient_predivide_factor"} <= set(
        inspect.signature(hvd.DistributedOptimizer).parameters
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_public_names_of_horovod_are_used_and_none_is_changed(path):
    """T69, T70, T84."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hvd":
            assert not node.attr.startswith("_"), f"line {node.lineno}: hvd.{node.attr}"
            assert isinstance(node.ctx, ast.Load), f"line {node.lineno}: hvd.{node.attr} is set"
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.split(".")[0] == "horovod":
                assert not any(part.startswith("_") for part in module.split("."))
                assert ".keras" not in module  # whose names have come and gone


def run(code, folder):
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": f"{folder}:{PACKAGE.parent}", "PATH": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize(
    "version, module, said",
    [
        ("0.21.0", "", "it is Horovod 0.21.0"),
        ("0.29.1", "", "it is Horovod 0.29.1"),
        ("0.28.1", "raise ImportError('Extension horovod.torch has not been built')", "has not been built"),
        (None, "", "No module named 'horovod'"),
    ],
)
def test_another_or_no_horovod_is_refused_with_the_remedy(tmp_path, version, module, said):
    """T8, T9, T10."""
    code = "import hvd_adaptive; from hvd_adaptive.horovod import load; load('torch')"
    if version is None:
        code = "import sys; sys.modules['horovod'] = None; " + code
        said = "import of horovod halted"
    else:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (tmp_path / "horovod" / "torch.py").write_text(module)
    error = run(code, tmp_path)
    assert said in error
    assert "horovod.torch of version 0.28.1 cannot be imported" in error
    assert "hvd-adaptive horovod install" in error


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_that_is_read_from_a_file_can_run(path):
    """No pickle, no eval, and torch loads tensors and plain values only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(names)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in ("eval", "exec", "os.system")
            if called == "torch.load":
                assert options.get("weights_only") == "True"
            if called in ("np.load", "numpy.load"):
                assert options.get("allow_pickle", "False") == "False"
