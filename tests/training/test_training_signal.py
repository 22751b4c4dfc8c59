"""The reconstruction teaches q: a VRNN on rows of digits uses its latent, unless samples are
detached.

On MNIST where ``AEVB_DATA`` names a folder that holds it, else on scikit-learn's digits.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from aevb.zoo import vrnn


def binary_rows() -> tuple[torch.Tensor, float]:
    """Images as sequences of rows, and the KL (nats) that a latent in use should pass after 300
    steps.
    """
    path = Path(os.environ.get("AEVB_DATA", "")) / "mnist" / "t10k-images-idx3-ubyte.gz"
    if path.is_file():
        pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16).reshape(
            -1, 28, 28
        )
        return torch.as_tensor((pixels >= 128).astype(np.float32)), 5.0
    return torch.as_tensor((load_digits().images >= 8).astype(np.float32)), 0.3


def train(rows: torch.Tensor, how: dict[str, str]) -> float:
    torch.manual_seed(0)
    model = vrnn(x=rows.shape[-1], h=64, hidden=(64,), layers=1)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        bound = model.elbo(x=rows[torch.randint(len(rows), (50,))], how=how)
        optimiser.zero_grad()
        (-bound.value.mean()).backward()
        optimiser.step()
    return bound.terms["kl(z)"].mean().item()


@pytest.mark.slow
def test_the_latent_is_used_unless_its_samples_are_detached():
    rows, enough = binary_rows()
    assert train(rows, {}) > enough
    assert train(rows, {"z": "detached"}) < 0.01
