"""Small tables of every kind of column, for the tests of ``aevb.tables``."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd


def mixed(n: int = 240, *, seed: int = 0, missing: float = 0.1) -> pd.DataFrame:
    """Three clusters seen through columns of all kinds, with missing cells in each of them."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    table = pd.DataFrame(
        {
            "height": rng.normal(170 + 8 * y, 5.0),
            "balance": rng.normal(-20.0 + 40 * y, 15.0),
            "income": np.exp(rng.normal(7 + 0.5 * y, 0.4)),
            "born": [
                datetime.datetime(1980, 1, 1) + datetime.timedelta(days=float(d))
                for d in np.round(rng.normal(900.0 * y, 400.0))
            ],
            "visits": pd.array(rng.poisson(3, size=n), dtype="Int64"),
            "clicks": pd.array(rng.negative_binomial(1.5, 1.5 / (1.5 + 5 + 9 * y)), dtype="Int64"),
            "member": pd.array(rng.random(n) < 0.2 + 0.3 * y, dtype="boolean"),
            "side": np.where(rng.random(n) < 0.3 + 0.2 * y, "left", "right"),
            "colour": np.array(["red", "green", "blue", "black"])[
                (y + (rng.random(n) < 0.3) * rng.integers(4, size=n)) % 4
            ],
            "size": pd.Categorical(
                np.array(["small", "medium", "large"])[(y + (rng.random(n) < 0.2)) % 3],
                categories=["small", "medium", "large"],
                ordered=True,
            ),
        },
        index=pd.Index(np.arange(n) * 10 + 1000, name="key"),
    )
    for name in table.columns:
        table.loc[table.index[rng.random(n) < missing], name] = None
    return table
