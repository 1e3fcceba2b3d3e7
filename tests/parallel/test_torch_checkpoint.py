"""A job that is stopped and resumed goes on as if it had not been, bit for bit."""

import pytest


def part(folder, begin, end, stop):
    """Trains every recipe from step ``begin`` to ``end``, and saves or loads at ``stop``.  Returns the
    digests of all that there is at the end."""
    import hashlib

    import horovod.torch as hvd
    import torch
    import training as t

    from hvd_adaptive.torch import assert_replicas_equal

    torch.set_num_threads(1)
    hvd.init()
    found = {}
    for number, recipe in enumerate(t.RECIPES):
        model = t.network(number)
        compressor = t.RECIPES[recipe](model.named_parameters())
        adam = torch.optim.Adam(model.parameters(), lr=1e-3) if number % 2 else None
        optimizer = t.distributed(model, compressor, adam)
        batches = t.Batches(number)
        for _ in range(begin):
            batches.loss(model)  # the data goes on where it was
        path = f"{folder}/{number}-{hvd.rank()}.pt"
        if begin == stop:
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            compressor.load_state_dict(state["compressor"])
        for step in range(begin, end):
            if step == stop and begin != stop:
                state = {"model": model, "optimizer": optimizer, "compressor": compressor}
                torch.save({key: value.state_dict() for key, value in state.items()}, path)
            t.train(model, optimizer, batches, 1)
        assert_replicas_equal(model)
        digest = hashlib.sha256()
        for tensor in [*model.parameters(), *compressor.residuals().values()]:
            digest.update(tensor.detach().numpy().tobytes())
        report = compressor.statistics()
        total = (report.total.bits_sent, report.total.bits_received, report.total.messages)
        found[recipe] = (digest.hexdigest(), report.step, report.price, dict(report.sparsity), total)
    return found


@pytest.mark.parametrize("np", [2])
def test_a_resumed_run_equals_the_uninterrupted_one(horovodrun, tmp_path, np):
    """T22, T24."""
    straight = horovodrun(part, str(tmp_path), 0, 12, 5, np=np, timeout=200).results
    resumed = horovodrun(part, str(tmp_path), 5, 12, 5, np=np, timeout=200).results
    assert resumed == straight
    assert straight[0] != straight[1]  # the residuals are each rank's own
