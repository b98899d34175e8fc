"""Models that are damaged or have changed are refused with one line, and never run as if they were whole."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastgen.pipeline import SetupError, generate_dataset
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.journal import _code, content
from fastgen.pipeline.loading import _check_tokenizer, quiet_transformers
from fastgen_serve.workers.loading import read_generating
from tests.pipeline import tiny
from tests.pipeline.children import interrupted_after


def settings(model: Path, **options: object) -> RunOptions:
    return RunOptions(model=str(model), input="-", output="out.txt", device="cpu", **options)


@pytest.fixture
def copied(bart: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bart, tmp_path / "model"))


NO_TOKENIZER = r"^model \S+ has no tokenizer: its files, .* are missing"
NOT_LOADED = r"^the tokenizer of model \S+ cannot be loaded: (?!'added_tokens'$)"
# Names of files, what is in them then (None: they are gone), and what is said.
DAMAGES = [
    ("tokenizer*", None, "tokenizer"),
    # What is left names a class, for which the library asks for packages that are there.
    ("tokenizer.json", None, NO_TOKENIZER),
    *(("tokenizer.json", text, NOT_LOADED) for text in ("{}", '{"added_tokens": []}', "{", "[]", "\0")),
    *(
        ("generation_config.json", text, "generation config|num_beams")
        for text in ("{", "", "[1]", '{"num_beams": "four"}', "\0")
    ),
]


@pytest.mark.parametrize(("names", "text", "said"), DAMAGES)
def test_a_damaged_model(copied: Path, names: str, text: str | None, said: str) -> None:
    for path in copied.glob(names):
        path.unlink() if text is None else path.write_text(text)
    with pytest.raises(SetupError, match=said):
        load(settings(copied))


@pytest.mark.parametrize("kind", ["t5", "mt5", "mbart", "switch_transformers", "gpt2"])
def test_the_tokenizer_that_the_library_makes_without_files(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(SetupError, match=r"no tokenizer: its files, .* are missing"):
        _check_tokenizer(AutoTokenizer.from_pretrained(tmp_path), str(tmp_path))


def test_a_tokenizer_of_bytes_needs_no_files(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    _check_tokenizer(ByT5Tokenizer(), str(tmp_path))


def test_with_half_a_tokenizer(gpt2: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpt2, tmp_path / "model"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(SetupError, match=r"merges"):
        load(settings(folder))


@pytest.mark.parametrize("quiet", [True, False])
def test_weights_that_are_missing(copied: Path, quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    some = "missing"

    def take_out(weights: dict) -> None:
        nonlocal some
        some = sorted(name for name in weights if name.endswith(".bias"))[0]
        weights.pop(some)

    tiny.change_weights(copied, take_out)
    with pytest.raises(SetupError, match=rf"1 of its weights are missing, {some} the first .*--allow-missing-weights"):
        load(settings(copied, quiet=quiet))
    assert "MISSING" not in capsys.readouterr().err
    loaded = [load(settings(copied, quiet=True, allow_missing_weights=True)) for _ in range(2)]
    assert content(loaded[0].model, loaded[0].tokenizer) == content(loaded[1].model, loaded[1].tokenizer)


def test_in_the_type_of_the_checkpoint(gpt2: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpt2, tmp_path / "model"))
    tiny.change_weights(folder, lambda weights: weights.update({name: each.half() for name, each in weights.items()}))
    config = json.loads((folder / "config.json").read_text())
    for named in ({"dtype": "float16"}, {}):  # where the configuration does not say it, the weights do
        (folder / "config.json").write_text(json.dumps({**config, "dtype": None, **named}))
        assert load(settings(folder, dtype="auto")).model.dtype == torch.float16
    assert load(settings(folder)).model.dtype == torch.float32


def test_loading_leaves_the_generator_of_random_numbers_as_it_was(gpt2: Path) -> None:
    """Otherwise all processes of a server, which load the same model, draw the same."""
    before = torch.get_rng_state()
    load(settings(gpt2))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_left_over(copied: Path) -> None:
    import torch

    tiny.change_weights(copied, lambda weights: weights.update({"left.over": torch.zeros(3)}))
    with pytest.raises(SetupError, match=r"1 of its weights are left over, left.over"):
        load(settings(copied))
    load(settings(copied, allow_missing_weights=True))


def two_weights_exchanged(folder: Path) -> None:
    def change(weights: dict) -> None:
        largest = max(weights.values(), key=lambda weight: weight.numel()).view(-1)
        largest[:2] = largest[:2].flip(0).clone()

    tiny.change_weights(folder, change)


def configuration(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"relu"'))


def tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    first, second = values["model"]["merges"][:2]
    values["model"]["merges"][:2] = second, first
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "part"), [(two_weights_exchanged, "weights"), (configuration, "configuration"), (tokenizer, "tokenizer")]
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_is_not_resumed_with_another_model(
    bart: Path, inputs: Path, tmp_path: Path, change: Callable[[Path], None], part: str, in_memory: bool
) -> None:
    """Files of the same names and sizes, or a model in memory of the same name."""
    folder = Path(shutil.copytree(bart, tmp_path / "model"))

    def run(output: Path) -> None:
        options = {"generation": {"max_new_tokens": 5}, "batch_size": 4, "device": "cpu", "quiet": True, "workers": 0}
        model, tokens = folder, None
        if in_memory:
            loaded = load(settings(folder, quiet=True))
            model, tokens = loaded.model, loaded.tokenizer
        generate_dataset(model, inputs, output, tokenizer=tokens, resume=True, **options)

    with pytest.raises(KeyboardInterrupt), interrupted_after(2):
        run(tmp_path / "out.txt")
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    saved = Path(shutil.copytree(folder, tmp_path / "saved"))
    change(folder)
    assert part == "tokenizer" or before == {path.name: path.stat().st_size for path in folder.iterdir()}
    with pytest.raises(SetupError, match=f"cannot resume with another model: its {part}"):
        run(tmp_path / "out.txt")
    shutil.rmtree(folder)
    # Where the model lies does not matter.
    folder = saved
    run(tmp_path / "out.txt")


def test_code_that_a_model_imports_from_beside_it_is_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("modeling", "helper"):
        (tmp_path / f"{name}.py").write_text(f"# {name}")
        module = ModuleType(f"transformers_modules.a.{name}")
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = type("Model", (), {"__module__": "transformers_modules.a.modeling"})()
    before = list(_code(model))
    (tmp_path / "helper.py").write_text("# changed")
    assert list(_code(model)) != before


def test_code_that_generates_in_place_of_the_library_is_not_run_unasked(gpt2: Path, tmp_path: Path) -> None:
    """A folder `custom_generate`, by the commands and by the server."""
    folder = Path(shutil.copytree(gpt2, tmp_path / "model"))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")
    for model in (load(settings(folder)).model, read_generating(str(folder), "fp32")[0]):
        assert "generate" not in vars(model)
    assert not (tmp_path / "has_run").exists()


def test_code_that_generates_in_place_of_the_library_is_part_of_the_model(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library loads it where that is asked for."""
    loaded = load(settings(gpt2))
    found = [content(loaded.model, loaded.tokenizer)["code"]]
    module = ModuleType("transformers_modules.a.custom_generate.generate")
    module.__file__ = str(tmp_path / "generate.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def generate(model: Any) -> None: ...

    generate.__module__ = module.__name__
    loaded.model.generate = partial(generate, model=loaded.model)
    for text in ("# one", "# another"):
        Path(module.__file__).write_text(text)
        found.append(content(loaded.model, loaded.tokenizer)["code"])
    assert len(set(found)) == 3


def test_each_handler_gives_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listing(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.given.append(record.getMessage())

    from transformers.utils.logging import get_logger

    handlers = [Listing(), Listing()]
    logger = get_logger("transformers")  # with the library's own handler, which it adds once
    monkeypatch.setattr(logger, "handlers", list(handlers))
    for _ in range(2):  # runs in one process
        quiet_transformers(quiet=False)
        for text in ("an option is ignored", "another one is"):
            logger.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING}))
    assert [handler.given for handler in handlers] == [["an option is ignored", "another one is"]] * 2
    assert [len(handler.filters) for handler in handlers] == [1, 1]
