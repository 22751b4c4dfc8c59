"""Many processes train the weights that one trains; when one of them dies, all stop and the last checkpoint is valid."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from aevb.training.checkpoint import latest
from aevb.training.distributed import World

SCRIPT = """
import os, sys
import numpy as np
import torch
from aevb import Bernoulli, Model, Normal, OneHot, fit, mlp

torch.set_num_threads(1)
torch.manual_seed(int(os.environ.get("RANK", "0")))  # other initial weights elsewhere: the first process's must win
model = Model(
    p={"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(8, net=mlp(8, dropout=0.1))},
    q={"y | x": OneHot(net=mlp(8)), "z | x, y": Normal(net=mlp(8))},
).double()
x = (np.random.default_rng(0).random((101, 8)) > 0.5).astype(float)
y = np.where(np.arange(101) % 5 == 0, np.arange(101) % 3, -1)
fit(model, {"x": x, "y": y}, steps=int(sys.argv[2]), batch=33, lr=0.01, classify=1.0, checkpoint_every=20, out=sys.argv[1])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def command(script, out, steps: int, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, str(script), str(out), str(steps)]


def test_two_processes_train_what_one_trains(tmp_path, script):
    found = []
    for processes in (1, 2):
        out = tmp_path / f"run {processes}"
        done = subprocess.run(command(script, out, 20, processes), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found.append(load_file(out / "checkpoints" / "step-20" / "weights.safetensors"))
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=0, atol=1e-9), name


def test_when_one_process_dies_all_stop_and_the_checkpoint_is_valid(tmp_path, script):
    out = tmp_path / "run"
    launcher = subprocess.Popen(command(script, out, 10**6, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert launcher.wait(timeout=30) != 0
    found = latest(out)
    assert found is not None
    assert found.step % 20 == 0


def test_every_row_and_its_noise_belong_to_one_process():
    noise = {"z": torch.arange(35.0).reshape(1, 1, 7, 5), "static": torch.zeros(1, 1, 1, 5), "seed": torch.tensor(3)}
    parts = [World(rank, 3).rows_of(noise, 7) for rank in range(3)]
    assert torch.equal(torch.cat([part["z"] for part in parts], -2), noise["z"])
    assert all(part["static"].shape == (1, 1, 1, 5) and part["seed"] == 3 for part in parts)
    assert [World(rank, 3).share(7) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 7)]
