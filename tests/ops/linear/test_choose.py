"""The table that chooses kernels: every cell serves, nothing else decides, and profiles of a machine."""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops.linear import choose, copies, kernels
from fastgen.ops.linear.choose import GEMM, GEMV, KERNELS, PANELS, TABLE, TORCH, Isa, Kernel, Layout
from tests.ops.instructions import has_tiles, instruction_set

needs_kernels = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# What torch calls them; None: all that the processor has.
NAMES = {Isa.PORTABLE: "default", Isa.AVX2: "avx2", Isa.AVX512: "avx512", Isa.AVX512_BF16: None, Isa.AMX: None}
KEYS = list(choose.SERVE)
HERE = choose.instruction_set()
REST = math.inf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The profile of this machine, which is not there yet."""
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path))
    choose.forget()
    yield tmp_path / "linear.json"
    monkeypatch.undo()
    choose.forget()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Isa], None]:
    return lambda isa: monkeypatch.setattr(choose, "instruction_set", functools.cache(lambda: isa))


def _laid_out(weight: Tensor, layout: Layout) -> Tensor:
    return weight.t().contiguous().t() if layout is Layout.COLUMNS else weight


def _product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """With what the table calls so; of a kernel, all ways to call it give the same bits."""
    if name == TORCH:
        return F.linear(x, weight, bias)
    if name == PANELS:
        return choose.linear(x, copies.panels(weight.bfloat16()), bias)
    kernel = KERNELS[name]
    y = kernel.multiply(x, weight, bias)
    out = torch.full_like(y, torch.nan)
    kernel.out(out, x, weight, bias)
    assert torch.equal(out, y)
    if kernel.several is not None:
        several = [torch.full_like(y, torch.nan) for _ in range(2)]
        kernel.several(several, x, [weight, weight], [bias, bias])
        assert all(torch.equal(each, y) for each in several)
    return y


@needs_kernels
@pytest.mark.parametrize("isa", Isa)
def test_every_cell_serves(isa: Isa) -> None:
    if isa > HERE:
        pytest.skip(f"needs {isa.name}: this processor has {HERE.name}")
    with instruction_set(NAMES[isa]):
        for (dtype, layout), m in itertools.product(KEYS, (1, 2, 8, 9, 15, 16, 17, 40)):
            x = torch.randn(m, 70).to(dtype)
            weight, bias = torch.randn(50, 70).bfloat16().to(dtype), torch.randn(50).to(dtype)
            weight = _laid_out(weight, layout)
            y = _product(choose.name_of(dtype, layout, m, isa), x, weight, bias)
            exact = x.double() @ weight.double().t() + bias.double()
            rtol = torch.finfo(dtype).eps if dtype is not F32 else 1e-5
            torch.testing.assert_close(y.double(), exact, atol=2e-4, rtol=rtol)


@pytest.mark.parametrize("isa", Isa)
def test_rows_of_the_table_are_whole(isa: Isa) -> None:
    """They end with the kernel for all others, and name a kernel for no row that it does not serve."""
    assert set(TABLE) == set(Isa) and set(TABLE[isa]) == (set() if isa is Isa.PORTABLE else set(KEYS))
    for (dtype, layout), row in TABLE[isa].items():
        bounds = [most for most, _ in row]
        assert bounds == sorted(set(bounds)) and bounds[0] >= 1 and bounds[-1] == REST
        for least, (most, name) in zip([1, *(bound + 1 for bound in bounds)], row, strict=False):
            assert name in (("gemv", "gemm", "bf16x3", PANELS) if dtype is F32 else ("gemv", "gemm", TORCH))
            assert name != "gemv" or most <= kernels.GEMV_MAX_ROWS[dtype]
            assert name != PANELS or (layout is Layout.PANELS and most <= kernels.PANELS_MAX_ROWS)
            assert name != "bf16x3" or (
                isa is Isa.AMX and least >= kernels.BF16X3_MIN_ROWS and layout is not Layout.COLUMNS
            )


@given(isa=st.sampled_from(Isa), m=st.integers(1, 10**6))
def test_float32_changes_its_bits_where_docs_precision_says(isa: Isa, m: int) -> None:
    """GEMV up to 8 rows, or 1 of a column-major weight, and bf16x3 with AMX from 16 rows on: the others are GEMM."""
    if isa is Isa.PORTABLE:
        rows = columns = TORCH
    else:
        rows = "gemv" if m <= 8 else "bf16x3" if isa is Isa.AMX and m >= 16 else "gemm"
        columns = "gemv" if m == 1 else "gemm"
    assert choose.name_of(F32, Layout.ROWS, m, isa) == rows
    assert choose.name_of(F32, Layout.COLUMNS, m, isa) == columns
    # The copy in 16 bits has the bits of GEMM.
    panel = TORCH if isa is Isa.PORTABLE else rows if m > 16 or rows == "bf16x3" else PANELS
    assert choose.name_of(F32, Layout.PANELS, m, isa) == panel


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("isa", Isa)
def test_half_precision_as_docs_precision_says(isa: Isa, m: int) -> None:
    """GEMV for few rows; for more GEMM, or torch's product where the processor multiplies bfloat16."""
    for dtype, most in ((F16, 64), (BF16, 24 if isa is Isa.AVX2 else 64)):
        torchs = isa is Isa.PORTABLE or (dtype is BF16 and isa in (Isa.AVX512_BF16, Isa.AMX))
        many = TORCH if torchs else "gemm"
        few = m <= (16 if isa is Isa.AMX else most) and isa is not Isa.PORTABLE
        assert choose.name_of(dtype, Layout.ROWS, m, isa) == ("gemv" if few else many)
        assert choose.name_of(dtype, Layout.COLUMNS, m, isa) == ("gemv" if m <= 16 and not torchs else many)


