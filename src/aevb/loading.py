"""Load a saved model. Its declaration and its weights are both untrusted input."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from aevb.declare.registry import OWN
from aevb.declare.serialization import MOST_FACTORS, deserialize
from aevb.model import TEACHING, Model
from aevb.model_folder import checked_files
from aevb.runtime.checked_files import IntegrityWarning, read_json, tensor_shapes

# Limits on a declaration from a file, so that a hostile one cannot exhaust memory or time.
MOST_FIXED = 2**24  # numbers that are not among the weights (buffers, temporary tensors)
MOST_UNWEIGHTED = 1000  # parents, or given variables, without weights
MOST_MADE = 20  # tensors created while building, per tensor of weights and per factor


def from_declaration(
    declaration: Mapping[str, Any],
    custom: Iterable[type] = (),
    *,
    modules: Mapping[str, Any] | None = None,
) -> Model:
    """Build a new model from :meth:`aevb.Model.declaration`.

    Arguments:
        declaration: The declaration.
        custom: Your own classes of conditionals and networks that are not registered.
        modules: Your own torch modules and functions, by factor, as for :func:`load`.

    Returns:
        The model, with new weights.

    >>> from aevb import Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> again = from_declaration(json.loads(json.dumps(model.declaration())))
    >>> str(again) == str(model)
    True
    """
    return Model(**deserialize(declaration, custom, modules))


def load(
    path: str | Path,
    custom: Iterable[type] = (),
    *,
    modules: Mapping[str, Any] | None = None,
) -> Model:
    """Load a model that :meth:`aevb.Model.save` wrote, and check its files against their hashes.

    Loading unpickles nothing and imports nothing.

    Arguments:
        path: The folder.
        custom: Your own classes of conditionals and networks that are not registered.
        modules: Your own torch modules and functions, by factor: ``modules={"q(z|x)": Encoder()}``;
            the weights come from the file. A warning says if a network has another name than the
            saved one.

    Returns:
        The model, with the saved weights, in evaluation mode (no dropout). ``fit`` trains it
        further as usual; a loop of your own calls ``model.train()`` first.

    Raises:
        ValueError: The folder holds no model or a damaged one.

    >>> import tempfile
    >>> from aevb import Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(folder)
    ...     again = load(folder)
    >>> again.declaration() == model.declaration()
    True
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    folder = Path(path)
    places = checked_files(folder)
    model = read_model(places["model.json"], places["weights.safetensors"], custom, modules)
    try:
        weights = load_file(places["weights.safetensors"])
        with safe_open(places["weights.safetensors"], "pt") as file:
            teaching = json.loads((file.metadata() or {}).get(TEACHING, "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{places['weights.safetensors']} is damaged or not a safetensors file: {error}."
        ) from None
    floating = [tensor.dtype for tensor in weights.values() if tensor.is_floating_point()]
    model = model.to(floating[0]) if floating else model
    model.load_state_dict(weights)
    model.teaching.restore(model, teaching if isinstance(teaching, Mapping) else None)
    return model.eval()


def read_model(
    path: Path,
    weights: Path,
    custom: Iterable[type] = (),
    modules: Mapping[str, Any] | None = None,
) -> Model:
    """Build a new model from its declaration file.

    Compare its sizes with the header of the weights file before allocating memory.
    """
    where = path.parent
    try:
        declaration = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    try:
        found = tensor_shapes(weights)
    except ValueError as error:
        raise ValueError(f"{weights} is damaged or not a safetensors file: {error}.") from None
    custom = tuple(custom)
    try:
        factors = _check_counts(declaration, len(found))
        with _Budget(
            MOST_FIXED + 2 * sum(map(math.prod, found.values())), MOST_MADE * (len(found) + factors)
        ):
            model = from_declaration(declaration, custom, modules=modules)
    except ValueError:
        raise
    except (
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise ValueError(
            f"{path} declares a model that cannot be built ({type(error).__name__}: "
            f"{str(error).splitlines()[0]})."
        ) from error
    _check_shapes(
        where, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, found
    )
    _warn_of_other_networks(model, declaration)
    return model


def _warn_of_other_networks(model: Model, saved: Mapping[str, Any]) -> None:
    """Warn of networks of the user whose names are not those in the file: they compute otherwise.

    A class and an object of it have one name.
    """
    declared = model.declaration()
    for side in "pq":
        for key, record in saved[side].items():
            there, here = _own_network(record), _own_network(declared[side].get(key))
            if there != here:
                factor = f"{side}({key.replace(' | ', '|')})"
                warnings.warn(
                    IntegrityWarning(
                        f"{factor} was saved with the network {there}, but is loaded with {here}. "
                        f"Unless this is the same code under a new name, the model computes "
                        f"something else with the saved weights. Pass {there}: "
                        f'load(path, modules={{"{factor}": …}}).'
                    ),
                    stacklevel=4,
                )


def _own_network(record: Any) -> str | None:
    """The name of the user's module or function in the record of a factor, if it has one."""
    net = record.get("net") if isinstance(record, Mapping) else None
    own = net.get("net") if isinstance(net, Mapping) else None
    return str(own[OWN]).removesuffix("(…)") if isinstance(own, Mapping) and OWN in own else None


class _Budget(TorchFunctionMode):
    """Raise ValueError if building a declaration would need more than its weights justify.

    The limits are on the number of tensors and on the number of their entries. The error comes
    before the tensor is created.
    """

    MAKERS = frozenset(
        {
            "empty",
            "zeros",
            "ones",
            "full",
            "eye",
            "rand",
            "randn",
            "new_empty",
            "new_zeros",
            "new_ones",
            "new_full",
        }
        | {"arange", "linspace", "tril_indices", "repeat_interleave"}
    )

    def __init__(self, numbers: int, tensors: int) -> None:
        super().__init__()
        self.left, self.tensors = numbers, tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.MAKERS:
            self.left -= self._numbers(func.__name__, args)
            self.tensors -= 1
            if self.left < 0 or self.tensors < 0:
                raise ValueError(
                    "the sizes in the declaration are larger than the weights in the file"
                )
        return func(*args, **kwargs or {})

    @staticmethod
    def _numbers(maker: str, args: Any) -> int:
        """Return how many numbers a call will create."""
        sizes = [size for size in args if not isinstance(size, Tensor)]
        shape = (
            sizes[0]
            if sizes and isinstance(sizes[0], tuple | list)
            else [size for size in sizes if type(size) is int]
        )
        if maker in ("arange", "linspace"):
            return max(map(abs, shape), default=0)
        if maker == "repeat_interleave":
            return math.prod(shape) * (args[0].numel() if isinstance(args[0], Tensor) else 1)
        return math.prod(shape) ** (2 if maker == "eye" and len(shape) == 1 else 1)


def _check_counts(declaration: Any, tensors: int) -> int:
    """Raise ValueError for more layers or parents than tensors, and for very long lists.

    Each layer and each parent needs some of the file's tensors. Return the number of factors.
    """
    parts = declaration if isinstance(declaration, Mapping) else {}
    sides = [side for side in (parts.get("p"), parts.get("q")) if isinstance(side, Mapping)]
    given = parts.get("given")
    records: list[Any] = [record for side in sides for record in side.values()]
    layers = max(
        (
            record["layers"]
            for record in records
            if isinstance(record, Mapping) and isinstance(record.get("layers"), int)
        ),
        default=0,
    )
    if layers > tensors:
        raise ValueError(
            f"The declaration has a recurrence of {layers} layers, but there are only {tensors} "
            f"tensors of weights."
        )
    if (longest := _longest(records)) > MOST_FACTORS:
        raise ValueError(
            f"The declaration has a list of {longest} entries; at most {MOST_FACTORS} are read."
        )
    if (
        parents := sum(key.count(",") for side in sides for key in side)
    ) > 2 * tensors + MOST_UNWEIGHTED:
        raise ValueError(
            f"The declaration has {parents} parents, but there are only {tensors} tensors of "
            f"weights."
        )
    if isinstance(given, Mapping) and len(given) > tensors + MOST_UNWEIGHTED:
        raise ValueError(
            f"The declaration has {len(given)} given variables, but there are only {tensors} "
            f"tensors of weights."
        )
    return len(records)


def _longest(values: Iterable[Any]) -> int:
    """The length of the longest list inside JSON data."""
    found, level = 0, list(values)
    while level:
        found = max([found, *(len(value) for value in level if isinstance(value, list))])
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return found


def _check_shapes(
    where: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(expected.keys() ^ found.keys()):
        raise ValueError(
            f"{where}: the weights and the declaration disagree: {name} is in only one of them."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{where}: {name} has shape {list(found[name])}, the declaration says "
                f"{list(shape)}."
            )
