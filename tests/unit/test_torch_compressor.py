"""The torch plug-in as far as one process without Horovod can see it."""

import pytest
import torch

from hvd_adaptive.core.errors import ConfigurationError, UnknownTensorError
from hvd_adaptive.core.recipe import topk
from hvd_adaptive.torch import Compression, Compressor
from hvd_adaptive.torch.parameters import Parameters


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))


def test_named_parameters_or_a_module(model):
    assert Parameters(model).names == Parameters(model.named_parameters()).names
    assert Parameters(model).dimensions == {"0.weight": 20, "0.bias": 4, "1.weight": 12, "1.bias": 3}


def test_named_parameters_that_cannot_be_used(model):
    with pytest.raises(ConfigurationError, match="named_parameters is empty"):
        Compression.topk([])
    used = model.named_parameters()
    list(used)
    with pytest.raises(ConfigurationError, match="a generator that was read once"):
        Compression.adaptive(used)
    with pytest.raises(ConfigurationError, match=r"two tensors of the name '0\.weight'"):
        Compression.sign([*model.named_parameters(), ("0.weight", model[1].weight)])
    with pytest.raises(ConfigurationError, match=r"pairs \(name, parameter\).*yielded a Parameter"):
        Compression.topk(model.parameters())
    with pytest.raises(ConfigurationError, match=r"pairs \(name, parameter\).*yielded a str"):
        Compression.topk(dict(model.named_parameters()))


def test_options_are_checked_by_name(model):
    """T2."""
    with pytest.raises(ConfigurationError, match="topk takes no option 'rtio'; did you mean 'ratio'"):
        Compression.topk(model, rtio=0.1)
    with pytest.raises(ConfigurationError, match="ratio must"):
        Compression.randk(model, 0)
    with pytest.raises(ConfigurationError, match="no recipe 'topp'; did you mean 'topk'"):
        Compression.from_config(model, "topp")
    with pytest.raises(ConfigurationError, match="key 'recipe'"):
        Compression.from_config(model, {"ratio": 0.1})
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        Compression.topk(model, overrides={"2.*": "none"})


def test_configurations(model):
    """T14."""
    made = [
        Compression.topk(model, 0.2, overrides={"*.bias": "none"}, name="x"),
        Compression.from_config(
            model, {"recipe": "topk", "ratio": 0.2, "overrides": {"*.bias": "none"}, "name": "x"}
        ),
        Compressor(topk(0.2), model, overrides={"*.bias": "none"}, name="x"),
        Compressor(
            {"recipe": "topk", "ratio": 0.2}, model, overrides={"*.bias": {"recipe": "none"}}, name="x"
        ),
    ]
    assert len({compressor._worker._choice for compressor in made}) == 1
    assert isinstance(Compression.from_config(model, "none"), Compressor)


def test_gradients_are_found_by_identity(model):
    """T17."""
    parameters = Parameters(model)
    model(torch.ones(2, 5)).sum().backward()
    for _ in range(2):
        for slot, parameter in reversed(list(enumerate(model.parameters()))):
            assert parameters.slot(parameter.grad) == slot
    with pytest.raises(
        UnknownTensorError, match=r"shape \(3, 4\) is the gradient of none of the 4 parameters"
    ):
        parameters.slot(model[1].weight.grad.clone())  # equal values are not identity


def test_adasum_hands_over_parameters_and_is_refused(model):
    """T54."""
    compressor = Compression.topk(model)
    with pytest.raises(ConfigurationError, match=r"op=hvd\.Adasum"):
        compressor.compress(model[0].weight)


def test_a_report_before_the_first_step(model):
    report = Compression.adaptive(model).statistics()
    assert report.step == 0 and report.total.bits_sent == 0 and report.total.ratio == 1.0
    assert report.reason == "first step: no price yet"


def test_a_state_before_the_first_step_survives_a_file(model, tmp_path):
    """T22."""
    compressor = Compression.topk(model)
    torch.save(compressor.state_dict(), tmp_path / "state.pt")
    other = Compression.topk(model)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict() == compressor.state_dict()


def test_sparse_gradients_pass_through(model):
    """T56."""
    x = torch.eye(3).to_sparse()
    assert Compression.topk(model).decompress(x, None) is x
