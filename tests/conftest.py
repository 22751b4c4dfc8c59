"""One thread: the tests' tensors are small, and starting threads costs more than they bring.
Workers are given whole files.
"""

import pytest
import torch

pytest.register_assert_rewrite("small_runs")
torch.set_num_threads(1)

# Tests that measure time or waiting, start processes that wait for each other, or have a C++
# compiler use a core of its own.
ONE_AFTER_ANOTHER = {
    "tests/compiled_step/test_array_bounds.py",
    "tests/compiled_step/test_fused_adam.py",
    "tests/compiled_step/test_rewriting.py",
    "tests/derive/test_large_declarations.py",
    "tests/runtime/test_contention.py",
    "tests/training/test_distributed.py",
}


@pytest.fixture
def soon(monkeypatch):
    """Steps are recorded after the first."""
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_AFTER", 1)
    monkeypatch.setattr("aevb.training.gradient_steps.RECORD_FOR", 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one worker (``--dist loadfile``), and the files above all to the same
    one.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "one after another" if file in ONE_AFTER_ANOTHER else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
