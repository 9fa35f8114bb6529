"""What the sequence ops promise beyond the table: layouts, states passed on, decoding steps, in-place forms."""

from __future__ import annotations

import pytest
import torch

import opgraft


def _normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _selective(batch: int, channels: int, length: int, states: int) -> dict[str, torch.Tensor]:
    return {
        "u": _normal(batch, channels, length, seed=1),
        "delta": _normal(batch, channels, length, seed=2),
        "A": -_normal(channels, states, seed=3).exp(),
        "B": _normal(batch, states, length, seed=4),
        "C": _normal(batch, states, length, seed=5),
        "D": _normal(channels, seed=6),
        "z": _normal(batch, channels, length, seed=7),
        "delta_bias": _normal(channels, seed=8),
    }


def _of(given: dict[str, torch.Tensor], part: slice | int) -> dict[str, torch.Tensor]:
    return {name: value[..., part] if value.dim() == 3 else value for name, value in given.items()}


def test_linear_scan_is_the_recurrence() -> None:
    decay, update, h = _normal(3, 40), _normal(3, 40, seed=1), _normal(3, seed=2)
    found = opgraft.linear_scan(decay, update, h)
    for t in range(40):
        h = decay[:, t] * h + update[:, t]
        torch.testing.assert_close(found[:, t], h)


@pytest.mark.parametrize("decay", [1.0, 0.9999, 0.99999])
def test_linear_scan_loses_no_digits_over_long_sequences(decay: float) -> None:
    """Against closed form: constant update, h[t] = (1 - a^(t+1)) / (1 - a)."""
    length = 65536
    a = torch.full((2, length), decay, dtype=torch.float32)
    found = opgraft.linear_scan(a, torch.ones_like(a))[:, -1].double()
    exact = float(a[0, 0].double())
    wanted = length if exact == 1.0 else (1 - exact**length) / (1 - exact)
    assert ((found - wanted).abs() / wanted).max() < 4 * torch.finfo(torch.float32).eps


def test_linear_scan_of_growing_decays_keeps_zero() -> None:
    grown = opgraft.linear_scan(torch.full((2, 600), 3.0), torch.zeros(2, 600))
    assert torch.equal(grown, torch.zeros(2, 600))


@pytest.mark.parametrize("last", [False, True])
def test_convolution_answers_in_the_layout_it_was_asked_in(last: bool) -> None:
    x = _normal(2, 9, 6).transpose(1, 2) if last else _normal(2, 6, 9)
    weight, bias = _normal(6, 4, seed=1), _normal(6, seed=2)
    found = opgraft.causal_conv1d(x, weight, bias, activation="silu")
    assert isinstance(found, torch.Tensor)
    assert found.stride() == x.stride()
    padded = torch.nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding=3, groups=6)[..., :9]
    torch.testing.assert_close(found, torch.nn.functional.silu(padded))


def test_a_convolution_in_parts_and_in_steps_equals_the_whole() -> None:
    x, weight, bias = _normal(2, 5, 23), _normal(5, 4, seed=1), _normal(5, seed=2)
    whole, last = opgraft.causal_conv1d(x, weight, bias, activation="silu", return_final_state=True)
    first, state = opgraft.causal_conv1d(x[..., :2], weight, bias, activation="silu", return_final_state=True)
    second, end = opgraft.causal_conv1d(x[..., 2:], weight, bias, state, "silu", return_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole)
    torch.testing.assert_close(end, last)
    kept, in_place = torch.zeros(2, 5, 4, dtype=x.dtype), torch.zeros(2, 4, 5, dtype=x.dtype).transpose(1, 2)
    for t in range(23):
        out, kept = opgraft.causal_conv1d_update(x[..., t], kept, weight, bias, "silu")
        torch.testing.assert_close(out, whole[..., t])
        torch.testing.assert_close(opgraft.causal_conv1d_update_(x[..., t], in_place, weight, bias, "silu"), out)
        torch.testing.assert_close(in_place, kept)


