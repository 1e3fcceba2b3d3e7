"""Recipes: every bad setting is named, an unknown one is guessed, and any difference shows."""

import dataclasses
import itertools

import pytest

from hvd_adaptive.core import plans
from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits, SignPayloadBits
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.lowrank import LowRank
from hvd_adaptive.core.memory import ErrorFeedback, NoMemory
from hvd_adaptive.core.policy import Adaptive, Fixed, SharedRandom, Warmup
from hvd_adaptive.core.recipe import (
    RECIPES,
    Recipe,
    adaptive,
    build,
    fingerprint,
    from_config,
    lowrank,
    none,
    randk,
    restate,
    sign,
    topk,
)

LINK = LinkTime(PayloadBits(1), bandwidth=1e9)


@pytest.mark.parametrize(
    "name, options, setting",
    [
        ("topk", {"ratio": 0}, "ratio"),
        ("topk", {"ratio": 2}, "ratio"),
        ("topk", {"ratio": "1%"}, "ratio"),
        ("topk", {"ratio": True}, "ratio"),
        ("topk", {"exact": 1}, "exact"),
        ("lowrank", {"rank": 0}, "rank"),
        ("lowrank", {"rank": 2.5}, "rank"),
        ("lowrank", {"memory": "momentum"}, "memory"),
        ("adaptive", {"rank": -1}, "rank"),
        ("adaptive", {"rank": False}, "rank"),
        ("adaptive", {"rank": 4, "memory": "ef21"}, "rank"),
        ("adaptive", {"rank": 4, "objective": "progress", "cost": PayloadBits(1)}, "rank"),
        ("adaptive", {"rank": 4, "warmup_steps": 5}, "rank"),
        ("adaptive", {"rank": 4, "objective": "energy"}, "rank"),
        ("topk", {"values": "fp8"}, "values"),
        ("topk", {"memory": "yes"}, "memory"),
        ("topk", {"warmup_steps": -3}, "warmup_steps"),
        ("topk", {"warmup_steps": 2.5}, "warmup_steps"),
        ("topk", {"warmup_steps": 5, "warmup_ratio": 0}, "warmup_ratio"),
        ("topk", {"dense_below": -1}, "dense_below"),
        ("topk", {"dense_below": 1.0}, "dense_below"),
        ("topk", {"dense_below": True}, "dense_below"),
        ("randk", {"ratio": 1.5}, "ratio"),
        ("randk", {"seed": -1}, "seed"),
        ("randk", {"seed": "x"}, "seed"),
        ("randk", {"memory": None}, "memory"),
        ("randk", {"dense_below": "1k"}, "dense_below"),
        ("sign", {"ratio": -0.1}, "ratio"),
        ("sign", {"exact": None}, "exact"),
        ("sign", {"warmup_steps": "many"}, "warmup_steps"),
        ("adaptive", {"cost": 1e9}, "cost"),
        ("adaptive", {"family": "topk"}, "family"),
        ("adaptive", {"objective": "speed"}, "objective"),
        ("adaptive", {"share": 1.0}, "share"),
        ("adaptive", {"share": "10%"}, "share"),
        ("adaptive", {"first_ratio": 0}, "first_ratio"),
        ("adaptive", {"values": "fp99"}, "values"),
        ("adaptive", {"values": "sign"}, "values"),
        ("adaptive", {"values": "fp16", "family": "sign"}, "values"),
        ("adaptive", {"warmup_steps": -1}, "warmup_steps"),
        ("adaptive", {"memory": {"kind": "momentum", "momentum": 1.0}}, "momentum"),
    ],
)
def test_a_bad_setting_is_named(name, options, setting):
    """T2."""
    with pytest.raises(ConfigurationError, match=rf"^{setting}"):
        build(name, options)


@pytest.mark.parametrize(
    "name, options, guess",
    [
        ("topk", {"ration": 0.1}, "ratio"),
        ("topk", {"warm_up_steps": 3}, "warmup_steps"),
        ("randk", {"sead": 3}, "seed"),
        ("sign", {"dense_bellow": 3}, "dense_below"),
        ("adaptive", {"costs": LINK}, "cost"),
        ("adaptive", {"famly": "sign"}, "family"),
    ],
)
def test_an_unknown_option_is_guessed(name, options, guess):
    """T82."""
    with pytest.raises(
        ConfigurationError, match=f"no option '{next(iter(options))}'.*did you mean '{guess}'"
    ):
        build(name, options)


