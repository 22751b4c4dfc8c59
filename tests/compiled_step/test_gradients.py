"""The building blocks with gradients of their own: equal to autograd's, once and twice, in loops
and out of them.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from aevb.compiled_step import gradients as operations
from aevb.compiled_step.gradients import affine, bernoulli_log_prob, deferred, elementary, lstm_cell


def parameters(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(4,), (2, 3, 4), (1, 1)])
def test_affine_has_the_gradients_of_linear(leading, bias, relu):
    x, weight, b = parameters((*leading, 5), (3, 5), (3,))
    b = b if bias else None

    def mine(x, weight, b):
        return affine(x, weight, b, relu=relu)

    plain = F.linear(x, weight, b)
    assert torch.equal(mine(x, weight, b), F.relu(plain) if relu else plain)
    inputs = (x, weight, b) if bias else (x, weight, None)
    assert torch.autograd.gradcheck(mine, inputs)
    assert torch.autograd.gradgradcheck(mine, inputs)


def test_large_products_of_single_precision_agree_with_torch():
    x, weight, b = parameters((2, 64, 300), (200, 300), (200,), dtype=torch.float32)
    mine, theirs = affine(x, weight, b, relu=True), F.relu(F.linear(x, weight, b))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    for a, c in zip(
        torch.autograd.grad(mine.square().sum(), (x, weight, b)),
        torch.autograd.grad(theirs.square().sum(), (x, weight, b)),
        strict=True,
    ):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-2)


def test_a_weights_gradient_lies_as_the_weight_does():
    x, weight = parameters((7, 5), (3, 5))
    (gradient,) = torch.autograd.grad(affine(x, weight).sum(), weight)
    assert gradient.is_contiguous()


def loop(x, weight, b, wait):
    h, total = x, 0.0
    for _ in range(4):
        if wait:
            h = affine(h, weight, b).tanh()
        else:
            h = F.linear(h, weight, b).tanh()
        total = total + h.square().sum()
    return total


def test_in_a_loop_the_gradient_is_one_product_and_the_same():
    x, weight, b = parameters((6, 3), (3, 3), (3,))
    with deferred():
        mine = loop(x, weight, b, True)
    theirs = loop(x, weight, b, False)
    assert torch.equal(mine, theirs)
    for a, c in zip(
        torch.autograd.grad(mine, (x, weight, b)),
        torch.autograd.grad(theirs, (x, weight, b)),
        strict=True,
    ):
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_a_pass_that_does_not_ask_for_the_weight_leaves_nothing_behind():
    x, weight, b = parameters((6, 3), (3, 3), (3,))
    with deferred():
        mine = loop(x, weight, b, True)
    (first,) = torch.autograd.grad(mine, x, retain_graph=True)
    (again,) = torch.autograd.grad(mine, weight, retain_graph=True)
    (twice,) = torch.autograd.grad(mine, weight)
    expected = torch.autograd.grad(loop(x, weight, b, False), (x, weight))
    torch.testing.assert_close(first, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, expected[1], rtol=1e-12, atol=1e-12)
    assert torch.equal(again, twice)


def test_in_a_loop_second_derivatives_exist():
    x, weight, b = parameters((2, 3), (3, 3), (3,))

    def function(x, weight, b):
        with deferred():
            return loop(x, weight, b, True)

    assert torch.autograd.gradgradcheck(function, (x, weight, b))


def test_in_a_loop_a_weight_may_have_several_biases_and_uses_outside_it():
    x, weight, other, b, c = parameters((4, 3), (3, 3), (3, 3), (3,), (3,))

    def function(product, waiting):
        with waiting():
            h = x
            for _ in range(3):
                h = (
                    product(h, weight, b)
                    + product(h, weight, c)
                    + product(h, weight)
                    + product(h, other, b)
                ).tanh()
        return product(h, weight, c).square().sum()

    for wanted in ((x, weight, other, b, c), (b,), (c,), (x,), (other, c)):
        mine, theirs = (
            torch.autograd.grad(function(*how), wanted)
            for how in ((affine, deferred), (F.linear, nullcontext))
        )
        for mine_, theirs_ in zip(mine, theirs, strict=True):
            torch.testing.assert_close(mine_, theirs_, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", ["everything", "the input", "nothing"])
def test_a_loop_leaves_nothing_in_memory(wanted):
    def run():
        x, weight, b = parameters((6, 3), (3, 3), (3,))
        with deferred():
            total = loop(x, weight, b, True)
        if wanted != "nothing":
            torch.autograd.grad(total, (x, weight, b) if wanted == "everything" else x)

    def alive():
        return sum(type(found) is operations._Waiting for found in gc.get_objects())

    gc.collect()
    before = alive()  # other tests may hold graphs of their own
    for _ in range(5):
        run()
    assert alive() <= before


def test_bernoulli_is_torchs_density():
    (logits,) = parameters((3, 1, 4, 5))
    x = (torch.rand(1, 4, 5, dtype=torch.float64) < 0.3).double()
    expected = torch.distributions.Bernoulli(logits=logits, validate_args=False).log_prob(x).sum(-1)
    torch.testing.assert_close(bernoulli_log_prob(logits, x), expected, rtol=1e-12, atol=1e-12)
    # a relaxed sample has gradients too
    relaxed = torch.rand(1, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bernoulli_log_prob, (logits, relaxed))
    assert torch.autograd.gradgradcheck(bernoulli_log_prob, (logits, relaxed))


@pytest.mark.parametrize("size", [1, 7, 16, 32, 64, 784, 1009])
def test_for_a_compiler_bernoulli_takes_fewer_logarithms_and_is_the_same(size):
    assert [operations._multiplied(size) for size in (1, 7, 16, 32, 64, 784, 1009)] == [
        1,
        1,
        1,
        2,
        4,
        49,
        1,
    ]
    logits = torch.cat(
        [
            torch.randn(9, size) * 5,
            torch.full((1, size), 100.0),
            torch.full((1, size), -100.0),
            torch.zeros(1, size),
        ]
    ).double()
    x = (torch.rand(12, size) < 0.3).double()
    expected = torch.distributions.Bernoulli(logits=logits, validate_args=False).log_prob(x).sum(-1)
    with elementary():
        torch.testing.assert_close(bernoulli_log_prob(logits, x), expected, rtol=1e-12, atol=1e-12)
        single = bernoulli_log_prob(logits.float(), x.float())
        error = (single - expected).abs() / (1 + expected.abs() + (x * logits).abs().sum(-1))
        assert error.max() < 1e-6
        logits[0, 0], logits[1, 0] = torch.nan, torch.inf
        x[1, 0] = 0.5
        assert bernoulli_log_prob(logits, x).isfinite().tolist() == [False, False] + 10 * [True]


def test_the_cell_is_torchs():
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 4).double()
    x, h, c = torch.randn(5, 3).double(), torch.randn(5, 4).double(), torch.randn(5, 4).double()
    mine = lstm_cell(
        F.linear(x, cell.weight_ih, cell.bias_ih), F.linear(h, cell.weight_hh, cell.bias_hh), c
    )
    for a, b in zip(mine, cell(x, (h, c)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_under_autocast_products_are_low_and_results_full_where_asked():
    x, weight, b = parameters((8, 5), (3, 5), (3,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low, full = affine(x, weight, b), affine(x, weight, b, full=True)
    assert (low.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(full, F.linear(x, weight, b), rtol=0.02, atol=0.05)
    (gradient,) = torch.autograd.grad(full.sum(), weight)
    assert gradient.dtype == torch.float32


def test_transforms_of_functions_pass_through():
    x, weight, b = parameters((4, 5), (3, 5), (3,))

    def total(weight):
        return affine(x.detach(), weight, b.detach(), relu=True).sum()

    assert torch.equal(
        torch.func.grad(total)(weight.detach()), torch.autograd.grad(total(weight), weight)[0]
    )
    stacked = torch.stack([weight.detach(), 2 * weight.detach()])
    assert torch.func.vmap(total)(stacked).shape == (2,)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own; its class varies
def test_forward_derivatives_pass_through():
    x, weight, b = parameters((4, 5), (3, 5), (3,))
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(
            affine(
                forward_ad.make_dual(x.detach(), torch.ones_like(x)), weight.detach(), b.detach()
            )
        ).tangent
    torch.testing.assert_close(moved, F.linear(torch.ones_like(x), weight), rtol=1e-12, atol=1e-12)
