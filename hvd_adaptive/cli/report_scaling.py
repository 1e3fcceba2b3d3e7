"""The seconds of a step on more workers than were measured, by the simulation's time model."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from ..core.cost import LinkTime, PayloadBits

WORKERS = tuple(2**i for i in range(1, 11))
"""Up to 1,024."""

LATENCY = 1e-4
"""Seconds of a hop, as in ``hvd-adaptive simulate``."""


def simulated(run: Mapping[str, Any], workers: int) -> float:
    """Seconds of a step of ``run``'s contestant on ``workers``, over links of ``run``'s rate.

    Computation, compression and a worker's payload stay as measured.  What is gathered is received and
    decoded from every other worker; a ring allreduce moves 2 (n - 1)/n of it.  A contestant that chooses
    by the link takes the dense exchange where that is faster.
    """
    from ..simulation.run import step_time

    parts, payload, gathers = run["parts"], _payload(run), run["collective"] == "allgather"
    more = (workers - 1) / max(1, run["ranks"] - 1) if gathers else 1.0
    fixed = parts["compute"] + parts["compress"]
    link = LinkTime(PayloadBits(1), run["rate"], LATENCY, fixed + more * parts["decompress"], workers)
    if not gathers:
        return step_time(link, round(payload), True)
    sparse = step_time(link, round((workers - 1) * payload), False)
    if not run["by_link"]:
        return sparse
    return min(sparse, step_time(dataclasses.replace(link, compute=fixed), 32 * run["parameters"], True))


def _payload(run: Mapping[str, Any]) -> float:
    """Bits that a worker handed over in a step: the mean between checks, the median of those."""
    if run["kind"] == "pace":
        return float(run["payload_per_step"])
    checks = run["checks"]
    if len(checks) == 1:
        return float(checks[0]["payload"] / (checks[0]["step"] - 1))
    pairs = itertools.pairwise(checks)
    return float(statistics.median((b["payload"] - a["payload"]) / (b["step"] - a["step"]) for a, b in pairs))
