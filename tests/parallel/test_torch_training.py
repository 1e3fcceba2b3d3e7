"""The torch plug-in under unmodified Horovod: every way in which an optimizer can be set up."""

import pytest


def run_checks(*names, sets=()):
    import horovod.torch as hvd
    import torch
    import training

    torch.set_num_threads(1)
    training.SETS += [hvd.ProcessSet(ranks) for ranks in sets]
    hvd.init(process_sets=training.SETS)
    return training.run(globals(), names)


def launch(horovodrun, names, np, **options):
    run = horovodrun(run_checks, *names, np=np, timeout=280, **options)
    assert run.results == [list(names)] * np


def reductions():
    """T1, T16, T76."""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk", "lowrank", "adaptive"):
        for op, predivide in ((hvd.Average, 1.0), (hvd.Average, 4.0), (hvd.Average, 3.0), (hvd.Sum, 1.0)):
            model = t.network()
            recording, _ = t.recorded(model, recipe)
            optimizer = t.distributed(model, recording, op=op, gradient_predivide_factor=predivide)
            t.train(model, optimizer, t.Batches(), 4)
            recording.check(hvd.size() if op == hvd.Sum else 1.0)
            assert_replicas_equal(model)


def groups():
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk"):
        for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-5)):
            for form in (1, 2, "list"):
                model = t.network(dtype=dtype)
                recording, _ = t.recorded(model, recipe)
                parameters = list(model.parameters())
                groups = [parameters[:2], parameters[3:]] if form == "list" else form
                optimizer = t.distributed(model, recording, groups=groups)
                t.train(model, optimizer, t.Batches(dtype=dtype), 3)
                recording.check(rounding=rounding)
                assert_replicas_equal(model)


def several_backward_passes():
    """T42."""
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    model = t.network()
    recording, compressor = t.recorded(model)
    optimizer = t.distributed(model, recording, backward_passes_per_step=3)
    batches = t.Batches()
    for passes in (3, 3, 2, 3):  # the third window ends early
        optimizer.zero_grad()
        for _ in range(passes):
            batches.loss(model).backward()
        optimizer.step()
    assert set(recording.calls.values()) == {4}
    assert compressor.statistics().step == 4
    recording.check()
    assert_replicas_equal(model)


def clipping_between_synchronize_and_step():
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    model = t.network()
    recording, _ = t.recorded(model, "adaptive")
    optimizer = t.distributed(model, recording)
    batches = t.Batches()
    for _ in range(4):
        optimizer.zero_grad()
        batches.loss(model).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        with optimizer.skip_synchronize():
            optimizer.step()
    assert set(recording.calls.values()) == {4}
    recording.check()
    assert_replicas_equal(model)


def zeroed_or_absent_gradients():
    """T6, T17. (T53)"""
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    model = t.network()
    recording, _ = t.recorded(model, "topk int8")
    optimizer = t.distributed(model, recording)
    batches = t.Batches()
    for to_none in (True, False, True, False):
        model.zero_grad(set_to_none=to_none)
        before = {name: r.clone() for name, r in recording.inner.residuals().items()}
        for name, r in recording.inner.residuals().items():  # clearing gradients clears no residual
            assert bool((r == before[name]).all())
        batches.loss(model).backward()
        optimizer.step()
    recording.check()
    assert_replicas_equal(model)


def unused_parameters_in_any_order():
    """Ranks use other branches, in another order; one is never used, one is frozen. (T30, T40, T41b)"""
    import random

    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk", "lowrank", "adaptive", "sign"):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(40, 40) for name in "abcdef"})
        model["f"].requires_grad_(False)
        recording, compressor = t.recorded(model, recipe)
        optimizer = t.distributed(model, recording)
        choice = random.Random(hvd.rank())
        generator = torch.Generator().manual_seed(hvd.rank())
        for step in range(8):
            used = choice.sample("abcd", step % 4 + 1)
            optimizer.zero_grad()
            x = torch.randn(8, 40, generator=generator)
            sum(model[name](x * (number + 1)).square().mean() for number, name in enumerate(used)).backward()
            optimizer.step()
        recording.check()
        assert_replicas_equal(model)
        calls = {name: recording.calls[f"{name}.weight"] for name in "abcdef"}
        assert calls == {**dict.fromkeys("abcde", 8), "f": 0}
        assert compressor.statistics().step == 8
        assert not recording.applied["e.weight"].any()


