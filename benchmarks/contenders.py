"""The contenders: for each model, the ways of writing its training step, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import in_jax
import in_pyro
import in_pythae
import tutorial
from lean import BUILDERS as LEAN
from lean import compiled as lean_compiled
from lean import lean
from library import aevb
from problems import Contender, Problem
from products import floor

BASE, OURS, FLOOR = "the tutorial's way", "aevb", "matrix products alone"


@dataclass(frozen=True)
class Entry:
    """A way of writing the step of some models.

    ``needs`` is a module of the extra ``bench``. ``slow`` means a long time before the first step.
    """

    build: Callable[[Problem], Contender]
    models: tuple[str, ...]
    needs: str | None = None
    device: str | None = None
    slow: bool = False

    def why_not(self, problem: Problem, *, quick: bool) -> str | None:
        """Return the reason why the contender does not run here, or None."""
        if self.needs is not None and find_spec(self.needs) is None:
            return f"{self.needs} is not installed (pip install 'aevb[bench]')"
        if self.slow and quick:
            return "compiling takes longer than a quick run"
        return None


ALL = ("vae", "vae-tutorial", "gmvae", "vrnn")
BERNOULLI = ("vae", "gmvae", "vrnn")
ENTRIES = {
    BASE: Entry(lambda problem: tutorial.BUILDERS[problem.model](problem), ALL),
    "Pyro": Entry(
        lambda problem: in_pyro.BUILDERS[problem.model](problem),
        tuple(in_pyro.BUILDERS),
        needs="pyro",
    ),
    "pythae": Entry(in_pythae.vae, ("vae",), needs="pythae"),
    "NumPyro, jit": Entry(in_jax.numpyro_vae, ("vae",), needs="numpyro"),
    "JAX by hand, jit": Entry(in_jax.by_hand, tuple(in_jax.BOUNDS), needs="jax"),
    "lean, by hand": Entry(lean, tuple(LEAN)),
    "lean, as a CUDA graph": Entry(partial(lean, captured=True), tuple(LEAN), device="cuda"),
    "lean, torch.compile": Entry(lean_compiled, tuple(LEAN), slow=True),
    "aevb, eager": Entry(partial(aevb, recorded=False), ALL),
    OURS: Entry(aevb, ALL),
    "aevb, bfloat16": Entry(partial(aevb, precision="bf16"), ALL),
    "aevb, compiled": Entry(partial(aevb, compile=True), ALL, slow=True),
    "aevb, compiled, bfloat16": Entry(
        partial(aevb, compile=True, precision="bf16"), ALL, slow=True
    ),
    FLOOR: Entry(floor, ALL),
}


def contenders(model: str, device: str, names: list[str] | None = None) -> dict[str, Entry]:
    """Return all contenders of a model on a kind of device, or some of them by name."""
    return {
        name: entry
        for name, entry in ENTRIES.items()
        if model in entry.models
        and entry.device in (None, device)
        and (names is None or name in names)
    }


def build(
    problem: Problem, names: list[str] | None = None, *, quick: bool = False
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Build the contenders of a problem; return them, and the reasons why others are missing."""
    found: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for name, entry in contenders(problem.model, problem.device, names).items():
        reason = entry.why_not(problem, quick=quick)
        if reason is None:
            try:
                found[name] = entry.build(problem)
                found[name].step()  # the first step allocates and compiles
            except Exception as error:  # an error of one library must not stop the others
                found.pop(name, None)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            left_out[name] = reason
    return found, left_out
