"""Small models and runs that the tests of recorded and compiled steps share."""

import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Beta,
    Mixture,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHot,
    StudentT,
    alternate,
    fit,
    mlp,
)
from aevb.data.preparation import Affine
from aevb.training import gradient_steps as stepping


def data(n=60, d=16):
    return (torch.rand(n, d, generator=torch.Generator().manual_seed(0)) < 0.3).float()


def vae(dropout=0.0):
    return Model(
        {"z": Normal(2), "x | z": Bernoulli(16, net=mlp(8, dropout=dropout))},
        {"z | x": Normal(net=mlp(8, 8, dropout=dropout))},
    )


def gmvae():
    q = {"y | x": OneHot(net=mlp(8)), "z | x, y": Normal(net=mlp(8))}
    return Model({"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(16, net=mlp(8))}, q)


def vrnn():
    p = {
        "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(6, layers=2),
        "z[t] | h[t]": Normal(2),
        "x[t] | h[t], z[t]": Bernoulli(4, net=mlp(5)),
    }
    return Model(p, {"b[t] | b[t+1], x[t]": GRU(4), "z[t] | h[t], b[t]": Normal(net=mlp(5))})


def partly_frozen():
    p = {
        "h[t] | h[t-1], x[t-1], z[t-1]": GRU(3),
        "z[t] | h[t]": Normal(2),
        "x[t] | h[t], z[t]": Bernoulli(4),
    }
    model = Model(p, {"z[t] | h[t], x[t]": Normal()})
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    return model


def of(family):
    """Return a model of x with a family."""
    return lambda: Model(
        {"z": Normal(2), "x | z": family(16, net=mlp(8))}, {"z | x": Normal(net=mlp(8))}
    )


labels = np.where(np.arange(60) % 2, np.arange(60) % 3, -1)
CASES = {
    "vae": (vae, {}, {}),
    "dropout": (lambda: vae(0.3), {}, {"clip": 1.0}),
    "warm-up of the KL": (vae, {}, {"kl_warmup": 20}),
    "weights of the KL": (
        gmvae,
        {},
        {"beta": {"z": 4.0, "y": 0.0}, "kl_warmup": 5, "kl_cycles": 3},
    ),
    "weights of the KL, importance-weighted": (
        gmvae,
        {},
        {"beta": {"z": 0.5}, "bound": "iwae", "samples": 3, "gradient": "dreg"},
    ),
    "free bits": (gmvae, {"y": labels}, {"free_bits": {"z": 0.05, "y": 9.0}, "beta": 2.0}),
    "free bits, score": (gmvae, {}, {"free_bits": 0.3, "how": {"y": "score"}, "samples": 2}),
    "free bits, sequence": (vrnn, {}, {"free_bits": 0.5, "kl_warmup": 9}),
    "by turns": (vae, {}, {"schedule": alternate(5, 7)}),
    "importance-weighted": (vae, {}, {"bound": "iwae", "samples": 3, "gradient": "dreg"}),
    "mixture": (gmvae, {}, {}),
    "relaxed": (gmvae, {}, {"how": {"y": "gumbel"}}),
    "score": (gmvae, {}, {"how": {"y": "score"}, "samples": 2}),
    "partly labelled": (gmvae, {"y": labels}, {"classify": 2.0}),
    "distorted": (gmvae, {}, {"agree": 1.0, "distort": {"x": Affine((4, 4))}}),
    "bfloat16": (vae, {}, {"precision": "bf16"}),
    "sequence": (vrnn, {}, {}),
    "particles": (vrnn, {}, {"bound": "particles", "samples": 3, "kl_warmup": 9}),
    "particles, score": (
        vrnn,
        {},
        {"bound": "particles", "samples": 3, "gradient": "score"},
    ),
    "windows": (partly_frozen, {}, {"window": 2, "kl_warmup": 9}),
    "windows with padding": (partly_frozen, {}, {"window": 3}),
    "checkpoints in time": (vrnn, {}, {"checkpoint_time": 2}),
    "partly frozen, by turns": (partly_frozen, {}, {"schedule": alternate(5, 7)}),
    **{
        family.__name__: (of(family), {}, {})
        for family in (Beta, Mixture, MultivariateNormal, NegativeBinomial, StudentT)
    },
}


def trained(monkeypatch, build, more, settings, after):
    monkeypatch.setattr(stepping, "RECORD_AFTER", after)
    monkeypatch.setattr(stepping, "RECORD_FOR", 0)
    made = []
    real = stepping.compile_step
    monkeypatch.setattr(
        stepping, "compile_step", lambda *args, **kw: (made.append(1), real(*args, **kw))[1]
    )
    torch.manual_seed(1)
    model = build()
    x = (
        data().reshape(60, 4, 4)
        if build in (vrnn, partly_frozen)
        else data() * 0.8 + 0.1
        if build is CASES["Beta"][0]
        else data()
    )
    run = fit(model, {"x": x, **more}, steps=24, batch=20, seed=3, log_every=4, **settings)
    monkeypatch.undo()
    return model, run, len(made)


def with_counting(calls, pure):
    @dataclass(frozen=True, repr=False)
    class Counting(Normal):
        def distribution(self, loc, scale=None):
            calls.append(1)
            return super().distribution(loc, scale)

    Counting.pure = pure
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": Bernoulli(16)}, {"z | x": Counting()})


def compiles(test):
    """Mark a test in which torch compiles; torch then uses deprecated functions itself."""
    missing = shutil.which(os.environ.get("CXX", "g++")) is None
    quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")(test)
    return pytest.mark.skipif(missing, reason="torch compiles for a CPU with a C++ compiler")(quiet)


def as_written(function, arguments):
    """Return the function itself, in place of :func:`aevb.compiled_step.fusing.compiled`."""
    return lambda given: function(*given)
