"""The pipeline and its workers: nothing is lost, nothing is poisoned, and every backend agrees."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import ballot, kernels, message, pipeline, plans
from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits
from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.errors import ConfigurationError, SettingsMismatchError
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.policy import Control
from hvd_adaptive.core.recipe import Recipe, adaptive, lowrank, none, randk, sign, topk
from hvd_adaptive.core.worker import Worker
from hvd_adaptive.torch.backend import TORCH

LINK = LinkTime(PayloadBits(1), bandwidth=1e6, compute=0.01)
FAST = LinkTime(PayloadBits(1), bandwidth=1e12, compute=0.01)  # so fast that sending everything pays
DIMENSIONS = {"matrix": 700, "one": 1, "vector": 90, "empty": 0, "wide": 2500}
SHAPES = {**DIMENSIONS, "matrix": (20, 35), "wide": (5, 5, 10, 10)}  # low rank sees 20 x 35 and 50 x 50

RECIPES: dict[str, Recipe] = {
    "none": none(),
    **{
        f"topk {kind}": topk(0.05, values=kind, dense_below=0)
        for kind in ("fp32", "fp16", "bf16", "int8", "int4")
    },
    "topk sign": topk(0.05, values="sign", dense_below=0),
    "topk sampled": topk(0.05, exact=False, dense_below=100),
    "topk warm-up": topk(0.02, warmup_steps=3, dense_below=50),
    "randk": randk(0.1, dense_below=0),
    "randk, small dense": randk(0.1, seed=5, dense_below=100),
    "sign": sign(dense_below=0),
    "sign half": sign(0.5, dense_below=0),
    "adaptive": adaptive(cost=LINK, dense_below=0),
    "adaptive fp16": adaptive(cost=Affine(PayloadBits(1, 16), 1.0, 1e4), values="fp16", dense_below=50),
    "adaptive sign": adaptive(cost=LINK, family="sign", dense_below=0),
    "adaptive dense spell": adaptive(cost=FAST, dense_below=0),
    "adaptive warm-up": adaptive(cost=LINK, warmup_steps=2, dense_below=0),
    "topk ring": topk(0.05, transport="ring", dense_below=0),
    "topk ring warm-up": topk(0.02, transport="ring", warmup_steps=3, dense_below=50),
    "adaptive ring": adaptive(cost=LINK, transport="ring", dense_below=0),
    "adaptive ring dense spell": adaptive(cost=FAST, transport="ring", dense_below=0),
    "lowrank": lowrank(3, dense_below=0),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make(seed, workers, steps, dimensions=DIMENSIONS, scale=1.0):
    """float32 gradients[step][worker][slot], with zeros, ties and heavy tails among them."""
    rng = np.random.default_rng(seed)

    def one(d):
        x = rng.standard_normal(d) * np.exp(rng.standard_normal(d)) * scale
        kind = rng.integers(5)
        if kind == 0:
            x = x * 0
        elif kind == 1:
            x = np.round(x)
        return x.astype(np.float32)

    return [[[one(d) for d in dimensions.values()] for _ in range(workers)] for _ in range(steps)]


def residuals(ensemble):
    """float64 residual of each worker and tensor, zeros where there is none."""
    kept = [worker.residuals() for worker in ensemble.workers]
    return [
        [
            np.asarray(own[n], np.float64) if n in own else np.zeros(d)
            for n, d in ensemble.workers[0].dimensions.items()
        ]
        for own in kept
    ]


def identity(ensemble, steps, applied):
    """sum of applied = mean over workers of (sum of gradients - residual), within float32 rounding."""
    left = residuals(ensemble)
    for slot, total in enumerate(applied):
        if not total.size:
            continue
        sums = [np.sum([np.asarray(g[r][slot], np.float64) for g in steps], axis=0) for r in range(len(left))]
        expected = np.mean([s - own[slot] for s, own in zip(sums, left, strict=True)], axis=0)
        size = max(np.abs([g[r][slot] for g in steps for r in range(len(left))]).max(), 1e-30)
        np.testing.assert_allclose(total, expected, rtol=0, atol=2e-6 * size * len(steps))


@every_recipe
@given(
    seed=st.integers(0, 10**6), workers=st.integers(1, 3), count=st.integers(1, 6), power=st.integers(-6, 6)
)
@settings(max_examples=8, deadline=None)
def test_nothing_is_lost(recipe, seed, workers, count, power):
    """T16, T29, T78."""
    steps = make(seed, workers, count, scale=10.0**power)
    ensemble = Ensemble(NUMPY, recipe, SHAPES, workers)
    applied = [np.zeros(d) for d in DIMENSIONS.values()]
    for gradients in steps:
        for slot, aggregate in enumerate(ensemble.reduce(gradients)):
            assert aggregate.dtype == np.float32 and aggregate.shape == applied[slot].shape
            applied[slot] += aggregate
    identity(ensemble, steps, applied)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["topk fp32", "topk int8", "randk", "sign", "adaptive", "none", "lowrank"])
def test_nothing_is_lost_of_torch_gradients_of_any_dtype(name, dtype):
    """T21."""
    steps = [[[torch.from_numpy(x).to(dtype) for x in own] for own in step] for step in make(4, 2, 5)]
    ensemble = Ensemble(TORCH, RECIPES[name], SHAPES, 2)
    applied = [np.zeros(d) for d in DIMENSIONS.values()]
    for gradients in steps:
        before = [[x.clone() for x in own] for own in gradients]
        for slot, aggregate in enumerate(ensemble.reduce(gradients)):
            assert aggregate.dtype == torch.float32
            applied[slot] += aggregate.numpy()
        for own, kept in zip(gradients, before, strict=True):  # what the caller owns is not written to
            assert all(torch.equal(x, y) for x, y in zip(own, kept, strict=True))
    identity(ensemble, [[[x.double().numpy() for x in own] for own in step] for step in steps], applied)


@every_recipe
def test_backends_agree_bit_for_bit(recipe):
    """T, support, message, ring but for sums, and aggregate: given the same control."""
    dimension = DIMENSIONS["wide"]
    plan = plans.plan(plans.Choice(recipe), {"x": (dimension,)}, 2, 1)["x"]
    controls = [Control(first=True)]
    controls += [Control(step=t, price=price, dense=False) for t, price in [(1, 1e-3), (2, 50.0), (9, 1e-9)]]
    controls += [Control(step=3, price=0.1, dense=True)] if recipe.adaptive else []
    if pipeline.dense(plan, controls[1]):
        controls = controls[:1]
    ours = pipeline.residual(NUMPY, plan, np.zeros(1))
    theirs = pipeline.residual(TORCH, plan, torch.zeros(1))
    for number, control in enumerate(controls):
        (((gradient,),),) = (
            make(number, 1, 1, {"x": dimension}) if number else make(99, 1, 1, {"x": dimension})
        )
        sent, kept, ours = pipeline.compress(NUMPY, plan, control, gradient, ours)
        other, also, theirs = pipeline.compress(TORCH, plan, control, torch.from_numpy(gradient), theirs)
        assert int(kept.sparsity) == int(also.sparsity)
        assert sent.message.tobytes() == other.message.numpy().tobytes()
        assert kept.indices.tolist() == also.indices.tolist()
        assert sent.ring[ballot.SIZE :].tobytes() == other.ring[ballot.SIZE :].numpy().tobytes()
        np.testing.assert_allclose(sent.ring[: ballot.SIZE], other.ring[: ballot.SIZE].numpy(), rtol=1e-5)
        ring = sent.ring * np.float32(2) / np.float32(2)
        incoming = pipeline.Incoming(ring, np.concatenate([sent.message, sent.message]))
        same = pipeline.Incoming(*(torch.from_numpy(x.copy()) for x in incoming[:2]))
        one, ours = pipeline.decompress(NUMPY, plan, control, incoming, kept, ours)
        two, theirs = pipeline.decompress(TORCH, plan, control, same, also, theirs)
        assert one.tobytes() == two.numpy().tobytes()
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.tobytes() == theirs.numpy().tobytes()


@every_recipe
def test_backends_train_alike(recipe):
    """Over steps the price is made of float32 sums, whose last bits may differ; it does not."""
    one, two = Ensemble(NUMPY, recipe, SHAPES, 2), Ensemble(TORCH, recipe, SHAPES, 2)
    for gradients in make(12, 2, 6):
        ours = one.reduce(gradients)
        theirs = two.reduce([[torch.from_numpy(x) for x in own] for own in gradients])
        if recipe.lowrank is None:
            assert [x.tobytes() for x in ours] == [x.numpy().tobytes() for x in theirs]
        else:  # products of matrices are summed in another order
            for x, y in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(x, y.numpy(), atol=1e-4 * max(1, np.abs(x).max(initial=0)))
        reports = one.workers[0].statistics(), two.workers[0].statistics()
        assert reports[0].sparsity == reports[1].sparsity
        assert reports[0].price == reports[1].price


@every_recipe
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_a_nonfinite_gradient_is_seen_by_all_and_poisons_nothing(recipe, value, when):
    steps = make(7, 3, 6)
    steps[when][1][0][13] = value
    spells = RECIPES["adaptive dense spell"], RECIPES["adaptive ring dense spell"]
    as_it_is = recipe.name == "none" or (recipe in spells and when == 2)
    ensemble = Ensemble(NUMPY, recipe, SHAPES, 3)
    applied = [np.zeros(d) for d in DIMENSIONS.values()]
    for number, gradients in enumerate(steps):
        before = residuals(ensemble)
        aggregates = ensemble.reduce(gradients)
        assert np.isfinite(aggregates[0]).all() == (number != when)
        assert all(np.isfinite(x).all() for x in aggregates[1:])
        for own in residuals(ensemble):
            assert all(np.isfinite(x).all() for x in own)
        if number == when:
            if not as_it_is:
                assert not np.isfinite(aggregates[0]).any()
            for rank, own in enumerate(residuals(ensemble)):
                held = "matrix" in ensemble.workers[0].residuals() and not as_it_is
                own_finite = np.nan_to_num(steps[when][rank][0], nan=0.0, posinf=0.0, neginf=0.0)
                carried = before[rank][0] + (own_finite if held else 0)
                np.testing.assert_allclose(own[0], carried, rtol=1e-6, atol=1e-6)
        else:
            for slot, aggregate in enumerate(aggregates):
                applied[slot] += aggregate
        if number == when:
            for slot in range(1, len(applied)):
                applied[slot] += aggregates[slot]
    # What was not finite counts as nothing; all else of that step comes later.
    steps[when][1][0][13] = 0
    if as_it_is or not ensemble.workers[0].residuals().get("matrix", np.zeros(0)).size:
        for rank in range(3):
            steps[when][rank][0][:] = 0
    identity(ensemble, steps, applied)
    assert [w.statistics().total.nonfinite_steps for w in ensemble.workers] == [1] * 3


@pytest.mark.parametrize("cost", [LINK, Affine(PayloadBits(1), 1.0, 1e4)], ids=["link", "affine"])
def test_zero_gradients_send_nothing_and_leave_the_price(cost):
    """T40."""
    dimensions = {"vector": 90, "one": 1}
    ensemble = Ensemble(NUMPY, adaptive(cost=cost, dense_below=0), dimensions, 2)
    for gradients in make(3, 2, 5, dimensions):
        ensemble.reduce(gradients)
    flushed = 0
    zeros = [[np.zeros(d, np.float32) for d in dimensions.values()]] * 2
    while any(x.any() for own in residuals(ensemble) for x in own):  # what is left comes, bit by bit
        ensemble.reduce(zeros)
        flushed += 1
        assert flushed < 300
    price = ensemble.workers[0].statistics().price
    for _ in range(5):
        assert not any(x.any() for x in ensemble.reduce(zeros))
    after = ensemble.workers[0].statistics()
    assert np.isfinite(after.price) and after.price > 0 and price > 0
    assert set(after.sparsity.values()) == {0}
    for gradients in make(8, 2, 5, dimensions):
        ensemble.reduce(gradients)
    assert ensemble.workers[0].statistics().improvement > 0


@pytest.mark.parametrize("objective", ["energy", "progress"])
def test_a_fast_link_goes_dense_and_comes_back(objective):
    """T75."""
    ensemble = Ensemble(NUMPY, adaptive(cost=FAST, objective=objective, dense_below=0), DIMENSIONS, 2)
    worker = ensemble.workers[0]
    dense = []
    for gradients in make(5, 2, 60):
        ensemble.reduce(gradients)
        dense.append(worker.statistics().sparsity["wide"] == DIMENSIONS["wide"])
        if dense[-1]:
            assert not any(x.any() for x in worker.residuals().values())
            assert worker.statistics().reason.startswith("dense: ")
    assert not dense[0] and dense[5] and not all(dense[5:])
    assert sum(dense) >= 50


@pytest.mark.parametrize(
    "other", ["topk fp16", "topk warm-up", "randk", "sign", "adaptive", "none", "adaptive sign"]
)
@pytest.mark.parametrize("name", ["topk fp32", "randk", "adaptive"])
def test_other_settings_on_one_worker_are_found_by_all_at_the_first_step(name, other):
    if name == other:
        return
    workers = [Worker(NUMPY, RECIPES[r], DIMENSIONS) for r in (name, name, other)]
    for rank, worker in enumerate(workers):
        worker.meet(range(3), rank)
    for slot, gradients in enumerate(zip(*make(0, 3, 1)[0], strict=True)):
        ways = [worker.outgoing(slot, x) for worker, x in zip(workers, gradients, strict=True)]
        # One form for all: whatever the settings, the ranks meet in the same two collectives.
        assert {outgoing.ring.size for outgoing, _ in ways} == {ballot.SIZE}
        assert all(worker.gathers(context) for worker, (_, context) in zip(workers, ways, strict=True))
        for outgoing, _ in ways:
            message.decode(outgoing.message, gradients[0].size)
        ring = np.mean([outgoing.ring for outgoing, _ in ways], axis=0, dtype=np.float32)
        for worker, (_, context) in zip(workers, ways, strict=True):
            with pytest.raises(SettingsMismatchError, match=r"different settings.*Recipe"):
                worker.settle(context, ring)


def test_the_first_form_of_small_tensors_is_whole():
    """T74."""
    ensemble = Ensemble(NUMPY, topk(0.01, dense_below=1000), DIMENSIONS, 2)
    gradients = make(2, 2, 1)[0]
    aggregates = ensemble.reduce(gradients)
    for slot, dimension in enumerate(DIMENSIONS.values()):
        if dimension < 1000:
            np.testing.assert_array_equal(aggregates[slot], (gradients[0][slot] + gradients[1][slot]) / 2)
    assert list(ensemble.workers[0].residuals()) == ["wide"]


def exchange(workers, slots, gradients):
    """One step of some tensors, over several workers; the aggregates."""
    found = []
    for slot in slots:
        ways = [w.outgoing(slot, g) for w, g in zip(workers, gradients[slot], strict=True)]
        contexts = [context for _, context in ways]
        if ways[0][0] is None:
            aggregate = np.mean([g for g in gradients[slot]], axis=0, dtype=np.float32)
        else:
            ring = np.mean([o.ring for o, _ in ways], axis=0, dtype=np.float32)
            words = np.concatenate([o.message for o, _ in ways]) if workers[0].gathers(contexts[0]) else None
            aggregates = [w.incoming(c, ring, words) for w, c in zip(workers, contexts, strict=True)]
            aggregate = aggregates[0]
            assert all(np.array_equal(aggregate, x) for x in aggregates)
        for worker, context in zip(workers, contexts, strict=True):
            worker.done(context)
        found.append(aggregate)
    return found


def pair(recipe, overrides=None, dimensions=DIMENSIONS):
    workers = [Worker(NUMPY, recipe, dimensions, overrides) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.meet([0, 1], rank)
    return workers


def by_slot(step):
    return list(zip(*step, strict=True))


def test_overrides_decide_tensor_by_tensor():
    workers = pair(
        topk(0.1, dense_below=0), {"m*": {"recipe": "topk", "ratio": 0.01, "dense_below": 0}, "v*": "none"}
    )
    for step in make(1, 2, 2):
        exchange(workers, range(5), by_slot([[x + 1 for x in own] for own in step]))
    assert workers[0].statistics().sparsity == {"matrix": 7, "one": 1, "vector": 90, "empty": 0, "wide": 250}
    assert list(workers[0].residuals()) == ["matrix", "one", "wide"]


def test_a_price_is_made_of_adaptive_tensors_alone():
    """Beside others, an adaptive tensor is tuned as it is by itself."""
    recipe = adaptive(cost=Affine(PayloadBits(1), 1.0, 1e4), dense_below=0)
    mixed = pair(topk(0.5, dense_below=0), {"wide": recipe})
    alone = pair(recipe, dimensions={"wide": DIMENSIONS["wide"]})
    for step in make(6, 2, 8):
        slots = by_slot(step)
        exchange(mixed, range(5), slots)
        exchange(alone, [0], slots[4:])
    one, two = mixed[0].statistics(), alone[0].statistics()
    assert one.price == two.price > 0
    assert one.sparsity["wide"] == two.sparsity["wide"]
    assert mixed[0].residuals()["wide"].tobytes() == alone[0].residuals()["wide"].tobytes()


@pytest.mark.parametrize("after", ["randk", "sign", "adaptive", "none", "topk int4", "forgets"])
@pytest.mark.parametrize("before", ["topk fp32", "randk", "adaptive dense spell", "sign"])
def test_residuals_are_carried_over_to_another_recipe(before, after):
    """Nothing is lost in a change of recipe at step 4, by the same identity. (T4)"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = topk(0.05, memory="none", dense_below=0) if after == "forgets" else RECIPES[after]
    steps = make(31, 2, 8)
    workers = pair(RECIPES[before])
    applied = [np.zeros(d) for d in DIMENSIONS.values()]

    class Both:  # what `identity` asks of an ensemble
        pass

    ensemble = Both()
    ensemble.workers = workers
    for number, step in enumerate(steps):
        if number == 4:
            held = {name: x.copy() for name, x in workers[0].residuals().items()}
            for rank, worker in enumerate(workers):
                worker.set_recipe(new)
                assert not worker.met([0, 1], rank)
                worker.meet([0, 1], rank)
                assert all(np.array_equal(worker.residuals()[n], x) for n, x in held.items() if rank == 0)
        for slot, aggregate in enumerate(exchange(workers, range(5), by_slot(step))):
            applied[slot] += aggregate
        if number == 4 and after == "forgets":  # it keeps nothing, but does not drop what was there unseen
            assert workers[0].residuals() == {}
            return
    identity(ensemble, steps, applied)
    if after == "none":
        assert workers[0].residuals() == {}


