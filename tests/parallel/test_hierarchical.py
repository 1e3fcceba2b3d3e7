"""Two hosts with two ranks each: dense inside, compressed between, the same model everywhere."""

import time

import pytest

TWO_HOSTS = "localhost:2,127.0.0.1:2"


def run_checks(*names, sets="dynamic"):
    import horovod.torch as hvd
    import torch
    import training

    torch.set_num_threads(1)
    hvd.init(process_sets=sets)
    return training.run(globals(), names)


def launch(horovodrun, *names, **options):
    run = horovodrun(run_checks, *names, timeout=280, **{"np": 4, "hosts": TWO_HOSTS, **options})
    assert run.results == [list(names)] * len(run.results)


class Sums:
    """Adds up what each parameter's gradients were and what was applied in their place."""

    def __init__(self, inner, model):
        import torch

        self.inner = inner
        self.parameters = dict(model.named_parameters())
        self.given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}

    def compress(self, tensor):
        (name,) = (name for name, p in self.parameters.items() if p.grad is tensor)
        self.given[name] += tensor.double()
        return self.inner.compress(tensor)

    def decompress(self, tensor, context):
        return self.inner.decompress(tensor, context)

    def check(self, applied, op):
        """applied = ``op`` over ranks of the gradients - ``op`` over hosts of the residuals."""
        import horovod.torch as hvd
        import torch

        kept = self.inner.residuals()
        held_back = 0.0
        for name, given in self.given.items():
            residual = kept.get(name, torch.zeros(given.numel())).double().view(given.shape)
            reduced = hvd.allreduce(given, name=f"given.{name}", op=op)
            residual = hvd.allreduce(residual, name=f"kept.{name}", op=hvd.Sum)  # of both hosts' speakers
            if op == hvd.Average:
                residual /= 2
            held_back += float(residual.abs().max())
            size = float(hvd.allreduce(given.abs().max(), name=f"size.{name}", op=hvd.Sum))
            torch.testing.assert_close(applied[name], reduced - residual, rtol=0, atol=1e-5 * (size + 1e-6))
        assert held_back > 0


def train(model, optimizer, steps, batches=None):
    """Train, and return the sum of the gradients that the optimizer applied."""
    import torch
    import training as t

    batches = batches or t.Batches()
    applied = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for _ in range(steps):
        optimizer.zero_grad()
        batches.loss(model).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            applied[name] += p.grad.double()
    return applied


def identity_and_replicas():
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.torch import Hierarchical, assert_replicas_equal

    for recipe, op, options in (
        ("topk", hvd.Average, {"ratio": 0.02}),
        ("adaptive", hvd.Sum, {"cost": t.LINK}),
        # a pattern of a tensor that one rank of a host speaks for
        ("topk", hvd.Average, {"ratio": 0.02, "overrides": {"2.weight": "sign"}}),
    ):
        model = t.network()
        compression = Hierarchical(recipe, model.named_parameters(), op=op, **options)
        sums = Sums(compression, model)
        optimizer = t.distributed(model, sums, process_set=compression.inside, op=op)
        applied = train(model, optimizer, 4)
        sums.check(applied, op)
        assert_replicas_equal(model)


def every_coordinate_is_dense_training():
    """With all coordinates sent, hierarchical training is Horovod's own, to rounding."""
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import Hierarchical

    dense, model = t.network(), t.network()
    train(dense, t.distributed(dense, hvd.Compression.none), 3)
    compression = Hierarchical("topk", model.named_parameters(), ratio=1.0)
    train(model, t.distributed(model, compression, process_set=compression.inside), 3)
    for p, q in zip(dense.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def hooks_in_another_order_on_every_rank():
    import horovod.torch as hvd
    import torch
    import training as t
    from torch import nn

    from hvd_adaptive.torch import Hierarchical, assert_replicas_equal

    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(40, 60) for _ in range(4))
    compression = Hierarchical("topk", model.named_parameters(), ratio=0.02)
    optimizer = t.distributed(model, compression, process_set=compression.inside)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 40)
        order = [(i + hvd.rank() + step) % 4 for i in range(4)]
        for i in order if step % 2 else order[:3]:  # and on every rank another layer is unused
            model[i](x).square().mean().backward()
        optimizer.step()
    assert_replicas_equal(model)


def half_precision():
    import torch
    import training as t

    from hvd_adaptive.torch import Hierarchical, assert_replicas_equal

    for dtype in (torch.bfloat16, torch.float64):
        model = t.network(dtype=dtype)
        compression = Hierarchical("topk", model.named_parameters(), ratio=0.05)
        optimizer = t.distributed(model, compression, process_set=compression.inside)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 2, t.Batches(dtype=dtype))
        assert all(p.dtype == dtype for p in model.parameters())
        assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert_replicas_equal(model)


def resuming_is_bit_identical():
    import copy

    import training as t

    from hvd_adaptive.torch import Hierarchical

    def fresh():
        model = t.network()
        compression = Hierarchical("topk", model.named_parameters(), ratio=0.02)
        return model, compression, t.distributed(model, compression, process_set=compression.inside)

    model, compression, optimizer = fresh()
    batches = t.Batches()
    train(model, optimizer, 3, batches)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), compression.state_dict()))
    later = copy.deepcopy(batches)
    train(model, optimizer, 3, batches)
    other, again, another = fresh()
    for part, state in zip((other, another, again), saved, strict=True):
        part.load_state_dict(state)
    train(other, another, 3, later)
    assert t.same(model, other)


