"""hvd-adaptive report: what runs are summed up to, the page that is drawn, and what is refused."""

import base64
import json
import re

import pytest
from click.testing import CliRunner

from hvd_adaptive.cli import main as cli
from hvd_adaptive.cli.report_runs import FORMAT, courses, reached, read, run_name, summarise
from hvd_adaptive.cli.report_scaling import simulated
from hvd_adaptive.core.errors import ConfigurationError

PARTS = {"compute": 0.05, "compress": 0.01, "decompress": 0.01, "communicate": 0.03}
LABELS = {"dense": ("Horovod, dense", "allreduce"), "topk1": ("top-k 1 %", "allgather")}


def run(
    contestant="dense",
    kind="train",
    rate=None,
    seed=0,
    ranks=4,
    step=0.1,
    losses=(2.0, 1.0, 0.4, 0.4, 0.4),
    **more,
):
    """A run whose checks come every 10 steps, and whose steps all take ``step`` seconds and 1,000 bits."""
    label, collective = LABELS.get(contestant, (contestant, "allgather"))
    document = {
        "format": FORMAT,
        "kind": kind,
        "task": "mlp",
        "contestant": contestant,
        "label": label,
        "collective": collective,
        "by_link": contestant == "adaptive",
        "seed": seed,
        "ranks": ranks,
        "rate": rate,
        "target": 0.5,
        "parameters": 1000,
        "steps": 30,
        "setup_seconds": 1.0,
        "step_seconds": [step, step, 50 * step],
        "parts": PARTS,
        "reason": "",
    }
    if kind == "train":
        document["checks"] = [
            {
                "step": n,
                "loss": loss,
                "seconds": (n - 1) * step,
                "bits": (n - 1) * 1000,
                "payload": (n - 1) * 800,
            }
            for n, loss in zip(range(10, 1000, 10), losses, strict=False)
        ]
    else:
        document |= {"bits_per_step": 2000, "payload_per_step": 1600}
    return document | more


def write(folder, *runs):
    (folder / "runs").mkdir(exist_ok=True)
    for one in runs:
        (folder / "runs" / run_name(one)).write_text(json.dumps(one))


def cell(summary, contestant, rate=None, ranks=4):
    (found,) = [
        c for c in summary["cells"] if (c["contestant"], c["rate"], c["ranks"]) == (contestant, rate, ranks)
    ]
    return found


def test_the_target_is_reached_between_two_checks_by_the_mean_of_three():
    point = reached(run(losses=(2.0, 1.0, 0.4, 0.4, 0.4)))
    # the means of three are 0.6 at step 40 and 0.4 at step 50
    assert point.steps + 1 == pytest.approx(45)
    assert point.seconds == pytest.approx(0.1 * point.steps)
    assert point.bits == pytest.approx(1000 * point.steps)


def test_one_lucky_check_does_not_count():
    assert reached(run(losses=(2.0, 2.0, 0.1, 2.0, 2.0))) is None


def test_a_first_check_below_the_target_is_taken_as_it_is():
    assert reached(run(losses=(0.3, 0.2))).steps == 9


def test_a_target_that_is_never_reached_has_no_time():
    assert reached(run(losses=(2.0, 1.0))) is None
    found = cell(summarise([run(losses=(2.0, 1.0))]), "dense")
    assert found["seconds"] == [None] and found["quotient"] is None and found["last_loss"] == [1.0]


def test_a_fixed_curve_is_timed_by_the_median_step_of_another_link():
    slow = run(kind="pace", rate=1e8, step=3.0)
    found = cell(summarise([run(), slow]), "dense", 1e8)
    steps = found["steps"][0] - 1
    assert not found["trained_here"]
    assert found["seconds"][0] == pytest.approx(3.0 * steps)
    assert found["bits_per_rank"][0] == pytest.approx(2000 * steps)


def test_a_curve_that_depends_on_the_link_is_not_carried_over():
    runs = [run("adaptive"), run("adaptive", kind="pace", rate=1e8)]
    assert ("mlp", 4, 1e8, "adaptive") not in courses(runs)


def test_a_run_over_the_link_itself_counts_before_a_pace():
    runs = [run(), run(rate=1e8, step=2.0), run(kind="pace", rate=1e8, step=9.0)]
    found = cell(summarise(runs), "dense", 1e8)
    assert found["trained_here"] and found["seconds"][0] == pytest.approx(2.0 * (found["steps"][0] - 1))


