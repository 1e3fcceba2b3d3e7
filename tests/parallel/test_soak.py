"""A minute of training: memory flat, replicas bit-equal, nobody waited for; and the same run twice."""


def test_a_minute_of_training(horovodrun):
    run = horovodrun("soak.py", "--seconds", 60, np=4, timeout=200)
    assert "Stalled" not in run.output and "stalled" not in run.output
    first = run.results[0]
    for found in run.results:
        assert found["memory_growth"] <= 0.02
        assert found["checksum"] == first["checksum"]
        assert found["threads"] == first["threads"]
        assert found["steps"] == first["steps"] >= 300
    assert first["different_T"] > 5  # T is adaptive
    assert 0 < first["sent_of_dense"] < 0.5


def test_the_same_seed_gives_the_same_bits(horovodrun):
    runs = [horovodrun("soak.py", "--steps", 200, "--seed", seed, timeout=140).results for seed in (1, 1)]
    same = [{k: v for k, v in run[0].items() if k not in ("memory_growth", "mebibytes")} for run in runs]
    assert same[0] == same[1]
    assert same[0]["different_T"] > 5