def test_packed_sequences_do_not_see_each_other() -> None:
    weight = _normal(5, 4, seed=1)
    parts = [_normal(1, 5, n, seed=n) for n in (3, 1, 8)]
    seq_idx = torch.tensor([[0] * 3 + [1] + [2] * 8], dtype=torch.int32)
    found = opgraft.causal_conv1d(torch.cat(parts, dim=-1), weight, seq_idx=seq_idx)
    wanted = torch.cat([opgraft.causal_conv1d(p, weight) for p in parts], dim=-1)
    torch.testing.assert_close(found, wanted)


def test_a_selective_scan_in_parts_and_in_steps_equals_the_whole() -> None:
    given = _selective(2, 6, 37, 5)
    whole, last = opgraft.selective_scan(**given, delta_softplus=True, return_final_state=True)
    first, state = opgraft.selective_scan(**_of(given, slice(0, 20)), delta_softplus=True, return_final_state=True)
    second = opgraft.selective_scan(**_of(given, slice(20, None)), delta_softplus=True, initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole)
    kept = torch.zeros(2, 6, 5, dtype=torch.float64)
    in_place = kept.clone()
    for t in range(37):
        step = _of(given, t)
        out, kept = opgraft.selective_scan_update(kept, **step, delta_softplus=True)
        torch.testing.assert_close(out, whole[..., t])
        torch.testing.assert_close(opgraft.selective_scan_update_(in_place, **step, delta_softplus=True), out)
    torch.testing.assert_close(kept, last)
    torch.testing.assert_close(in_place, last)


@pytest.mark.parametrize("length", [24, 152])
@pytest.mark.parametrize("channels", [6800, 14_000])
def test_a_selective_scan_of_many_channels_is_exact(device: torch.device, channels: int, length: int) -> None:
    """So many that a GPU walks time serially, its rows in boxes: 6,800 twice do not fill their last one."""
    given = {n: v.to(device) for n, v in _selective(2, channels, length, 16).items()}
    rows = {n: v.bfloat16() for n, v in given.items() if v.dim() == 3}
    narrow = {n: v.float().requires_grad_() for n, v in given.items() if n not in rows}
    narrow |= {n: v.requires_grad_() for n, v in rows.items()}
    exact = {n: v.detach().double().requires_grad_() for n, v in narrow.items()}
    up = rows["z"].detach().cos()
    results = []
    for arguments in (narrow, exact):
        y, state = opgraft.selective_scan(**arguments, delta_softplus=True, return_final_state=True)
        (y * up.to(y.dtype)).sum().backward()
        results.append({"y": y, "state": state, **{n: v.grad for n, v in arguments.items()}})
    for name, found in results[0].items():
        wanted = results[1][name]
        assert found is not None
        assert wanted is not None
        assert torch.linalg.norm(found.double() - wanted) <= 4e-3 * torch.linalg.norm(wanted), name


def test_constant_matrices_equal_repeated_ones() -> None:
    given = _selective(2, 4, 11, 3)
    given["B"], given["C"] = _normal(4, 3, seed=9), _normal(4, 3, seed=10)
    found = opgraft.selective_scan(**given)
    repeated = {n: given[n][None, :, :, None].repeat(2, 1, 1, 11) for n in ("B", "C")}
    torch.testing.assert_close(found, opgraft.selective_scan(**{**given, **repeated}))


def test_in_place_steps_are_functionalised_by_the_compiler() -> None:
    x, weight = _normal(2, 5, dtype=torch.float32), _normal(5, 4, seed=1, dtype=torch.float32)

    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return opgraft.causal_conv1d_update_(x * 2, state, weight) + 1

    state, wanted_state = torch.ones(2, 5, 3), torch.ones(2, 5, 3)
    found = torch.compile(step, fullgraph=True)(x, state)
    torch.testing.assert_close(found, step(x, wanted_state))
    torch.testing.assert_close(state, wanted_state)