def refusals():
    import horovod.torch as hvd
    import torch
    import training as t
    from torch import nn

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.core.recipe import topk
    from hvd_adaptive.torch import Hierarchical

    model = t.network()
    with t.raises(ConfigurationError, "op=", "Average"):
        Hierarchical("topk", model.named_parameters(), op=hvd.Adasum)
    with t.raises(ConfigurationError, "ratio", "option of a recipe's name"):
        Hierarchical(topk(0.1), model.named_parameters(), ratio=0.1)

    compression = Hierarchical("topk", model.named_parameters())
    wrong = t.distributed(model, compression)
    with t.raises(ConfigurationError, "process_set=compression.inside"):
        train(model, wrong, 1)
    model = t.network()
    compression = Hierarchical("topk", model.named_parameters(), op=hvd.Sum)
    wrong = t.distributed(model, compression, prefix="op.", process_set=compression.inside)
    with t.raises(ConfigurationError, "op="):
        train(model, wrong, 1)

    embedding = nn.Embedding(50, 40, sparse=True)
    compression = Hierarchical("topk", embedding.named_parameters())
    optimizer = t.distributed(
        embedding, compression, torch.optim.SGD(embedding.parameters(), 0.1), process_set=compression.inside
    )
    embedding(torch.tensor([1, 2])).sum().backward()
    with t.raises(ConfigurationError, "sparse"):
        optimizer.step()


def without_dynamic_process_sets():
    import training as t

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.torch import Hierarchical

    with t.raises(ConfigurationError, 'hvd.init(process_sets="dynamic")'):
        Hierarchical("topk", t.network().named_parameters())


def one_host_is_dense():
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.torch import Hierarchical

    dense, model = t.network(), t.network()
    train(dense, t.distributed(dense, hvd.Compression.none), 3)
    compression = Hierarchical("topk", model.named_parameters())
    train(model, t.distributed(model, compression, process_set=compression.inside), 3)
    assert t.same(dense, model)


def one_rank_per_host():
    import training as t

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.torch import Hierarchical

    with t.raises(ConfigurationError, "two or more ranks per host"):
        Hierarchical("topk", t.network().named_parameters())


def test_training(horovodrun):
    launch(
        horovodrun,
        "identity_and_replicas",
        "every_coordinate_is_dense_training",
        "hooks_in_another_order_on_every_rank",
        "half_precision",
        "resuming_is_bit_identical",
    )


def test_refusals(horovodrun):
    launch(horovodrun, "refusals")


def the_other_host_is_slow():
    """Nobody waits after the last step, and who leaves first must not end it for the other host."""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.torch import Hierarchical, hierarchical

    model = t.network()
    compression = Hierarchical("topk", model.named_parameters())
    optimizer = t.distributed(model, compression, process_set=compression.inside)
    train(model, optimizer, 1)
    if hvd.rank() >= 2:
        wire = hierarchical._wire
        hierarchical._wire = lambda tensor: time.sleep(0.5) or wire(tensor)
    train(model, optimizer, 1)


def test_the_last_step_of_a_slow_host_is_waited_for(horovodrun):
    launch(horovodrun, "the_other_host_is_slow")


def test_other_shapes_of_a_cluster(horovodrun):
    launch(horovodrun, "one_host_is_dense", np=2, hosts="localhost:2")
    launch(horovodrun, "one_rank_per_host", np=2, hosts="localhost:1,127.0.0.1:1")


def test_process_sets_must_be_dynamic(horovodrun):
    launch(horovodrun, "without_dynamic_process_sets", sets=None)


STEPS = 6


def bits_between_hosts(mode):
    """Bits of payload that this rank sent to other hosts, in all steps."""
    import horovod.torch as hvd
    import torch
    import training as t
    from torch import nn

    from hvd_adaptive.torch import Compression, Hierarchical, assert_replicas_equal

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 2000), nn.Tanh(), nn.Linear(2000, 2000), nn.Tanh(), nn.Linear(2000, 1)
    )
    named = list(model.named_parameters())
    if mode == "flat":
        compression = Compression.topk(named, ratio=0.05)
        optimizer = t.distributed(model, compression)
    else:
        compression = Hierarchical("topk", named, ratio=0.05)
        optimizer = t.distributed(model, compression, process_set=compression.inside)
    train(model, optimizer, STEPS)
    assert_replicas_equal(model)
    statistics = compression.statistics()
    return 0 if statistics is None else statistics.total.bits_sent


def test_bits_between_hosts_shrink_by_the_ranks_per_host(over_links):
    import hosts  # not on the ranks, which import this module too

    if lack := hosts.missing():
        pytest.skip(lack)
    sent, carried = {}, {}
    with hosts.Hosts(2) as pair:
        for mode in ("flat", "hierarchical"):
            before = pair.sent(0) + pair.sent(1)
            sent[mode] = sum(over_links(pair, bits_between_hosts, mode))
            carried[mode] = pair.sent(0) + pair.sent(1) - before
    # two ranks per host: half of the bits, as the ranks count them; biases and ballots go dense
    assert sent["flat"] / sent["hierarchical"] == pytest.approx(2, rel=0.05)
    # on the links too, where headers, start-up and Horovod's own talk come to the same on both sides
    assert carried["flat"] > 1.8 * carried["hierarchical"]