def test_warmup_counts_from_the_change_of_recipe():
    """T5."""
    workers = pair(topk(0.1, dense_below=0))
    sent = []
    for number, step in enumerate(make(3, 2, 9)):
        if number == 3:
            for rank, worker in enumerate(workers):
                worker.set_recipe(topk(0.01, warmup_steps=4, warmup_ratio=0.5, dense_below=0))
                worker.meet([0, 1], rank)
        exchange(workers, range(5), by_slot([[x + 1 for x in own] for own in step]))
        sent.append(workers[0].statistics().sparsity["wide"])
    narrowing = [int(np.ceil(2500 * 0.5 * (0.01 / 0.5) ** (t / 4))) for t in range(4)]
    assert sent == [250, 250, 250, *narrowing, 25, 25]


def test_a_recipe_changed_on_one_worker_is_found_by_both():
    workers = pair(topk(0.1, dense_below=0))
    steps = make(3, 2, 3)
    exchange(workers, range(5), by_slot(steps[0]))
    workers[1].set_recipe(topk(0.2, dense_below=0))
    workers[1].meet([0, 1], 1)
    ways = [w.outgoing(0, g[0]) for w, g in zip(workers, steps[1], strict=True)]
    ring = np.mean([o.ring for o, _ in ways], axis=0, dtype=np.float32)
    for worker, (_, context) in zip(workers, ways, strict=True):
        with pytest.raises(SettingsMismatchError, match="different settings"):
            worker.settle(context, ring)