def gradients_of_any_type():
    """T21."""
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for dtype, rounding in ((torch.float16, 0.01), (torch.bfloat16, 0.05), (torch.float64, 1e-5)):
        for recipe in ("topk", "randk", "sign", "adaptive"):
            model = t.network(dtype=dtype)
            recording, compressor = t.recorded(model, recipe)
            optimizer = t.distributed(model, recording)
            t.train(model, optimizer, t.Batches(dtype=dtype), 4)
            assert all(p.grad.dtype == dtype for p in model.parameters())
            assert {r.dtype for r in compressor.residuals().values()} == {torch.float32}
            recording.check(rounding=rounding)
            assert_replicas_equal(model)


def sparse_gradients():
    """Left to Horovod as they are, or made dense by it and then compressed. (T56, T58)"""
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import Compression, assert_replicas_equal

    def network():
        torch.manual_seed(1)
        return torch.nn.ModuleDict(
            {
                "left": torch.nn.Embedding(100, 20, sparse=True),
                "right": torch.nn.Embedding(100, 20, sparse=True),
                "head": torch.nn.Linear(20, 1),
            }
        )

    def different(net, step):
        left, right = torch.tensor([2, 5, step]), torch.tensor([90, 91])
        return net["head"](net["left"](left)).sum() + 3 * net["head"](net["right"](right)).sum()

    def equal(net, step):  # two gradients of one shape with the same values, and later with none
        index = torch.tensor([1, 5, 5, 7])
        both = net["left"](index) + net["right"](index) if step < 4 else torch.ones(1, 20)
        return net["head"](both).square().sum()

    def both_used(net, step):
        index = torch.tensor([hvd.rank(), 3, 3])
        return net["head"](net["left"](index) + net["right"](index + step)).square().sum()

    # Horovod cannot know that an absent gradient would be sparse, so without sparse_as_dense all are used.
    for as_dense, losses in (
        (True, (equal, different)),
        (True, (different, equal)),
        (False, (both_used,) * 2),
    ):
        made = []
        for ours in (False, True):
            net = network()
            compressor = Compression.topk(net, ratio=1.0, dense_below=0)  # sends all, so it changes no bit
            optimizer = t.distributed(
                net,
                compressor if ours else hvd.Compression.none,
                torch.optim.SGD(net.parameters(), lr=0.1),
                sparse_as_dense=as_dense,
            )
            for step in range(6):
                # An absent gradient would be dense on this rank alone, and dense and sparse updates round
                # differently: where one is unused, it stays as a sparse zero.
                net.zero_grad(set_to_none=step < 4)
                losses[hvd.rank()](net, step).backward()
                optimizer.step()
            assert_replicas_equal(net, name=f"{as_dense} {ours}")
            made.append(net)
        assert t.same(*made)
        assert compressor.statistics().step == 6


def two_models_and_equal_names():
    """T13."""
    import training as t

    from hvd_adaptive.torch import Compression, assert_replicas_equal

    one, two = t.network(1), t.network(2)
    a, b = t.recorded(one, "topk"), t.recorded(two, "adaptive")
    first, second = t.distributed(one, a[0]), t.distributed(two, b[0])
    batches = t.Batches()
    for _ in range(4):
        t.train(one, first, batches, 1)
        t.train(two, second, batches, 1)
    for (recording, compressor), model in ((a, one), (b, two)):
        recording.check()
        assert compressor.statistics().step == 4
        assert_replicas_equal(model)
    # Alone, the first would have come to the same: nothing is shared.
    alone = t.network(1)
    optimizer = t.distributed(alone, Compression.topk(alone.named_parameters(), 0.02))
    batches = t.Batches()
    for _ in range(4):
        t.train(alone, optimizer, batches, 1)
        batches.loss(two)
    assert t.same(alone, one)


