"""Elastic jobs: ranks are killed in the middle of a step, the others go on, new ones come.

``HVD_ADAPTIVE_KILLS=10 pytest tests/parallel/test_elastic.py -k torch`` kills ten in one job.
"""

import json
import os
import stat

import numpy as np
import pytest

# One machine under several names: Horovod gives up a host on which a rank has failed.
HOSTS = [
    *("127.0.0.1", "localhost", "127.1", "127.0.1", "2130706433", "0x7f.1", "0177.1", "0x7f000001"),
    *("127.0x0.1", "127.0x1", "0x7f.0.1", "0177.0.1", "127.00.1", "127.01", "0x7f.0x1", "0177.0x1"),
]


def discover(folder, hosts):
    """A discovery script, and the file that it reads."""
    (folder / "hosts").write_text("".join(f"{host}:1\n" for host in hosts))
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*"))]


def elastic_torch(folder, steps, kills, hosts):
    """Trains; at each step in ``kills`` the last rank ends itself in the middle of the backward pass, and
    a new host is found."""
    import logging
    import signal
    import time
    from pathlib import Path

    import horovod.torch as hvd
    import torch
    from horovod.torch import elastic

    from hvd_adaptive.torch import Compression, assert_replicas_equal
    from hvd_adaptive.torch.elastic import ElasticState

    torch.set_num_threads(1)
    logging.basicConfig()
    hvd.init()
    torch.manual_seed(os.getpid())  # a newcomer's own weights must not count
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
    compressor = Compression.topk(model, 0.02)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    generator = torch.Generator().manual_seed(os.getpid())
    held, sizes, committed = [], [], {}

    def end():
        folder_ = Path(folder)
        for number, step in enumerate(kills):
            marker = folder_ / f"killed-{number}"
            last = hvd.rank() == hvd.size() - 1 and hvd.size() > 1
            if state.step == step and last and not marker.exists():
                marker.touch()
                with (folder_ / "hosts").open("a") as file:
                    file.write(f"{hosts[number]}:1\n")
                os.kill(os.getpid(), signal.SIGKILL)

    model[0].weight.register_hook(lambda g: end())  # the last gradient: the others are under way

    @elastic.run
    def train(state):
        residuals = compressor.residuals()
        for name, residual in committed.items():
            assert torch.equal(residual, residuals[name])  # as of the last commit, and this rank's own
        norm = sum(float(r.square().sum()) for r in residuals.values()) ** 0.5
        held.append([state.step, norm, hvd.rank()])
        while state.step < steps:
            waited = time.monotonic()
            while hvd.size() < 2 and time.monotonic() - waited < 60:  # alone: wait for the newcomer
                state.commit()
                time.sleep(0.2)
            optimizer.zero_grad()
            x = torch.randn(8, 40, generator=generator)
            (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
            optimizer.step()
            state.step += 1
            sizes.append(hvd.size())
            committed.update({name: r.clone() for name, r in compressor.residuals().items()})
            state.commit()
        assert_replicas_equal(model)
        assert compressor.statistics().step >= 1

    state = ElasticState(model=model, optimizer=optimizer, compression=compressor, step=0)
    train(state)
    report = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "held": held,
        "sizes": sizes,
        "step": compressor.statistics().step,
        "changes": [[c.stayed, c.came, c.lost, c.norm] for c in state.changes],
        "weights": [float(p.double().sum()) for p in model.parameters()],
        "residual": float(sum(r.square().sum() for r in compressor.residuals().values())),
    }
    (Path(folder) / f"report-{hvd.rank()}-{os.getpid()}").write_text(json.dumps(report))


KILLS = int(os.environ.get("HVD_ADAPTIVE_KILLS", "2"))


