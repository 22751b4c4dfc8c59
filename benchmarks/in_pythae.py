"""The same VAE in pythae: its model and loss, and the step of its trainer.

The batch is in memory, as for all contenders, and the loader of pythae is left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from problems import Batches, Contender, Problem
from torch import Tensor


def vae(problem: Problem) -> Contender:
    from pythae.data.datasets import DatasetOutput
    from pythae.models import VAE, VAEConfig
    from pythae.models.base.base_utils import ModelOutput
    from pythae.models.nn import BaseDecoder, BaseEncoder

    class Encoder(BaseEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.body = problem.network("encoder")

        def forward(self, x: Tensor) -> ModelOutput:
            mean, raw = self.body(x).chunk(2, -1)
            # σ is a softplus, as in all contenders.
            return ModelOutput(embedding=mean, log_covariance=2 * F.softplus(raw).log())

    class Decoder(BaseDecoder):
        def __init__(self) -> None:
            super().__init__()
            self.body = problem.network("decoder")

        def forward(self, z: Tensor) -> ModelOutput:
            return ModelOutput(reconstruction=torch.sigmoid(self.body(z)))

    config = VAEConfig(
        input_dim=(problem.sizes.x,), latent_dim=problem.sizes.z, reconstruction_loss="bce"
    )
    model = VAE(config, encoder=Encoder(), decoder=Decoder()).to(problem.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.lr)
    data = problem.rows()
    batches = Batches(data)
    model.train()

    def step() -> float:
        output = model(
            DatasetOutput(data=batches()), epoch=1, dataset_size=len(data), uses_ddp=False
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        loss = output.loss.item()
        if math.isnan(loss):
            raise ArithmeticError("NaN detected in train loss")
        return loss

    return Contender(step)
