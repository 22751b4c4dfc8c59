"""A function, traced, is the function: also for other tensors, also where it writes into what it
has made.
"""

import pytest
import torch
from torch import fx

from aevb.compiled_step.tracing import traced

a, b = (
    torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(4, 3, generator=torch.Generator().manual_seed(1)),
)
fixed = torch.arange(3.0)


def of_gradients(x, y):
    w = x.detach().requires_grad_()
    return torch.autograd.grad((torch.tanh(w) * y).exp().sum(), w)


def in_place(x, y):
    total = torch.zeros(4, 3)
    total[1:3].add_(x[1:3])
    total[:, 0].mul_(y[:, 0])
    return total, total.sum()


def into_a_constant(x, y):
    constant = torch.tensor([[1.0, 2.0, 3.0]])
    part = constant[:, 1:]
    part.add_(x[0, 1:])
    return constant * y, part


def parts(x, y):
    values, places = torch.cat([x, y]).sort(0)
    first, *_, last = values.split(3)
    return first, last, places, {"whole": x.unbind(1)}["whole"][2]


def of_a_constant(x, y):
    """Written into twice, the second time as a part; what was made of it before is as it was."""
    zeros = torch.zeros(4, 3)
    before = zeros + 1
    zeros.add_(x)
    zeros[2:].mul_(y[2:])
    return before, zeros * 2, before[1:]


def out(x, y):
    total = torch.ones(4, 3)
    both = total * 2 + y
    torch.add(x, 1, out=total)
    return both, total


def several(x, y):
    kept = [torch.zeros(4, 3), x.clone()]
    torch._foreach_add_(kept, [y, y])
    return kept


def fixed_results(x, y):
    constant = torch.full((2, 3), 2.0)
    first, second = constant.unbind(0)
    return constant, first, second.exp(), x


def gradient_of_a_part(x, y):
    w = x.detach().requires_grad_()
    h = torch.zeros(4, 3)
    h[1:] = w[1:] * y[1:]
    return torch.autograd.grad(h.square().sum() + w.sum(), w)


def into_a_chunk(x, y):
    constant = torch.ones(4, 3)
    constant.unsafe_chunk(2)[1].add_(x[2:])
    return constant * y, constant


FUNCTIONS = {
    "a constant written into by a chunk": into_a_chunk,
    "a constant written into, twice": of_a_constant,
    "written into as out": out,
    "several at once": several,
    "constants as results": fixed_results,
    "gradients through a part": gradient_of_a_part,
    "a chain": lambda x, y: ((x @ y.T).relu() + 1, x.new_full((2,), 3.0)),
    "gradients": of_gradients,
    "written into": in_place,
    "a constant written into": into_a_constant,
    "several results": parts,
    "a tensor from outside": lambda x, y: (x * fixed + y.sum(),),
    "an argument, and the same twice": lambda x, y: (x, (z := x + y), z),
    "mapped": torch.vmap(lambda x, y: (x.softmax(-1) @ y, torch.where(y > 0, x, 2.0))),
    "half precision": lambda x, y: (torch.autocast("cpu", torch.bfloat16)(torch.mm)(x, y.T),),
}


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_it_is_the_same(name, fold):
    function = FUNCTIONS[name]
    x, y = a.clone(), b.clone()
    graph = traced(function, x, y, fold=fold)
    assert torch.equal(x, a)
    for arguments in ((x, y), (y, x), (x, y)):
        found = tuple(graph(*arguments))
        torch.testing.assert_close(found, tuple(function(*arguments)), rtol=0, atol=0)
        for result in found:
            mine = result.untyped_storage().data_ptr() not in (
                x.untyped_storage().data_ptr(),
                y.untyped_storage().data_ptr(),
            )
            if mine and result.is_floating_point():
                result.mul_(3)  # whoever gets it may
    assert torch.equal(x, a)
    assert torch.equal(y, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value_has_its_form(name):
    class Checked(fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                form = node.meta["val"]
                assert (form.shape, form.stride(), form.dtype) == (
                    result.shape,
                    result.stride(),
                    result.dtype,
                )
            return result

    Checked(traced(FUNCTIONS[name], a, b)).run(a, b)


def test_what_is_the_same_every_time_is_folded():
    graph = traced(
        lambda x: (x * (torch.ones_like(x).neg() / 100).exp(), torch.zeros(3).add_(1)), a, fold=True
    )
    targets = [
        node.target
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not torch.ops.aten.detach.default
    ]
    assert targets == [
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.zeros.default,
        torch.ops.aten.add_.Tensor,
    ]


def test_a_buffer_that_changes_is_seen():
    buffer = torch.ones(3)
    graph = traced(lambda x: (x * (buffer * 2),), a, fold=True)
    buffer.fill_(5.0)
    assert torch.equal(graph(a)[0], a * 10)


def test_a_step_cannot_depend_on_a_value():
    for asks in (lambda x: x * float(x.sum()), lambda x: x[x > 0], lambda x: torch.equal(x, x)):
        with pytest.raises(RuntimeError, match="asks for the value of a tensor"):
            traced(asks, a)


def test_the_same_tensor_twice_is_two_arguments():
    graph = traced(lambda x, y: (x - 2 * y,), a, a)
    assert torch.equal(graph(a, b)[0], a - 2 * b)