@pytest.mark.timeout(200 * KILLS)
def test_torch_ranks_are_killed_and_others_come(horovodrun, tmp_path):
    """T60, T61. (T25)"""
    script = discover(tmp_path, HOSTS[:2])
    run = horovodrun(
        elastic_torch,
        *(str(tmp_path), 5 * KILLS + 4, [5 * number + 4 for number in range(KILLS)], HOSTS[2:]),
        np=2,
        discovery=script,
        timeout=100 * KILLS,
    )
    found = reports(tmp_path)
    assert len(found) == 2, run.output[-6000:]
    assert len(list(tmp_path.glob("killed-*"))) == KILLS
    first, second = sorted(found, key=lambda r: -len(r["changes"]))
    assert first["weights"] == second["weights"]
    assert first["step"] == second["step"] == 5 * KILLS + 4
    # Who was there from the start met the others three times or more, and lost one rank each time.
    assert sum(lost for _, _, lost, _ in first["changes"]) == KILLS
    assert sum(came for _, came, _, _ in first["changes"]) >= 2 + KILLS  # both at the start, the rest later
    assert all((norm > 0) == (lost > 0) for _, _, lost, norm in first["changes"])
    # A survivor goes on with what it held; a newcomer begins with nothing.
    assert [norm > 0 for step, norm, _ in first["held"]] == [step > 0 for step, _, _ in first["held"]]
    assert second["held"][0][0] > 0 and second["held"][0][1] == 0
    assert first["residual"] > 0 and second["residual"] > 0
    assert "residuals of a norm of about" in run.output


def elastic_keras(folder, steps, kill, host):
    """As above, with Keras 3 and one kill."""
    import signal
    import time
    from pathlib import Path

    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_adaptive.keras import Compression, DistributedOptimizer
    from hvd_adaptive.tensorflow.elastic import ElasticState

    hvd.init()
    keras.utils.set_random_seed(os.getpid())
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60, "tanh"), keras.layers.Dense(30)])
    compressor = Compression.topk(ratio=0.05)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), compressor)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(os.getpid())
    held = []

    def residual():
        return float(sum(tf.reduce_sum(r**2) for r in compressor.residuals().values()))

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            marker = Path(folder) / "killed-0"
            if state.step == kill and hvd.size() == 2 and hvd.rank() == 1 and not marker.exists():
                marker.touch()
                with (Path(folder) / "hosts").open("a") as file:
                    file.write(f"{host}:1\n")
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state):
        held.append([state.step, residual()])
        while state.step < steps:
            began = time.monotonic()
            while hvd.size() < 2 and time.monotonic() - began < 60:
                state.commit()
                time.sleep(0.2)
            x = rng.normal(size=(8, 40)).astype(np.float32)
            model.fit(x, x[:, :30], batch_size=8, epochs=1, verbose=0, callbacks=[Kill()])
            state.step += 1
            state.commit()

    state = ElasticState(model, compression=compressor, step=0)
    train(state)
    report = {
        "held": held,
        "step": compressor.statistics().step,
        "changes": [[c.stayed, c.came, c.lost, c.norm] for c in state.changes],
        "weights": [float(np.asarray(w, np.float64).sum()) for w in model.get_weights()],
        "momenta": [float(np.asarray(v, np.float64).sum()) for v in optimizer.variables],
    }
    (Path(folder) / f"report-{hvd.rank()}-{os.getpid()}").write_text(json.dumps(report))


@pytest.mark.timeout(400)
def test_a_keras_rank_is_killed_and_another_comes(horovodrun, tmp_path):
    """T60, T61."""
    pytest.importorskip("tensorflow")
    run = horovodrun(
        elastic_keras,
        *(str(tmp_path), 10, 4, HOSTS[2]),
        np=2,
        discovery=discover(tmp_path, HOSTS[:2]),
        timeout=250,
        env={"TF_USE_LEGACY_KERAS": "0"},
    )
    found = reports(tmp_path)
    assert len(found) == 2, run.output[-6000:]
    assert (tmp_path / "killed-0").exists()
    first, second = sorted(found, key=lambda r: -len(r["changes"]))
    assert first["weights"] == second["weights"] and first["momenta"] == second["momenta"]
    assert first["step"] == second["step"] == 10
    assert sum(lost for _, _, lost, _ in first["changes"]) == 1
    assert [norm > 0 for step, norm in first["held"]] == [step > 0 for step, _ in first["held"]]
    assert second["held"][0][0] > 0 and second["held"][0][1] == 0
