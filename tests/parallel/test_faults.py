"""What goes wrong in the middle of training: what every rank sees, and that nothing is lost but time.

Each fault happens on rank 1 in step 5, in a job of its own.  Afterwards every job is resumed from its
last complete checkpoint, and must end as a job without the fault does, bit for bit.  ``pytest -rP``
prints what the ranks saw and after how many seconds.  HVD_ADAPTIVE_STOP: for how many seconds the
rank is stopped that goes on by itself (2).
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

STEPS, FAULT = 8, 5
FAULTS = ["kill", "corrupt", "memory", "disk", "stop", "raise"]
if not os.environ.get("HVD_ADAPTIVE_EVERY_FAULT"):  # each is a launch
    FAULTS = ["kill", "corrupt", "memory"]


def _network(fault):
    import torch

    torch.manual_seed(0)
    width = 5000 if fault == "memory" else 60  # 40 MB, which no freed memory can serve
    return torch.nn.Sequential(
        torch.nn.Linear(2000 if fault == "memory" else 40, width), torch.nn.Linear(width, 3)
    )


def _fail(fault, seconds):
    """Called while the last gradient of a step is made, others being under way."""
    import resource
    import signal
    import subprocess

    import horovod.torch as hvd

    if fault == "raise":
        raise RuntimeError("a planted error")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "link":  # the test sees that it is time to pull the cable, and does
        time.sleep(5)
    if fault == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "memory":
        import psutil

        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    if fault == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    if fault == "corrupt":
        original = hvd.allgather_async

        def flipped(words, **options):
            words = words.clone()
            words[-1] ^= 1 << 20
            return original(words, **options)

        hvd.allgather_async = flipped


def _save(folder, step, **parts):
    """Whole or not at all: a file appears under its name once it is complete."""
    import horovod.torch as hvd
    import torch

    path = f"{folder}/{hvd.rank()}-{step}.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}.part")
    os.replace(f"{path}.part", path)


def _complete(folder):
    """The newest step that every rank has saved; 0 for none."""
    import horovod.torch as hvd

    ranks = range(hvd.size())
    return max((s for s in range(1, 99) if all((folder / f"{r}-{s}.pt").exists() for r in ranks)), default=0)


def _train(folder, fault, *, plant, seconds=2):
    import hashlib

    import horovod.torch as hvd
    import torch
    import training as t

    folder = Path(folder) / fault
    folder.mkdir(exist_ok=True)
    hvd.barrier()
    model = _network(fault)
    compressor = t.Compression.topk(model, 0.01)
    optimizer = t.distributed(model, compressor, prefix=f"{fault}.")
    parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
    begin, batches = _complete(folder), t.Batches()
    if begin:
        state = torch.load(folder / f"{hvd.rank()}-{begin}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    width = model[0].in_features
    step = 0

    def hook(gradient):
        if plant and step == FAULT and hvd.rank() == 1:
            (folder / "began").write_text(repr(time.time()))
            _fail(fault, seconds)

    model[0].weight.register_hook(hook)
    for step in range(STEPS):
        loss = batches.loss(model, width)  # the data goes on where it was
        if step < begin:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fault != "memory" or step + 1 in (4, STEPS):  # files of 120 MB
            _save(folder, step + 1, **parts)
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *compressor.residuals().values()]:
        digest.update(tensor.detach().numpy().tobytes())
    return begin, digest.hexdigest()


def suffer(folder, fault, seconds):
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    try:
        return _train(folder, fault, plant=True, seconds=seconds)
    except BaseException as error:
        said = {"error": type(error).__name__, "text": str(error)[:300], "at": time.time()}
        (Path(folder) / f"{fault}-{rank}.json").write_text(json.dumps(said))
        raise


def resume(folder, straight, faults):
    """Without the fault from the start, and from where a job with it broke off."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    return {
        fault: (_train(straight, fault, plant=False), _train(folder, fault, plant=False)) for fault in faults
    }


