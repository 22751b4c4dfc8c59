"""Faults: each is named with its place and its fix, nothing is lost, and once it is removed the run
goes on as if it had not been.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from aevb import (
    Bernoulli,
    ContinuousBernoulli,
    Model,
    Normal,
    OneHot,
    cli,
    fit,
    load,
    load_run,
    mlp,
)
from aevb.data.sources import open_source
from aevb.runtime.checked_files import IntegrityWarning, seal
from aevb.training import checkpoint, validation
from aevb.training import run_folder as folder
from aevb.training.checkpoint import CheckpointError, TrainingError, folders, latest, read
from aevb.training.events import UNTAUGHT, events
from aevb.training.gradient_steps import GradientSteps as Stepper
from aevb.training.resuming import partial_fingerprint
from aevb.training.run import Run
from aevb.training.run_folder import Folder

# the better the one, the worse the other: the best is the first
TRAIN, VALIDATION = (np.ones((60, 6), np.float32), np.zeros((30, 6), np.float32))
SETTINGS = {
    "steps": 40,
    "batch": 20,
    "decay": "constant",
    "lr": 1e-2,
    "checkpoint_every": 10,
    "validate_every": 10,
}


def small_vae(family=Bernoulli, dropout: float = 0.2) -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(2), "x | z": family(6, net=mlp(8, dropout=dropout))},
        q={"z | x": Normal(net=mlp(8))},
    )


def train(out, model: Model | None = None, **changed) -> Model:
    model = small_vae() if model is None else model
    fit(model, {"x": TRAIN}, validation={"x": VALIDATION}, out=out, **(SETTINGS | changed))
    return model


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())


def rows(out) -> list[dict]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its folder and its model."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(out)


@pytest.fixture(scope="module")
def partway(tmp_path_factory):
    """A run that stopped at step 30, with the checkpoints of steps 10 (the best), 20 and 30."""
    out = tmp_path_factory.mktemp("partway")
    train(out, steps=30)
    return out


def at_step(monkeypatch, moment: int, act) -> None:
    """Do something just before a step."""
    take = Stepper.step

    def acting(self, step, *arguments):
        if step == moment:
            act(self)
        take(self, step, *arguments)

    monkeypatch.setattr(Stepper, "step", acting)


# Damaged checkpoints ------------------------------------------------------------------------------


def edit(folder, **changes) -> None:
    """Change the manifest, and what it says of itself."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(sealed(manifest)))


def sealed(manifest: dict) -> dict:
    plain = {name: value for name, value in manifest.items() if name != "sha256"}
    return plain | {"sha256": seal(plain)}


def edit_state(folder, **changes) -> None:
    edit(folder, state=json.loads((folder / "manifest.json").read_text())["state"] | changes)


def without(folder, *names: str) -> None:
    """Take an entry out of the manifest: its name, and those of the entries around it."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    place = manifest
    for name in names[:-1]:
        place = place[name]
    del place[names[-1]]
    path.write_text(json.dumps(sealed(manifest)))


def put(folder, content: bytes, name: str = "weights.safetensors") -> None:
    """Replace a file together with what the manifest says of it."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(
        folder,
        files=files
        | {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}},
    )


def truncate(path, bytes_: int = 7) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-bytes_] if bytes_ > 0 else content + b"x" * -bytes_)


