"""``hvd-adaptive report``: what benchmarks/network measured, as plots and one page."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import ConfigurationError
from .report_runs import BASELINE, courses, rate_name, read, summarise

if TYPE_CHECKING:
    from .report_plots import Plot

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Compression over real links</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; }}
body {{ max-width: 1180px; margin: 2em auto; padding: 0 1em; }}
img {{ max-width: 100%; }}
figure {{ margin: 1.5em 0; }}
figcaption, .note {{ color: #555; font-size: 13px; max-width: 60em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 3px 10px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
caption {{ text-align: left; font-weight: bold; padding: 1.2em 0 .4em; }}
</style>
</head>
<body>
<h1>Compression over real links</h1>
{body}
</body>
</html>
"""

_COLUMNS = (
    "contestant",
    "seconds to target",
    "times faster than dense",
    "steps",
    "MB sent by a worker",
    "ms of a step",
    "computation",
    "compress",
    "decompress",
    "not hidden",
    "seconds to set up",
    "trained here",
)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; by default DIRECTORY/report.",
)
def report(directory: Path, out: Path | None) -> None:
    """Draw the runs that benchmarks/network/run.py left in DIRECTORY.

    Writes plots as PNG files, and index.html, which holds them all and needs nothing else.
    """
    runs = read(directory)
    summary = summarise(runs)
    if not summary["cells"]:
        why = (
            "; ".join(f"{one['label']}: {one['failed']}" for one in summary["failed"])
            or "only steps were timed"
        )
        raise ConfigurationError(f"{directory} holds no run that trained to draw a curve of ({why})")
    # After the directory was looked at: matplotlib takes a second to come.
    from .report_plots import draw, draw_scaling

    out = out or directory / "report"
    out.mkdir(parents=True, exist_ok=True)
    plots = list(itertools.chain(draw(out, summary, courses(runs)), draw_scaling(out, runs)))
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    page = out / "index.html"
    page.write_text(_page(summary, plots))
    click.echo(f"{len(runs)} runs, {len(plots)} plots: {page}")


def _page(summary: Mapping[str, Any], plots: Sequence[Plot]) -> str:
    body = [_introduction(summary)]
    for task in sorted({cell["task"] for cell in summary["cells"]}):
        body.append(f"<h2>{html.escape(task)}</h2>")
        body += [_figure(plot) for plot in plots if plot.path.name.startswith(f"{task}-")]
        body += _tables([cell for cell in summary["cells"] if cell["task"] == task])
    if summary["failed"]:
        body.append("<h2>What failed</h2><ul>")
        body += [
            f"<li>{html.escape(one['label'])}: {html.escape(one['failed'])}</li>" for one in summary["failed"]
        ]
        body.append("</ul>")
    return _PAGE.format(body="\n".join(body))


def _introduction(summary: Mapping[str, Any]) -> str:
    seeds = max((len(cell["seeds"]) for cell in summary["cells"]), default=0)
    cores = " or ".join(map(str, summary["cores"])) or "an unknown number of"
    return (
        f'<p class="note">Up to {seeds} seeds, on hosts of {cores} processor cores; hosts that are network '
        "namespaces of one machine share its cores, so that computation and compression take longer there "
        "than on as many machines, and communication counts for less.</p>"
        '<p class="note">The clock of a run starts after its first step, in which '
        "ranks connect, measure their link and compile; that step's seconds stand in a column of their own. "
        'It stands still while the held-out loss is computed. Where "trained here" says no, the curve was '
        "trained over another link, on which it does not depend, and its steps were timed over this one.</p>"
    )


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.path.read_bytes()).decode()
    title, caption = html.escape(plot.title), html.escape(plot.caption)
    return (
        f'<figure><img alt="{title}" src="data:image/png;base64,{data}">'
        f"<figcaption>{title}. {caption}</figcaption></figure>"
    )


def _tables(cells: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    def key(cell: Mapping[str, Any]) -> tuple[int, float]:
        return -cell["ranks"], cell["rate"] or math.inf

    for _, group in itertools.groupby(sorted(cells, key=key), key=key):
        own = sorted(group, key=lambda cell: cell["seconds_median"] or math.inf)
        first = own[0]
        rows = [f"<th>{name}</th>" for name in _COLUMNS]
        caption = f"{first['ranks']} workers, {rate_name(first['rate'])}"
        yield f'<div class="wide"><table><caption>{caption}</caption><tr>{"".join(rows)}</tr>'
        for cell in own:
            yield "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in _row(cell)) + "</tr>"
        yield "</table></div>"


def _row(cell: Mapping[str, Any]) -> list[str]:
    quotient, spread = cell["quotient"], cell["quotient_range"]
    factor = "" if quotient is None or cell["contestant"] == BASELINE else f"{quotient:.2f}"
    if factor and spread:
        factor += f" ({spread[0]:.2f} to {spread[1]:.2f})"
    steps = [step for step in cell["steps"] if step is not None]
    parts = [f"{1e3 * cell['parts'][part]:.1f}" for part in cell["parts"]]
    seconds, bits = cell["seconds_median"], cell["bits_per_rank_median"]
    return [
        cell["label"],
        "not reached" if seconds is None else f"{seconds:.1f}",
        factor,
        f"{min(steps):.0f} to {max(steps):.0f}" if steps else "",
        "" if bits is None else f"{bits / 8e6:.1f}",
        f"{1e3 * cell['step_seconds']:.1f}",
        *parts,
        f"{cell['setup_seconds']:.1f}",
        "yes" if cell["trained_here"] else "no",
    ]
