"""A trained model and a language model, and a process as it was before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.conftest import one_thread

if TYPE_CHECKING:  # without FairSeq this file is loaded, and no test beside it
    from tests.fairseq.commands.world import World

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def world(shared_folder: Callable[[str], AbstractContextManager[tuple[Path, bool]]]) -> World:
    from tests.fairseq.commands.world import World

    with shared_folder("world") as (folder, is_new):
        made = World(folder)
        if is_new:
            made.make()
    return made


@pytest.fixture(scope="session")
def language(world, tmp_path_factory) -> World:
    """Data and a language model, which is hardly trained."""
    from tests.fairseq.commands.world import World, command_of_fairseq, train_language_model

    made = World(tmp_path_factory.mktemp("language"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        command_of_fairseq(
            "preprocess", "--only-source", "--trainpref", world.folder / "train.en", "--destdir", made.data,
            "--validpref", world.folder / "valid.en", "--testpref", world.folder / "test.en",
        )  # fmt: skip
        train_language_model(made.data, made.model.parent)
    return made
