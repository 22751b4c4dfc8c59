"""Sequence models whose evidence is not exact: trained by the bound, with smoothing posteriors.

q reads the data from each step to the end through a recurrence that runs backwards.
"""

from __future__ import annotations

from aevb.declare.deterministic import GRU, Deterministic
from aevb.declare.families import MultivariateNormal, Normal
from aevb.declare.networks import linear, mlp
from aevb.model import Model
from aevb.zoo.arguments import Likelihood, family_of, reading


def volatility(
    x: int = 1,
    *,
    h: int = 32,
    hidden: tuple[int, ...] = (32,),
    likelihood: Likelihood = "Normal",
    seed: int | None = None,
) -> Model:
    """Stochastic volatility: the scale of x follows a latent autoregression v.

    The scale is softplus(v + c), about exp(v + c) for small scales. The mean of x is constant.

    Arguments:
        x: Number of series.
        h: Size of the recurrent state by which q reads the data.
        hidden: Sizes of the hidden layers of q.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x].

    >>> volatility(x=2, h=4, hidden=(4,), likelihood="StudentT").graph.latents
    ('v',)
    """
    eye = [[float(i == j) for j in range(x)] for i in range(x)]
    only_scale = linear(fixed={"v[t]": [[0.0] * x for _ in range(x)] + eye})
    return Model(
        p={
            "v[t] | v[t-1]": Normal(x, net=linear(bias=False), scale="learned"),
            "x[t] | v[t]": family_of(likelihood, x, only_scale),
        },
        q={
            "b[t] | b[t+1], x[t]": GRU(h),
            "v[t] | v[t-1], b[t]": Normal(net=mlp(*hidden)),
        },
        seed=seed,
    )


def dmm(
    x: int = 88,
    z: int = 16,
    *,
    h: int = 64,
    hidden: tuple[int, ...] = (64,),
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Deep Markov model: a Markov chain of latents with neural transition and emission.

    Arguments:
        x: Number of entries of a step.
        z: Number of entries of a step's latent.
        h: Size of the recurrent state by which q reads the data.
        hidden: Sizes of the hidden layers of the networks.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x].

    >>> model = dmm(x=4, z=2, h=8, hidden=(8,))
    >>> model.sample(3, steps=5, seed=0)["z"].shape
    torch.Size([3, 5, 2])
    """
    net = mlp(*hidden)
    return Model(
        p={"z[t] | z[t-1]": Normal(z, net=net), "x[t] | z[t]": family_of(likelihood, x, net)},
        q={"b[t] | b[t+1], x[t]": GRU(h), "z[t] | z[t-1], b[t]": Normal(net=net)},
        seed=seed,
    )


def srnn(
    x: int = 88,
    z: int = 16,
    h: int = 64,
    *,
    hidden: tuple[int, ...] = (64,),
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Stochastic RNN: a recurrence of the data and a Markov chain of latents, with smoothing q.

    Arguments:
        x: Number of entries of a step.
        z: Number of entries of a step's latent.
        h: Size of both recurrent states, of p and of q.
        hidden: Sizes of the hidden layers of the networks.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x].

    >>> model = srnn(x=4, z=2, h=8, hidden=(8,))
    >>> model.sample(3, steps=5, seed=0)["x"].shape
    torch.Size([3, 5, 4])
    """
    net = mlp(*hidden)
    return Model(
        p={
            "h[t] | h[t-1], x[t-1]": GRU(h),
            "z[t] | z[t-1], h[t]": Normal(z, net=net),
            "x[t] | h[t], z[t]": family_of(likelihood, x, net),
        },
        q={
            "b[t] | b[t+1], h[t], x[t]": GRU(h),
            "z[t] | z[t-1], b[t]": Normal(net=net),
        },
        seed=seed,
    )


def kvae(
    x: int = 256,
    a: int = 2,
    z: int = 4,
    *,
    hidden: tuple[int, ...] = (64,),
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Kalman VAE: a code a of each frame x follows a linear-Gaussian state space model z.

    q draws the codes from the frames, and the states by a linear smoother of the codes.

    Arguments:
        x: Number of entries of a frame.
        a: Number of entries of a frame's code.
        z: Number of entries of the state.
        hidden: Sizes of the hidden layers of encoder and decoder.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x].

    >>> model = kvae(x=16, a=1, z=2, hidden=(8,))
    >>> model.graph.latents
    ('a', 'z')
    """
    net = mlp(*hidden)
    family = family_of(likelihood, x, net)
    return Model(
        p={
            "z[0]": Normal(z),
            "z[t] | z[t-1]": Normal(z, net=linear(bias=False), scale="learned"),
            "a[t] | z[t]": Normal(a, net=linear(bias=False), scale="learned"),
            "x[t] | a[t]": family,
        },
        q={
            "a[t] | x[t]": Normal(net=reading(family, net)),
            "b[t] | b[t+1], a[t]": Deterministic(2 * z, net=linear(bias=False)),
            "z[t] | z[t-1], b[t]": MultivariateNormal(net=linear(), covariance="shared"),
        },
        seed=seed,
    )
