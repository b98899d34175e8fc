"""The no-repeat n-gram operator against a definition in plain Python, on every backend there is."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen import ops
from fastgen.ops import _library
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_, reference

ROOT = Path(__file__).parents[2]
SCORE_TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TOKEN_TYPES = [torch.int64, torch.int32]


def kernel(scores, tokens, lengths, n, *, context=None, context_lengths=None):
    """The operator as users call it: C++ or CUDA where it was built."""
    return no_repeat_ngram_(scores, tokens, n, lengths, context=context, context_lengths=context_lengths)


@pytest.fixture(params=["kernel", "reference"], scope="session")
def operator(request, device):
    if request.param == "reference":
        return reference
    backend = torch.device(device).type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fastgen::no_repeat_ngram_", backend):
        pytest.skip(f"no {backend} kernel in this process: {_library.backend('fastgen::no_repeat_ngram_')}")
    return kernel


def banned_tokens(tokens: list[int], n: int, source: list[int]) -> set[int]:
    """The definition: what the last n - 1 of `tokens` would complete to an n-gram of `source`."""
    if len(tokens) < n - 1:
        return set()
    prefix = tokens[len(tokens) - (n - 1) :]
    return {source[i + n - 1] for i in range(len(source) - n + 1) if source[i : i + n - 1] == prefix}


def expected(scores, tokens, lengths, n, *, context=None, context_lengths=None):
    def rows_of(matrix, lengths):
        rows = matrix.tolist()
        return (
            rows
            if lengths is None
            else [row[: max(length, 0)] for row, length in zip(rows, lengths.tolist(), strict=True)]
        )

    result = scores.clone()
    rows = rows_of(tokens, lengths)
    sources = rows if context is None else rows_of(context, context_lengths)
    for r, row in enumerate(rows):
        for token in banned_tokens(row, n, sources[r // (len(rows) // len(sources))]):
            if 0 <= token < scores.shape[1]:
                result[r, token] = -math.inf
    return result


def assert_same(actual, wanted):
    assert actual.dtype == wanted.dtype
    assert torch.equal(actual.cpu().nan_to_num(nan=7e4), wanted.cpu().nan_to_num(nan=7e4))


class Guarded:
    """Scores inside a larger tensor, whose other elements show every stray write."""

    def __init__(self, rows, vocabulary, dtype, device, layout):
        self._shape, self._transposed = (rows, vocabulary), layout == "transposed"
        self._row_step, self._column_step = {"row gaps": (2, 1), "columns strided": (1, 3)}.get(layout, (1, 1))
        shape = ((rows + 2) * self._row_step, (vocabulary + 2) * self._column_step)
        self._whole = torch.randn(shape[::-1] if self._transposed else shape, device=device).to(dtype)
        self.scores, self._before = self._within(self._whole), self._whole.clone()

    def _within(self, whole):
        matrix = whole.t() if self._transposed else whole
        return matrix[self._row_step :: self._row_step, self._column_step :: self._column_step][
            : self._shape[0], : self._shape[1]
        ]

    def untouched_outside(self):
        outside = torch.ones_like(self._whole, dtype=torch.bool)
        self._within(outside).fill_(False)
        return torch.equal(self._whole[outside], self._before[outside])


@st.composite
def problems(draw):
    """Arguments as plain numbers. Few distinct ids, so that n-grams repeat; ids on both sides of the vocabulary."""
    context_rows = draw(st.integers(1, 3))
    rows = draw(st.one_of(st.integers(0, 6), st.just(40))) * context_rows
    length, context_length = draw(st.integers(0, 24)), draw(st.integers(0, 24))
    vocabulary = draw(st.integers(0, 12))
    ids = draw(st.sampled_from([(0, 1), (0, 2), (0, 5), (-3, 15), (-1, 0), (5, 5), (-(2**31), 2**31 - 1)]))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    def some_lengths(rows, length):
        return integers(-2, length + 3, rows) if draw(st.booleans()) else None  # outside the row, too

    problem = {
        "tokens": integers(*ids, rows, length),
        "lengths": some_lengths(rows, length),
        "n": draw(st.one_of(st.integers(1, 5), st.integers(1, 30), st.just(2**63 - 1))),
        "context": None,
        "context_lengths": None,
    }
    if draw(st.booleans()):
        problem["context"] = integers(*ids, context_rows, context_length)
        problem["context_lengths"] = some_lengths(context_rows, context_length)
    return rows, vocabulary, problem


class TestAgainstTheDefinition:
    @settings(max_examples=120)
    @given(
        problem=problems(),
        score_type=st.sampled_from(SCORE_TYPES),
        token_type=st.sampled_from(TOKEN_TYPES),
        length_type=st.sampled_from(TOKEN_TYPES),
        layout=st.sampled_from(["contiguous", "row gaps", "columns strided", "transposed"]),
        strided_tokens=st.booleans(),
    )
    def test_any_problem(self, operator, device, problem, score_type, token_type, length_type, layout, strided_tokens):
        rows, vocabulary, arguments = problem
        guarded = Guarded(rows, vocabulary, score_type, device, layout)
        wanted = expected(guarded.scores, **arguments)
        for name in ("tokens", "context"):
            if arguments[name] is not None:
                x = arguments[name].to(device, token_type)
                arguments[name] = x.repeat_interleave(2, dim=1)[:, ::2] if strided_tokens else x
        for name in ("lengths", "context_lengths"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].to(device, length_type)
        unchanged = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}

        result = operator(guarded.scores, **arguments)

        assert result is guarded.scores
        assert_same(result, wanted)
        assert guarded.untouched_outside()
        assert all(torch.equal(arguments[name], x) for name, x in unchanged.items())

    @pytest.mark.parametrize("n", [1, 2, 3, 7, 511, 512, 513, 2000])
    def test_long_rows(self, operator, device, n):
        tokens = torch.randint(0, 3, (5, 2000), device=device)
        tokens[0] = 1  # every window matches, however long
        tokens[1, 1000:] = tokens[1, :1000]
        scores = torch.randn(5, 50, device=device)
        wanted = expected(scores, tokens, None, n)
        assert_same(operator(scores, tokens, None, n), wanted)
        assert bool(wanted.isinf().any()) == (n <= 2000)

    @pytest.mark.parametrize("n", [10_000])
    def test_prefix_beyond_shared_memory(self, operator, device, n):
        """n - 1 int64 tokens take more than the 48 KiB that a CUDA block may share."""
        tokens = torch.full((2, 21_000), 4, device=device)
        tokens[1, -1] = 5
        scores = torch.zeros(2, 8, device=device)
        assert_same(operator(scores, tokens, None, n), expected(torch.zeros(2, 8), tokens, None, n))
        assert scores[0].isinf().nonzero().flatten().tolist() == [4]

    @pytest.mark.parametrize("layout", ["contiguous", "row gaps", "columns strided", "transposed"])
    def test_ids_outside_the_vocabulary_are_never_written(self, operator, device, layout):
        outside = [-1, -2, -6, 5, 6, 10, -(2**31), 2**31 - 1, -(2**62), 2**62, 2**63 - 1, -(2**63)]
        guarded = Guarded(3, 5, torch.float32, device, layout)
        tokens = torch.tensor([outside, outside, [*outside[:-1], 4]], device=device)
        operator(guarded.scores, tokens, None, 1)
        assert guarded.scores.isinf().nonzero().tolist() == [[2, 4]]
        assert guarded.untouched_outside()

    def test_keeps_nan_and_infinities(self, operator, device):
        scores = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan]] * 2, device=device)
        tokens = torch.tensor([[4, 4], [0, 1]], device=device)
        operator(scores, tokens, None, 2)
        assert_same(scores[:, :4], torch.tensor([[math.nan, math.inf, -math.inf, 1.0]] * 2))
        assert scores[0, 4] == -math.inf and scores[1, 4].isnan()


def moved(x, device):
    """A copy of `x` on `device` with the same strides, even those that make elements share memory."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device, copy=True)
    return storage.as_strided(x.shape, x.stride())


