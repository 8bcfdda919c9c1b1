"""Products of few rows against plain PyTorch. Without CUDA: TRITON_INTERPRET=1, in float16 (see `test_kernels.py`)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ddtree_engine import model
from ddtree_engine.cache import LayerCache
from ddtree_engine.checkpoint import StackConfig, TargetConfig, target_tensors
from ddtree_engine.model import Norm, Target

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="no triton in this environment")

from ddtree_engine import products, step_kernels  # noqa: E402 (triton may be missing)

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no bfloat16 products
TOLERANCE = 2e-3 if INTERPRETED else 1e-2  # of a result's length
ROWS = [1, 2, 16, 17, 33, products.MOST_ROWS]
SHAPES = [(512, 256), (256, 768), (33, 96), (1, 32), (1000, 320)]  # columns, depth


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole, not of each number: sums near zero have no digits of their own. NaN passes no comparison."""
    return float((got.float() - expected).norm() / expected.norm())


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def expected_of(x: torch.Tensor, weight: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return (x.float() if norm is None else norm.exact(x)) @ weight.float().t()


@pytest.fixture(params=[False, True], ids=["plain", "normed"])
def normed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def norm_of(depth: int, normed: bool) -> Norm | None:
    return Norm((torch.rand(depth, device=DEVICE) + 0.5).to(DTYPE), 1e-6) if normed else None


@pytest.mark.parametrize(("cols", "depth"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_product_equals_norm_then_product(rows: int, cols: int, depth: int, normed: bool) -> None:
    torch.manual_seed(rows + cols)
    x, weight, norm = random(rows, depth, scale=3), random(cols, depth), norm_of(depth, normed)
    assert products.takes(x, weight)
    assert error(products.product(x, weight, norm=norm), expected_of(x, weight, norm)) < TOLERANCE


@pytest.mark.parametrize(("cols", "depth"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_residual_is_added_to_in_place(rows: int, cols: int, depth: int) -> None:
    torch.manual_seed(rows + cols)
    x, weight, residual = random(rows, depth), random(cols, depth), random(rows, cols, scale=20)
    expected = expected_of(x, weight, None) + residual.float()
    assert products.product(x, weight, residual=residual) is residual
    assert error(residual, expected) < TOLERANCE


@pytest.mark.parametrize(("ff", "depth"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gated_product_equals_swiglu_of_the_product(rows: int, ff: int, depth: int, normed: bool) -> None:
    torch.manual_seed(rows + ff)
    x, weight, norm = random(rows, depth), random(2 * ff, depth, scale=depth**-0.5), norm_of(depth, normed)
    gate, up = expected_of(x, weight, norm).chunk(2, 1)
    assert products.takes(x, weight, gated=True)
    assert error(products.product(x, weight, norm=norm, gated=True), F.silu(gate) * up) < TOLERANCE


def test_rows_next_to_a_result_are_not_written() -> None:
    """Tiles are wider than what is left of rows and columns."""
    room = torch.full((40, 33), 7.0, dtype=DTYPE, device=DEVICE)
    products.product(random(19, 96), random(33, 96), residual=room[:19])
    assert (room[19:] == 7).all()


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "dtype"),
    [
        (2, 4096, 4096, DTYPE),  # bound by memory: cuBLAS is as fast
        (products.MOST_ROWS + 1, 512, 256, DTYPE),
        (1, 64, 48, DTYPE),  # no whole tiles
        (1, 1 << 14, 4160, DTYPE),  # none of a size that keeps the memory busy
        (1, 512, 256, torch.float32),
    ],
)
def test_other_products_are_left_to_cublas(rows: int, cols: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = (torch.empty(n, depth, dtype=dtype, device=DEVICE) for n in (rows, cols))
    assert not products.takes(x, weight)
    assert not products.takes(x, None)  # packed for the CPU


CONFIG = TargetConfig(
    StackConfig(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ff=96, vocab=100, eps=1e-6, theta=1e4, max_positions=50),
    tied=False,
    eos_ids=(0,),
)


def results(target: Target, rows: int) -> list[torch.Tensor]:
    """Of one pass, with the queries for attention: logits, keys, values; on the CPU in float32."""
    random = torch.Generator().manual_seed(rows)
    device, s = target.embedding.device, CONFIG.stack
    tokens, positions = (torch.randint(n, (rows,), generator=random).to(device) for n in (s.vocab, s.max_positions))
    slots = torch.randperm(300, generator=random)[:rows].to(device)
    cache = LayerCache(s, 300, target.embedding.dtype, device)
    hidden = target.forward(tokens, positions, slots, cache, lambda queries, keys, values: queries.flatten(1), ())
    return [t.float().cpu() for t in (target.logits(hidden.last), cache.keys, cache.values)]


@pytest.mark.parametrize("rows", [1, 5, 200, 300])  # the last by cuBLAS
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_fused_steps_equal_plain_steps(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(rows)
    tensors = {
        name: (torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5).to(dtype)
        for name, shape in target_tensors(CONFIG).items()
    }
    plain = Target({name: t.float() for name, t in tensors.items()}, CONFIG, CONFIG.stack.max_positions, torch.device("cpu"))
    monkeypatch.setattr(model, "_pack", lambda weight: None)  # as on CUDA
    fused = Target({name: t.to(DEVICE) for name, t in tensors.items()}, CONFIG, CONFIG.stack.max_positions, DEVICE)
    fused.stack.steps = step_kernels.TritonSteps(CONFIG.stack, fused.stack.rope)
    tolerance = 1e-5 if dtype == torch.float32 else 3 * TOLERANCE  # of several products
    for got, expected in zip(results(fused, rows), results(plain, rows), strict=True):
        assert error(got, expected) < tolerance
