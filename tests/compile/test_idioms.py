"""What the rules of norms, losses, convolutions, recurrences and fp8 outputs take for their op, and what they leave.

Every match is written and run: the rewritten graph gives the function's own values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import all_ops  # noqa: F401

import opgraft
from opgraft.compile import stretch
from opgraft.compile.change import Change
from opgraft.compile.find import find_sites
from opgraft.compile.rewrite import put_kernel
from opgraft.compile.scope import scopes
from opgraft.compile.site import Site

from models import captured, without_inductor

pytestmark = pytest.mark.usefixtures("all_ops")
BF16 = torch.bfloat16


def sites_of(function: Callable[..., Any], inputs: Sequence[Any], idiom: str | None = None) -> list[Site]:
    found = find_sites(captured(function, *inputs).graph)
    return [site for site in found if idiom in (None, site.idiom)]


def check(function: Callable[..., Any], inputs: Sequence[Any], idiom: str, *, tolerance: float = 1e-5) -> None:
    """One site of the idiom; written, the op gives the function's values and the idiom is gone."""
    module = captured(function, *inputs)
    (site,) = [s for s in find_sites(module.graph) if s.idiom == idiom]
    before = len(module.graph.nodes)
    put_kernel(site)
    module.graph.lint()
    module.recompile()
    assert any(site.spec.name.replace("::", ".") in str(n.target) for n in module.graph.nodes)
    assert not any(n in site.nodes for n in module.graph.nodes if n not in site.outputs and not n.users), before
    # Dynamo's own order of inputs, without those that it does not need.
    by_name = dict(zip(inspect.signature(function).parameters, inputs, strict=True))
    names = [str(n.target).removeprefix("L_").removesuffix("_") for n in module.graph.find_nodes(op="placeholder")]
    got, want = module(*(by_name[name] for name in names)), function(*inputs)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# --- norms


def llama(x: Any, w: Any, eps: float = 1e-6) -> Any:
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(dtype)


def gemma(x: Any, w: Any) -> Any:
    h = x.float()
    out = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


def gemma3n(x: Any, w: Any) -> Any:
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5) * w.float()).type_as(x)


def t5(x: Any, w: Any) -> Any:
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, BF16) else h)


def by_division(x: Any, w: Any) -> Any:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5) * w


def by_a_sum(x: Any, w: Any) -> Any:
    return torch.rsqrt(1e-5 + (x**2).sum(dim=(-1,), keepdim=True) / x.shape[-1]) * x * w


NORMS = {
    "llama": llama,
    "gemma": gemma,
    "gemma3n": gemma3n,
    "t5": t5,
    "by a division": by_division,
    "by a sum": by_a_sum,
    "called": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
    "no weight": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_site(name: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 5, 16).to(dtype), torch.rand(16).to(dtype)
    check(
        lambda x, w: NORMS[name](x * 2, w) + 1, (x, w), "rms-norm", tolerance=1e-5 if dtype == torch.float32 else 0.05
    )


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_a_norm_of_a_sum_gives_the_sum_too(name: str) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = r + x
        return NORMS[name](summed, w) * 2, summed - 1

    check(function, (torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)), "add-rms-norm")


OTHER_NORMS = {
    "mean of x": lambda x, w: x * torch.rsqrt(x.mean(-1, keepdim=True) + 1e-6) * w,
    "another axis": lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-6) * w,
    "another x": lambda x, w: x.flip(0) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
    "cube": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6) * w,
    "the root is read": lambda x, w: (r := torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + x * r * w,
    "layer norm": lambda x, w: F.layer_norm(x, (16,), w),
    "a sum over another length": lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) / 15 + 1e-6) * w,
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_what_is_no_such_norm_is_left_alone(name: str) -> None:
    assert sites_of(OTHER_NORMS[name], (torch.randn(16, 16), torch.rand(16))) == []


def test_a_norm_whose_statistics_have_no_gradient_is_left_alone() -> None:
    def function(x: Any, w: Any) -> Any:
        with torch.no_grad():
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * r * w

    assert sites_of(function, (torch.randn(4, 16, requires_grad=True), torch.rand(16))) == []


def test_a_write_inside_a_norm_ends_the_match() -> None:
    def function(x: Any, w: Any) -> Any:
        x = x * 1
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x.mul_(2)
        return x * r * w

    assert sites_of(function, (torch.randn(4, 16), torch.rand(16))) == []


# --- losses


