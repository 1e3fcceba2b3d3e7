"""The ground we stand on: unmodified Horovod, built here, reduces and gathers on real ranks."""

import time

import numpy as np
import pytest


def torch_collectives():
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank = hvd.rank()
    reduced = hvd.allreduce(torch.arange(4.0) * (rank + 1), op=hvd.Sum, name="x")
    gathered = hvd.allgather(torch.full((rank + 1,), rank, dtype=torch.uint8), name="y")
    return reduced.numpy(), gathered.numpy()


def tensorflow_collectives():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank = hvd.rank()
    reduced = hvd.allreduce(tf.range(4.0) * (rank + 1), op=hvd.Sum, name="x")
    gathered = hvd.allgather(tf.fill([rank + 1], tf.cast(rank, tf.uint8)), name="y")
    return reduced.numpy(), gathered.numpy()


@pytest.mark.parametrize("worker", [torch_collectives, tensorflow_collectives])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(horovodrun, worker, size):
    run = horovodrun(worker, np=size)
    for reduced, gathered in run.results:
        np.testing.assert_array_equal(reduced, np.arange(4.0) * size * (size + 1) / 2)
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), np.arange(1, size + 1)))


def one_rank_fails(message):
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError(message)
    return hvd.rank()


def test_a_failing_rank_fails_the_run(horovodrun):
    run = horovodrun(one_rank_fails, "broken on purpose", np=2, check=False)
    assert run.returncode not in (0, None)
    assert run.results[1] is None
    assert "ValueError: broken on purpose" in run.output_of(1)


def sleeps():
    time.sleep(600)


def test_a_hanging_run_is_ended(horovodrun):
    assert horovodrun(sleeps, np=2, timeout=10, check=False).returncode is None
