"""What cross_entropy and linear_cross_entropy promise beyond the table: torch's meaning, graphs run twice, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_cross_entropy import run
from torch.nn import functional as F

import opgraft


def _normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _targets(*sizes: int, classes: int, ignored: bool = True) -> torch.Tensor:
    drawn = torch.randint(0, classes, sizes, generator=torch.Generator().manual_seed(1))
    if ignored and drawn.dim():
        drawn.view(-1)[1::4] = -100
    return drawn


def _options() -> Iterator[dict[str, Any]]:
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.2):
            for weighted in (False, True):
                yield {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted}


@pytest.mark.parametrize("options", list(_options()), ids=str)
def test_it_is_torchs_cross_entropy(options: dict[str, Any]) -> None:
    weight = _normal(13, seed=5).abs() if options["weighted"] else None
    given = {k: v for k, v in options.items() if k != "weighted"}
    found, wanted = (_normal(9, 13).requires_grad_() for _ in range(2))
    target = _targets(9, classes=13)
    losses = (
        opgraft.cross_entropy(found, target, weight=weight, **given),
        F.cross_entropy(wanted, target, weight, **given),
    )
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.sum().mul(0.3).backward()
    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_are_torchs_too(reduction: str) -> None:
    logits, target = _normal(5, 7), _normal(5, 7, seed=2).softmax(-1)
    found = opgraft.cross_entropy(logits, target, label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(logits, target, label_smoothing=0.1, reduction=reduction))


def test_z_loss_and_softcap_are_what_they_say() -> None:
    logits, target = _normal(6, 11, seed=3), _targets(6, classes=11, ignored=False)
    capped = 2.5 * torch.tanh(logits / 2.5)
    lse = capped.logsumexp(-1)
    wanted = F.cross_entropy(capped, target) + 0.01 * lse.square().mean()
    found, found_lse = opgraft.cross_entropy(logits, target, z_loss=0.01, softcap=2.5, return_lse=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_lse, lse)


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(factor: float) -> None:
    logits, target = _normal(7, 19).requires_grad_(), _targets(7, classes=19)
    loss = opgraft.cross_entropy(logits, target)
    assert isinstance(loss, torch.Tensor)
    incoming = torch.tensor(factor, dtype=loss.dtype)
    (first,) = torch.autograd.grad(loss, logits, incoming, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, incoming * 2, retain_graph=True)
    (third,) = torch.autograd.grad(loss, logits, incoming)
    assert torch.equal(first, kept), "a gradient that was given away was written again"
    torch.testing.assert_close(second, kept * 2)
    torch.testing.assert_close(third, kept)


def test_a_loss_that_is_used_twice_and_gradients_that_add_up() -> None:
    logits, target = _normal(7, 19).requires_grad_(), _targets(7, classes=19)
    loss = opgraft.cross_entropy(logits, target)
    (loss * 2 + loss.square()).backward()
    assert logits.grad is not None
    first = logits.grad.clone()
    opgraft.cross_entropy(logits, target).backward()
    other = logits.detach().clone().requires_grad_()
    wanted = F.cross_entropy(other, target)
    (wanted * 2 + wanted.square()).backward()
    torch.testing.assert_close(first, other.grad)
    F.cross_entropy(other, target).backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_checkpointing_and_offloaded_tensors() -> None:
    logits, target = _normal(7, 19).requires_grad_(), _targets(7, classes=19)
    (wanted,) = torch.autograd.grad(F.cross_entropy(logits * 2, target) * 3, logits)
    loss = torch.utils.checkpoint.checkpoint(
        lambda x: opgraft.cross_entropy(x * 2, target) * 3, logits, use_reentrant=False
    )
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted)
    with torch.autograd.graph.save_on_cpu():
        loss = opgraft.cross_entropy(logits * 2, target) * 3
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted)


def test_a_shifted_view_needs_no_copy_and_gives_the_rows_it_names() -> None:
    logits, labels = _normal(3, 8, 21), _targets(3, 8, classes=21)
    found = opgraft.cross_entropy(logits[:, :-1], labels[:, 1:])
    wanted = F.cross_entropy(logits[:, :-1].reshape(-1, 21), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(found, wanted)


def test_rows_that_are_ignored_get_zeros_even_where_they_are_not_numbers() -> None:
    logits, target = _normal(4, 5), torch.tensor([0, -100, 2, -100])
    logits[1], logits[3, 2] = torch.nan, torch.inf
    logits.requires_grad_()
    loss = opgraft.cross_entropy(logits, target)
    loss.backward()
    assert logits.grad is not None
    assert loss.isfinite()
    assert not logits.grad[[1, 3]].any()
    assert logits.grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1, 3, 64, 128, 129])
def test_few_rows_and_one_more(rows: int, reduction: Any, device: torch.device) -> None:
    """A GPU deals few rows out otherwise than many, and counts their targets in the same kernel."""
    logits = _normal(rows, 8209, dtype=torch.float32).to(device).requires_grad_()
    weight = _normal(8209, seed=3, dtype=torch.float32).abs().to(device)
    target = _targets(rows, classes=8209).to(device)
    share = torch.linspace(0.5, 2.0, rows, device=device) if reduction == "none" else 1.5
    exact = logits.detach().double().requires_grad_()
    for given in (None, weight):
        loss = opgraft.cross_entropy(logits, target, weight=given, reduction=reduction)
        (gradient,) = torch.autograd.grad((loss * share).sum(), logits)
        wanted = F.cross_entropy(exact, target, None if given is None else given.double(), reduction=reduction)
        (wanted_gradient,) = torch.autograd.grad((wanted * share).sum(), exact)
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
        scale = wanted_gradient.abs().max().item()
        torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-5, atol=1e-6 * scale)
    none = opgraft.cross_entropy(logits, torch.full_like(target, -100), reduction=reduction)
    (gradient,) = torch.autograd.grad((none * share).sum(), logits)
    assert bool(none.isnan().all()) == (reduction == "mean")
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 65536.0, torch.nan])
def test_a_compiled_step_gives_the_gradient_of_an_eager_one(
    dtype: torch.dtype, factor: float, device: torch.device
) -> None:
    """Also under a loss scale, without which most of a float16 gradient would be zero."""
    logits = _normal(24, 5003, dtype=dtype).mul_(3).to(device).requires_grad_()
    target = _targets(24, classes=5003).to(device)
    compiled = torch.compile(opgraft.cross_entropy, fullgraph=True, dynamic=False)
    loss = compiled(logits, target)
    (found,) = torch.autograd.grad(loss * factor, logits)
    eager = opgraft.cross_entropy(logits, target)
    (wanted,) = torch.autograd.grad(eager * factor, logits)
    torch.testing.assert_close(loss, eager)
    assert not found[target < 0].any()
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_target_that_is_no_class_is_refused_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match=r"cross_entropy: target is 7 in row 1, expected a class from 0 to 4"):
        opgraft.cross_entropy(_normal(3, 5), torch.tensor([0, 7, 1]))


@pytest.mark.gpu
def test_a_target_that_is_no_class_is_not_a_number_on_the_gpu() -> None:
    loss = opgraft.cross_entropy(_normal(3, 5).cuda(), torch.tensor([0, 7, 1], device="cuda"), reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("given", [{"reduction": "average"}, {"softcap": 0.0}, {"softcap": -1.0}], ids=lambda g: str(g))
def test_bad_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cross_entropy: "):
        opgraft.cross_entropy(_normal(3, 5), torch.zeros(3, dtype=torch.int64), **given)


@pytest.mark.parametrize("classes", [1, 2, 7, 8, 1023, 1024, 1025, 4097, 32003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_in_which_a_row_ends(classes: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = _normal(5, classes + 3, dtype=dtype).to(device)[:, 1 : classes + 1].requires_grad_()
    target = _targets(5, classes=classes).to(device)
    exact = logits.detach().double().requires_grad_()
    loss, wanted = (
        opgraft.cross_entropy(logits, target, reduction="sum"),
        F.cross_entropy(exact, target, reduction="sum"),
    )
    torch.testing.assert_close(loss, wanted.to(loss.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits)[0], torch.autograd.grad(wanted, exact)[0].to(dtype), rtol=1e-2, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "rtol"),
    [
        (1500, 5000, torch.bfloat16, 2**-7),
        (700, 50257, torch.bfloat16, 2**-7),
        (300, 128256, torch.bfloat16, 2**-7),
        (300, 100001, torch.float32, 1e-5),
        (90, 1000003, torch.bfloat16, 2**-7),
        (200, 30011, torch.float64, 1e-10),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_rows_than_the_device_has_at_a_time(
    rows: int, classes: int, dtype: torch.dtype, rtol: float, reduction: Any
) -> None:
    """Every row once, whoever took it: losses and gradients against float64, and the same bits again."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, classes + 1, device="cuda", generator=generator).to(dtype)[:, 1:].requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    target[::7] = -100
    share = torch.rand(rows, device="cuda", generator=generator) if reduction == "none" else 1.0
    runs = []
    for _ in range(2):
        loss = opgraft.cross_entropy(logits, target, reduction=reduction)
        runs.append((loss.detach(), torch.autograd.grad((loss * share).sum(), logits)[0]))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    exact = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(exact, target, reduction=reduction)
    (gradient,) = torch.autograd.grad((loss * share).sum(), exact)
    torch.testing.assert_close(runs[0][0].double(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(runs[0][1].double(), gradient, rtol=rtol, atol=rtol * 1e-3 * gradient.abs().max().item())


def _linear_step(function: Any, dtype: torch.dtype = torch.float64, **given: Any) -> list[torch.Tensor]:
    hidden, weight, bias = (
        v.to(dtype).requires_grad_() for v in (_normal(2, 9, 6), _normal(17, 6, seed=1), _normal(17, seed=2))
    )
    target = _targets(2, 9, classes=17)
    found = function(hidden, weight, target, bias, **given)
    outputs = found if isinstance(found, tuple) else (found,)
    total = sum((out.sin().sum() for out in outputs), start=torch.zeros((), dtype=outputs[0].dtype))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(total, (hidden, weight, bias))]


def _unchunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    given.pop("chunk_rows", None)
    return opgraft.cross_entropy(F.linear(hidden, weight, bias), target, weight=class_weight, **given)


LINEAR_OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.01},
    {"softcap": 3.0, "return_lse": True},
    {"class_weight": _normal(17, seed=8).abs()},
    {"class_weight": _normal(17, seed=8).abs(), "z_loss": 0.01},
]


