"""Links measured between real ranks: at the start of training, and by ``hvd-adaptive calibrate``."""

import json

import numpy as np

from hvd_adaptive.core import link as links
from hvd_adaptive.core.recipe import adaptive


def train_torch(steps):
    import horovod.torch as hvd
    import torch

    from hvd_adaptive.torch import Compression, assert_replicas_equal

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    compression = Compression.adaptive(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    torch.manual_seed(hvd.rank())
    reasons = set()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        reasons.add(compression.statistics().reason.split(":")[0])
    assert_replicas_equal(model)
    (link,) = links._known.values()
    return link, reasons


def train_tensorflow(steps):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    hvd.init()
    tf.random.set_seed(0)
    weights = tf.Variable(tf.random.normal([64, 64]))
    compression = Compression.adaptive()
    tf.random.set_seed(hvd.rank())

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.random.normal([8, 64]) @ weights))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])

    reasons = set()
    for _ in range(steps):
        step()
        reasons.add(compression.statistics().reason.split(":")[0])
    (link,) = links._known.values()
    return link, reasons, weights.numpy()


def check(link, reasons):
    assert link.world_size == 2
    assert link.allgather.per_byte > 0 and link.allreduce.per_byte > 0
    assert reasons <= {"first step", "sparse", "dense", "a sparse step, to compare it with dense ones"}
    assert reasons & {"sparse", "dense"}


def test_torch_measures_the_link_and_all_ranks_reckon_alike(horovodrun):
    run = horovodrun(train_torch, 60, np=2)
    (link, reasons), other = run.results
    check(link, reasons)
    assert (link, reasons) == other


def test_tensorflow_measures_the_link_and_all_ranks_reckon_alike(horovodrun):
    run = horovodrun(train_tensorflow, 40, np=2)
    (link, reasons, weights), (link2, reasons2, weights2) = run.results
    check(link, reasons)
    assert (link, reasons) == (link2, reasons2)
    np.testing.assert_array_equal(weights, weights2)


SCRIPT = """
import sys
import horovod.torch as hvd
import torch
from hvd_adaptive.torch import Compression
assert sys.argv == [__file__, "--anything"], sys.argv
hvd.init()
model = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=Compression.topk(model.named_parameters()),
)
while True:
    optimizer.zero_grad()
    try:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    except Exception:
        pass
"""


def run_calibrate(folder):
    from click.testing import CliRunner

    from hvd_adaptive.cli.calibrate import calibrate

    options = ["--repeats", "3", "--longest", "0.05", "--json", f"{folder}/link.json"]
    result = CliRunner().invoke(
        calibrate, [*options, f"{folder}/train.py", "--anything"], catch_exceptions=False
    )
    return result.exit_code, result.output


def test_calibrate_writes_what_adaptive_reads(horovodrun, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = horovodrun(run_calibrate, str(tmp_path), np=2)
    (code, said), (other, nothing) = run.results
    assert code == other == 0 and nothing == ""
    assert "allgather" in said and "link.json" in said
    document = json.loads((tmp_path / "link.json").read_text())
    assert document["world_size"] == 2 and document["compute"] > 0
    cost = adaptive(cost=str(tmp_path / "link.json")).adaptive.cost
    assert cost.compute == document["compute"]
