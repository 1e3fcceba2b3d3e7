"""``python3 -m hvd_adaptive.setup``: make the ``.venv`` of this checkout, or find it ready."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .machine import SetupError
from .venv import prepare

ROOT = Path(__file__).resolve().parents[2]


class Lines:
    """Plain lines, for a terminal and for a log alike."""

    def __init__(self) -> None:
        self._said = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        print(f"-- {name} ...", flush=True)
        start = time.monotonic()
        yield
        print(f"-- {name}: {time.monotonic() - start:.0f} s", flush=True)

    def say(self, sentence: str) -> None:
        print(f"   {sentence}", flush=True)

    def progress(self, percent: int) -> None:
        if percent // 10 > self._said // 10:
            self.say(f"{percent} % compiled")
        self._said = percent


def main() -> int:
    try:
        python = prepare(ROOT, Lines())
    except SetupError as error:
        print(f"Set-up stopped. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Set-up was interrupted; the same command begins it anew.", file=sys.stderr)
        return 130
    print(f"   ready: {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