def test_an_option_like_no_other_gets_the_list():
    with pytest.raises(ConfigurationError, match="'zzz'; it knows ratio, seed"):
        build("randk", {"zzz": 1})


@pytest.mark.parametrize("name, guess", [("top-k", "topk"), ("adaptve", "adaptive"), ("rand_k", "randk")])
def test_an_unknown_recipe_is_guessed(name, guess):
    with pytest.raises(ConfigurationError, match=f"no recipe '{name}'; did you mean '{guess}'"):
        from_config(name)


def test_from_config():
    """T14."""
    assert from_config("topk") == topk()
    assert from_config({"recipe": "topk", "ratio": 0.2, "values": "int8"}) == topk(0.2, values="int8")
    assert from_config({"recipe": "none"}) == none()
    made = sign(0.5)
    assert from_config(made) is made
    for wrong in ({}, {"ratio": 0.1}, 7):
        with pytest.raises(ConfigurationError, match="'recipe'"):
            from_config(wrong)
    with pytest.raises(ConfigurationError, match="did you mean 'ratio'"):
        from_config({"recipe": "topk", "rato": 0.1})


def test_what_the_recipes_are():
    """T77, T83."""
    assert topk(0.1) == Recipe("topk", Fixed(0.1), ErrorFeedback(), "fp32")
    assert randk(0.1, seed=3) == Recipe("randk", SharedRandom(0.1, 3), ErrorFeedback())
    assert sign().values == "sign" and sign().policy == Fixed(1.0)
    assert topk(0.1, warmup_steps=9).policy == Warmup(Fixed(0.1), 9, 0.25)
    default = Adaptive(
        LinkTime(PayloadBits(1, 4), bandwidth=1e9), measure=True, objective="progress", auto=True
    )
    assert adaptive(rank=0).adaptive == adaptive(warmup_steps=4).adaptive == default
    assert adaptive().adaptive == dataclasses.replace(default, lowrank=LowRank(24))
    assert lowrank(3) == Recipe("lowrank", LowRank(3), ErrorFeedback())
    assert adaptive(cost=PayloadBits(1)).adaptive.objective == "energy"
    assert adaptive().values == "int4" and adaptive(cost=PayloadBits(1)).values == "fp32"
    assert topk().adaptive is None and topk(warmup_steps=3).adaptive is None
    assert randk().shared and not topk().shared
    assert none().spares(10**12) and not topk().spares(1024) and topk().spares(1023)
    assert topk(dense_below=0).spares(0) and not topk(dense_below=0).spares(1)


def test_the_default_cost_is_of_what_is_sent():
    payloads = {"fp32": PayloadBits(1), "fp16": PayloadBits(1, 16), "int4": PayloadBits(1, 4)}
    for values, payload in payloads.items():
        assert adaptive(values=values).adaptive.cost.payload == payload
    assert adaptive(family="sign").adaptive.cost.payload == SignPayloadBits(1)


def test_time_is_measured_only_where_the_cost_has_none():
    assert adaptive(cost=LINK).adaptive.measure
    assert not adaptive(cost=LinkTime(PayloadBits(1), 1e9, compute=0.01)).adaptive.measure
    assert not adaptive(cost=PayloadBits(1)).adaptive.measure


@pytest.mark.parametrize("make", [topk, randk, sign, adaptive])
def test_forgetting_is_warned_of(make):
    """T83."""
    with pytest.warns(UserWarning, match="memory='none'"):
        recipe = make(memory="none")
    assert isinstance(recipe.memory, NoMemory)


@pytest.mark.filterwarnings("ignore:memory=")
def test_the_fingerprint_differs_for_each_option():
    others = {
        "topk": dict(ratio=0.02, exact=False, values="fp16", memory="none", warmup_steps=5, dense_below=7),
        "randk": dict(ratio=0.02, seed=1, memory="none", dense_below=7),
        "sign": dict(ratio=0.5, exact=False, memory="none", warmup_steps=5, dense_below=7),
        "adaptive": dict(
            cost=LinkTime(PayloadBits(1), bandwidth=2e9),
            family="sign",
            objective="energy",
            share=0.2,
            values="bf16",
            first_ratio=0.5,
            memory="none",
            warmup_steps=5,
            dense_below=7,
            rank=5,
        ),
        "lowrank": dict(rank=5, memory="none", dense_below=7),
        "none": {},
    }
    assert set(others) == set(RECIPES)
    recipes = [build(name, {}) for name in RECIPES]
    recipes += [build(name, {key: value}) for name, o in others.items() for key, value in o.items()]
    recipes += [topk(warmup_steps=5, warmup_ratio=0.5), adaptive(cost=PayloadBits(1))]
    recipes += [adaptive(cost=LinkTime(PayloadBits(1), 1e9, latency=1e-6))]
    marks = {fingerprint(recipe) % (1 << 18) for recipe in recipes}  # as many bits as a ballot carries
    assert len(marks) == len(recipes)
    assert fingerprint(topk(0.5)) == fingerprint(topk(0.5))