def flip(path, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= bit
    path.write_bytes(bytes(content))


def reshape(folder, name: str) -> None:
    tensors = load_file(folder / name)
    key = next(key for key, tensor in tensors.items() if tensor.dim())
    put(folder, save(tensors | {key: torch.zeros(3)}), name)


def rename(folder, name: str, key: str) -> None:
    tensors = load_file(folder / name)
    put(folder, save({key: torch.zeros(3)} | dict(list(tensors.items())[1:])), name)


def narrow(folder) -> None:
    put(
        folder,
        save(
            {
                name: tensor.half()
                for name, tensor in load_file(folder / "weights.safetensors").items()
            }
        ),
    )


DAMAGES = {
    "weights truncated": (
        lambda f: truncate(f / "weights.safetensors"),
        "weights.safetensors is damaged: .* bytes instead of",
    ),
    "weights grown": (
        lambda f: truncate(f / "weights.safetensors", -1),
        "weights.safetensors is damaged: .* bytes instead of",
    ),
    "weights empty": (
        lambda f: (f / "weights.safetensors").write_bytes(b""),
        "weights.safetensors is damaged: 0 bytes instead of",
    ),
    "weights, one byte": (
        lambda f: flip(f / "weights.safetensors"),
        "its SHA-256 is not the one recorded",
    ),
    "optimiser, one byte": (
        lambda f: flip(f / "optimizer.safetensors"),
        "its SHA-256 is not the one recorded",
    ),
    "weights missing": (
        lambda f: (f / "weights.safetensors").unlink(),
        "weights.safetensors is missing",
    ),
    "optimiser missing": (
        lambda f: (f / "optimizer.safetensors").unlink(),
        "optimizer.safetensors is missing",
    ),
    "weights a folder": (
        lambda f: (f / "weights.safetensors").unlink() or (f / "weights.safetensors").mkdir(),
        "cannot be read: Is a directory",
    ),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (
        lambda f: truncate(f / "manifest.json"),
        "manifest.json is damaged: it is no JSON",
    ),
    "manifest empty": (
        lambda f: (f / "manifest.json").write_bytes(b""),
        "manifest.json is damaged: it is no JSON",
    ),
    "manifest binary": (
        lambda f: (f / "manifest.json").write_bytes(b"\xff\x00\xfe"),
        "manifest.json is damaged: it is no JSON",
    ),
    "no version": (
        lambda f: without(f, "version"),
        "manifest.json is damaged: version is missing, or not what it should be",
    ),
    "no step": (lambda f: without(f, "step"), "damaged: step is missing"),
    "no files": (lambda f: without(f, "files"), "damaged: files is missing"),
    "no file": (
        lambda f: without(f, "files", "optimizer.safetensors"),
        "damaged: files: optimizer.safetensors is missing",
    ),
    "no hash": (
        lambda f: without(f, "files", "weights.safetensors", "sha256"),
        "damaged: files: weights.safetensors is missing",
    ),
    "no state": (lambda f: without(f, "state"), "damaged: state is missing"),
    "no best": (lambda f: without(f, "state", "best"), "damaged: state: best is missing"),
    "no sums": (
        lambda f: edit_state(f, metrics={"taken": 3}),
        "damaged: state: metrics is missing",
    ),
    "sums of words": (
        lambda f: edit_state(f, metrics={"taken": 3, "sums": {"elbo": "low"}}),
        "damaged: state: metrics is missing",
    ),
    "no settings": (
        lambda f: without(f, "state", "settings"),
        "damaged: state: settings is missing",
    ),
    "step a word": (lambda f: edit(f, step="thirty"), "damaged: step is missing, or not"),
    "files a list": (lambda f: edit(f, files=[1]), "damaged: files is missing, or not"),
    "best a number": (lambda f: edit_state(f, best=3), "damaged: state: best is missing, or not"),
    "waited a word": (
        lambda f: edit_state(f, waited="long"),
        "damaged: state: waited is missing, or not",
    ),
    "pickle as weights": (
        lambda f: put(f, pickle.dumps({"weights": [1, 2, 3]})),
        "weights.safetensors is not a safetensors file",
    ),
    "foreign": (
        lambda f: (f / "manifest.json").write_text('{"format": "something else"}'),
        "was not written by aevb. Move it out",
    ),
    "foreign list": (
        lambda f: (f / "manifest.json").write_text("[]"),
        "was not written by aevb. Move it out",
    ),
    "newer": (
        lambda f: edit(f, version=99),
        "format version 99, newer than this version's 1. Update aevb",
    ),
    "another step's": (
        lambda f: edit(f, step=29),
        "holds the checkpoint of step 29. Rename it to step-29, or delete it",
    ),
    "other shapes": (
        lambda f: reshape(f, "weights.safetensors"),
        r"has shape \[3\], the model's has .*\. Resume with the model",
    ),
    "other moments": (
        lambda f: reshape(f, "optimizer.safetensors"),
        r"has shape \[3\], the model's has",
    ),
    "other names": (
        lambda f: rename(f, "weights.safetensors", "w"),
        "its weights are not this model's: .* is in only one of them. Resume with",
    ),
    "other parameters": (
        lambda f: rename(f, "optimizer.safetensors", "w/exp_avg"),
        "its optimiser is not this model's: w/exp_avg belongs to no",
    ),
    "other precision": (narrow, "is torch.float16, the model's is torch.float32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_advice_works(tmp_path, whole, partway, damage):
    act, message = DAMAGES[damage]
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    assert [folder.name for folder in folders(out)] == ["step-10", "step-20", "step-30"]
    newest = out / "checkpoints" / "step-30"
    act(newest)
    before = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    with pytest.raises(CheckpointError, match=message) as error:
        train(out, resume=True)
    # nothing was deleted
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == before
    with (
        pytest.raises(CheckpointError)
        if "this model's" not in message and "the model's" not in message
        else pytest.raises(ValueError)
    ):
        load_run(out, which="last")
    if (
        advice := re.search(
            r"Delete (\S+); resume=True then goes on from (\S+)\.$", str(error.value)
        )
    ) is not None:
        assert (advice[1], advice[2]) == (str(newest), "step-20")
        shutil.rmtree(advice[1])
        assert same(train(out, resume=True), whole[1])
        assert rows(out) == rows(whole[0])


def test_without_an_earlier_checkpoint_the_advice_is_to_start_again(tmp_path, whole):
    for resume in (True, False):
        out = tmp_path / str(resume)
        train(out, steps=10)
        (folder,) = folders(out)
        flip(folder / "weights.safetensors")
        with pytest.raises(
            CheckpointError,
            match=r"Delete .*step-10; there is none before it, so training then starts again\.",
        ):
            train(out, resume=True)
        shutil.rmtree(folder)
        assert same(train(out, resume=resume), whole[1])
        assert rows(out) == rows(whole[0])


def test_a_model_declared_otherwise_does_not_continue_a_run_though_its_weights_fit(
    tmp_path, partway
):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    with pytest.raises(
        CheckpointError,
        match="was trained with another model: model.json declares another p. Resume with the same "
        "model",
    ):
        train(out, small_vae(dropout=0.3), resume=True)


@pytest.mark.parametrize("content", [None, b"", b'{"format": "aevb mo', b"\xff\xfe"])
def test_resuming_writes_a_damaged_declaration_again(tmp_path, whole, partway, content):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    (out / "model.json").unlink()
    if content is not None:
        (out / "model.json").write_bytes(content)
    with pytest.raises(ValueError, match="model.json is (missing|damaged)"):
        load_run(out)
    train(out, resume=True)
    assert (out / "model.json").read_bytes() == (whole[0] / "model.json").read_bytes()
    load_run(out)


@pytest.mark.parametrize(
    "tail",
    [
        '{"step": 30, "elb',
        "\x00\x00\x00",
        '{"elbo": 1}',
        '{"step": "x"}',
        "[]",
        '{"step": 31, "elbo": 0.0}',
    ],
)
def test_a_half_written_record_is_passed_over(tmp_path, whole, partway, tail):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write(tail)
    train(out, resume=True)
    assert rows(out) == rows(whole[0])


# The disk refuses ---------------------------------------------------------------------------------


@pytest.fixture
def size_limit(monkeypatch):
    """Files may not be written, with the words of a limit on their size; taken away again by
    ``None``.

    (The kernel's own limit would bind this process's other files too, such as the log that its
    output may go to.)
    """
    real, refused = Path.open, [False]

    def guarded(self, mode="r", *arguments, **options):
        if refused[0] and set(mode) & set("wa"):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self))
        return real(self, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded)
    return lambda bytes_: refused.__setitem__(0, bytes_ is not None)


@pytest.mark.parametrize(("log_every", "place"), [(1, "metrics.jsonl"), (1000, "checkpoints")])
def test_a_disk_that_refuses_in_mid_run_costs_nothing(
    tmp_path, whole, monkeypatch, size_limit, log_every, place
):
    at_step(monkeypatch, 15, lambda stepper: size_limit(100))
    with pytest.raises(
        TrainingError,
        match=rf"^Step \d+: .*{place} could not be written: File too large\. Raise the limit "
        rf".*step-10\.$",
    ):
        train(tmp_path, log_every=log_every, validate_every=10 if log_every == 1 else 1000)
    size_limit(None)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-10"]
    assert read(folders(tmp_path)[0]).step == 10
    model = train(
        tmp_path, log_every=log_every, validate_every=10 if log_every == 1 else 1000, resume=True
    )
    assert same(model, whole[1])


WORDS = {
    errno.ENOSPC: "No space left on device. Make room, then resume=True goes on from the last good "
    "checkpoint, .*step-10",
    errno.EDQUOT: "Disk quota exceeded. Make room in your quota, then resume=True",
    errno.EROFS: "Read-only file system. Make it writable, then resume=True",
    errno.EACCES: "Permission denied. Make it writable, then resume=True",
    errno.EIO: "Input/output error. Remove the cause, then resume=True",
}


@pytest.mark.parametrize("number", WORDS, ids=errno.errorcode.get)
def test_the_systems_words_come_with_the_remedy(tmp_path, whole, monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    at_step(monkeypatch, 15, lambda stepper: monkeypatch.setattr(os, "fsync", refuse))
    with pytest.raises(
        TrainingError,
        match=f"^Step 20: {tmp_path}/checkpoints could not be written: {WORDS[number]}",
    ):
        train(tmp_path)
    monkeypatch.undo()
    assert same(train(tmp_path, resume=True), whole[1])
    assert rows(tmp_path) == rows(whole[0])


def test_before_the_first_checkpoint_the_advice_is_to_start_again(
    tmp_path, whole, monkeypatch, size_limit
):
    at_step(monkeypatch, 5, lambda stepper: size_limit(100))
    with pytest.raises(
        TrainingError, match="Raise the limit .* and start again: no checkpoint was written yet"
    ):
        train(tmp_path)
    size_limit(None)
    monkeypatch.undo()
    assert same(train(tmp_path), whole[1])


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path, monkeypatch, size_limit
):
    (tmp_path / "file").write_text("")
    at_step(monkeypatch, 0, lambda stepper: pytest.fail("a step was taken"))
    with pytest.raises(
        TrainingError,
        match=r"file/run could not be written: Not a directory\..* choose another folder; nothing "
        r"was trained yet",
    ):
        train(tmp_path / "file" / "run")
    size_limit(100)
    with pytest.raises(
        TrainingError, match="could not be written: File too large.*nothing was trained yet"
    ):
        train(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_scalars_for_tensorboard_are_refused_like_other_files(
    tmp_path, whole, monkeypatch, size_limit
):
    at_step(
        monkeypatch, 15, lambda stepper: size_limit((tmp_path / "metrics.jsonl").stat().st_size)
    )
    monkeypatch.setattr(Folder, "append", lambda self, row: None)
    with pytest.raises(
        TrainingError,
        match=r"^Step \d+: .*tensorboard could not be written: File too large\. .*step-10\.$",
    ):
        train(tmp_path, tensorboard=True)
    size_limit(None)
    monkeypatch.undo()
    assert same(train(tmp_path, tensorboard=True, resume=True), whole[1])


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_folder_removed_in_mid_run_is_missed_and_not_made_again(tmp_path, monkeypatch, log_every):
    out, model = tmp_path / "run", small_vae()
    at_step(monkeypatch, 15, lambda stepper: shutil.rmtree(out))
    with pytest.raises(
        TrainingError,
        match="No such file or directory. The run's folder was removed while it trained",
    ):
        train(out, model, log_every=log_every, validate_every=1000)
    assert not out.exists()
    model.save(tmp_path / "kept")


def test_on_the_command_line_a_fault_is_one_line_and_exit_code_1(
    tmp_path, monkeypatch, capsys, size_limit
):
    (tmp_path / "models.py").write_text(
        "from aevb import Bernoulli, Model, Normal, mlp\n\n"
        'vae = Model(p={"z": Normal(2), "x | z": Bernoulli(6, net=mlp(8))}, q={"z | x": '
        "Normal(net=mlp(8))})\n"
    )
    np.save(tmp_path / "x.npy", (np.random.default_rng(0).random((60, 6)) > 0.5).astype(np.float32))
    arguments = [
        "train",
        f"{tmp_path}/models.py:vae",
        "--data",
        f"{tmp_path}/x.npy",
        "--out",
        f"{tmp_path}/run",
        "--epochs",
        "20",
    ]
    monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
    at_step(monkeypatch, 10, lambda stepper: size_limit(100))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"aevb: Step 11: .*metrics.jsonl could not be written: File too large\. .* no checkpoint "
        r"was written yet\.\n",
        error,
    )


# Kills --------------------------------------------------------------------------------------------


class KilledError(Exception):
    pass


@pytest.mark.parametrize("file", range(3))
def test_a_kill_inside_a_save_leaves_the_checkpoint_before_it(tmp_path, whole, monkeypatch, file):
    real, calls = checkpoint.write_synced, []

    def dying(path, content):
        calls.extend([path] if path.parent.name.startswith("writing-") else [])
        if len(calls) == 4 + file:  # inside the second checkpoint
            path.write_bytes(content[: len(content) // 2])
            raise KilledError
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_synced", dying)
    # a kill cleans nothing up
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
    with pytest.raises(KilledError):
        train(tmp_path)
    monkeypatch.undo()
    assert [folder.name for folder in folders(tmp_path)] == ["step-10"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert same(train(tmp_path, resume=True), whole[1])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-10",
        "step-30",
        "step-40",
    ]


@pytest.mark.parametrize("moment", [3, 8, 20])
def test_a_record_over_steps_before_and_after_a_kill_is_the_same(tmp_path, monkeypatch, moment):
    settings = {"log_every": 7, "checkpoint_every": 2}

    def kill(stepper):
        raise KilledError

    at_step(monkeypatch, moment, kill)
    with pytest.raises(KilledError):
        train(tmp_path / "run", **settings)
    monkeypatch.undo()
    train(tmp_path / "run", **settings, resume=True)
    train(tmp_path / "whole", **settings)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


LEFT = {
    "an empty folder": [],
    "the lock": [".lock"],
    "half a declaration": [".lock", "model.json.writing"],
    "the declaration": [".lock", "model.json"],
    "half the settings": [".lock", "model.json", "config.toml.writing"],
    "no record": [".lock", "model.json", "config.toml", "metrics.jsonl.writing"],
    "all but a checkpoint": [".lock", "model.json", "config.toml", "metrics.jsonl"],
    "half a checkpoint": [
        ".lock",
        "model.json",
        "config.toml",
        "metrics.jsonl",
        "checkpoints/writing-7/weights.safetensors",
    ],
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", LEFT)
def test_what_a_kill_at_the_start_leaves_can_be_started_and_resumed(tmp_path, whole, left, resume):
    out = tmp_path / "run"
    out.mkdir()
    for name in LEFT[left]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        source = whole[0] / name.removesuffix(".writing")
        content = source.read_bytes() if source.is_file() else b"half a file"
        (out / name).write_bytes(
            content[: len(content) // 2] if name.endswith(".writing") else content
        )
    with pytest.raises(ValueError, match=r"holds no (run: model.json is missing|checkpoint yet)"):
        load_run(out)
    assert same(train(out, resume=resume), whole[1])
    assert rows(out) == rows(whole[0])
    kept = sorted(path.name for path in out.iterdir())
    assert kept == [".lock", "checkpoints", "config.toml", "metrics.jsonl", "model.json"]


# The lock -----------------------------------------------------------------------------------------

HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file.fileno(), f"{os.getpid()}\\n".encode())
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_trained_by_one_process_at_a_time(tmp_path, whole):
    out = tmp_path / "run"
    with (
        Folder(out).held(),
        pytest.raises(
            TrainingError,
            match=rf"run is being trained by process {os.getpid()}\. Wait until it ends, stop "
            rf"it, or",
        ),
    ):
        train(out)
    train(out, steps=10)
    (out / ".lock").unlink()
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(out / ".lock")], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match=f"is being trained by process {holder.pid}"):
            train(out, resume=True)
        with pytest.raises(ValueError, match="holds a run already"):
            train(out)
        load_run(out)  # reading is free
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert same(train(out, resume=True), whole[1])  # the kernel took the lock back
    assert (out / ".lock").read_text().splitlines()[0] == str(os.getpid())


def test_a_second_process_that_is_refused_has_written_nothing(tmp_path, monkeypatch, capsys):
    np.savetxt(tmp_path / "other.csv", np.random.default_rng(0).normal(size=(20, 3)), delimiter=",")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "aevb",
            "train",
            "fa",
            "--steps",
            "3",
            "--out",
            f"{tmp_path}/run",
            "--data",
            f"{tmp_path}/other.csv",
        ],
    )
    with Folder(tmp_path / "run").held():
        for name in ("data.json", "model.json", "metrics.jsonl"):
            (tmp_path / "run" / name).write_text("the first one's")
        with pytest.raises(SystemExit, match="1"):
            cli.main()
    assert "is being trained by process" in capsys.readouterr().err
    found = {
        path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.name != ".lock"
    }
    assert found == dict.fromkeys(("data.json", "model.json", "metrics.jsonl"), "the first one's")


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_run_whose_folder_another_took_writes_nothing_there(tmp_path, monkeypatch, log_every):
    out = tmp_path / "run"

    def retake(stepper):
        if stepper.settings.seed == 0:
            shutil.rmtree(out)
            train(out, seed=7, steps=10)
            taken.update({path: path.read_bytes() for path in out.rglob("*") if path.is_file()})

    taken = {}
    at_step(monkeypatch, 15, retake)
    with pytest.raises(
        TrainingError,
        match=rf"run belongs to another run now \(process {os.getpid()}\).* writes nothing more "
        rf"there. The model in",
    ):
        train(out, log_every=log_every, validate_every=1000)
    assert len(taken) > 5
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == taken


