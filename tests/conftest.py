"""One thread: the tests' tensors are small, and starting threads costs more than they bring."""

import pytest
import torch

pytest.register_assert_rewrite("small_runs")
torch.set_num_threads(1)


@pytest.fixture
def soon(monkeypatch):
    """Steps are recorded after the first."""
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_AFTER", 1)
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_FOR", 0)
