"""Models whose rule switches with a hidden class: exact evidence by the forward algorithm."""

from __future__ import annotations

from aevb.declare import switching as by_class
from aevb.declare.conditionals import Conditional
from aevb.declare.deterministic import GRU
from aevb.declare.families import Normal, OneHot
from aevb.model import Model
from aevb.zoo.arguments import Likelihood, family_of, trained_by


@trained_by("em")
def hmm(
    x: int = 1,
    y: int = 2,
    *,
    h: int = 16,
    likelihood: Likelihood = "Normal",
    seed: int | None = None,
) -> Model:
    """Hidden Markov model: a chain of classes y, and data around the centre of each class.

    Arguments:
        x: Number of entries of a step.
        y: Number of classes.
        h: Size of the recurrent state by which q reads the data.
        likelihood: The family of x, as a name or a conditional. With "MultivariateNormal", each
            class has a full covariance.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x]. ``fit`` trains it with ``em()``; its evidence and the
        posterior of the classes are exact.

    >>> import torch
    >>> hmm(y=3).smooth(x=torch.zeros(1, 20, 1), method="exact").probs["y"].shape
    torch.Size([1, 20, 3])
    """
    return Model(
        p={**_chain(y), "x[t] | y[t]": family_of(likelihood, x)},
        q=_reader(h, "x[t]"),
        seed=seed,
    )


@trained_by("mle")
def switching(
    x: int = 1,
    u: int = 1,
    y: int = 2,
    *,
    autoregressive: bool = False,
    h: int = 16,
    seed: int | None = None,
) -> Model:
    """Switching regression: coefficients and noise of x on a given u switch with a hidden chain y.

    Arguments:
        x: Number of entries of a step.
        u: Number of given columns that x is regressed on.
        y: Number of classes.
        autoregressive: Whether x reads its last value too; with ``u=0``, only that (an
            autoregressive HMM).
        h: Size of the recurrent state by which q reads the data.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x] and given u [N, T, u]. ``fit`` trains it with ``mle()``.

    >>> import torch
    >>> model = switching(u=2, y=3)
    >>> model.log_evidence(x=torch.zeros(1, 20, 1), u=torch.zeros(1, 20, 2)).method
    'exact'
    """
    reads = [*(["u[t]"] if u else []), *(["x[t-1]"] if autoregressive else [])]
    if not reads:
        raise ValueError(
            "switching: with u=0 and without autoregressive=True, x has nothing to regress on. Use "
            "hmm."
        )
    regression = Normal(x, net=by_class.switching("y[t]"))
    return Model(
        p={**_chain(y), f"x[t] | y[t], {', '.join(reads)}": regression},
        q=_reader(h, ", ".join(["x[t]", *reads])),
        given={"u": u} if u else None,
        seed=seed,
    )


def _chain(y: int) -> dict[str, Conditional]:
    return {"y[0]": OneHot(y, learned=True), "y[t] | y[t-1]": OneHot(y)}


def _reader(h: int, data: str) -> dict[str, Conditional]:
    """Return q: the class given the last one and a summary of the data from now on."""
    return {f"b[t] | b[t+1], {data}": GRU(h), "y[t] | y[t-1], b[t]": OneHot()}