def test_workers_at_different_steps_are_found_by_both():
    """As where only one rank loads a checkpoint."""
    workers = pair(topk(0.1, dense_below=0))
    steps = make(3, 2, 3)
    exchange(workers, range(5), by_slot(steps[0]))
    fresh = Worker(NUMPY, topk(0.1, dense_below=0), DIMENSIONS)
    fresh.meet([0, 1], 1)
    mixed = [workers[0], fresh]
    ways = [w.outgoing(0, g[0]) for w, g in zip(mixed, steps[1], strict=True)]
    ring = np.mean([o.ring for o, _ in ways], axis=0, dtype=np.float32)
    for worker, (_, context) in zip(mixed, ways, strict=True):
        with pytest.raises(SettingsMismatchError, match="different steps"):
            worker.settle(context, ring)


def test_a_change_in_the_middle_of_a_step_is_refused():
    (worker, _) = pair(topk(0.1, dense_below=0))
    worker.outgoing(0, make(0, 1, 1)[0][0][0])
    with pytest.raises(ConfigurationError, match="set_recipe must be called between steps"):
        worker.set_recipe("sign")
    with pytest.raises(ConfigurationError, match="state_dict must be called between steps"):
        worker.state()


def test_a_bad_recipe_changes_nothing():
    (worker, _) = pair(topk(0.1, dense_below=0))
    with pytest.raises(ConfigurationError, match="did you mean 'topk'"):
        worker.set_recipe("topkk")
    assert worker.recipe == topk(0.1, dense_below=0) and worker.ranks == [0, 1]


