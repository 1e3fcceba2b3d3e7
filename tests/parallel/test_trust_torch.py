"""What others' users ran into, tried on the torch plug-in: see docs/reliability.md."""


def run_checks(*names):
    import horovod.torch as hvd
    import torch
    import training

    torch.set_num_threads(1)
    hvd.init()
    return training.run(globals(), names)


def compression_from_the_first_step():
    """T19."""
    import training as t

    for recipe, count in (("topk", 48), ("randk", 240), ("adaptive", 24)):
        model = t.network()
        recording, compressor = t.recorded(model, recipe)
        t.train(model, t.distributed(model, recording), t.Batches(), 1)
        sent = compressor.statistics().sparsity["0.weight"]
        assert sent == count or (recipe == "adaptive" and 0 < sent < 240), (recipe, sent)
        recording.check()


def groups_with_predivision():
    """Horovod ignores the factor in groups; the mean comes out right all the same. (T39)"""
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk"):
        model = t.network()
        recording, _ = t.recorded(model, recipe)
        optimizer = t.distributed(model, recording, groups=2, gradient_predivide_factor=4.0)
        t.train(model, optimizer, t.Batches(), 4)
        recording.check()
        assert_replicas_equal(model)


def gradients_are_not_held():
    """T53."""
    import gc
    import weakref

    import training as t

    model = t.network()
    compressor = t.RECIPES["topk"](model.named_parameters())
    optimizer = t.distributed(model, compressor)
    for _ in range(3):
        t.train(model, optimizer, t.Batches(), 1)
        gradients = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad()
        gc.collect()
        assert not [gradient for gradient in gradients if gradient() is not None]


def clipping_before_reduction():
    """Hooks of tensors clip each rank's own gradient; what was clipped is what is compressed."""
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    model = t.network()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1.0))
    recording, _ = t.recorded(model, "topk")
    optimizer = t.distributed(model, recording)
    t.train(model, optimizer, t.Batches(), 4)
    recording.check()
    assert all(float(given.norm()) <= 0.04001 for given in recording.given.values())
    assert_replicas_equal(model)


def small_gradients_are_not_cast():
    """T52."""
    import horovod.torch.optimizer as inside
    import torch
    import training as t

    seen, original = [], inside.allreduce_async_
    try:
        inside.allreduce_async_ = lambda x, *a, **o: seen.append(x.dtype) or original(x, *a, **o)
        for dtype in (torch.float16, torch.float32, torch.float64):
            model = t.network(dtype=dtype)
            compressor = t.Compression.topk(model.named_parameters(), dense_below=10**6)
            optimizer = t.distributed(model, compressor)
            t.train(model, optimizer, t.Batches(dtype=dtype), 1)
            seen.clear()  # in the first step all tensors travel in one form
            t.train(model, optimizer, t.Batches(dtype=dtype), 1)
            assert seen == [dtype] * 4
    finally:
        inside.allreduce_async_ = original