def test_a_folder_taken_between_the_check_and_the_last_rename_is_left_alone(tmp_path, monkeypatch):
    out, real = tmp_path / "run", checkpoint.sync_folder

    def retake(path):
        real(path)
        if path.name.startswith("writing-") and not taken:
            taken["step"] = True
            out.rename(tmp_path / "old")
            train(out, seed=7, steps=10)

    taken = {}
    monkeypatch.setattr(checkpoint, "sync_folder", retake)
    with pytest.raises(TrainingError, match="belongs to another run now"):
        train(out)
    assert [folder.name for folder in folders(out)] == ["step-10"]
    assert read(folders(out)[0]).state["settings"]["seed"] == 7


def test_a_lock_file_that_was_removed_is_made_again_and_noted(tmp_path, whole, monkeypatch):
    at_step(monkeypatch, 15, lambda stepper: (tmp_path / ".lock").unlink())
    assert same(train(tmp_path), whole[1])
    monkeypatch.undo()
    notes = [row["note"] for row in rows(tmp_path) if "note" in row]
    assert notes == [
        f"{tmp_path / '.lock'} was removed while the run trained. It was made again, so that no "
        f"second process trains here."
    ]
    assert Run.load(tmp_path).step == 40


def test_where_there_are_no_locks_it_is_said_and_two_runs_never_mix(tmp_path, whole, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def second(stepper):
        if stepper.settings.seed == 0:
            (out / "checkpoints" / "step-10").rename(tmp_path / "step-10")
            train(out, seed=7, steps=10)

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    out = tmp_path / "alone"
    assert same(train(out), whole[1])
    note = (
        f"{out} lies on a file system without locks (No locks available), which cannot keep a "
        f"second process from training there."
    )
    assert [row["note"][: len(note)] for row in rows(out) if "note" in row] == [note]
    out = tmp_path / "both"
    at_step(monkeypatch, 15, second)
    with pytest.raises(TrainingError, match="belongs to another run now"):
        train(out)
    assert {read(place).state["settings"]["seed"] for place in folders(out)} == {7}


# Whose folder it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_only_an_empty_folder_or_a_run_is_taken(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.json").write_text("mine")
    small_vae().save(tmp_path / "saved")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError,
        match=r"mine holds files that are not a run's \(model.json\), which would be overwritten. "
        r"Choose a folder that is empty",
    ):
        train("mine", resume=resume)
    with pytest.raises(
        ValueError,
        match="saved holds a saved model, which would be overwritten. Choose a folder that is "
        "empty or does not exist",
    ):
        train("saved", resume=resume)
    with pytest.raises(ValueError, match=r"\. holds files that are not a run's \(mine, saved\)"):
        train(".", resume=resume)
    with pytest.raises(ValueError, match='out="" names no folder'):
        train("", resume=resume)
    with pytest.raises(
        ValueError,
        match="saved holds a model or a run of its own. Choose another folder for the runs of "
        "several seeds",
    ):
        fit(small_vae(), {"x": TRAIN}, out="saved", seeds=2, steps=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert same(load(tmp_path / "saved"), small_vae())


def test_a_lock_of_somebody_else_does_not_make_a_folder_a_run(tmp_path, whole):
    for name, content in (("named", "npm 7"), ("empty", ""), ("number", "12 monkeys\n")):
        out = tmp_path / name
        out.mkdir()
        (out / ".lock").write_text(content)
        (out / "model.json").write_text("mine")
        with pytest.raises(
            ValueError,
            match=r"holds files that are not a run's \(\.lock, model\.json\), which would be "
            r"overwritten",
        ):
            train(out)
        assert {path.name: path.read_text() for path in out.iterdir()} == {
            ".lock": content,
            "model.json": "mine",
        }
    out = tmp_path / "killed"
    out.mkdir()
    for name in (
        "model.json",
        "config.toml",
    ):  # a kill between making the lock's file and writing into it
        shutil.copy(whole[0] / name, out / name)
    (out / ".lock").touch()
    assert same(train(out), whole[1])


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path, partway):
    out, other = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(partway, out)
    other.write_text("mine")
    (out / ".lock").unlink()
    (out / ".lock").symlink_to(other)
    with pytest.raises(
        TrainingError,
        match=r"\.lock is a link to another file, which would be overwritten. Remove the link",
    ):
        train(out, resume=True)
    (out / ".lock").unlink()
    (out / "model.json.writing").symlink_to(other)
    train(out, resume=True)
    assert other.read_text() == "mine"


