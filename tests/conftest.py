"""Use one thread: the tensors are small, and starting threads costs more than it saves.

Each worker gets whole files.
"""

import pytest
import torch

pytest.register_assert_rewrite("small_runs")
torch.set_num_threads(1)

# These tests need a core of their own: they measure time, start processes that wait for each other,
# or run a C++ compiler.
ONE_AFTER_ANOTHER = {
    "tests/comparison/test_sweep.py",
    "tests/compiled_step/test_array_bounds.py",
    "tests/compiled_step/test_fused_adam.py",
    "tests/compiled_step/test_rewriting.py",
    "tests/derive/test_large_declarations.py",
    "tests/runtime/test_contention.py",
    "tests/training/test_distributed.py",
}


@pytest.fixture(autouse=True)
def brief_trial(monkeypatch):
    """Let a diagnosis train its copy of the model for a few steps only."""
    monkeypatch.setattr("aevb.diagnostics.further_training.STEPS", 12)


@pytest.fixture
def soon(monkeypatch):
    """Record steps after the first one."""
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_AFTER", 1)
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_FOR", 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one worker (``--dist loadfile``), and the files above to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "one after another" if file in ONE_AFTER_ANOTHER else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
