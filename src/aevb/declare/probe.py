"""Try a network of the user on a few rows: what it returns, and whether it is a function of a row.

A bound is a sum over rows, and an estimate is a function of parameters, batch and noise. So a
network must compute each row alone, keep its buffers as they are, and have no parameters that the
model does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aevb.declare.own_dropout import asking
from aevb.runtime.seeding import global_generator

Shape = tuple[int, ...]
ROWS = 3


class Found(NamedTuple):
    """What a network returns and does."""

    shapes: tuple[Shape, ...]  # of each returned tensor, without the rows
    dropouts: tuple[tuple[float, int], ...]
    draws: bool  # whether its code draws random numbers itself
    writes: bool  # whether it changes its inputs in place, as nn.ReLU(inplace=True) does


def probe(
    name: str,
    call: Callable[..., Any],
    parents: Mapping[str, Shape],
    module: nn.Module | None,
    joined: bool,
) -> Found:
    """Call a network on a few rows. Raise ValueError if it is no function of a row."""
    generator = torch.Generator("cpu").manual_seed(0)
    own = [] if module is None else list(module.parameters())
    _check_tied(name, module)
    floating = [parameter.dtype for parameter in own if parameter.is_floating_point()]
    kind = floating[0] if floating else torch.get_default_dtype()
    place = own[0].device if own else torch.get_default_device()

    def rows(shape: Shape) -> Tensor:
        # Numbers in [0, 1) are valid pixels, probabilities, and (as 0) class numbers.
        drawn = torch.rand(ROWS, *shape, generator=generator, dtype=kind, device="cpu")
        return drawn.to(place)

    values = [rows(shape) for shape in parents.values()]
    others = [torch.cat([value[:1], rows(value.shape[1:])[1:]]) for value in values]
    versions = [value._version for value in values]
    buffers = {} if module is None else {key: b.clone() for key, b in module.named_buffers()}
    random = global_generator(place)
    before = random.get_state()
    try:
        with torch.enable_grad(), asking() as dropouts:
            result = _called(name, call, values, parents, joined)
        after = random.get_state()
        writes = [value._version for value in values] != versions
        random.set_state(before)
        found = _tensors(name, result)
        _check_parameters(name, found, own)
        with torch.no_grad():
            again = _tensors(name, _called(name, call, others, parents, joined))
    finally:
        random.set_state(before)
    draws = not torch.equal(before, after)
    if draws and _draws_in_evaluation(call, values, module, random):
        raise ValueError(
            f"{name} draws random numbers in every call, so means of the posterior would change "
            f"from call to call. Draw in training only (if self.training), or declare what is "
            f"random as a latent variable."
        )
    if not any(tensor.is_meta for tensor in found):
        _check_rows(name, found, again, module)
        _check_buffers(name, module, buffers)
    return Found(
        tuple(tuple(tensor.shape[1:]) for tensor in found),
        tuple(dropouts),
        draws,
        writes,
    )


def _draws_in_evaluation(
    call: Callable[..., Any],
    values: list[Tensor],
    module: nn.Module | None,
    random: torch.Generator,
) -> bool:
    if module is None:
        return True
    training = [part for part in module.modules() if part.training]
    before = random.get_state()
    try:
        module.eval()
        with torch.no_grad():
            call(*values)
        return not torch.equal(before, random.get_state())
    finally:
        random.set_state(before)
        for part in training:
            part.training = True


def _called(
    name: str,
    call: Callable[..., Any],
    values: list[Tensor],
    parents: Mapping[str, Shape],
    joined: bool,
) -> Any:
    try:
        return call(*values)
    except Exception as error:
        reads = ", ".join(
            f"{label} [rows, {', '.join(map(str, shape))}]" for label, shape in parents.items()
        )
        line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        form = "one tensor of all of them side by side" if joined else "one tensor per parent"
        fix = (
            " For one tensor of all of them: wrap(…, join=True)."
            if len(parents) > 1 and not joined
            else ""
        )
        raise ValueError(
            f"{name} failed on {ROWS} rows of its parents ({reads}; {form}, in this order): "
            f"{type(error).__name__}: {line}.{fix}"
        ) from error


def _tensors(name: str, result: Any) -> list[Tensor]:
    parts = [result] if isinstance(result, Tensor) else result
    if (
        not isinstance(parts, list | tuple)
        or not parts
        or not all(isinstance(part, Tensor) for part in parts)
    ):
        raise ValueError(
            f"{name} returns a {type(result).__name__}; it must return a tensor [rows, …], or a "
            f"tuple of tensors, one per raw parameter of the family."
        )
    for part in parts:
        if part.shape[:1] != (ROWS,) or not part.is_floating_point() or not part.numel():
            raise ValueError(
                f"{name} returns {str(part.dtype)[6:]} of shape {list(part.shape)} for {ROWS} "
                f"rows; it must return numbers of shape [{ROWS}, …], one line per row."
            )
    return list(parts)


def _check_parameters(name: str, found: list[Tensor], own: list[nn.Parameter]) -> None:
    """Refuse parameters that the module does not register: no one would train or save them."""
    known, seen = {id(parameter) for parameter in own}, set[Any]()
    waiting = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
    leaves = [tensor for tensor in found if tensor.requires_grad and tensor.is_leaf]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [other for other, _ in node.next_functions if other is not None]
    if any(id(leaf) not in known for leaf in leaves):
        raise ValueError(
            f"{name} uses parameters that it does not register, so the model would neither train "
            f"nor save them. Pass the module itself as net=, or make the parts attributes of one "
            f"module (nn.ModuleList, not a list)."
        )


def _check_tied(name: str, module: nn.Module | None) -> None:
    """Refuse one parameter under two names: a file of weights and a step would have it twice."""
    names: dict[int, str] = {}
    for key, parameter in [] if module is None else module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), key)
        if first != key:
            raise ValueError(
                f"{name} has one parameter under two names, {first} and {key}. Register it once, "
                f"and use it twice in forward()."
            )


def _check_rows(
    name: str, found: list[Tensor], again: list[Tensor], module: nn.Module | None
) -> None:
    alike = all(
        torch.allclose(a[0], b[0], rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(found, again, strict=True)
    )
    if alike:
        return
    normalised = next(
        (
            f"{type(part).__name__}{key and f' ({key})'}"
            for key, part in ([] if module is None else module.named_modules())
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        ),
        None,
    )
    if normalised is not None:
        raise ValueError(
            f"{name} has {normalised}, which mixes the rows of a batch: the bound of an example "
            f"would depend on the others, and on which classes are enumerated. Use nn.GroupNorm or "
            f"nn.LayerNorm; trained statistics may stay, if the module is given in evaluation mode "
            f"(module.eval())."
        )
    raise ValueError(
        f"{name} mixes rows: its output for the first row changes with the others. The rows are "
        f"examples, time steps, samples and enumerated values, so a network must compute each row "
        f"alone."
    )


def _check_buffers(name: str, module: nn.Module | None, before: Mapping[str, Tensor]) -> None:
    for key, buffer in [] if module is None else module.named_buffers():
        if key not in before or not torch.equal(buffer, before[key]):
            raise ValueError(
                f"{name} changes its buffer {key} when it is called in training, so an estimate "
                f"would depend on the calls before it. Leave that part out, or give the module in "
                f"evaluation mode (module.eval())."
            )
