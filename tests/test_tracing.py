"""A function, traced, is the function: also for other tensors, also where it writes into what it has made."""

import pytest
import torch

from aevb.training.tracing import traced

a, b = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
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


FUNCTIONS = {
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_it_is_the_same(name):
    function = FUNCTIONS[name]
    x, y = a.clone(), b.clone()
    graph = traced(function, x, y)
    assert torch.equal(x, a)
    for arguments in ((x, y), (y, x), (x, y)):
        torch.testing.assert_close(tuple(graph(*arguments)), tuple(function(*arguments)), rtol=0, atol=0)
    assert torch.equal(x, a)


def test_every_value_has_its_form():
    graph = traced(FUNCTIONS["several results"], a, b)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            assert node.meta["val"].shape == (4, 3)
    forms = [node.meta["val"] for node in graph.graph.nodes if "sort" in str(node.args) and "val" in node.meta]
    assert [(form.shape, form.dtype) for form in forms[:2]] == [((8, 3), torch.float32), ((8, 3), torch.int64)]


def test_a_step_cannot_depend_on_a_value():
    with pytest.raises(RuntimeError, match="asks for the value of a tensor"):
        traced(lambda x: x * float(x.sum()), a)
