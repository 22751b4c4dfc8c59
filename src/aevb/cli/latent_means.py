"""Posterior means of the latents of a run's rows, for the commands that print or write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aevb.cli.data_argument import ROWS, batches
from aevb.estimate.keys import real_steps

if TYPE_CHECKING:
    import numpy as np

    from aevb.model import Model


def posterior_means(
    model: Model, data: Mapping[str, Any], seed: int
) -> tuple[dict[str, np.ndarray], str]:
    """Return the posterior mean of every latent, and which posterior gave it: "exact" or "q".

    Means are [N, size] or [N, T, size], with NaN beyond the end of a sequence.
    """
    import numpy as np
    import torch

    from aevb.estimate.places import places_of
    from aevb.posterior import posterior_of, why_not_q

    found: dict[str, list[np.ndarray]] = {name: [] for name in model.graph.latents}
    parts_of_rows = batches(model, data)
    # If q cannot answer for some rows, use the exact posterior for all, so that codes are
    # comparable.
    exact = any(why_not_q(model, model.teaching, batch) is not None for batch in parts_of_rows)
    method = "q"
    for i, batch in enumerate(parts_of_rows):
        posterior = posterior_of(
            model,
            model.teaching,
            batch,
            seed=seed + i,
            prefer_exact=exact,
            first_row=i * ROWS,
            places=places_of(data),
        )
        method = posterior.method
        for name, parts in found.items():
            with torch.no_grad():
                mean = posterior[name].mean
            real = real_steps(batch, timed=model.graph.timed[name])
            if real is not None:
                mean = torch.where(real.transpose(0, 1), mean, torch.nan)
            parts.append(mean.cpu().numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}, method