def test_tensors_that_step_at_their_own_pace():
    """Two optimizers behind one compressor: one steps five times as often.  A third tensor never
    takes part.  The slow one is governed by what is new, and little is remembered."""
    dimensions = {"fast": 3000, "slow": 3000, "frozen": 3000}
    workers = pair(adaptive(cost=LINK, dense_below=0), dimensions=dimensions)
    steps = make(0, 2, 300, dimensions)
    applied = [np.zeros(3000), np.zeros(3000)]
    seen = [[], []]
    for number, step in enumerate(steps):
        slots = [0, 1] if number % 5 == 4 else [0]
        for slot, aggregate in zip(slots, exchange(workers, slots, by_slot(step)), strict=True):
            applied[slot] += aggregate
            seen[slot].append(step)
    for slot in (0, 1):
        left = np.mean([w.residuals()[("fast", "slow")[slot]] for w in workers], axis=0, dtype=np.float64)
        sums = np.mean(
            [np.sum([s[r][slot] for s in seen[slot]], axis=0, dtype=np.float64) for r in (0, 1)], axis=0
        )
        np.testing.assert_allclose(applied[slot], sums - left, atol=1e-3)
    assert workers[0].statistics().step == 300
    assert workers[0].control(1).step == 300
    assert len(workers[0]._rounds) < 100
    late = exchange(workers, [2], by_slot(steps[0]))  # such as a layer that is unfrozen
    assert workers[0].control(2).step == 300 and late[0].any()