def one_compressor_over_two_optimizers():
    """As for a GAN: one steps more often, and both are under way at once, with unused parameters. (T13)"""
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "adaptive", "randk"):
        torch.manual_seed(0)
        both = torch.nn.ModuleDict(
            {
                "maker": torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(3)]),
                "judge": torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(3)]),
            }
        )
        recording, _ = t.recorded(both, recipe)
        maker, judge = (
            hvd.DistributedOptimizer(
                torch.optim.Adam(both[part].parameters(), lr=1e-3),
                named_parameters=[(f"{part}.{n}", p) for n, p in both[part].named_parameters()],
                compression=recording,
            )
            for part in ("maker", "judge")
        )
        generator = torch.Generator().manual_seed(hvd.rank())

        def loss(part, skip, both=both, generator=generator):
            x = torch.randn(8, 40, generator=generator)
            return sum(m(x).square().mean() for number, m in enumerate(both[part]) if number != skip)

        for step in range(5):
            maker.zero_grad()
            judge.zero_grad()
            loss("maker", None).backward()
            # On each rank another layer, of one shape, is compressed only in judge.step().
            loss("judge", (hvd.rank() + step) % 3).backward()
            maker.step()
            judge.step()
            for _ in range(2):
                judge.zero_grad()
                loss("judge", hvd.rank() % 3).backward()
                judge.step()
        recording.check()
        assert recording.calls["maker.0.weight"] == 5 and recording.calls["judge.0.weight"] == 15
        assert_replicas_equal(both)


def overrides_and_a_change_of_recipe():
    """T4, T85."""
    import training as t

    from hvd_adaptive.torch import Compression, assert_replicas_equal

    model = t.network()
    compressor = Compression.topk(
        model.named_parameters(),
        0.01,
        overrides={"2.weight": {"recipe": "randk", "ratio": 0.2, "dense_below": 0}, "0.bias": "sign"},
        dense_below=0,
    )
    recording = t.Recording(compressor, model)
    optimizer = t.distributed(model, recording)
    batches = t.Batches()
    t.train(model, optimizer, batches, 3)
    assert compressor.statistics().sparsity == {"0.weight": 24, "0.bias": 60, "2.weight": 360, "2.bias": 1}
    recording.check()
    for recipe, options in (
        ("adaptive", {"cost": t.LINK}),
        ("randk", {"ratio": 0.05}),
        ("topk", {"ratio": 0.1, "overrides": {"0*": "none"}}),
    ):
        compressor.set_recipe(recipe, **options)
        t.train(model, optimizer, batches, 3)
        recording.check()
        assert_replicas_equal(model)
    assert compressor.statistics().sparsity == {"0.weight": 2400, "0.bias": 60, "2.weight": 180, "2.bias": 30}
    compressor.set_recipe("none")
    t.train(model, optimizer, batches, 1)
    assert compressor.residuals() == {}
    assert compressor.statistics().step == 13
    assert_replicas_equal(model)


def loss_scaling_skips_on_all_ranks():
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk", "lowrank", "sign", "adaptive"):
        model = t.network()
        compressor = t.RECIPES[recipe](model.named_parameters())
        optimizer = t.distributed(model, compressor)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        batches = t.Batches()
        for step in range(6):
            before = t.weights(model)
            optimizer.zero_grad()
            loss = batches.loss(model)
            if step == 2 and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            hook = model[2].bias.register_hook(lambda g: g / 0)  # a tensor too small to be compressed
            if step != 4 or hvd.rank() != 0:
                hook.remove()
            scaler.scale(loss).backward()
            hook.remove()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            skipped = all((x == y).all() for x, y in zip(before, t.weights(model), strict=True))
            assert skipped == (step in (2, 4)), (recipe, step)
            assert all(torch.isfinite(r).all() for r in compressor.residuals().values())
        assert scaler.get_scale() == 256.0
        assert compressor.statistics().total.nonfinite_steps == 2
        assert_replicas_equal(model)