def test_what_lies_beside_a_run_does_not_keep_it_from_going_on(tmp_path, whole):
    train(tmp_path, steps=20)
    (tmp_path / "notes.txt").write_text("mine")
    assert same(train(tmp_path, resume=True), whole[1])
    assert (tmp_path / "notes.txt").read_text() == "mine"


# The files beside the checkpoints -----------------------------------------------------------------


def lines_of(out) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


HISTORIES = {
    "a line missing": (
        lambda lines: lines[:2] + lines[3:],
        r"(1|10) of its \d+ lines are missing or unreadable|are not those that the run wrote",
    ),
    "half a line": (
        lambda lines: [*lines[:2], lines[2][:9], *lines[3:]],
        r"1 of its \d+ lines are missing or unreadable up to step 30",
    ),
    "a number changed": (
        lambda lines: [lines[0].replace("1", "7", 1), *lines[1:]],
        "its lines are not those that the run wrote up to step 30",
    ),
    "a word for a number": (
        lambda lines: [re.sub(r'"elbo": [^,]*', '"elbo": "low"', lines[0]), *lines[1:]],
        r"1 of its \d+ lines are missing",
    ),
    "no line": (lambda lines: [], r"(\d+) of its \1 lines are missing or unreadable"),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_damaged_history_is_told_and_the_run_goes_on(tmp_path, whole, partway, name):
    act, message = HISTORIES[name]
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    (out / "metrics.jsonl").write_text("".join(line + "\n" for line in act(lines_of(out))))
    with pytest.warns(
        IntegrityWarning,
        match=rf"metrics.jsonl is damaged: .*{message}.*The run's history has what could be read",
    ):
        Run.load(out)
    assert same(train(out, resume=True), whole[1])
    (note,) = [row["note"] for row in rows(out) if "note" in row]
    assert re.search(message, note)
    assert Run.load(out).step == 40  # what is there now is what the last checkpoint recorded


def test_a_damaged_history_keeps_its_notes(tmp_path):
    model = Model({"y": OneHot(3), "x | y": Bernoulli(6)}, {"y | x": OneHot()})
    labels = np.arange(len(TRAIN)) % 3
    run = fit(model, {"x": TRAIN, "y": labels}, steps=10, log_every=2, out=tmp_path)
    assert [event.kind for event in events(run.rows)] == [UNTAUGHT]
    first, *others = lines_of(tmp_path)
    changed = [first, others[0].replace('"seconds": ', '"seconds": 9'), *others[1:]]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in changed))
    with pytest.warns(IntegrityWarning, match="its lines are not those that the run wrote up to"):
        again = Run.load(tmp_path)
    assert events(again.rows) == events(run.rows)


