"""What the torch plug-in refuses: on every rank, with a sentence that says what to do, and without a hang."""


def run_checks(*names):
    import horovod.torch as hvd
    import torch
    import training

    torch.set_num_threads(1)
    hvd.init()
    return training.run(globals(), names)


def launch(horovodrun, names, np):
    run = horovodrun(run_checks, *names, np=np, timeout=200)
    assert run.results == [list(names)] * np


def settings_that_differ():
    """One rank differs in the recipe or in any option; all ranks say so at the first step. (T31)"""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.core.cost import LinkTime, PayloadBits
    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.torch import Compressor

    other_link = LinkTime(PayloadBits(1), bandwidth=2e7, compute=0.01)
    pairs = [
        ({"recipe": "topk", "ratio": 0.01}, {"recipe": "topk", "ratio": 0.02}),
        ({"recipe": "topk"}, {"recipe": "randk"}),
        ({"recipe": "topk"}, {"recipe": "adaptive"}),
        ({"recipe": "randk"}, {"recipe": "adaptive"}),
        ({"recipe": "randk"}, {"recipe": "randk", "seed": 1}),
        ({"recipe": "sign"}, {"recipe": "none"}),
        ({"recipe": "topk"}, {"recipe": "topk", "dense_below": 10**6}),
        ({"recipe": "topk"}, {"recipe": "topk", "values": "int8"}),
        ({"recipe": "topk"}, {"recipe": "topk", "warmup_steps": 3}),
        ({"recipe": "adaptive", "cost": t.LINK}, {"recipe": "adaptive", "cost": other_link}),
    ]
    for odd in (0, hvd.size() - 1):
        for number, pair in enumerate(pairs):
            model = t.network()
            compressor = Compressor(pair[hvd.rank() == odd], model)
            optimizer = t.distributed(model, compressor, prefix=f"settings.{odd}.{number}.")
            before = t.weights(model)
            with t.raises(SettingsMismatchError, "different settings", "give every rank the same", "Recipe("):
                t.train(model, optimizer, t.Batches(), 1)
            assert all((x == y).all() for x, y in zip(before, t.weights(model), strict=True))


def overrides_that_differ():
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.torch import Compression

    model = t.network()
    overrides = {"0.weight": "none" if hvd.rank() else "sign"}
    compressor = Compression.topk(model.named_parameters(), overrides=overrides)
    with t.raises(SettingsMismatchError, "different settings", "overrides"):
        t.train(model, t.distributed(model, compressor), t.Batches(), 1)


def a_recipe_changed_on_one_rank():
    import horovod.torch as hvd
    import training as t
    from horovod.common.exceptions import HorovodInternalError

    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.torch import Compression

    # A small tensor goes as it is on one rank and as a ballot on the other: Horovod itself refuses that.
    for dense_below, kind, words in (
        (0, SettingsMismatchError, "different settings"),
        (1024, HorovodInternalError, "Mismatched ALLREDUCE tensor shapes"),
    ):
        model = t.network(1)
        compressor = Compression.topk(model.named_parameters(), dense_below=dense_below)
        optimizer = t.distributed(model, compressor, prefix=f"changed.{dense_below}.")
        t.train(model, optimizer, t.Batches(), 2)
        if hvd.rank() == 1:
            compressor.set_recipe("adaptive", dense_below=dense_below)
        with t.raises(kind, words):
            t.train(model, optimizer, t.Batches(), 1)


def a_checkpoint_on_one_rank():
    """T25."""
    import horovod.torch as hvd
    import training as t
    from horovod.common.exceptions import HorovodInternalError

    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.torch import Compression

    for dense_below, kind, words in (
        (0, SettingsMismatchError, "load checkpoints of the same step"),
        (1024, HorovodInternalError, "Mismatched ALLREDUCE tensor shapes"),
    ):
        model = t.network(2)
        compressor = Compression.topk(model.named_parameters(), dense_below=dense_below)
        t.train(model, t.distributed(model, compressor, prefix=f"saved.{dense_below}."), t.Batches(), 2)
        state = compressor.state_dict()
        model = t.network(3)
        compressor = Compression.topk(model.named_parameters(), dense_below=dense_below)
        if hvd.rank() == 1:
            compressor.load_state_dict(state)
        optimizer = t.distributed(model, compressor, prefix=f"loaded.{dense_below}.")
        with t.raises(kind, words):
            t.train(model, optimizer, t.Batches(), 1)


def adasum():
    """T54, T55."""
    import horovod.torch as hvd
    import training as t

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.torch import Compression

    model = t.network()
    compressor = Compression.topk(model.named_parameters())
    optimizer = t.distributed(model, compressor, op=hvd.Adasum)
    with t.raises(ConfigurationError, "op=hvd.Adasum", "use op=hvd.Average or op=hvd.Sum"):
        t.train(model, optimizer, t.Batches(), 1)


def a_tensor_that_belongs_to_no_parameter():
    import training as t

    from hvd_adaptive.core.errors import UnknownTensorError
    from hvd_adaptive.torch import Compression

    model = t.network()
    compressor = Compression.topk(model[0].named_parameters())
    with t.raises(UnknownTensorError, "shape (30,)", "none of the 2 parameters", "named_parameters()"):
        t.train(model, t.distributed(model, compressor), t.Batches(), 1)


def changes_in_the_middle_of_a_step():
    import training as t

    from hvd_adaptive.core.errors import ConfigurationError
    from hvd_adaptive.torch import Compression

    model = t.network(4)
    compressor = Compression.topk(model.named_parameters())
    optimizer = t.distributed(model, compressor)
    t.Batches().loss(model).backward()
    with t.raises(ConfigurationError, "set_recipe must be called between steps"):
        compressor.set_recipe("sign")
    with t.raises(ConfigurationError, "state_dict must be called between steps"):
        compressor.state_dict()
    optimizer.step()
    with t.raises(ConfigurationError, "sign takes no option 'rato'", "did you mean 'ratio'"):
        compressor.set_recipe("sign", rato=3)
    with t.raises(ConfigurationError, "no state of a compressor"):
        compressor.load_state_dict({})
    t.train(model, optimizer, t.Batches(), 1)  # and nothing of it did harm
    assert compressor.statistics().step == 2


NAMES = [
    "changes_in_the_middle_of_a_step",
    "settings_that_differ",
    "overrides_that_differ",
    "a_tensor_that_belongs_to_no_parameter",
    "adasum",
    "a_recipe_changed_on_one_rank",
    "a_checkpoint_on_one_rank",
]


def test_refusals_at_two_ranks(horovodrun):
    launch(horovodrun, NAMES, np=2)


def test_refusals_at_four_ranks(horovodrun):
    launch(horovodrun, ["settings_that_differ"], np=4)