def test_a_restated_cost_is_for_the_model_and_world_at_hand():
    recipe = restate(adaptive(warmup_steps=3), 5000, 8)
    assert recipe.adaptive.cost == LinkTime(PayloadBits(5000, 4), bandwidth=1e9, world_size=8)
    assert isinstance(recipe.policy, Warmup)
    assert restate(adaptive(cost=PayloadBits(1)), 70, 4).adaptive.cost == PayloadBits(70)
    assert restate(topk(), 5000, 8) == topk()
    assert restate(adaptive(), 10, 1).adaptive.cost.world_size == 2  # alone, one trains without us


NAMES = ["encoder.embedding.weight", "encoder.layer.weight", "encoder.layer.bias", "head.weight"]


def test_overrides_by_pattern():
    """T85."""
    choice = plans.choose(
        "topk",
        {"*embedding*": {"recipe": "topk", "ratio": 0.001}, "*.bias": "none", "encoder*": sign()},
        NAMES,
    )
    assert [choice.named(name) for name in NAMES] == [topk(0.001), sign(), none(), topk()]


def test_bad_overrides():
    """T82."""
    with pytest.raises(ConfigurationError, match=r"'\*embeding\*' matches no parameter.*embedding"):
        plans.choose("topk", {"*embeding*": "none"}, NAMES)
    with pytest.raises(ConfigurationError, match=r"overrides\['head\*'\]: ratio must"):
        plans.choose("topk", {"head*": {"recipe": "topk", "ratio": 7}}, NAMES)
    with pytest.raises(ConfigurationError, match="same cost="):
        plans.choose("adaptive", {"head*": adaptive(cost=PayloadBits(1))}, NAMES)
    plans.choose(adaptive(cost=LINK), {"head*": adaptive(cost=LINK, first_ratio=0.5)}, NAMES)


def test_choices_differ_where_overrides_do():
    choices = [
        plans.choose("topk", overrides, NAMES)
        for overrides in ({}, {"head*": "none"}, {"head*": "sign"}, {"*": "none"}, {"*.bias": "none"})
    ]
    for one, other in itertools.combinations(choices, 2):
        assert one.fingerprint != other.fingerprint


def test_fixed_costs_are_shared_by_what_is_tuned():
    dimensions = {"embedding": 6000, "layer": 3000, "bias": 10, "head": 1000}
    choice = plans.choose(
        adaptive(cost=Affine(PayloadBits(1), 1, 1), dense_below=100), {"head": "topk"}, dimensions
    )
    made = plans.plan(choice, {name: (d,) for name, d in dimensions.items()}, 4, 2)
    assert [p.share for p in made.values()] == [6 / 9, 3 / 9, 0.0, 0.0]
    assert made["layer"].recipe.adaptive.cost.dimension == 9000
    assert made["head"].recipe == topk()
    assert {(p.world_size, p.rank, p.fingerprint) for p in made.values()} == {(4, 2, choice.fingerprint)}


def test_names_of_tensors():
    plans.check_names(["a", "b"])
    with pytest.raises(ConfigurationError, match=r"empty.*generator"):
        plans.check_names([])
    with pytest.raises(ConfigurationError, match="two tensors of the name 'b'"):
        plans.check_names(["b", "a", "b"])


def test_buckets_hold_each_tensor_once_the_last_ones_first():
    """T15."""
    for number in (1, 2, 3):
        groups = plans.buckets([10, 40, 30, 20, 100], number)
        assert sorted(p for group in groups for p in group) == [0, 1, 2, 3, 4]
        assert [p for group in groups for p in group] == [4, 3, 2, 1, 0]
    assert plans.buckets([], 2) == []
    assert plans.buckets([1, 1, 1, 1], 2) == [[3, 2], [1, 0]]


def test_tags_differ_from_compressor_to_compressor():
    assert plans.tag(None) != plans.tag(None)
    assert plans.tag("mine") == "hvd_adaptive.mine"