@given(
    dtype=st.sampled_from([F32, BF16, F16]),
    columns=st.booleans(),
    m=st.integers(1, 70),
    n=st.integers(2, 300),
    k=st.integers(2, 300),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_of_a_product_only_the_type_the_layout_and_its_rows_count(
    dtype: torch.dtype, columns: bool, m: int, n: int, k: int, biased: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    layout = Layout.COLUMNS if columns else Layout.ROWS
    x, weight = torch.randn(m, k, generator=random).to(dtype), torch.randn(n, k, generator=random).to(dtype)
    bias = weight[:, 0].contiguous() if biased else None
    expected = KERNELS.get(choose.name_of(dtype, layout, m))
    for each in (x, x.view(m, 1, k), x.t().contiguous().t(), F.pad(x, (0, 3))[:, :k]):
        assert choose.kernel_for(each, _laid_out(weight, layout), bias) is expected


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.ones(20, 8).half()},
        {"x": torch.ones(20, 8).double()},
        {name: torch.ones(8, 8).double() for name in ("x", "weight")} | {"bias": None},
        {"weight": torch.ones(5, 8).bfloat16()},
        {"bias": torch.ones(5).half()},
        {"x": torch.ones(20, 8, device="meta")},
        {"weight": torch.ones(5, 8, device="meta")},
        {"bias": torch.ones(5, device="meta")},
        {name: torch.ones(5, 8, device="meta") for name in ("x", "weight")} | {"bias": None},
        {"weight": torch.ones(10, 16)[::2, ::2]},
        {"weight": torch.ones(8)},
        {"weight": torch.ones(1, 5, 8)},
        {"bias": torch.ones(10)[::2]},
        {"bias": torch.ones(6)},
        {"bias": torch.ones(1, 5)},
        {"x": torch.ones(0, 8)},
        {"x": torch.ones(3, 0, 8)},
        {"weight": torch.ones(0, 8), "bias": torch.ones(0)},
        {"x": torch.ones(20, 0), "weight": torch.ones(5, 0)},
        {"x": torch.ones(20, 9)},
        {"x": torch.ones(())},
    ],
    ids=lambda changes: " ".join(
        f"{name} {list(each.shape)} {each.dtype} {each.device}" for name, each in changes.items() if each is not None
    ),
)
def test_what_no_kernel_takes(changes: dict[str, Tensor], use: Callable[[Isa], None]) -> None:
    use(Isa.AVX2)
    given = {"x": torch.ones(20, 8), "weight": torch.ones(5, 8), "bias": torch.ones(5)}
    assert choose.kernel_for(**given) is GEMM
    assert choose.kernel_for(**{**given, **changes}) is None


_MKLDNN, _CUDA = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("of", "precision", "rounds"),
    [
        (None, "medium", True),
        (None, "high", True),
        (_MKLDNN, "bf16", True),
        (_MKLDNN, "tf32", True),
        (torch.backends.mkldnn, "bf16", True),
        (torch.backends, "tf32", True),
        (_MKLDNN, "ieee", False),
        (_CUDA, "tf32", False),
    ],
)
def test_where_torch_may_round_operands(of: Any, precision: str, rounds: bool, use: Callable[[Isa], None]) -> None:
    """Its products of float32 replace bf16x3; all others stay."""
    use(Isa.AMX)

    def found() -> list[Kernel | None]:
        sizes = ((F32, 4), (F32, 12), (F32, 40), (F16, 4), (F16, 70))
        return [choose.kernel_for(torch.ones(m, 8, dtype=t), torch.ones(5, 8, dtype=t), None) for t, m in sizes]

    many = KERNELS["bf16x3"]
    assert found() == [GEMV, GEMM, many, GEMV, GEMM]
    try:
        if of is None:
            torch.set_float32_matmul_precision(precision)
        else:
            of.fp32_precision = precision
        assert found() == [GEMV, GEMM, None if rounds else many, GEMV, GEMM]
    finally:
        torch.set_float32_matmul_precision("highest")
        for each in (_MKLDNN, _CUDA, torch.backends.mkldnn, torch.backends):
            each.fp32_precision = "none"