def transformers_loss(logits: Any, labels: Any) -> Any:
    """As ForCausalLMLoss has it."""
    vocabulary = logits.shape[-1]
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocabulary), labels.view(-1), ignore_index=-100, reduction="mean")


LOSSES = {
    "transformers": transformers_loss,
    "sum": lambda x, t: F.cross_entropy(x.view(-1, 11), t.view(-1), reduction="sum") / 3,
    "none": lambda x, t: F.cross_entropy(x.view(-1, 11), t.view(-1), reduction="none", label_smoothing=0.1),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x.view(-1, 11).float(), dim=-1), t.view(-1), ignore_index=3),
    "shifted logits": lambda x, t: F.cross_entropy(x[:, :-1].reshape(-1, 11).float(), t[:, 1:].reshape(-1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_site(name: str, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(2, 6, 11).to(dtype), torch.randint(0, 11, (2, 6))
    check(lambda x, t: LOSSES[name](x * 1, t), (logits, labels), "cross-entropy", tolerance=0.02)


@pytest.mark.parametrize(("wanted", "dtype"), [(True, BF16), (True, torch.float16), (False, BF16)])
def test_a_loss_on_a_cpu_makes_its_gradient_in_the_same_pass(wanted: bool, dtype: torch.dtype) -> None:
    """Where one is wanted, but not in float16, whose small gradients are lost before a loss scale."""
    logits, labels = torch.randn(2, 6, 11).to(dtype).requires_grad_(wanted), torch.randint(0, 11, (2, 6))
    module = captured(transformers_loss, logits, labels)
    (site,) = find_sites(module.graph)
    put_kernel(site)
    one_pass = torch.ops.opgraft.cross_entropy_with_gradient.default
    assert any(n.target is one_pass for n in module.graph.nodes) == (wanted and dtype != torch.float16)


OTHER_LOSSES = {
    "classes in the middle": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "probabilities": lambda x, t: F.cross_entropy(x.view(-1, 11), x.view(-1, 11).softmax(-1)),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_another_loss_is_left_alone(name: str) -> None:
    assert sites_of(OTHER_LOSSES[name], (torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6)))) == []


# --- convolutions

CONVOLUTIONS = {
    "mamba": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=3, groups=8)[..., :12]),
    "cut by three slices": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=3, groups=8)[:, :, : x.shape[-1]]),
    "padded in front": lambda x, w, b: F.silu(F.conv1d(F.pad(x, (3, 0)), w, b, groups=8)),
    "no bias": lambda x, w, b: F.conv1d(F.pad(x, [3, 0]), w, groups=8),
    "sigmoid": lambda x, w, b: (y := F.conv1d(x, w, b, padding=(3,), groups=8)[..., :12]) * torch.sigmoid(y),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_causal_convolution_is_one_site(name: str) -> None:
    x, w, b = torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8)
    check(lambda x, w, b: CONVOLUTIONS[name](x * 2, w, b) + 1, (x, w, b), "causal-conv1d", tolerance=1e-4)


OTHER_CONVOLUTIONS = {
    "not causal": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=8)[..., 1:13],
    "padded behind": lambda x, w, b: F.conv1d(F.pad(x, (0, 3)), w, b, groups=8),
    "padded with ones": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), value=1.0), w, b, groups=8),
    "reflected": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), mode="reflect"), w, b, groups=8),
    "strided": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=8, stride=2),
    "dilated": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=8, dilation=2),
    "whole": lambda x, w, b: F.conv1d(x, w.expand(8, 8, 4), b, padding=3)[..., :12],
    "surplus is read": lambda x, w, b: (y := F.conv1d(x, w, b, padding=3, groups=8))[..., :12] + y.sum(),
}


@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_another_convolution_is_left_alone(name: str) -> None:
    inputs = (torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8))
    assert sites_of(OTHER_CONVOLUTIONS[name], inputs, "causal-conv1d") == []


def test_a_convolution_that_stays_a_cut_view_is_left_alone() -> None:
    """The op's result is dense, the view is not: what follows was traced with the view's strides."""
    inputs = (torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8))
    assert sites_of(lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=8)[..., :12], inputs, "causal-conv1d") == []


# --- float8