def test_a_checkpoint_of_another_run_is_told(tmp_path, partway):
    train(tmp_path / "other", steps=30, seed=3)
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    for which, step in (("best", 10), ("last", 30)):
        shutil.rmtree(out / "checkpoints")
        shutil.copytree(partway / "checkpoints", out / "checkpoints")
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
        shutil.copytree(
            tmp_path / "other" / "checkpoints" / f"step-{step}",
            out / "checkpoints" / f"step-{step}",
        )
        with pytest.warns(
            IntegrityWarning,
            match=f"not those that the run wrote up to step {step}, or the checkpoint of step "
            f"{step} is another run's",
        ):
            load_run(out, which=which)


def test_a_last_checkpoint_that_is_gone_is_told(tmp_path, whole, partway):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    shutil.rmtree(out / "checkpoints" / "step-30")
    for read_it in (load_run, Run.load):
        with pytest.warns(
            IntegrityWarning,
            match="metrics.jsonl goes on to step 30, but the last checkpoint is of step 20: the "
            "run was stopped",
        ):
            read_it(out)
    assert same(train(out, resume=True), whole[1])
    load_run(out)


def test_a_manifest_without_its_own_hash_is_refused(tmp_path, partway):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    path = out / "checkpoints" / "step-30" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match="manifest.json was changed: its SHA-256 is not the one recorded"
    ):
        load_run(out)


