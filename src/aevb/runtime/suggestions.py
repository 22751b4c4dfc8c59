"""Suggest the name that the user probably meant, for error messages about unknown names.

Every message of this kind says where the name stands, which names there are, and ends with
:func:`did_you_mean`, so that all of them find the same mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

SHOWN = 12  # names that a message lists


def nearest(
    name: object, choices: Iterable[object], *, aliases: Mapping[str, str] | None = None
) -> str | None:
    """Return the choice that a mistyped name most probably means; None if none is similar.

    ``aliases`` are names that other libraries use, and the choices that they mean. The case of the
    letters, and ``-`` instead of ``_``, do not matter.

    >>> nearest("Batch-size", ["batch", "beta"])
    'batch'
    >>> nearest("learning_rate", ["lr", "warmup"], aliases={"learning_rate": "lr"})
    'lr'
    >>> nearest("q", ["x", "label"]) is None
    True
    """
    by_form = {_form(choice): str(choice) for choice in choices}
    form = _form(name)
    also = {_form(alias): choice for alias, choice in (aliases or {}).items()}
    if form in by_form:
        return by_form[form]
    if form in also and _form(also[form]) in by_form:
        return also[form]
    begun = [known for known in by_form if len(form) > 2 and known.startswith(form)]
    close = begun if len(begun) == 1 else get_close_matches(form, [*by_form, *also], 1)
    if not close:
        return None
    return by_form[close[0]] if close[0] in by_form else also[close[0]]


def did_you_mean(
    name: object, choices: Iterable[object], *, aliases: Mapping[str, str] | None = None
) -> str:
    """Return " Did you mean 'z'?" for a mistyped name; empty if no choice is similar.

    >>> "There is no latent 'zz'." + did_you_mean("zz", ["y", "z"])
    "There is no latent 'zz'. Did you mean 'z'?"
    """
    found = nearest(name, choices, aliases=aliases)
    return "" if found is None else f" Did you mean {found!r}?"


def listed(names: Iterable[object], most: int = SHOWN) -> str:
    """Return names between commas, at most ``most`` of them.

    >>> listed("abc", most=2)
    'a, b, … (3 in all)'
    """
    known = [str(name) for name in names]
    shown = ", ".join(known[:most]) or "none"
    return shown + (f", … ({len(known)} in all)" if len(known) > most else "")


def _form(name: object) -> str:
    return str(name).lower().replace("-", "_")
