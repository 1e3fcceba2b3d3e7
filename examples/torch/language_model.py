"""A character-level language model on text that you name, with mixed precision, checkpoints and resuming.

    horovodrun -np 2 python examples/torch/language_model.py --text book.txt --recipe topk

Without --text it reads the help topics of Python itself, some 460,000 characters of English that come
with every Python.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import click
import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F

from hvd_adaptive.torch import Compression

RECIPES = {
    "dense": lambda named: Compression.none,
    "fp16": lambda named: Compression.fp16,
    "topk": lambda named: Compression.topk(named, ratio=0.01),
    "randk": lambda named: Compression.randk(named, ratio=0.01),
    "lowrank": lambda named: Compression.lowrank(named, rank=4),
    "sign": lambda named: Compression.sign(named),
    "adaptive": lambda named: Compression.adaptive(named),
}
WINDOW = 64  # characters that the model sees at once


class LanguageModel(nn.Module):
    """Embeddings and an LSTM: the next character from those before it."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def read(path: Path | None) -> tuple[torch.Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    text = path.read_text(errors="replace") if path else "".join(pydoc_data.topics.topics.values())
    if len(text) < 2 * WINDOW:
        raise click.UsageError(f"--text needs at least {2 * WINDOW} characters; {path} has {len(text)}")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), len(characters)


def save(folder: Path, state: dict) -> None:
    """Every process saves its own file, because residuals differ between processes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{hvd.rank()}.pt"
    torch.save(state, file.with_suffix(".new"))
    hvd.allreduce(torch.zeros(1), name="saved")  # all have written before the first replaces its old file
    file.with_suffix(".new").replace(file)


def load(folder: Path) -> dict | None:
    """This process's file, if every process has one of the same step."""
    file = folder / f"rank-{hvd.rank()}.pt"
    state = torch.load(file) if file.exists() else None
    steps = set(hvd.allgather_object(None if state is None else (state["step"], state["ranks"])))
    if steps == {None}:
        return None
    if len(steps) > 1 or state["ranks"] != hvd.size():
        raise click.ClickException(
            f"the files in {folder} are of other steps or another number of processes; "
            "give another --checkpoint, or remove it to begin anew"
        )
    return state


@click.command()
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What to read.")
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="adaptive", show_default=True)
@click.option("--steps", default=150, show_default=True, help="Steps in all, those before a resume included.")
@click.option("--batch", default=16, show_default=True, help="Windows per process and step.")
@click.option("--width", default=128, show_default=True, help="Of embeddings and LSTM.")
@click.option("--rate", default=5e-3, show_default=True, help="Learning rate.")
@click.option("--clip", default=1.0, show_default=True, help="Greatest norm of the averaged gradient.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder to resume from and to save to.")
def main(
    text: Path | None,
    recipe: str,
    steps: int,
    batch: int,
    width: int,
    rate: float,
    clip: float,
    checkpoint: Path | None,
) -> None:
    """Train a language model and say how well it predicts, and how much was sent."""
    hvd.init()
    torch.manual_seed(0)
    data, characters = read(text)
    held_out = len(data) // 10
    model = LanguageModel(characters, width)
    compression = RECIPES[recipe](model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    # bfloat16 does not need a scaler; it stands here to show the order of calls that float16 needs.  The
    # scale stays as it is while all is finite: a residual is in units of the scale that it came from.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1_000_000)
    windows = torch.Generator().manual_seed(hvd.rank())
    first = 0

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if hasattr(compression, "state_dict"):  # Horovod's own compressors have no state
        parts["compression"] = compression
    if checkpoint and (state := load(checkpoint)):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        windows.set_state(state["windows"])
        first = state["step"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def loss_of(begin: torch.Tensor) -> torch.Tensor:
        x = data[begin[:, None] + torch.arange(WINDOW + 1)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(x[:, :-1])
        return F.cross_entropy(predicted.float().flatten(0, 1), x[:, 1:].flatten())

    for step in range(first + 1, steps + 1):
        loss = loss_of(torch.randint(len(data) - held_out - WINDOW, (batch,), generator=windows))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.synchronize()  # averaged over all processes, still scaled
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():  # it is done already
            scaler.step(optimizer)  # skipped on all processes alike where a gradient is not finite
        scaler.update()
        if hvd.rank() == 0 and (step % max(1, steps // 20) == 0 or step == steps):
            bar = "━" * (30 * step // steps)
            print(f"{bar:─<30} step {step}/{steps}  loss {loss.item():.3f}", flush=True)

    if checkpoint:
        state = {name: part.state_dict() for name, part in parts.items()}
        save(checkpoint, {**state, "windows": windows.get_state(), "step": steps, "ranks": hvd.size()})
    if hvd.rank() == 0:
        with torch.no_grad():
            begin = torch.linspace(len(data) - held_out, len(data) - WINDOW - 1, 50).long()
            bits = loss_of(begin).item() / 0.6931
        print(f"{recipe}: {bits:.2f} bits per character of the last tenth of the text")
        if hasattr(compression, "statistics"):
            total = compression.statistics().total
            print(
                f"{total.bits_sent / 8e6:.1f} MB sent per rank, {1 / total.ratio:.0f} times less than dense"
            )


if __name__ == "__main__":
    main()