@pytest.mark.parametrize("name", ["step-²", "step-٣", "step-"])
def test_folders_that_only_look_like_checkpoints_are_passed_over(tmp_path, partway, name):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    (out / "checkpoints" / name).mkdir()
    assert load_run(out, which="last")


def test_the_declaration_of_a_run_is_the_one_its_checkpoints_recorded(tmp_path, whole, partway):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    content = (out / "model.json").read_text()
    (out / "model.json").write_text(content.replace('"dropout": 0.2', '"dropout": 0.3'))
    with pytest.raises(
        CheckpointError,
        match="model.json was changed: its SHA-256 is not the one that the last checkpoint "
        "recorded",
    ):
        load_run(out)
    with pytest.raises(
        CheckpointError,
        match="was trained with another model, and its model.json is missing or damaged",
    ):
        train(out, small_vae(dropout=0.3), resume=True)
    assert same(train(out, resume=True), whole[1])
    assert (out / "model.json").read_text() == content
    load_run(out)


def test_the_recipe_of_the_rows_is_the_one_the_checkpoints_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "plot", lambda self, path: None)
    np.savetxt("a.csv", np.random.default_rng(0).normal(3.0, 2.0, (20, 3)), delimiter=",")

    def aevb(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    command = [
        "train",
        "fa",
        "--data",
        "a.csv",
        "--prepare",
        "standardise",
        "--steps",
        "3",
        "--out",
        "run",
    ]
    assert aevb(*command)[0] == 0
    content = Path("run/data.json").read_text()
    for change in (
        lambda: Path("run/data.json").write_text(content.replace('"seed": 0', '"seed": 1')),
        lambda: Path("run/data.json").unlink(),
    ):
        change()
        for words in (["evaluate", "run"], ["sample", "run"]):
            code, error = aevb(*words)
            assert code == 2
            assert re.fullmatch(
                r"aevb: run/data.json (was changed: its SHA-256 .*|is missing)\. Resuming the run "
                r"with its model and .* again\.\n",
                error,
            )
        assert aevb(*command, "--resume")[0] == 0
        assert Path("run/data.json").read_text() == content
    assert aevb("evaluate", "run")[0] == 0
    code, error = aevb(
        "train",
        "fa",
        "--data",
        "a.csv",
        "--prepare",
        "standardise",
        "--steps",
        "3",
        "--out",
        "run",
        "--resume",
        "--hold-out",
        "0.2",
    )
    assert code == 2
    assert (
        "run was trained with hold_out=0.0, not 0.2 (data.json). Resume with the same data" in error
    )


def test_a_run_is_not_resumed_with_one_row_changed_in_the_middle(tmp_path, partway):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    x = np.array(TRAIN)
    x[len(x) // 2, 0] = 1 - x[len(x) // 2, 0]
    with pytest.raises(CheckpointError, match="was trained on other data"):
        fit(small_vae(), {"x": x}, out=out, resume=True, **SETTINGS)


def test_a_run_of_an_earlier_version_without_these_hashes_goes_on(tmp_path, whole, partway):
    out = tmp_path / "run"
    shutil.copytree(partway, out)
    for place in folders(out):
        manifest = json.loads((place / "manifest.json").read_text())
        del manifest["sha256"], manifest["beside"], manifest["state"]["history"]
        manifest["state"]["settings"]["data"] = partial_fingerprint(
            open_source(small_vae().graph, {"x": TRAIN}, torch.empty(0))
        )
        (place / "manifest.json").write_text(json.dumps(manifest))
    load_run(out)
    Run.load(out)
    with pytest.raises(CheckpointError, match="was trained on other data"):
        fit(small_vae(), {"x": 1 - TRAIN}, out=out, resume=True, **SETTINGS)
    assert same(train(out, resume=True), whole[1])
    assert [row["note"][:40] for row in rows(out) if "note" in row] == [
        "The version of aevb that began this run "
    ]


def test_a_run_that_failed_lets_go_of_its_folder(tmp_path, monkeypatch):
    def fail(stepper):
        raise KilledError

    at_step(monkeypatch, 3, fail)
    with pytest.raises(KilledError) as kept:
        train(tmp_path)
    monkeypatch.undo()
    train(tmp_path)
    assert kept.value.__traceback__ is not None  # and not because the failed one was forgotten


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "value", "message"),
    [
        (
            Bernoulli,
            np.inf,
            r"x has 1 value not finite \(first, from 0: row 17, column 4: inf\)\. Replace them; "
            r"NaN marks a missing entry",
        ),
        (Normal, -np.inf, r"x has 1 value not finite \(first, from 0: row 17, column 4: -inf\)"),
        (
            Bernoulli,
            0.5,
            r"not 0 or 1 \(first, from 0: row 17, column 4: 0\.5\), but p gives x a Bernoulli\. "
            r"Binarise them",
        ),
        (
            ContinuousBernoulli,
            255.0,
            r"outside \[0, 1\] \(first, from 0: row 17, column 4: 255\.0\), but p gives x a "
            r"ContinuousBernoulli\. They look like grey levels",
        ),
    ],
)
def test_values_that_cannot_be_are_named_before_the_first_step(tmp_path, family, value, message):
    x = np.random.default_rng(0).integers(0, 2, (60, 6)).astype(np.float32)
    x[17, 4] = value
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        fit(small_vae(family), {"x": x}, out=out, **SETTINGS)
    with pytest.raises(ValueError, match=message):
        fit(
            small_vae(family),
            {"x": np.round(np.clip(np.nan_to_num(x, posinf=0, neginf=0), 0, 1))},
            validation={"x": x},
            out=out,
            **SETTINGS,
        )
    assert not out.exists()


