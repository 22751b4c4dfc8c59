"""The models of the tutorial (sections 5.2 to 5.6), with its sizes as defaults."""

from __future__ import annotations

from aevb.declare.conditionals import Conditional
from aevb.declare.deterministic import GRU, LSTM
from aevb.declare.families import MultivariateNormal, Normal, OneHot
from aevb.declare.networks import Shape, linear, mlp
from aevb.model import Model
from aevb.zoo.arguments import Likelihood, choose, family_of, networks_of, reading


def fa(
    x: int = 3, z: int = 2, *, posterior: str = "full", scale: float = 0.5, seed: int | None = None
) -> Model:
    """Factor analysis (5.2): x = W z + noise.

    Arguments:
        x: Number of columns of the data.
        z: Number of factors.
        posterior: The covariance of q(z | x): "full", "diagonal", or "fixed" to one scale.
        scale: The standard deviation of the "fixed" posterior.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, x]. Its evidence and posterior are exact.

    >>> import torch
    >>> model = fa(x=4, z=2)
    >>> model.log_evidence(x=torch.zeros(5, 4)).method
    'exact'
    """
    # From random weights, far from the posterior, an E-step would take thousands of steps.
    start = linear(bias=False, init="zeros")
    families: dict[str, Conditional] = {
        "full": MultivariateNormal(net=start, covariance="shared"),
        "diagonal": Normal(net=start, scale="learned"),
        "fixed": Normal(net=start, scale=scale),
    }
    return Model(
        p={
            "z": Normal(z),
            "x | z": Normal(x, net=linear(bias=False, init="normal"), scale="learned"),
        },
        q={"z | x": choose("posterior", posterior, families)},
        seed=seed,
    )


def vae(
    x: int | Shape = 784,
    z: int = 20,
    *,
    hidden: tuple[int, ...] = (500, 500),
    dropout: float = 0.1,
    net: str = "mlp",
    channels: tuple[int, ...] = (32, 64),
    likelihood: Likelihood = "ContinuousBernoulli",
    seed: int | None = None,
) -> Model:
    """Variational auto-encoder (5.3), by default with the continuous Bernoulli likelihood.

    That likelihood is for data in [0, 1].

    Arguments:
        x: Number of entries of a row, for instance of pixels; or the shape of an image.
        z: Number of entries of the code.
        hidden: Sizes of the hidden layers of encoder and decoder.
        dropout: Share of the hidden units that a training step leaves out.
        net: "mlp", or "conv" for convolutions on images; x is then (channels, height, width).
        channels: The channels of the convolutions; the dense layer has ``hidden[0]`` units.
        likelihood: The family of x, as a name or a conditional such as ``Normal(scale=0.1)``.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, x].

    >>> model = vae(x=64, z=2, hidden=(32,), likelihood="Bernoulli")
    >>> model.sample(3, seed=0)["x"].shape
    torch.Size([3, 64])
    """
    encoder, decoder = networks_of(net, x, mlp(*hidden, dropout=dropout), channels)
    family = family_of(likelihood, x, decoder)
    return Model(
        p={"z": Normal(z), "x | z": family},
        q={"z | x": Normal(net=reading(family, encoder))},
        seed=seed,
    )


def cvae(
    x: int | Shape = 784,
    z: int = 20,
    y: int = 10,
    *,
    variant: str = "both",
    hidden: tuple[int, ...] = (500, 500),
    dropout: float = 0.1,
    net: str = "mlp",
    channels: tuple[int, ...] = (32, 64),
    likelihood: Likelihood = "ContinuousBernoulli",
    seed: int | None = None,
) -> Model:
    """Conditional VAE (5.4): images given a label.

    Arguments:
        x: Number of entries of a row.
        z: Number of entries of the code.
        y: Number of labels.
        variant: The label conditions "both" prior and likelihood, the "prior" only, or the
            "likelihood" only.
        hidden: Sizes of the hidden layers of encoder and decoder.
        dropout: Share of the hidden units that a training step leaves out.
        net: "mlp", or "conv" for convolutions on images; x is then (channels, height, width).
        channels: The channels of the convolutions; the dense layer has ``hidden[0]`` units.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, x] and given labels y [N].

    >>> model = cvae(x=64, z=2, y=10, hidden=(32,), likelihood="Bernoulli")
    >>> model.sample(3, y=7, seed=0)["x"].shape
    torch.Size([3, 64])
    """
    encoder, decoder = networks_of(net, x, mlp(*hidden, dropout=dropout), channels)
    family = family_of(likelihood, x, decoder)
    variants: dict[str, dict[str, Conditional]] = {
        "both": {"z | y": Normal(z), "x | y, z": family},
        "prior": {"z | y": Normal(z), "x | z": family},
        "likelihood": {"z": Normal(z), "x | y, z": family},
    }
    return Model(
        p=choose("variant", variant, variants),
        q={"z | x, y": Normal(net=reading(family, encoder))},
        given={"y": y},
        seed=seed,
    )