@pytest.mark.parametrize("given", LINEAR_OPTIONS, ids=lambda g: "-".join(g) or "plain")
@pytest.mark.parametrize("chunk_rows", [1, 5, 18, None])
def test_chunks_give_what_the_whole_gives(given: dict[str, Any], chunk_rows: int | None) -> None:
    found = _linear_step(opgraft.linear_cross_entropy, chunk_rows=chunk_rows, **given)
    for got, want in zip(found, _linear_step(_unchunked, **given), strict=True):
        torch.testing.assert_close(got, want)


def test_chunks_in_one_graph_under_compile() -> None:
    compiled = torch.compile(opgraft.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = _linear_step(compiled, chunk_rows=7)
    for got, want in zip(found, _linear_step(_unchunked), strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivative_of_chunks() -> None:
    target = _targets(5, classes=7)
    inputs = (_normal(5, 3).requires_grad_(), _normal(7, 3, seed=1).requires_grad_())

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return opgraft.linear_cross_entropy(hidden, weight, target, chunk_rows=2)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_chunks_under_autocast_and_of_no_rows() -> None:
    hidden, weight = (_normal(*s, dtype=torch.float32).requires_grad_() for s in ((6, 4), (11, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = opgraft.linear_cross_entropy(hidden, weight, _targets(6, classes=11), chunk_rows=4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    none = opgraft.linear_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), reduction="sum")
    assert none.item() == 0


def test_the_full_logits_are_never_there(device: torch.device) -> None:
    """No tensor of their size is made, in forward or backward."""
    rows, classes = 64, 503
    hidden = _normal(rows, 8, dtype=torch.float32).to(device).requires_grad_()
    weight = _normal(classes, 8, seed=1, dtype=torch.float32).to(device).requires_grad_()
    target = _targets(rows, classes=classes).to(device)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, torch.Tensor):
                    self.seen = max(self.seen, value.numel())
            return out

    with Largest() as largest:
        opgraft.linear_cross_entropy(hidden, weight, target, chunk_rows=16).backward()
    assert largest.seen <= 16 * classes


def test_random_calls_are_as_exact_as_the_reference(device: torch.device) -> None:
    assert not run(100, device, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_gradients_of_many_rows_on_a_cpu_have_the_bits_of_few(dtype: torch.dtype) -> None:
    """Over 32 MiB the kernel asks for the gradient's pages as it comes to them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1700, 10007, generator=generator).to(dtype)
    target = torch.randint(0, 10007, (1700,), generator=generator)

    def gradient(first: int, last: int, scale: float) -> torch.Tensor:
        part = logits[first:last].detach().requires_grad_()
        loss = opgraft.cross_entropy(part, target[first:last], reduction="sum")
        return torch.autograd.grad(loss, part, torch.full_like(loss, scale))[0]

    for scale in (1.0, 3.0):
        whole = gradient(0, 1700, scale)
        for first, last in ((0, 4), (848, 853), (1697, 1700)):
            assert torch.equal(whole[first:last], gradient(first, last, scale))
