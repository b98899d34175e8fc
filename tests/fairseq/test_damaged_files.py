"""Files of FairSeq's that were cut, or in which bytes have changed: one error that names the file."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import indexed_dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st


def checkpoint(new_format: bool) -> bytes:
    buffer = io.BytesIO()
    arguments = Namespace(arch="transformer", task="translation", data="", source_lang="xx", target_lang="yy")
    state = {"args": arguments, "model": {"weight": torch.arange(40.0)}, "extra_state": {}, "optimizer_history": []}
    torch.save(state, buffer, _use_new_zipfile_serialization=new_format)
    return buffer.getvalue()


def data() -> dict[str, bytes]:
    """The two files of a data set."""
    with tempfile.TemporaryDirectory() as folder:
        builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{folder}/data.bin")
        for length in (3, 1, 7):
            builder.add_item(torch.arange(4, 4 + length))
        builder.finalize(f"{folder}/data.idx")
        return {end: Path(folder, f"data.{end}").read_bytes() for end in ("idx", "bin")}


CHECKPOINTS = {"zip": checkpoint(True), "pickle": checkpoint(False)}
DATA = data()


@st.composite
def damaged(draw: Callable[[Any], Any], whole: bytes) -> bytes:
    """The bytes cut, or with up to four of them changed."""
    if draw(st.booleans()):
        return whole[: draw(st.integers(0, len(whole) - 1))]
    found = bytearray(whole)
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)):
        found[place] = value
    return bytes(found)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_damaged_checkpoints(kind, tmp_path):
    path = tmp_path / "model.pt"

    @settings(max_examples=60, deadline=None)
    @example(b"")
    @example(CHECKPOINTS[kind][:5])
    @example(b"\x80\x02e.")
    @example(b"\x80\x02h\x65.")  # KeyError: 101
    @given(damaged(CHECKPOINTS[kind]))
    def read(content: bytes) -> None:
        path.write_bytes(content)
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        except pickle.UnpicklingError as error:
            assert "\n" not in str(error) and (str(path) in str(error) or "add_safe_globals" in str(error)), error
        else:
            assert isinstance(state, dict)

    read()


def test_damaged_data(tmp_path):
    @settings(max_examples=150, deadline=None)
    @example({**DATA, "idx": b""})
    @example({**DATA, "bin": b""})
    @example({**DATA, "idx": DATA["idx"][:17] + b"\x65" + DATA["idx"][18:]})  # KeyError: 101
    @example({**DATA, "idx": DATA["idx"][:18] + struct.pack("<Q", 2**62) + DATA["idx"][26:]})
    @given(st.fixed_dictionaries({end: st.just(whole) | damaged(whole) for end, whole in DATA.items()}))
    def read(content: dict[str, bytes]) -> None:
        for end, part in content.items():
            (tmp_path / f"data.{end}").write_bytes(part)
        try:
            found = indexed_dataset.MMapIndexedDataset(str(tmp_path / "data"))
            assert all(found[i].dtype == torch.int64 for i in range(len(found)))
        except ValueError as error:
            assert "\n" not in str(error) and "damaged" in str(error) and str(tmp_path / "data") in str(error), error

    read()