def quantised(v: Any) -> Any:
    scale = v.abs().amax(dim=-1, keepdim=True).float() / 448.0
    return (v.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def with_a_least_scale(v: Any) -> Any:
    scale = (v.float().abs().amax(-1, True) * (1 / 448.0)).clamp(min=1e-12)
    return (v * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def in_blocks(v: Any) -> Any:
    parts = v.float().view(*v.shape[:-1], -1, 128)
    scale = parts.abs().amax(-1, keepdim=True).clamp(1e-4) / 448.0
    return (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(v.shape), scale


QUANTISED = {"row": quantised, "least scale": with_a_least_scale, "blocks": in_blocks}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("how", QUANTISED)
def test_a_gate_quantised_is_one_site(how: str, dtype: torch.dtype) -> None:
    def function(g: Any, u: Any) -> Any:
        return QUANTISED[how](F.silu(g) * u)

    check(function, (torch.randn(4, 256).to(dtype), torch.randn(4, 256).to(dtype)), "silu-mul-fp8", tolerance=0.15)


@pytest.mark.parametrize("how", QUANTISED)
def test_a_norm_quantised_is_one_site(how: str) -> None:
    inputs = (torch.randn(4, 256), torch.rand(256))
    check(lambda x, w: QUANTISED[how](llama(x, w)), inputs, "rms-norm-fp8", tolerance=0.15)


def test_a_norm_of_a_sum_quantised() -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = x + r
        return (*quantised(gemma(summed, w)), summed)

    inputs = (torch.randn(4, 64), torch.randn(4, 64), torch.rand(64))
    check(function, inputs, "add-rms-norm-fp8", tolerance=0.15)


def test_a_quantised_gate_is_left_alone_where_a_gradient_is_wanted() -> None:
    inputs = (torch.randn(4, 64, requires_grad=True), torch.randn(4, 64))
    assert sites_of(lambda g, u: quantised(F.silu(g) * u), inputs, "silu-mul-fp8") == []


OTHER_SCALES = {
    "largest of all": lambda v: (v / (v.abs().max() / 448)).to(torch.float8_e4m3fn),
    "another largest": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 240)).to(torch.float8_e4m3fn),
    "largest, not magnitude": lambda v: (v / (v.amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn),
    "another axis": lambda v: (v / (v.abs().amax(0, keepdim=True) / 448)).to(torch.float8_e4m3fn),
    "a large least scale": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 448).clamp(1.0)).to(torch.float8_e4m3fn),
    "another type": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_another_scale_is_left_alone(name: str) -> None:
    inputs = (torch.randn(4, 64), torch.randn(4, 64))
    assert sites_of(lambda g, u: OTHER_SCALES[name](F.silu(g) * u), inputs, "silu-mul-fp8") == []


# --- recurrences


def loop_and_stack(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, dim=1)


def mamba_loop(a: Any, b: Any) -> Any:
    """As transformers' Mamba walks: the state is read at every step."""
    state, outputs = torch.zeros(a.shape[0], a.shape[2]), []
    for i in range(a.shape[1]):
        state = a[:, i, :] * state + b[:, i, :]
        outputs.append((state * 2).sum(-1))
    return torch.stack(outputs, dim=-1)


def from_the_first(a: Any, b: Any) -> Any:
    h = b.select(1, 0)
    states = [h]
    for t in range(1, a.shape[1]):
        h = b.select(1, t) + h * a.select(1, t)
        states.append(h)
    return torch.stack(states, 0)


def backwards(a: Any, b: Any) -> Any:
    """Discounted sums, from the end."""
    h, states = torch.zeros_like(b[:, 0]), []
    for t in reversed(range(a.shape[1])):
        h = b[:, t] + a[:, t] * h
        states.insert(0, h)
    return torch.stack(states, 1)


def last_state(a: Any, b: Any) -> Any:
    h = torch.ones_like(b[:, 0]) * 0.5
    for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
        h = x * h + y
    return h


LOOPS = {f.__name__: f for f in (loop_and_stack, mamba_loop, from_the_first, backwards, last_state)}


@pytest.mark.parametrize("name", LOOPS)
def test_an_unrolled_recurrence_is_one_site(name: str) -> None:
    inputs = (torch.rand(2, 6, 5), torch.randn(2, 6, 5))
    check(lambda a, b: LOOPS[name](a * 0.5, b) + 1, inputs, "recurrence", tolerance=1e-4)


def one_step_left_out(a: Any, b: Any) -> Any:
    h = torch.zeros_like(b[:, 0])
    for t in (0, 1, 2, 4, 5):
        h = a[:, t] * h + b[:, t]
    return h


def another_order(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, -1 - t]
        states.append(h)
    return torch.stack(states, 1)


def not_linear(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = torch.tanh(a[:, t] * h + b[:, t])
        states.append(h)
    return torch.stack(states, 1)


@pytest.mark.parametrize("loop", [one_step_left_out, another_order, not_linear], ids=lambda f: f.__name__)
def test_another_recurrence_is_left_alone(loop: Callable[..., Any]) -> None:
    assert sites_of(loop, (torch.rand(2, 6, 5), torch.randn(2, 6, 5)), "recurrence") == []


def combine(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def combine_otherwise(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[0] * right[1] + left[1]


def scan(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    from torch._higher_order_ops.associative_scan import associative_scan

    return lambda a, b: associative_scan(function, (a * 0.5, b * 1), dim=1, combine_mode=mode)[1] + 1


@pytest.mark.parametrize("length", [2, 3, 8, 13])
def test_an_associative_scan_taken_apart_is_one_site(length: int) -> None:
    inputs = (torch.rand(2, length, 5), torch.randn(2, length, 5))
    check(scan(combine, "generic"), inputs, "unrolled-scan", tolerance=1e-4)


def higher_order(function: Callable[..., Any], dim: int) -> Callable[..., Any]:
    """The op itself, as Dynamo keeps it on a GPU: dimension 0 is scanned, and is a view of the one that is meant."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def flat(a: Any, b: Any, c: Any, d: Any) -> Any:
        return list(function((a, b), (c, d)))

    def scanned(a: Any, b: Any) -> Any:
        pairs = [(a * 0.5).movedim(dim, 0), (b * 1).movedim(dim, 0)]
        products, states = associative_scan_op(flat, pairs, ())
        products.movedim(0, dim)  # as the public function leaves it: made and never read
        return states.movedim(0, dim) + 1

    return scanned


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_associative_scan_is_one_site(dim: int) -> None:
    function, (a, b) = higher_order(combine, dim), (torch.rand(3, 8, 5), torch.randn(3, 8, 5))
    (report,) = opgraft.sites(function, (a, b), choose="kernel")
    assert (report.idiom, report.chosen) == ("associative-scan", True), str(report)
    h, steps = torch.zeros(b.movedim(dim, 0).shape[1:]), []
    for decay, update in zip(a.movedim(dim, 0), b.movedim(dim, 0), strict=True):
        steps.append(h := decay * 0.5 * h + update)
    want = torch.stack(steps, dim) + 1
    torch.testing.assert_close(without_inductor(function, "kernel")(a, b), want)
    module = captured(function, a, b)
    (site,) = find_sites(module.graph)
    found = stretch.around(site, [Change(site)], scopes(module.graph))
    assert found is not None
    torch.testing.assert_close(found.graph(chosen=True)(a, b)[-1], want)


def test_an_associative_scan_whose_products_are_wanted_is_left_alone() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def function(a: Any, b: Any) -> Any:
        products, states = associative_scan_op(lambda a, b, c, d: [a * c, c * b + d], [a * 1, b * 1], ())
        return products.movedim(0, 1) + states.movedim(0, 1)

    assert sites_of(function, (torch.rand(8, 2), torch.randn(8, 2))) == []
    assert sites_of(higher_order(combine_otherwise, 1), (torch.rand(2, 8), torch.randn(2, 8))) == []


def test_another_associative_scan_is_left_alone() -> None:
    inputs = (torch.rand(2, 8, 5), torch.randn(2, 8, 5))
    assert sites_of(scan(combine_otherwise, "generic"), inputs) == []


@pytest.mark.parametrize("name", ["taken apart", "loop_and_stack", "mamba_loop", "backwards"])
def test_a_recurrence_is_checked_against_float64_and_differentiated(name: str) -> None:
    function = scan(combine, "generic") if name == "taken apart" else LOOPS[name]
    a, b = torch.rand(2, 6, 5, requires_grad=True), torch.randn(2, 6, 5, requires_grad=True)
    (site,) = opgraft.sites(function, (a, b), choose="kernel")
    assert site.chosen, site.decision.why
    got, want = without_inductor(function, "kernel")(a, b), function(a, b)
    torch.testing.assert_close(got, want)
    seed = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, (a, b), seed), torch.autograd.grad(want, (a, b), seed))


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_a_norm_of_a_sum_is_checked_against_float64(name: str) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = x + r
        return NORMS[name](summed, w) * 2, summed - 1

    found = opgraft.sites(function, (torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)), choose="kernel")
    assert [(s.idiom, s.chosen) for s in found] == [("add-rms-norm", True)], [str(s) for s in found]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_checked_against_float64(name: str) -> None:
    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    (site,) = opgraft.sites(lambda x, t: LOSSES[name](x * 1, t), (logits, labels), choose="kernel")
    assert site.chosen, site.decision.why