@pytest.mark.timeout(1200)
def test_every_rank_sees_it_and_a_restart_equals_a_run_without(horovodrun, tmp_path):
    """T32."""
    seconds = int(os.environ.get("HVD_ADAPTIVE_STOP", "2"))
    for fault in FAULTS:
        run = horovodrun(suffer, str(tmp_path), fault, seconds, np=2, timeout=150 + seconds, check=False)
        assert run.returncode is not None, f"{fault}: a rank hangs\n{run.output[-4000:]}"
        seen = _said(tmp_path, fault)
        if fault == "stop":
            assert run.returncode == 0 and not seen
            continue
        assert run.returncode != 0, fault
        assert (1 in seen) == (fault != "kill"), fault
        # Horovod ends the job on the ranks that are well.
        assert seen[0]["error"] == ("MessageError" if fault == "corrupt" else "HorovodInternalError"), fault
        text = {"raise": "a planted error", "corrupt": "is corrupt", "memory": "alloc"}.get(fault, "")
        assert fault == "kill" or text in seen[1]["text"].lower(), seen[1]
    straight = tmp_path / "straight"
    straight.mkdir()
    found = horovodrun(resume, str(tmp_path), str(straight), FAULTS, np=2, timeout=200).results
    for rank, of_rank in enumerate(found):
        for fault in FAULTS:
            (zero, expected), (begin, resumed) = of_rank[fault]
            assert zero == 0
            assert begin == {"stop": STEPS, "memory": 4}.get(fault, FAULT), (fault, begin)
            assert resumed == expected, (fault, rank)


def _said(folder, fault):
    """What the ranks saw, by rank; printed for ``pytest -rP``."""
    began = float((folder / fault / "began").read_text())
    seen = {}
    for rank in range(2):
        path = folder / f"{fault}-{rank}.json"
        if path.exists():
            seen[rank] = said = json.loads(path.read_text())
            print(f"{fault}: rank {rank}, {said['at'] - began:.2f} s: {said['error']}: {said['text'][:110]}")
    return seen


def test_a_link_that_is_cut_ends_the_job_and_a_restart_equals_a_run_without(horovodrun, tmp_path):
    """T32."""
    import hosts  # which the ranks do not have

    if hosts.missing():
        pytest.skip(hosts.missing())
    script = tmp_path / "suffer.py"
    workers = Path(__file__).parent / "workers"
    script.write_text(
        f"import importlib.util, sys\nsys.path[:0] = {[str(workers), str(Path(hosts.__file__).parent)]!r}\n"
        f"spec = importlib.util.spec_from_file_location('worker', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        f"module.suffer({str(tmp_path)!r}, 'link', 0)\n"
    )
    with hosts.Hosts(2) as pair:
        words, options = [sys.executable, script], ["--gloo-timeout-seconds", "10"]
        environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        process = pair.start_horovodrun(words, options=options, env=environment)
        until = time.monotonic() + 120
        while not (tmp_path / "link" / "began").exists():
            assert process.poll() is None and time.monotonic() < until, process.stdout.read()
            time.sleep(0.1)
        pair.cut(1)
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0, output
    seen = _said(tmp_path, "link")
    assert seen[0]["error"] == "HorovodInternalError", output
    straight = tmp_path / "straight"
    straight.mkdir()
    for found in horovodrun(resume, str(tmp_path), str(straight), ["link"]).results:
        (zero, expected), (begin, resumed) = found["link"]
        assert (zero, begin) == (0, FAULT)
        assert resumed == expected


def one_group_member_unused():
    """A parameter that got a gradient on one rank only, in a group, without any compression of ours."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), groups=1
    )
    x = torch.ones(1, 4)
    (model[0](x) + (model[1](x) if hvd.rank() else 0)).sum().backward()
    optimizer.step()


def test_a_group_that_is_not_complete_hangs_in_horovod_itself(horovodrun):
    """T41b."""
    run = horovodrun(one_group_member_unused, np=2, timeout=25, check=False)
    assert run.returncode is None and run.results == [None, None]  # it ran past its time, on both ranks