def reports_count_what_horovod_was_given():
    """Bits and messages, against those that Horovod's own functions see. (T3, T72, T73, T74)"""
    import horovod.torch as hvd
    import horovod.torch.optimizer as inside
    import training as t

    seen = {}

    def watched(module, name):
        original = getattr(module, name)

        def call(tensor, *args, **kwargs):
            for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
                seen["bits"] += 8 * one.numel() * one.element_size()
                seen["payloads"] += name == "allgather_async" or one.numel() > 20
                seen["rings"] += 0 if name == "allgather_async" else 8 * one.numel() * one.element_size()
            handle = original(tensor, *args, **kwargs)
            if name == "allgather_async":
                seen["handles"].append(handle)
            return handle

        setattr(module, name, call)
        return original

    def waiting(handle):
        result = synchronize(handle)
        if handle in seen["handles"]:
            seen["gathered"] += 32 * result.numel()
        return result

    reduce, gather = watched(inside, "allreduce_async_"), watched(hvd, "allgather_async")
    synchronize, hvd.synchronize = hvd.synchronize, waiting
    try:
        for recipe in t.RECIPES:
            model = t.network()
            compressor = t.RECIPES[recipe](model.named_parameters())
            optimizer = t.distributed(model, compressor)
            batches = t.Batches()
            total = 0
            for step in range(5):
                seen.update(bits=0, payloads=0, rings=0, gathered=0, handles=[])
                t.train(model, optimizer, batches, 1)
                last = compressor.statistics().last
                own = seen["bits"] - seen["rings"]
                assert last.bits_sent == seen["bits"], (recipe, step)
                assert last.bits_received == seen["rings"] + seen["gathered"] - own, (recipe, step)
                assert last.messages == seen["payloads"], (recipe, step)
                assert last.bits_dense == 32 * sum(p.numel() for p in model.parameters())
                assert last.ratio == last.bits_sent / last.bits_dense
                assert last.compress_seconds > 0 and last.decompress_seconds > 0
                total += last.bits_sent
            report = compressor.statistics()
            assert report.total.bits_sent == total
            assert report.step == 5 and list(report.sparsity)
            assert report.improvement > 0 or "dense" in report.reason  # whose later steps go as they are
            assert set(report.sparsity) == {"0.weight", "0.bias", "2.weight", "2.bias"}
            assert report.sparsity["2.bias"] == 30 and (report.price > 0) == recipe.startswith("adaptive")
    finally:
        inside.allreduce_async_, hvd.allgather_async, hvd.synchronize = reduce, gather, synchronize


def the_utility_finds_a_planted_difference():
    """T33."""
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import ReplicasDifferError, assert_replicas_equal

    model = t.network()
    optimizer = t.sgd(model)
    t.Batches().loss(model).backward()
    assert_replicas_equal(model)
    with torch.no_grad():
        if hvd.rank() == 1:
            model[2].weight[3, 4] = torch.nextafter(model[2].weight[3, 4], torch.tensor(9.0))
    with t.raises(ReplicasDifferError, "'2.weight' differs between rank 0 and rank 1"):
        assert_replicas_equal(model)
    model = t.network()
    optimizer.step()  # along gradients that differ, into momenta that do
    with t.raises(ReplicasDifferError, "'state.0.momentum_buffer' differs between rank 0 and rank 1"):
        assert_replicas_equal(optimizer.state_dict())
    assert_replicas_equal({"a": [1, None, torch.zeros(0)], "b": torch.tensor(True)})
    with t.raises(ReplicasDifferError, "'x.1' differs"):
        assert_replicas_equal({"x": [0, float(hvd.rank())]})
    with t.raises(ReplicasDifferError, "has 3 tensors and rank 1 has"):
        assert_replicas_equal([0, 1, 2] + [3] * hvd.rank())


