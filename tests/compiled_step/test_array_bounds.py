"""Compiled code stays inside its arrays, and compiled steps are the plain steps."""

from contextlib import nullcontext

import pytest
import torch
from interpreter.compiled import trained
from torch._inductor.codegen.cpp import CppKernelProxy
from torch.fx.experimental.proxy_tensor import make_fx

from aevb.compiled_step import array_bounds as compiler
from aevb.compiled_step import fusing

SMALL = 132  # the seed of a random model with few clusters to compile

# torch's compiler uses what torch advises against
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def total(a, b, c, d):
    """A sum that torch vectorises over the kept axis (3 or 11 numbers), with another one between it
    and the summed axis.
    """
    turned = [value.permute(1, 2, 0) for value in (a, c, d)]
    return ((turned[0] + turned[1] * turned[2] + b).sum(1),)


def compiled(kept):
    a, c, d = (torch.randn(kept, 6, 100) for _ in range(3))
    arguments = [a, torch.randn(6, 100, kept), c, d]
    return arguments, *fusing._both(make_fx(total)(*arguments), arguments)


@pytest.mark.slow
def test_a_sum_is_stored_where_it_belongs_and_nowhere_else():
    arguments, wrapped, code = compiled(11)
    assert code is not None
    assert compiler.stays_inside(code, arguments)
    torch.testing.assert_close(wrapped(*arguments)[0], total(*arguments)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_code_that_writes_past_the_end_is_not_used(monkeypatch):
    monkeypatch.setattr(fusing, "corrected", nullcontext)  # torch's compiler as it is
    arguments, function, code = compiled(3)
    assert code is None
    torch.testing.assert_close(function(*arguments)[0], total(*arguments)[0], rtol=0, atol=0)


def test_the_correction_ends_with_the_compilation():
    before = CppKernelProxy.aggregate_reduction_buffers
    with compiler.corrected():
        assert CppKernelProxy.aggregate_reduction_buffers is not before
    assert CppKernelProxy.aggregate_reduction_buffers is before


def test_arguments_that_are_expanded_or_empty_are_judged_too():
    seen = []
    # with names of its own, as compiled code has
    code = eval("lambda given: seen.extend(given)", {"seen": seen})
    arguments = [
        torch.ones(1, 3).expand(4, 3),
        torch.zeros(0, 2),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
    ]
    assert compiler.stays_inside(code, arguments)
    for copy, argument in zip(seen, arguments, strict=True):
        assert copy.stride() == argument.stride()
        assert torch.equal(copy, argument)
        assert copy.data_ptr() != argument.data_ptr() or not copy.numel()
    past = eval("lambda given: given[0].as_strided((1,), (1,), given[0].numel()).fill_(0)", {})
    assert not compiler.stays_inside(past, [torch.ones(3)])


@pytest.mark.slow
def test_compiled_steps_of_a_random_model_are_the_plain_ones_and_crash_nothing(tmp_path):
    """One model of the fuzz, in a process of its own; more: ``cd tests && python -m
    interpreter.compiled --models 40``.
    """
    found, status, errors = trained([SMALL], tmp_path)
    assert status == 0, errors
    (one,) = found
    assert one[1] <= 1, one