def gmvae(
    x: int | Shape = 784,
    z: int = 64,
    y: int = 10,
    *,
    hidden: tuple[int, ...] = (512, 512),
    net: str = "mlp",
    channels: tuple[int, ...] = (32, 64),
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Gaussian mixture VAE (5.5): a cluster y, and a code z drawn around the centre of the cluster.

    By default for binary data.

    Arguments:
        x: Number of entries of a row.
        z: Number of entries of the code.
        y: Number of clusters.
        hidden: Sizes of the hidden layers of the networks.
        net: "mlp", or "conv" for convolutions on images; x is then (channels, height, width).
        channels: The channels of the convolutions; the dense layer has ``hidden[0]`` units.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, x]; data y [N] are known clusters, −1 where unknown.

    >>> import torch
    >>> model = gmvae(x=16, z=2, y=3, hidden=(8,))
    >>> model.posterior(x=torch.zeros(5, 16))["y"].probs.shape
    torch.Size([5, 3])
    """
    encoder, decoder = networks_of(net, x, mlp(*hidden, init="glorot_normal"), channels)
    family = family_of(likelihood, x, decoder)
    encoder = reading(family, encoder)
    return Model(
        p={"y": OneHot(y), "z | y": Normal(z, net=linear(init="glorot_normal")), "x | z": family},
        q={"y | x": OneHot(net=encoder), "z | x, y": Normal(net=encoder)},
        seed=seed,
    )


def m2(
    x: int | Shape = 784,
    z: int = 64,
    y: int = 10,
    *,
    hidden: tuple[int, ...] = (512, 512),
    net: str = "mlp",
    channels: tuple[int, ...] = (32, 64),
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Mixture model M2 (5.5.1): class y and style z are independent; the decoder reads both.

    Arguments:
        x: Number of entries of a row.
        z: Number of entries of the style.
        y: Number of classes.
        hidden: Sizes of the hidden layers of the networks.
        net: "mlp", or "conv" for convolutions on images; x is then (channels, height, width).
        channels: The channels of the convolutions; the dense layer has ``hidden[0]`` units.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, x]; data y [N] are known classes, −1 where unknown.

    >>> import torch
    >>> model = m2(x=16, z=2, y=3, hidden=(8,))
    >>> model.elbo(x=torch.zeros(4, 16), y=torch.tensor([0, 2, -1, -1])).value.shape
    torch.Size([4])
    """
    encoder, decoder = networks_of(net, x, mlp(*hidden, init="glorot_normal"), channels)
    family = family_of(likelihood, x, decoder)
    encoder = reading(family, encoder)
    return Model(
        p={"y": OneHot(y), "z": Normal(z), "x | y, z": family},
        q={"y | x": OneHot(net=encoder), "z | x, y": Normal(net=encoder)},
        seed=seed,
    )


def vrnn(
    x: int = 28,
    z: int = 2,
    h: int = 256,
    *,
    posterior: str = "filtering",
    hidden: tuple[int, ...] = (500, 500),
    layers: int = 2,
    likelihood: Likelihood = "Bernoulli",
    seed: int | None = None,
) -> Model:
    """Variational RNN (5.6) for sequences, by default binary.

    Arguments:
        x: Number of entries of a step.
        z: Number of entries of a step's latent.
        h: Size of the recurrent state.
        posterior: q reads x up to step t ("filtering") or all of x ("smoothing").
        hidden: Sizes of the hidden layers of the networks.
        layers: Layers of the LSTM.
        likelihood: The family of x, as a name or a conditional.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x].

    >>> model = vrnn(x=4, z=2, h=8, hidden=(8,), layers=1, posterior="smoothing")
    >>> model.sample(3, steps=5, seed=0)["x"].shape
    torch.Size([3, 5, 4])
    """
    net = mlp(*hidden)
    family = family_of(likelihood, x, net)
    posteriors: dict[str, dict[str, Conditional]] = {
        "filtering": {"z[t] | h[t], x[t]": Normal(net=reading(family, net))},
        "smoothing": {"b[t] | b[t+1], x[t]": GRU(h), "z[t] | h[t], b[t]": Normal(net=net)},
    }
    return Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(h, layers=layers),
            "z[t] | h[t]": Normal(z, net=net),
            "x[t] | h[t], z[t]": family,
        },
        q=choose("posterior", posterior, posteriors),
        seed=seed,
    )