def test_a_state_continues_bit_for_bit():
    """T15."""
    for recipe in RECIPES.values():
        steps = make(21, 2, 8)
        straight, broken = pair(recipe), pair(recipe)
        for step in steps[:4]:
            exchange(straight, range(5), by_slot(step))
            exchange(broken, range(5), by_slot(step))
        states = [worker.state() for worker in broken]
        resumed = pair(recipe)
        for worker, state in zip(resumed, states, strict=True):
            worker.restore(state, lambda _, x: x.copy())
        for step in steps[4:]:
            one = exchange(straight, range(5), by_slot(step))
            two = exchange(resumed, range(5), by_slot(step))
            assert [x.tobytes() for x in one] == [x.tobytes() for x in two]
        assert straight[0].statistics().total == resumed[0].statistics().total
        assert straight[0].statistics().price == resumed[0].statistics().price


def test_states_that_do_not_fit():
    (worker, _) = pair(topk(0.1))
    state = worker.state()

    def refused(match, **changes):
        with pytest.raises(ConfigurationError, match=match):
            worker.restore({**state, **changes}, lambda _, x: x)

    refused("another version", format=99)
    refused("of a sign compressor", recipe="sign")
    refused("differ in the parameter 'more'", steps={**state["steps"], "more": 1})
    refused("residual of 'matrix' has 3 elements and the parameter 700", residuals={"matrix": np.zeros(3)})
    with pytest.raises(ConfigurationError, match="no state of a compressor"):
        worker.restore([1, 2], lambda _, x: x)