def test_quotients_compare_the_same_seed_and_medians():
    dense = [run(seed=0, step=0.2), run(seed=1, step=0.4), run(seed=2, step=0.8)]
    own = [run("topk1", seed=0, step=0.1), run("topk1", seed=1, step=0.1), run("topk1", seed=2, step=0.1)]
    summary = summarise(dense + own)
    assert cell(summary, "topk1")["quotient"] == pytest.approx(4.0)
    assert cell(summary, "topk1")["quotient_range"] == pytest.approx([2.0, 8.0])
    assert cell(summary, "dense")["quotient"] == pytest.approx(1.0)


def test_a_seed_that_never_got_there_counts_as_infinitely_long():
    runs = [run(seed=0), run(seed=1, step=0.3), run(seed=2, losses=(2.0, 1.0))]
    found = cell(summarise(runs), "dense")
    assert found["seconds_median"] == max(s for s in found["seconds"] if s is not None)
    runs[1] = run(seed=1, losses=(2.0, 1.0))
    assert cell(summarise(runs), "dense")["seconds_median"] is None


def test_the_simulation_gathers_from_every_worker_and_rings_at_a_constant():
    dense = run(rate=1e8, kind="pace", payload_per_step=1e8)
    own = run("topk1", rate=1e8, kind="pace", payload_per_step=1e6)
    assert simulated(own, 1024) > 20 * simulated(own, 8)
    assert simulated(dense, 1024) < 1.5 * simulated(dense, 8)
    # one second carries 1e8 bits: 1,023 messages of 1e6 bits take 10.23 s
    waiting = 1023e6 / 1e8 + 1023 * 1e-4
    decoding = PARTS["decompress"] * 1023 / 3
    assert simulated(own, 1024) == pytest.approx(PARTS["compute"] + PARTS["compress"] + decoding + waiting)


def test_the_simulated_adaptive_goes_dense_where_that_is_faster():
    own = run("adaptive", rate=1e8, kind="pace", payload_per_step=20_000, parameters=1_000_000)
    fixed = own | {"by_link": False}
    assert simulated(own, 4) == simulated(fixed, 4)
    assert simulated(own, 1024) < simulated(fixed, 1024)


def test_the_page_holds_every_plot_and_nothing_from_elsewhere(tmp_path):
    runs = [run(), run("topk1", seed=0), run("topk1", seed=1, losses=(2.0, 0.4, 0.4, 0.4)), run("unheard-of")]
    runs += [run(name, kind="pace", rate=rate) for name in LABELS for rate in (1e8, 1e9)]
    runs += [run("topk1", kind="pace", rate=1e8, ranks=2)]
    runs += [run("ddp-bf16", failed="TypeError: <no> bf16")]
    write(tmp_path, *runs)
    answer = CliRunner().invoke(cli.main, ["report", str(tmp_path), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    page = (tmp_path / "out" / "index.html").read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    files = sorted((tmp_path / "out").glob("*.png"))
    names = {path.name for path in files}
    assert names == {
        f"mlp-{what}.png" for what in ("time-to-target", "loss-time", "loss-bits", "parts", "scaling")
    }
    assert sorted(pictures) == sorted(path.read_bytes() for path in files)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "TypeError: &lt;no&gt; bf16" in page and "100 Mbit/s" in page and "simulated" in page
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["cells"] == summarise(read(tmp_path))["cells"]


@pytest.mark.parametrize("losses", [(2.0, 1.0), (0.4,)])
def test_one_run_alone_is_drawn(tmp_path, losses):
    write(tmp_path, run(losses=losses))
    answer = CliRunner().invoke(cli.main, ["report", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert len(list((tmp_path / "report").glob("*.png"))) == 5


def refusal(folder):
    answer = CliRunner().invoke(cli.main, ["report", str(folder)])
    assert answer.exit_code == 1, answer.output
    return answer.output


def test_a_directory_without_runs_is_refused(tmp_path):
    assert "no runs/*.json" in refusal(tmp_path) and "run.py" in refusal(tmp_path)
    assert "not a directory" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a run of the network benchmark"),
        (json.dumps({"recipe": "topk"}), "not a run of the network benchmark"),
        (json.dumps(run() | {"step_seconds": "fast"}), "'step_seconds' is 'fast'"),
        (json.dumps(run() | {"seed": True}), "'seed' is True"),
        (json.dumps(run() | {"rate": -1}), "'rate' is -1"),
        (json.dumps({k: v for k, v in run().items() if k != "checks"}), "'checks' is None"),
    ],
)
def test_a_foreign_or_damaged_file_is_named(tmp_path, content, said):
    write(tmp_path, run())
    (tmp_path / "runs" / "other.json").write_text(content)
    answer = refusal(tmp_path)
    assert "other.json" in answer and said in answer
    with pytest.raises(ConfigurationError):
        read(tmp_path)


def test_runs_that_all_failed_are_refused(tmp_path):
    write(tmp_path, run(failed="it broke"))
    assert "it broke" in refusal(tmp_path)