def a_learning_rate_that_decays():
    """Residuals are in the unit of gradients: the learning rate of the step that sends counts. (T27)"""
    import horovod.torch as hvd
    import numpy as np
    import torch
    import training as t

    dimension, count, steps = 2000, 20, 12
    targets = [torch.randn(dimension, generator=torch.Generator().manual_seed(r)) for r in range(hvd.size())]
    w = torch.nn.Parameter(torch.zeros(dimension))
    inner = torch.optim.SGD([w], lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(inner, step_size=4, gamma=0.1)
    compressor = t.Compression.topk([("w", w)], count / dimension)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=[("w", w)], compression=compressor)
    reference = np.zeros(dimension, np.float32)
    residuals = [np.zeros(dimension, np.float32) for _ in targets]
    for step in range(steps):
        optimizer.zero_grad()
        (0.5 * (w - targets[hvd.rank()]).square().sum()).backward()
        optimizer.step()
        schedule.step()
        sent = np.zeros(dimension)
        for rank, target in enumerate(targets):
            residuals[rank] += reference - target.numpy()
            chosen = np.argsort(-np.abs(residuals[rank]))[:count]
            sent[chosen] += residuals[rank][chosen] / len(targets)
            residuals[rank][chosen] = 0
        reference -= (np.float32(0.4 * 0.1 ** (step // 4)) * sent).astype(np.float32)
        np.testing.assert_allclose(w.detach().numpy(), reference, atol=1e-5)


def momentum_correction_and_ef21():
    """Against plain momentum SGD where all is sent; replicas equal where little is. (T46)"""
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for dense_below in (0, 1024):
        trained = []
        for ours in (False, True):
            model = t.network(3)
            inner = t.sgd(model, momentum=0.0 if ours else 0.9)
            compressor = t.Compression.topk(model, 1.0, memory="momentum", dense_below=dense_below)
            compression = compressor if ours else t.hvd.Compression.none
            optimizer = t.distributed(model, compression, inner, prefix=f"momentum.{dense_below}.{ours}.")
            t.train(model, optimizer, t.Batches(), 6)
            assert_replicas_equal(model)
            trained.append(model)
        for one, two in zip(*(m.parameters() for m in trained), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    for memory in ({"kind": "momentum", "clip": 1.0}, "ef21"):
        for make in (t.Compression.topk, t.Compression.randk, t.Compression.sign, t.Compression.adaptive):
            options = {"cost": t.LINK} if make is t.Compression.adaptive else {"ratio": 0.1}
            model = t.network(4)
            compressor = make(model, memory=memory, **options)
            optimizer = t.distributed(model, compressor, t.sgd(model, momentum=0.0))
            first = float(t.Batches(9).loss(model))
            t.train(model, optimizer, t.Batches(), 12)
            assert float(t.Batches(9).loss(model)) < first
            assert_replicas_equal(model)
            assert compressor.statistics().step == 12


def a_loss_scale_that_doubles():
    """A GradScaler that grows at every other step, against training without one: not a bit differs. (T47)"""
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    for recipe in ("topk", "randk", "sign", "adaptive"):
        trained = []
        for scaled in (False, True):
            model = t.network(5)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
            compressor = t.RECIPES[recipe](model.named_parameters(), scaler=scaler)
            optimizer = t.distributed(model, compressor, prefix=f"scaled.{scaled}.{recipe}.")
            batches = t.Batches()
            for _ in range(9):
                optimizer.zero_grad()
                scaler.scale(batches.loss(model)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == (2.0**14 if scaled else 1.0)
            assert_replicas_equal(model)
            trained.append(model)
        assert t.same(*trained), recipe


def skipped_steps_lose_nothing():
    """One tensor is not finite on one rank, at the steps 2 and 4: what was sent of the others is sent
    again. (T47)"""
    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    model = t.network(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    compressor = t.Compression.topk(model, 0.05, scaler=scaler)
    optimizer = t.distributed(model, compressor, t.sgd(model, momentum=0.0))
    batches, weight = t.Batches(), model[0].weight
    given, start = torch.zeros_like(weight), weight.detach().clone()
    for step in range(8):
        optimizer.zero_grad()
        bad = step in (2, 4) and hvd.rank() == 0
        hook = model[2].bias.register_hook(lambda g, bad=bad: g / 0 if bad else g)
        seen = []
        watch = weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        scale = scaler.get_scale()
        scaler.scale(batches.loss(model)).backward()
        hook.remove()
        watch.remove()
        given += seen[0] / scale
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert compressor.statistics().total.nonfinite_steps == 2
    residual = compressor.residuals()["0.weight"].view_as(weight) / scale
    mean = hvd.allreduce(given - residual, name="given")
    torch.testing.assert_close((start - weight.detach()) / 0.05, mean, rtol=0, atol=1e-4)
    assert_replicas_equal(model)


def compressors_come_and_go():
    """Two hundred are made, used and dropped: no thread, name or tensor of theirs is left."""
    import gc
    import threading
    import weakref

    import torch
    import training as t

    made, threads, tensors = [], None, None
    for number in range(200):
        model = torch.nn.Linear(40, 40)
        t.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        compressor = t.RECIPES[["topk", "adaptive", "randk", "sign"][number % 4]](model.named_parameters())
        optimizer = t.distributed(model, compressor, prefix=f"{number}.")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
        made.append(weakref.ref(compressor))
        del model, compressor, optimizer
        if number in (19, 199):
            gc.collect()
            alive = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
            if number == 19:
                threads, tensors = threading.active_count(), alive
    assert threading.active_count() == threads
    assert alive <= tensors
    assert not [ref for ref in made if ref() is not None]


CHECKS = [
    "compression_from_the_first_step",
    "groups_with_predivision",
    "gradients_are_not_held",
    "clipping_before_reduction",
    "small_gradients_are_not_cast",
    "a_learning_rate_that_decays",
    "momentum_correction_and_ef21",
    "a_loss_scale_that_doubles",
    "skipped_steps_lose_nothing",
    "compressors_come_and_go",
]


def test_at_two_ranks(horovodrun):
    run = horovodrun(run_checks, *CHECKS, timeout=280)
    assert run.results == [CHECKS] * 2