def test_later_steps_of_a_dense_spell_go_as_they_are():
    """The first sends what was kept; after it there is nothing to keep, to count or to agree on."""
    dimensions = {"matrix": 700, "wide": 3000}
    ensemble = Ensemble(NUMPY, adaptive(cost=FAST, dense_below=0), dimensions, 2)
    bits = []
    for gradients in make(5, 2, 5, dimensions):
        ensemble.reduce(gradients)
        bits.append(ensemble.workers[0].statistics().last.bits_sent)
    whole, ballots = 32 * 3700, 32 * 2 * ballot.SIZE
    assert bits[1:] == [whole + ballots, whole, whole, whole]
    assert not any(x.any() for own in residuals(ensemble) for x in own)


@every_recipe
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_one_pass_over_memory_gives_the_same_bits_as_the_primitives(recipe, value):
    dimensions = {"matrix": 700, "wide": 40_000}
    steps = make(9, 2, 6, dimensions)
    steps[3][1][1][17] = value

    def train():
        ensemble = Ensemble(NUMPY, recipe, dimensions, 2)
        results = []
        for gradients in steps:
            results += ensemble.reduce([[x.copy() for x in own] for own in gradients])
            results += [x.astype(np.float32) for own in residuals(ensemble) for x in own]
        return results, ensemble.workers[0].statistics().total.bits_sent

    fused, bits = train()
    with kernels.disabled():
        plain, plain_bits = train()
    assert bits == plain_bits
    for a, b in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@every_recipe
def test_what_rides_the_ring_is_of_one_length_on_all_ranks(recipe):
    """T37."""
    workers = pair(recipe)
    steps = make(31, 2, 5)
    for number, step in enumerate(steps):
        for slot in range(len(DIMENSIONS)):
            scale = np.float32(10.0 ** (number - 2))
            own = [step[0][slot] * 0, step[1][slot] * scale]  # nothing at all on one rank
            ways = [w.outgoing(slot, g) for w, g in zip(workers, own, strict=True)]
            lengths = {None if out is None else len(out.ring) for out, _ in ways}
            assert len(lengths) == 1
            assert (
                len({worker.gathers(context) for worker, (_, context) in zip(workers, ways, strict=True)})
                == 1
            )
            if ways[0][0] is not None:
                ring = np.mean([out.ring for out, _ in ways], axis=0, dtype=np.float32)
                gathered = np.concatenate([out.message for out, _ in ways])
                for worker, (_, context) in zip(workers, ways, strict=True):
                    messages = gathered if worker.gathers(context) else None
                    worker.incoming(context, ring.copy(), messages)
            for worker, (_, context) in zip(workers, ways, strict=True):
                worker.done(context)
