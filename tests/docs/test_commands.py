"""Every command and every line of Python on the pages is run, but for those listed here with a reason."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import NAMES, PAGES, ROOT, Block, blocks, commands

# Whole commands, or the beginning of one that ends in "...".
NOT_RUN = {
    "make ...": "`make check-fresh`, `make check-wheel` and their own tests run what the Makefile does",
    "pip install ...": "changes the environment that runs the tests; `make check-fresh` and `make check-wheel` install",
    "pip uninstall ...": "the same",
    "apt-get install ...": "changes the machine",
    "python docs/make_support_table.py": "runs the equivalence grid for minutes",
    "python docs/make_benchmark_tables.py": "would change README.md; a test of its own checks the tables",
    "python examples/train.py ...": "trains the shipped models for ten minutes each",
    "MALLOC_MMAP_MAX_=0 ...": "the same",
    "fastgen-generate HuggingFaceTB/SmolLM2-135M-Instruct ...": "needs a model of the hub",
    "fastgen-generate examples/models/kjv-bart sources.txt several.txt ...": "needs Ray; test_on_ray.py has such runs",
    "fastgen-serve ...": "serves until it is told to stop; tests/serve runs it",
    "curl ...": "asks a server; the same",
    "python -m benchmarks ...": "takes minutes; tests/benchmarks runs the command on small workloads",
    "python -m benchmarks.serving ...": "the same",
}
# A line that is in the block.
PYTHON_NOT_RUN = {
    'data = base64.b64encode(open("page.png", "rb").read()).decode()': "needs a server",
    "print(answer.choices[0].message.parsed)": "needs a server; tests/serve/test_forms.py has one",
    "for call in answer.choices[0].message.tool_calls or []:": "needs a server; tests/serve/test_tools.py has one",
    'model = UniLMForSeq2SeqLM.from_published("unilm1-base-cased.bin")': "needs the authors' file of 450 MB",
    'model = AutoModelForCausalLM.from_pretrained("smollm2", gguf_file="model.gguf", quantization_config=keep)': (
        "needs a file of 98 MB"
    ),
    'client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")': (
        "needs a server; tests/serve/test_openai.py has one"
    ),
}
MOST_TOKENS = 24
NEEDS_FAIRSEQ = {"docs/fairseq.md", "docs/unilm-prophetnet.md"}
_PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:python|pip|make|fastgen-\S+|cat|head|apt-get|\.venv/\S+) "


def left_out(command: str) -> str | None:
    """The entry of NOT_RUN that a command falls under."""
    for entry in NOT_RUN:
        beginning = entry.removesuffix(" ...")
        if command == beginning or (entry.endswith(" ...") and command.startswith(f"{beginning} ")):
            return entry
    return None


def runs(block: Block) -> bool:
    """Whether the block is run. All of it is, or nothing."""
    if block.language == "python":
        return not PYTHON_NOT_RUN.keys() & set(block.text.splitlines())
    if block.language != "sh":
        return False
    found = {left_out(command) is None for command in commands(block)}
    assert len(found) == 1, f"line {block.line}: commands that are run and commands that are not, in one block"
    return found.pop()


def put_examples(folder: Path) -> None:
    """`examples/`, whose models end after few tokens where a page does not say how many."""
    shutil.copytree(ROOT / "examples", folder / "examples", copy_function=os.symlink)
    for path in folder.glob("examples/models/*/generation_config.json"):
        changed = {**json.loads(path.read_text()), "max_new_tokens": MOST_TOKENS}
        path.unlink()
        path.write_text(json.dumps(changed))


def run_page(name: str, folder: Path, programs: Path) -> str:
    """Runs a page in `folder`, where `examples/` is; returns what it printed."""
    found = [vars(block) for block in blocks(ROOT / name) if runs(block)]
    put_examples(folder)
    # A reader has no settings of FastGen's, and no interpreter of Triton's, with which no step is captured.
    own = ("FASTGEN_", "TRITON_")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(own)},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FASTGEN_CACHE": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(programs / "python"), "-m", "tests.docs.run_page", name]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=json.dumps(found), text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


RUN = [name for name, page in zip(NAMES, PAGES, strict=True) if any(map(runs, blocks(page)))]


@pytest.mark.parametrize("name", [name for name in RUN if name != "docs/fairseq.md"])
def test_a_page_runs(name, tmp_path, programs):
    if name in NEEDS_FAIRSEQ and importlib.util.find_spec("fairseq") is None:
        pytest.skip("FairSeq is not installed")
    run_page(name, tmp_path, programs)


@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="FairSeq is not installed")
def test_the_page_of_fairseq_leads_from_text_to_outputs(tmp_path, programs):
    said = run_page("docs/fairseq.md", tmp_path, programs)
    lines = [line for line in (tmp_path / "out.txt").read_text().splitlines() if re.match(r"[STHDP]-\d|Generate", line)]
    assert len(lines) == 24 * 5 + 1
    assert re.search(r"^Generate test with beam=5: BLEU4 = \d", "\n".join(lines), re.MULTILINE)
    assert "the model waited" in said


@pytest.mark.parametrize("name", NAMES)
def test_every_block_says_what_it_is(name):
    indented = re.findall(r"^[ \t]+```.*", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert not indented, f"{name}: blocks that would not be run: {indented}"
    for block in blocks(ROOT / name):
        assert block.language in ("sh", "python", "text"), f"{name}:{block.line}: {block.language!r}"
        if block.language == "text":
            assert not re.search(rf"^{_PROGRAMS}", block.text, re.MULTILINE), f"{name}:{block.line} holds a command"


def test_what_is_not_run_is_on_a_page():
    every = [block for page in PAGES for block in blocks(page)]
    found = {left_out(command) for block in every if block.language == "sh" for command in commands(block)}
    assert not NOT_RUN.keys() - found
    assert not PYTHON_NOT_RUN.keys() - {line for block in every for line in block.text.splitlines()}
