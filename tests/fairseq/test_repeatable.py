"""The same command prints the same digits, whatever this machine has done before."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen_cli import fairseq as commands
from tests.fairseq import models

pytestmark = pytest.mark.skipif(
    choose.instruction_set() is Isa.PORTABLE, reason="all products are torch's on this instruction set"
)


def checkpoint(folder: Path) -> Path:
    """A model wide enough for FastGen's products."""
    words = models.dictionary()
    for side in ("de", "en"):
        words.save(str(folder / f"dict.{side}.txt"))
    size: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_embed_dim": 384, f"{part}_ffn_embed_dim": 1024, f"{part}_layers": 1}
    arguments = models.sizes(**size)
    model = models.encoder_decoder(scale=0.3, **size)
    about = {"arch": "transformer", "task": "translation", "criterion": "cross_entropy", "data": ""}
    history = {"criterion_name": "", "optimizer_name": "", "num_updates": 1, "lr_scheduler_state": {"best": None}}
    state = {"args": Namespace(**{**vars(arguments), **about}), "model": model.state_dict()}
    extra = {"extra_state": {"train_iterator": {"epoch": 1}}, "last_optimizer_state": None}
    torch.save({**state, **extra, "optimizer_history": [history]}, folder / "model.pt")
    (folder / "input.txt").write_text("w1 w2 w3\nw9 w8 w7 w6 w5 w4\nw40 w41\nw11 w3 w17 w20\n")
    return folder / "model.pt"


def test_the_same_command_twice_prints_the_same_digits(strict, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    path = checkpoint(tmp_path)
    words = [str(tmp_path), "--path", str(path), "-s", "de", "-t", "en", "--input", str(tmp_path / "input.txt")]
    words += "--cpu --buffer-size 4 --batch-size 4 --beam 3 --max-len-b 8 --postprocess-workers 0".split()

    def printed() -> list[str]:
        assert commands.interactive(words) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("H-", "D-", "P-"))]

    first = printed()
    assert len(first) == 12 and printed() == first
    # Or this would show nothing.
    chosen = choose.kernel_for
    monkeypatch.setattr(choose, "kernel_for", lambda *given: _another(chosen(*given)))
    assert printed() != first


def _another(kernel: choose.Kernel | None) -> choose.Kernel | None:
    return None if kernel is None else kernel._replace(multiply=lambda *given: kernel.multiply(*given) * 1.01)