class TestErrors:
    """What is not taken is refused before anything is written, in the same words by every backend."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n": 0}, "n must be at least 1, but is 0"),
            ({"scores": torch.zeros(4)}, r"scores must be \[rows, vocabulary\], but has 1 dimensions"),
            ({"scores": torch.zeros(4, 5, dtype=torch.int64)}, "scores must be float32, float16, bfloat16 or float64"),
            ({"scores": torch.zeros(1, 5).expand(4, 5)}, "elements of scores share memory"),
            ({"scores": torch.zeros(20).as_strided((4, 5), (1, 1))}, "elements of scores share memory"),
            ({"scores": torch.zeros(40).as_strided((4, 5), (2, 3))}, "elements of scores share memory"),
            ({"scores": torch.zeros(3, 5)}, "the 3 rows of scores"),
            ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"tokens must be \[rows, length\]"),
            ({"tokens": torch.zeros(4, 6)}, "tokens must be int32 or int64"),
            ({"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths must have one element for each of the 4 rows"),
            ({"lengths": torch.zeros(4)}, "lengths must be int32 or int64"),
            ({"context_lengths": torch.zeros(4, dtype=torch.int64)}, "context_lengths needs a context"),
            ({"context": torch.zeros(4, 6, dtype=torch.int32)}, "context must have the type of tokens"),
            ({"context": torch.zeros(3, 6, dtype=torch.int64)}, "must be a multiple of the 3 rows of context"),
            ({"context": torch.zeros(0, 6, dtype=torch.int64)}, "must be a multiple of the 0 rows of context"),
            (
                {"context": torch.zeros(2, 6, dtype=torch.int64), "context_lengths": torch.zeros(4, dtype=torch.int64)},
                "context_lengths must have one element for each of the 2 rows",
            ),
        ],
    )
    def test_refused(self, operator, device, changes, message):
        arguments = {
            "scores": torch.zeros(4, 5),
            "tokens": torch.zeros(4, 6, dtype=torch.int64),
            "lengths": None,
            "n": 1,
        } | changes
        arguments = {name: moved(x, device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        before = arguments["scores"].clone()
        with pytest.raises(RuntimeError, match=f"no_repeat_ngram_: .*{message}"):
            operator(**arguments)
        assert torch.equal(arguments["scores"], before)

    def test_another_device(self, operator, device):
        for name in ("tokens", "lengths", "context"):
            arguments = {"scores": torch.zeros(2, 3, device=device), "tokens": torch.zeros(2, 3).long().to(device)}
            arguments |= {"lengths": None, "n": 1}
            arguments[name] = torch.zeros((2,) if name == "lengths" else (2, 3), dtype=torch.int64, device="meta")
            with pytest.raises(RuntimeError, match="must be on the device of scores"):
                operator(**arguments)

    def test_gradient(self, device):
        scores = torch.zeros(1, 3, device=device, requires_grad=True)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError, match="not differentiable"):
            no_repeat_ngram_(scores * 1, tokens, 2)
        with torch.no_grad():
            assert no_repeat_ngram_(scores * 1, tokens, 2).isinf().sum() == 1


class TestRegistration:
    def arguments(self, device):
        tokens = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]], device=device)
        return torch.zeros(2, 6, device=device), tokens, torch.tensor([5, 2], device=device), 3

    # Releases before it do not functionalise an operator that returns what it changes.
    functionalised = pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12), reason="needs torch 2.12"
    )

    @functionalised
    def test_compiles_without_a_graph_break(self, device):
        def step(scores, tokens, lengths, n):
            doubled = scores * 2
            torch.ops.fastgen.no_repeat_ngram_(doubled, tokens, lengths, n)
            return doubled + 1, torch.ops.fastgen.no_repeat_ngram_(scores, tokens, lengths, n)

        scores, *rest = self.arguments(device)
        plain, compiled = scores.clone(), scores.clone()
        wanted = step(plain, *rest)
        results = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, *rest)
        for result, want in zip((*results, compiled), (*wanted, plain), strict=True):
            assert_same(result, want)

    def test_meta(self):
        scores, tokens, lengths, n = self.arguments("meta")
        assert no_repeat_ngram_(scores, tokens, n, lengths) is scores

    def test_backends_name_every_operator(self):
        backends = ops.backends()
        folder = Path(ops.__file__).parent
        names = {module.stem for module in folder.glob("[!_]*.py")} - {"runtime"}
        # Those of linear/ have their schemas in its `__init__`.
        assert {module for module, _ in ops.OPERATORS.values()} == names | {"linear", "linear.choose"}
        assert list(backends) == list(ops.OPERATORS) == sorted(ops.OPERATORS)
        assert all(isinstance(phrase, str) and phrase for phrase in backends.values())
        assert backends["no_repeat_ngram"].startswith(("C++ (csrc)", "torch reference: "))


class TestCuda:
    @pytest.mark.long
    def test_source_compiles(self, tmp_path):
        """nvcc and torch's headers are enough for this; neither a GPU nor a CUDA torch is needed."""
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            pytest.skip("nvcc is not installed")
        include = Path(torch.__file__).parent / "include"
        if not (include / "torch/csrc/stable/accelerator.h").exists():
            pytest.skip(f"torch {torch.__version__} came without its C++ headers")
        for source in sorted((ROOT / "fastgen/csrc/cuda").glob("*.cu")):
            command = [nvcc, "-c", str(source), "-o", str(tmp_path / "object.o"), "-std=c++17", "-O1", "-DUSE_CUDA"]
            command += ["-arch=sm_90", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(include)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{source.name}:\n{done.stdout}{done.stderr}"