WAYS = [
    "reductions",
    "groups",
    "several_backward_passes",
    "clipping_between_synchronize_and_step",
    "zeroed_or_absent_gradients",
    "unused_parameters_in_any_order",
    "gradients_of_any_type",
    "sparse_gradients",
    "two_models_and_equal_names",
    "one_compressor_over_two_optimizers",
    "overrides_and_a_change_of_recipe",
    "loss_scaling_skips_on_all_ranks",
    "reports_count_what_horovod_was_given",
    "the_utility_finds_a_planted_difference",
]


def test_every_way_of_use_at_two_ranks(horovodrun):
    launch(horovodrun, WAYS, np=2)


def process_sets():
    """Even and odd ranks train models of their own. (T59)"""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.torch import Compression, ReplicasDifferError, assert_replicas_equal

    evens, odds = t.SETS
    mine = odds if hvd.rank() % 2 else evens
    for recipe in ("topk", "randk", "adaptive", "sign"):
        model = t.network(hvd.rank() % 2)
        recording, compressor = t.recorded(model, recipe, process_set=mine)
        optimizer = t.distributed(model, recording, process_set=mine)
        t.train(model, optimizer, t.Batches(), 5)
        recording.check(process_set=mine)
        assert_replicas_equal(model, process_set=mine)
        with t.raises(ReplicasDifferError, "between rank 0 and rank 1"):
            assert_replicas_equal(model)
        assert compressor.statistics().step == 5
    # All ranks, through both at once: the settings agree, the ranks do not.
    from hvd_adaptive.core.errors import SettingsMismatchError

    for told, used in ((hvd.global_process_set, mine), (mine, hvd.global_process_set)):
        model = t.network()
        compressor = Compression.topk(model.named_parameters(), process_set=told)
        optimizer = t.distributed(model, compressor, process_set=used)
        with t.raises(SettingsMismatchError, "process_set="):
            t.train(model, optimizer, t.Batches(), 1)


def a_rank_outside_of_the_set():
    """The last check: one that does not take part would keep the others waiting. (T59)"""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.torch import Compression

    model = t.network()
    evens, _ = t.SETS
    optimizer = t.distributed(model, Compression.topk(model.named_parameters(), process_set=evens))
    if hvd.rank() % 2:
        with t.raises(ConfigurationError, f"rank {hvd.rank()} is not in the process set", "process_set="):
            t.train(model, optimizer, t.Batches(), 1)


def test_four_ranks(horovodrun):
    names = [
        "reductions",
        "one_compressor_over_two_optimizers",
        "process_sets",
        "a_rank_outside_of_the_set",
    ]
    launch(horovodrun, names, np=4, sets=[[0, 2], [1, 3]])


def plain_training():
    """Alone, Horovod calls no compressor: the run equals one without Horovod."""
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in t.RECIPES:
        model, plain = t.network(), t.network()
        compressor = t.RECIPES[recipe](model.named_parameters())
        t.train(model, t.distributed(model, compressor), t.Batches(), 5)
        t.train(plain, t.sgd(plain), t.Batches(), 5)
        assert t.same(model, plain)
        assert compressor.statistics().step == 0 and compressor.statistics().total.ratio == 1.0
        assert compressor.residuals() == {}
        assert_replicas_equal(model)


def test_one_rank_trains_as_without_us(horovodrun):
    """T62."""
    launch(horovodrun, ["plain_training"], np=1)


def replicas_stay_equal(steps, recipes):
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    torch.set_num_threads(1)
    hvd.init()
    for number, recipe in enumerate(recipes or t.RECIPES):
        model = t.network(number)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer = t.distributed(
            model, t.RECIPES[recipe](model.named_parameters()), None if number % 2 else adam
        )
        batches = t.Batches(number)
        t.train(model, optimizer, batches, steps)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert_replicas_equal(model)
        assert_replicas_equal(optimizer.state_dict())
    return True


@pytest.mark.parametrize("np, recipes", [(2, None), (4, ["adaptive ring"])])
def test_replicas_stay_bit_equal_over_200_steps(horovodrun, np, recipes):
    """T33, T68."""
    run = horovodrun(replicas_stay_equal, 200, recipes, np=np, timeout=280)
    assert run.results == [True] * np