@needs_kernels
@pytest.mark.parametrize("name", ["default", "avx2", "avx512", None])
def test_the_instruction_set_is_the_one_of_the_kernels(name: str | None) -> None:
    with instruction_set(name):
        choose.forget()
        named = {"default": Isa.PORTABLE, "avx2": Isa.AVX2, "avx512": Isa.AVX512, None: Isa.AMX}[name]
        found = choose.instruction_set()
        assert found == min(named, HERE)
        assert (found is Isa.AMX) <= has_tiles()
        x, weight = torch.ones(12, 8), torch.ones(5, 8)
        assert choose.kernel_for(x, weight, None) is (None if found is Isa.PORTABLE else GEMM)
        assert choose.reads_panels(12) == (found is not Isa.PORTABLE) and not choose.reads_panels(17)
        words = "torch's products" if found is Isa.PORTABLE else f"the shipped table, {found.name}"
        assert choose.backend().startswith(words)
    choose.forget()


def test_without_kernels_all_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "is_available", lambda: False)
    assert choose.instruction_set() is Isa.PORTABLE and choose.backend().startswith("torch's products")
    assert choose.kernel_for(torch.ones(3, 8), torch.ones(5, 8), None) is None


# ---- the profile of a machine


def _write(path: Path, machine: str, profile: Any) -> None:
    path.write_text(json.dumps({machine: profile}))
    choose.forget()


@needs_kernels
def test_a_profile_takes_the_place_of_the_rows_that_it_has(cache: Path, use: Callable[[Isa], None]) -> None:
    _write(cache, choose.machine(Isa.AVX512), {"float32 rows": [[2, "gemv"], [None, "gemm"]]})
    for m, name in ((2, "gemv"), (3, "gemm"), (100, "gemm")):
        assert choose.name_of(F32, Layout.ROWS, m, Isa.AVX512) == name
    for key in KEYS[1:]:
        assert choose._table(Isa.AVX512)[key] == TABLE[Isa.AVX512][key]
    assert choose.name_of(F32, Layout.ROWS, 3, Isa.AVX2) == "gemv"  # that of another one
    use(Isa.AVX512)
    said = choose.backend()
    assert said.startswith("a profile of this machine (") and said.endswith("), AVX512")
    _write(cache, choose.machine(Isa.AVX512), {"float32 rows": [[3, "gemv"], [None, "gemm"]]})
    assert choose.backend() != said  # which profile it is


def _check_ignored() -> None:
    choose.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for isa in Isa:
            assert choose._table(isa) == TABLE[isa]


# Of float32 by rows, what is no row of a table; then profiles of what there is not, or of kernels that do not serve it.
NO_ROWS: list[Any] = [
    None, [], {"8": "gemm"}, [8, "gemm"], [[8]], [[8, "gemv", 1], [None, "gemm"]], [[8, "gemv"]],
    [[None, "gemm"], [8, "gemv"]], [["many", "gemv"], [None, "gemm"]], [[10**400, "gemv"], [None, "gemm"]],
    [[[8], "gemv"], [None, "gemm"]], [[None, "cublas"]], [[8, ["gemv"]], [None, "gemm"]], [[None, PANELS]],
]  # fmt: skip
NO_PROFILES: list[Any] = [
    None, 7, {"float32": [[None, "gemm"]]}, {"float32 diagonals": [[None, "gemm"]]}, {"float64 rows": [[None, "gemm"]]},
    {"bfloat16 rows": [[None, "gemv"]], "float32 rows": [[None, "blas"]]}, {"float32 columns": [[None, "bf16x3"]]},
    {"float32 columns": [[None, "upcast"]]}, {"bfloat16 columns": [[None, "gemv"]]},
    {"float16 rows": [[None, "bf16x3"]]},
]  # fmt: skip
FILES = [
    *("", "[]", "7", "null", "\x00", "[" * 200_000),  # which are broken
    *(json.dumps({choose.machine(isa): {"float32 rows": row} for isa in Isa}) for row in NO_ROWS),
    *(json.dumps({choose.machine(isa): profile for isa in Isa}) for profile in NO_PROFILES),
    json.dumps({"another processor | AVX512": {"float32 rows": [[None, "gemm"]]}}),
    json.dumps({choose.machine(Isa.AVX512): {"float32 rows": [[None, "bf16x3"]]}}),  # which that processor lacks
]


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_what_is_no_profile_of_this_machine_is_ignored(content: str, cache: Path) -> None:
    cache.write_text(content)
    _check_ignored()


def test_a_folder_in_its_place_is_ignored(cache: Path) -> None:
    cache.mkdir()
    _check_ignored()


def test_where_the_profile_lies(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    assert choose.profile_path() == cache
    monkeypatch.setenv("FASTGEN_CACHE", "")
    assert choose.profile_path() is None
    _check_ignored()
    monkeypatch.delenv("FASTGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose.profile_path() == tmp_path / "fastgen" / "linear.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose.profile_path() == tmp_path / ".cache" / "fastgen" / "linear.json"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert choose.profile_path() is None