def test_a_nan_is_a_missing_entry(tmp_path):
    x = TRAIN.copy()
    x[::2, 3] = np.nan
    run = fit(small_vae(), {"x": x}, validation={"x": x}, **SETTINGS)
    assert np.isfinite(run.history["validation elbo"]).all()


def test_a_loss_that_is_not_finite_at_step_100_loses_nothing(tmp_path, monkeypatch):
    settings = {"steps": 120, "checkpoint_every": 25, "validate_every": 60}
    reference = train(tmp_path / "whole", **settings)

    def poison(stepper):
        with torch.no_grad():
            stepper.model.factors["p(x|z)"].net.heads.bias[2] = float("inf")

    at_step(monkeypatch, 100, poison)
    message = (
        r"^Step 100: the term x \(p.s factor p\(x\|z\)\) is not finite for rows .* The parameters "
        r"of p\(x\|z\) are not finite\. No step was taken\."
    )
    with pytest.raises(TrainingError, match=message + r" The last good .*step-100\."):
        train(tmp_path / "run", **settings)
    monkeypatch.undo()
    found = latest(tmp_path / "run")
    assert found is not None
    assert all(tensor.isfinite().all() for tensor in found.weights.values())
    assert same(train(tmp_path / "run", resume=True, **settings), reference)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_skipped_step_is_noted_once_though_the_run_is_resumed_there(tmp_path, monkeypatch):
    take = Stepper.step

    def poisoned(self, step, *arguments):
        bias = self.model.factors["p(x|z)"].net.heads.bias
        kept = bias.detach().clone()
        with torch.no_grad():
            bias[0] = float("inf") if step == 10 else bias[0]
        take(self, step, *arguments)
        if step == 10:
            with torch.no_grad():
                bias.copy_(kept)
        if step == 12 and not resumed:
            raise KilledError

    monkeypatch.setattr(Stepper, "step", poisoned)
    resumed = False
    with pytest.raises(KilledError):
        train(tmp_path / "run", skip=1)
    resumed = True
    train(tmp_path / "run", skip=1, resume=True)
    train(tmp_path / "whole", skip=1)
    assert sum("note" in row for row in rows(tmp_path / "run")) == 1
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


