"""A small model with its rows, and comparisons of weights, that the tests of training share."""

import numpy as np
import torch

from aevb import Bernoulli, Model, Normal, mlp


def small_vae() -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(2), "x | z": Bernoulli(6, net=mlp(8, dropout=0.2))},
        q={"z | x": Normal(net=mlp(8))},
    )


def bits(n: int = 90, d: int = 6) -> np.ndarray:
    return (np.random.default_rng(0).random((n, d)) > 0.5).astype(np.float32)


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def across(model: Model) -> Model:
    """Return the model with the same weights, each matrix in column-major layout."""
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data
        )
    return model
