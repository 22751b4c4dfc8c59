"""Many processes train the weights that one trains; when one of them dies, all stop and the last
checkpoint is valid.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aevb import em, fit, zoo
from aevb.estimate.bound import sample_with_seed
from aevb.training import job
from aevb.training.checkpoint import latest
from aevb.training.distributed import World

MODEL = """
import os
import torch
from aevb import Bernoulli, Model, Normal, OneHot, mlp

torch.set_num_threads(1)


def mixture():
    # Every process starts with other weights: those of the first must win.
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return Model(
        p={"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(8, net=mlp(8, dropout=0.1))},
        q={"y | x": OneHot(net=mlp(8)), "z | x, y": Normal(net=mlp(8))},
    ).double()
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "models.py").write_text(MODEL)
    np.savez(
        tmp_path / "data.npz", x=(np.random.default_rng(0).random((99, 8)) > 0.5).astype(float)
    )
    return tmp_path


def command(folder, out, epochs: float, processes: int) -> list[str]:
    launcher = (
        ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    )
    arguments = [
        "--data",
        folder / "data.npz",
        "--out",
        out,
        "--epochs",
        epochs,
        "--batch",
        "33",
        "--checkpoint-every",
        "3",
    ]
    return [
        sys.executable,
        *launcher,
        "-m",
        "aevb",
        "train",
        f"{folder}/models.py:mixture",
        *map(str, arguments),
    ]


# The free bits lie among the KL terms of the steps: half of the rows would often decide otherwise.
WEIGHTED = (
    "--beta z=3 --beta y=0.5 --kl-warmup 4 --kl-cycles 2 --free-bits z=0.55 --free-bits y=0.014"
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="plain"),
        pytest.param(WEIGHTED, id="weighted", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_trains(files, options):
    found = []
    for processes in (1, 2):
        out = files / f"run{processes}"
        done = subprocess.run(
            [*command(files, out, 7, processes), *options.split()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(load_file(out / "checkpoints" / "step-21" / "weights.safetensors"))
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=0, atol=1e-9), name
    assert done.stdout.count("21 steps in") == 1  # one of them speaks


def test_more_processes_than_rows_of_a_step_are_refused(monkeypatch):
    class Alone(World):
        def copy_first(self, tensors):
            pass

    monkeypatch.setattr(job, "join", lambda device: Alone(3, 4))
    model, x = zoo.fa(), np.random.default_rng(0).normal(size=(10, 3))
    with pytest.raises(
        ValueError,
        match=r"A step takes 3 rows, so some of the 4 processes would have none\. Start at most 3 "
        r".*, or raise batch=",
    ):
        fit(model, {"x": x}, batch=3, steps=1)
    with pytest.raises(
        ValueError,
        match=r"A step takes 2 rows, .* Start at most 2 processes \(torchrun --nproc-per-node\)\.$",
    ):
        fit(model, {"x": x[:2]}, schedule=em(), steps=1)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.slow),
    ],
)
def test_when_one_process_dies_or_hangs_all_stop_with_a_sentence_and_the_checkpoint_is_valid(
    files, request_
):
    """The first process is left waiting for the second, and says so within ``AEVB_WAIT`` seconds;
    the launcher then ends the rest.
    """
    out, told = files / "run", files / "told"
    with told.open("wb") as errors:
        asked = {**os.environ, "AEVB_WAIT": "6"}
        launcher = subprocess.Popen(
            command(files, out, 10**6, 2), stdout=subprocess.DEVNULL, stderr=errors, env=asked
        )
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [
        int(pid)
        for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ]
    assert len(workers) == 2
    os.kill(workers[-1], request_)
    if request_ == signal.SIGSTOP:
        while "--resume" not in told.read_text() and time.monotonic() < deadline + 30:
            time.sleep(0.1)
        os.kill(workers[-1], signal.SIGCONT)  # the launcher waits for it, too
    assert launcher.wait(timeout=60) != 0
    if request_ == signal.SIGSTOP:
        assert (
            "aevb: Another process of this run has ended, or has not answered for 6 s "
            "(AEVB_WAIT), so that none can go on." in told.read_text()
        )
    found = latest(out)
    assert found is not None
    assert found.step % 3 == 0


def test_every_row_and_its_noise_belong_to_one_process():
    noise = {
        "z": torch.arange(35.0).reshape(1, 1, 7, 5),
        "static": torch.zeros(1, 1, 1, 5),
        "seed": torch.tensor(3),
    }
    parts = [World(rank, 3).rows_of(noise, 7) for rank in range(3)]
    assert torch.equal(torch.cat([part["z"] for part in parts], -2), noise["z"])
    assert all(part["static"].shape == (1, 1, 1, 5) for part in parts)
    # one of its own each; the first keeps the batch's
    assert [int(part["seed"]) for part in parts] == [3, 5, 7]
    assert [World(rank, 3).share(7) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 7)]


def test_what_torch_draws_from_a_seed_is_not_alike_in_two_processes():
    dist, seed = torch.distributions.Poisson(torch.full((50, 3), 4.0)), {"z": torch.tensor(11)}
    alone, first, second = (
        sample_with_seed(dist, World(rank, size).rows_of(seed, 100)["z"])
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert torch.equal(alone, first)  # one process draws as it always did
    assert (first != second).float().mean() > 0.5  # of 150 equal rates, a seventh agree by chance
