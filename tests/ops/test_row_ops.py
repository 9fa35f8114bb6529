"""What the ops over rows promise beyond the table: rounding rules bit for bit, other libraries' meanings, extremes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import row_rule
import torch

import opgraft

LENGTHS = (1, 7, 8, 64, 65, 128, 200, 256, 257, 520, 1000, 1024, 4096, 5120, 8192, 14336, 16384, 33000, 65536, 70000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = list(itertools.product((0, 128), (None, 0.003), (False, True)))
every_16_and_32_bit_type = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def _normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _assert_by_rule(found: Any, values: torch.Tensor, options: tuple[int, float | None, bool], what: str) -> None:
    codes, scales = row_rule.encode(values, *options)
    torch.testing.assert_close(found[1].cpu(), scales, rtol=0, atol=0, equal_nan=True, msg=f"{what}: scales differ")
    assert torch.equal(found[0].cpu().view(torch.uint8), codes), f"{what}: codes differ"


@every_16_and_32_bit_type
@pytest.mark.parametrize("length", LENGTHS)
def test_fp8_norms_follow_the_rule_bit_for_bit(length: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = _normal(3, length, dtype=dtype), _normal(3, length, seed=1, dtype=dtype)
    weight = _normal(length, seed=2, dtype=torch.float32 if length % 3 else dtype)
    summed = x + residual
    for index, options in enumerate(OPTIONS):
        own = weight if index % 3 else None
        more = (1e-5, float(index % 2), bool(index // 2 % 2))
        there = None if own is None else own.to(device)
        found = opgraft.rms_norm_fp8(x.to(device), there, *more, *options)
        _assert_by_rule(found, row_rule.normalised(x, own, *more), options, f"rms_norm_fp8, {options}")
        *codes, kept = opgraft.add_rms_norm_fp8(x.to(device), residual.to(device), there, *more, *options)
        _assert_by_rule(codes, row_rule.normalised(summed, own, *more), options, f"add_rms_norm_fp8, {options}")
        assert torch.equal(kept.cpu(), summed)


@every_16_and_32_bit_type
@pytest.mark.parametrize("length", LENGTHS)
def test_silu_mul_fp8_follows_the_rule_bit_for_bit(length: int, dtype: torch.dtype, device: torch.device) -> None:
    gate, up = _normal(3, length, dtype=dtype) * 4, _normal(3, length, seed=1, dtype=dtype)
    for options in OPTIONS:
        found = opgraft.silu_mul_fp8(gate.to(device), up.to(device), *options)
        _assert_by_rule(found, row_rule.silu_product(gate, up), options, f"silu_mul_fp8, {options}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_silu_of_every_16_bit_gate_is_the_rule_and_near_the_truth(dtype: torch.dtype, device: torch.device) -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    gate = gate[gate.isfinite()].reshape(-1, 1)
    up = torch.ones_like(gate)
    codes, scales = opgraft.silu_mul_fp8(gate.to(device), up.to(device))
    values = row_rule.silu_product(gate, up)
    _assert_by_rule((codes, scales), values, (0, None, False), "every gate")
    exact = torch.nn.functional.silu(gate.double())
    error = (values.double() - exact).abs() / exact.abs().clamp_min(1e-30)
    # log2(e) is rounded: far gates, whose silu is next to nothing, lose a few digits more.
    assert (error <= torch.finfo(torch.float32).eps * (4 + gate.abs().double() / 8)).all()


def test_codes_round_to_nearest_even_and_saturate(device: torch.device) -> None:
    """Against every midpoint of neighbouring e4m3 numbers. Under the bound 1 the scale is 1, codes are the values."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    between = (numbers[1:] + numbers[:-1]) / 2
    spread = torch.cat([numbers, between, between * (1 + 1e-6), between * (1 - 1e-6)])
    # silu(gate) = gate for gates above 30 in float32: up carries the sign and the rest of the value.
    gate, up = torch.full_like(spread, 64.0).float(), (torch.cat([spread, -spread]) / 64).float()
    row = torch.cat([gate, gate]), up
    big = torch.tensor([64.0]), torch.tensor([1e6])
    given = [torch.cat(pair)[None].to(device) for pair in zip(row, big, strict=True)]
    codes, scale = opgraft.silu_mul_fp8(*given, 0, 1.0)
    assert scale.item() == 1.0
    wanted = (given[0] * given[1]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


def test_a_bound_saturates_and_powers_of_two_never_do(device: torch.device) -> None:
    x = _normal(5, 300, dtype=torch.bfloat16).to(device)
    codes, scale = opgraft.rms_norm_fp8(x, scale_upper_bound=1e-3)
    assert (scale == torch.tensor(1e-3)).all()
    assert codes.float().abs().max() == 448
    codes, scale = opgraft.rms_norm_fp8(x, block=128, power_of_two=True)
    assert (torch.frexp(scale.cpu())[0] == 0.5).all()
    assert scale.shape == (5, 3)
    dense = codes.float() * scale.repeat_interleave(128, -1)[:, :300]
    torch.testing.assert_close(dense, opgraft.rms_norm(x.float()), rtol=0.07, atol=0.02)
    _, scale = opgraft.rms_norm_fp8(x, scale_upper_bound=0.003, power_of_two=True)
    assert (scale == 2.0**-9).all()


@pytest.mark.parametrize("block", [0, 128])
def test_not_a_number_and_infinity(block: int, device: torch.device) -> None:
    up = torch.ones(3, 300, device=device)
    gate = torch.full((3, 300), 2.0, device=device)
    gate[0, 5], gate[1, 5], gate[2, 5] = float("nan"), float("inf"), float("-inf")
    codes, scale = opgraft.silu_mul_fp8(gate, up, block)
    ruled = codes.float()[:, : block or 300]
    assert scale[0, 0].isnan()
    assert ruled[0].isnan().all()
    assert scale[1, 0].isinf()
    assert ruled[1, 5].isnan()
    assert (ruled[1, 6:] == 0).all()
    assert scale[2, 0].isfinite()  # silu's limit there is 0
    assert ruled[2, 5] == 0
    codes, scale = opgraft.silu_mul_fp8(gate, up, block, 0.5)
    assert scale[1, 0] == 0.5
    assert codes[1, 5].float() == 448
    codes, scale = opgraft.rms_norm_fp8(gate, block=block)
    assert codes[:2].float()[:, 5].isnan().all()
    assert codes[0].float().isnan().all()
    zeros, smallest = opgraft.rms_norm_fp8(torch.zeros(2, 200, device=device), block=block)
    assert (zeros.view(torch.uint8) == 0).all()
    assert (smallest == torch.tensor(1 / (448 * 512))).all()


@pytest.mark.parametrize("length", [8, 100, 128, 1024, 4096, 5120, 8192, 33000])
def test_a_row_has_the_same_bits_in_every_batch(length: int, device: torch.device) -> None:
    x = _normal(700, length, dtype=torch.bfloat16).to(device)
    weight = _normal(length, seed=1, dtype=torch.bfloat16).to(device)
    many, codes = opgraft.rms_norm(x, weight), opgraft.rms_norm_fp8(x, weight, block=128)
    for row in (0, 333, 699):
        one = x[row : row + 1]
        assert torch.equal(opgraft.rms_norm(one, weight)[0], many[row])
        alone = opgraft.rms_norm_fp8(one, weight, block=128)
        assert torch.equal(alone[0][0].view(torch.uint8), codes[0][row].view(torch.uint8))
        assert torch.equal(alone[1][0], codes[1][row])


@pytest.mark.gpu
@every_16_and_32_bit_type
@pytest.mark.parametrize("length", [64, 300, 512, 1000, 4096, 9000, 40000])
def test_rows_of_more_than_l2_holds_have_the_bits_of_few(length: int, dtype: torch.dtype) -> None:
    """Inputs over L2's size are read with a mark, fewer rows of them are not."""
    device = torch.device("cuda")
    rows = 2 * torch.cuda.get_device_properties(device).L2_cache_size // (length * dtype.itemsize) + 3
    generator = torch.Generator(device).manual_seed(0)
    x, other, grad = (torch.randn(rows, length, generator=generator, device=device).to(dtype) for _ in range(3))
    for weight in (None, _normal(length, seed=1).to(device), _normal(length, seed=2, dtype=dtype).to(device)):

        def results(first: int, last: int, weight: torch.Tensor | None = weight) -> list[torch.Tensor]:
            own, more, up = x[first:last], other[first:last], grad[first:last]
            return [
                opgraft.rms_norm(own, weight, 1e-6, 1.0),
                *opgraft.add_rms_norm(own, more, weight, cast_before_weight=True),
                *opgraft.add_rms_norm_fp8(own, more, weight, block=128),
                torch.ops.opgraft.rms_norm_backward(up, own, weight, 1e-6, 0.0)[0],
                torch.ops.opgraft.add_rms_norm_backward(up, more, own, weight, 1e-6, 0.0)[0],
            ]

        whole = results(0, rows)
        for first, last in ((0, 9), (rows // 2, rows // 2 + 9), (rows - 9, rows)):
            for index, (all_rows, few) in enumerate(zip(whole, results(first, last), strict=True)):
                assert torch.equal(all_rows[first:last].view(torch.uint8), few.view(torch.uint8)), index


@every_16_and_32_bit_type
def test_rounding_at_the_end_is_that_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = _normal(64, 512, dtype=dtype).to(device), _normal(512, seed=1, dtype=dtype).to(device)
    wanted = torch.nn.functional.rms_norm(x.double(), (512,), weight.double(), 1e-6)
    found = opgraft.rms_norm(x, weight)
    torch.testing.assert_close(found.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_rounding_before_the_weight_is_that_of_llama(device: torch.device) -> None:
    """In bfloat16 almost every product differs between the two roundings; the right one agrees but for rare ties."""
    x, weight = (
        _normal(256, 1024, dtype=torch.bfloat16).to(device),
        _normal(1024, seed=1, dtype=torch.bfloat16).to(device),
    )
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    llama, gemma = weight * normal.to(x.dtype), (normal * weight.float()).to(x.dtype)
    before, after = opgraft.rms_norm(x, weight, cast_before_weight=True), opgraft.rms_norm(x, weight)
    assert (before != llama).float().mean() < 1e-3
    assert (after != gemma).float().mean() < 1e-3
    assert (llama != gemma).float().mean() > 0.1


def test_the_sum_of_the_fp8_op_has_a_gradient_and_its_codes_have_none(device: torch.device) -> None:
    x, residual = (_normal(4, 64, seed=s).to(device).requires_grad_() for s in (0, 1))
    codes, scales, summed = opgraft.add_rms_norm_fp8(x, residual)
    assert not codes.requires_grad
    assert not scales.requires_grad
    grads = torch.autograd.grad(summed.square().sum(), (x, residual))
    for grad in grads:
        torch.testing.assert_close(grad, 2 * summed.detach())


def test_weight_gradients_are_the_same_bits_every_time(device: torch.device) -> None:
    x, weight = _normal(3000, 256, dtype=torch.bfloat16).to(device), _normal(256, seed=1).to(device)
    grad = _normal(3000, 256, seed=2, dtype=torch.bfloat16).to(device)
    runs = [torch.ops.opgraft.rms_norm_backward(grad, x, weight, 1e-6, 0.0)[1] for _ in range(3)]
    assert runs[0].dtype == torch.float32
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_slices_of_packed_rows_are_read_in_place(device: torch.device) -> None:
    packed = _normal(6, 4, 3, 64, dtype=torch.bfloat16).to(device)
    weight = _normal(64, seed=1, dtype=torch.bfloat16).to(device)
    for part in (packed[:, :, 1], packed[..., 0, :], packed[:, 2], packed.transpose(0, 1), packed[..., 8:40]):
        own = weight[: part.shape[-1]]
        assert torch.equal(opgraft.rms_norm(part, own), opgraft.rms_norm(part.contiguous(), own))
        found, wanted = opgraft.silu_mul_fp8(part, part), opgraft.silu_mul_fp8(part.contiguous(), part.contiguous())
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))


@every_16_and_32_bit_type
@pytest.mark.parametrize("length", [8, 64, 520, 1000, 4096, 8192])
def test_a_row_has_the_same_bits_wherever_it_lies(length: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows and results that begin beside 16 bytes, and a weight that does, against copies that begin on them."""
    for rows in (3, 300):
        x, other, grad = (_normal(rows * length + 3, seed=s, dtype=dtype).to(device) for s in range(3))
        weight = _normal(length + 1, seed=3, dtype=dtype).to(device)[1:]
        shifted = [t[1 + s : 1 + s + rows * length].view(rows, length) for s, t in enumerate((x, other, grad))]
        for given in (weight, weight.clone(), None):
            own = None if given is None else given.clone()
            x, other, grad = (t.clone() for t in shifted)
            for found, wanted in (
                ((opgraft.rms_norm(shifted[0], given),), (opgraft.rms_norm(x, own),)),
                (opgraft.add_rms_norm(*shifted[:2], given), opgraft.add_rms_norm(x, other, own)),
                (
                    torch.ops.opgraft.rms_norm_backward(shifted[2], shifted[0], given, 1e-6, 1.0),
                    torch.ops.opgraft.rms_norm_backward(grad, x, own, 1e-6, 1.0),
                ),
                (
                    torch.ops.opgraft.add_rms_norm_backward(shifted[2], shifted[1], shifted[0], given, 1e-6, 0.0),
                    torch.ops.opgraft.add_rms_norm_backward(grad, other, x, own, 1e-6, 0.0),
                ),
            ):
                assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("length", [1, 7, 33, 65, 1001, 4097, 8191, 20001])
def test_rows_of_odd_length_are_as_exact_as_others(length: int, device: torch.device) -> None:
    """bfloat16 against float64, gradients too; what lies beside a row is left alone."""
    room = _normal(40, length + 5, dtype=torch.bfloat16).to(device)
    x, grad = room[:, 3 : 3 + length], _normal(40, length, seed=1, dtype=torch.bfloat16).to(device)
    weight = _normal(length, seed=2, dtype=torch.bfloat16).to(device)
    found = (opgraft.rms_norm(x, weight), *torch.ops.opgraft.rms_norm_backward(grad, x, weight, 1e-6, 0.0))
    exact = [t.double().requires_grad_() for t in (x, weight)]
    wanted = torch.nn.functional.rms_norm(exact[0], (length,), exact[1], 1e-6)
    both = torch.autograd.grad(wanted, exact, grad.double())
    for own, true in zip(found, (wanted, *both), strict=True):
        torch.testing.assert_close(own.double(), true, rtol=2**-7, atol=2**-7 * true.abs().mean().item())


@pytest.mark.parametrize(
    ("given", "said"), [({"block": 64}, "block is 64"), ({"scale_upper_bound": 0.0}, "bound is 0")]
)
def test_other_blocks_and_bounds_are_refused(given: dict[str, Any], said: str, device: torch.device) -> None:
    x = _normal(2, 16).to(device)
    for call in (
        lambda: opgraft.rms_norm_fp8(x, **given),
        lambda: opgraft.add_rms_norm_fp8(x, x, **given),
        lambda: opgraft.silu_mul_fp8(x, x, **given),
        lambda: opgraft.rms_norm_fp8(x.to("meta"), **given),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