# Best and last ------------------------------------------------------------------------------------


def test_the_best_and_the_last_checkpoint_are_kept_and_either_is_loaded(whole):
    out, model = whole
    assert [folder.name for folder in folders(out)] == ["step-10", "step-30", "step-40"]
    assert same(load_run(out, which="last"), model)  # what fit left in memory
    best = load_run(out)
    assert not same(best, model)
    assert same(best, train(None, steps=10))
    with pytest.raises(ValueError, match='which is "best" or "last"'):
        load_run(out, which="first")


def test_the_best_is_kept_though_checkpoints_are_not_due_then(tmp_path):
    train(tmp_path, validate_every=7, checkpoint_every=40)
    assert [folder.name for folder in folders(tmp_path)] == ["step-7", "step-40"]
    assert same(load_run(tmp_path), train(None, steps=7))
    shutil.rmtree(tmp_path / "checkpoints" / "step-7")
    with pytest.raises(
        CheckpointError,
        match='step-7, the best checkpoint, is missing. Load the last one: which="last"',
    ):
        load_run(tmp_path)
    load_run(tmp_path, which="last")


def test_after_patience_the_model_has_the_best_weights_though_the_run_was_resumed(
    tmp_path, monkeypatch
):
    settings = {"patience": 3, "steps": 100}
    reference = train(tmp_path / "whole", **settings)
    assert same(reference, load_run(tmp_path / "whole"))
    assert same(reference, train(None, steps=10))
    assert not same(reference, load_run(tmp_path / "whole", which="last"))

    def fail(stepper):
        raise KilledError

    at_step(monkeypatch, 25, fail)
    with pytest.raises(KilledError):
        train(tmp_path / "run", **settings)
    monkeypatch.undo()
    assert same(train(tmp_path / "run", resume=True, **settings), reference)
    assert Path(tmp_path / "run" / "checkpoints" / "step-40").is_dir()


def test_a_run_that_ran_out_of_patience_is_over(tmp_path):
    reference = train(tmp_path, patience=2, steps=100)
    before = rows(tmp_path)
    assert before[-1]["step"] == 30
    assert same(train(tmp_path, patience=2, steps=100, resume=True), reference)
    assert rows(tmp_path) == before


def test_a_validation_that_is_not_finite_is_never_the_best(monkeypatch):
    values = iter([float("nan"), -3.0, float("inf"), -2.0])
    monkeypatch.setattr(validation, "Evaluation", lambda *_, **__: lambda: {"elbo": next(values)})
    run = fit(small_vae(), {"x": TRAIN}, validation={"x": VALIDATION}, **SETTINGS)
    assert run.best == (40, -2.0)
