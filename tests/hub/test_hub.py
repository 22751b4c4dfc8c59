"""Share runs: what is sent, that it comes back whole, and that damage and foreign files do not."""

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in import hub

import aevb
from aevb import Model, Normal, Run, fit, load_run
from aevb import hub as sharing
from aevb.data.datasets import Recipe
from aevb.hub.contents import FOLDERS_OF, staged
from aevb.trackers import Tracker, TrackerWarning
from aevb.training.checkpoint import CheckpointError, folders, read, write
from aevb.training.events import FOLDER, LOCAL, Event

DATA = "/home/somebody/ward 7.csv"
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
SETTINGS = {"steps": 30, "batch": 20, "validate_every": 10, "checkpoint_every": 10, "lr": 0.3}


def small() -> Model:
    torch.manual_seed(0)
    return Model({"z": Normal(1), "x | z": Normal(3)}, {"z | x": Normal()})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("shared") / "birds"
    recipe = Recipe(DATA, columns={"x": ["a", "b", "c"]})
    made = fit(small(), {"x": X}, validation={"x": X}, out=out, recipe=recipe, **SETTINGS)
    (out / "private.csv").write_text("a secret")
    return made


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    with hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield found


@pytest.fixture(scope="module")
def card(run):
    return run.card()


def paths(items) -> list[str]:
    return [item.path for item in items]


# What is sent -------------------------------------------------------------------------------------


def test_only_the_files_of_a_run_are_listed(run):
    steps = sorted({read(one).step for one in folders(run.out)} & {30, run.best.step})
    parts = ("manifest.json", "optimizer.safetensors", "weights.safetensors")
    expected = {f"checkpoints/step-{step}/{part}" for step in steps for part in parts}
    expected |= {"config.toml", "data.json", "metrics.jsonl", "model.json"}
    found = sharing.contents(run.out)
    assert set(paths(found)) == expected
    assert all(str(item).startswith(f"{item.path} (") and item.what for item in found)


def test_the_published_run_has_no_folders_of_the_data_and_no_optimiser(run):
    with staged(run.out) as place:
        everything = b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())
        assert b"somebody" not in everything
        assert b"a secret" not in everything
        assert Recipe.read(place).data == "ward 7.csv"
        newest = read(folders(place)[-1])
        assert newest.optimizer == {}
        whole = read(folders(run.out)[-1])
        assert all(torch.equal(newest.weights[name], one) for name, one in whole.weights.items())
        assert Run.load(place).rows == Run.load(run.out).rows
        shutil.copytree(place, run.out.parent / "copy")
    with pytest.raises(CheckpointError, match="shared without the state of its optimiser, so it"):
        fit(
            small(),
            {"x": X},
            validation={"x": X},
            out=run.out.parent / "copy",
            resume=True,
            **SETTINGS | {"steps": 40},
        )
    with staged(run.out, resumable=True) as place:
        assert read(folders(place)[-1]).optimizer.keys() == whole.optimizer.keys()


def test_notes_of_the_machine_are_not_published(tmp_path, run):
    """The rows of the others stay, at both checkpoints, and the published history is whole."""

    class Failing(Tracker):
        def log(self, step, values):
            raise ConnectionError("cannot reach tracker.somebody.example:443")

    out = tmp_path / "somebody" / "run"
    with pytest.warns(TrackerWarning):
        fit(small(), {"x": X}, validation={"x": X}, out=out, trackers=[Failing()], **SETTINGS)
    lock = out / ".lock"
    noted = Event("not compiled", "run", "Not compiled: no /home/somebody/bin/gcc (x/y).").row(30)
    add_to_history(out, noted, Event(FOLDER, "run", f"{lock} was removed.").row(30))
    assert "somebody" in (out / "metrics.jsonl").read_text()
    whole = Run.load(out)
    kinds = [row["kind"] for row in whole.rows if "note" in row]
    assert {"tracker failed", "folder", "not compiled"} <= {*kinds}
    with staged(out) as place:
        text = (place / "metrics.jsonl").read_text()
        assert "somebody" not in text
        assert "Not compiled: no gcc (x/y)." in text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = Run.load(place)
        assert [row for row in found.rows if "note" not in row] == [
            row for row in whole.rows if "note" not in row
        ]
        assert {row["kind"] for row in found.rows if "note" in row}.isdisjoint(LOCAL)
    for text in ("(x + u) / 256", "a/b/c", "https://hub.example.org/me/run", "1 / 2/3"):
        assert FOLDERS_OF.sub("", text) == text
    assert FOLDERS_OF.sub("", "in ~/runs/a.csv, /tmp/x/y.") == "in a.csv, y."


def add_to_history(out, *rows):
    """Write rows to the history of a run, as if they had been recorded before its last step."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path = out / "metrics.jsonl"
    path.write_text(path.read_text() + "".join(lines))
    content = path.read_bytes()
    record = {"lines": content.count(b"\n"), "sha256": hashlib.sha256(content).hexdigest()}
    newest = folders(out)[-1]
    one = read(newest)
    keep = frozenset(read(folder).step for folder in folders(out))
    shutil.rmtree(newest)
    write(out, replace(one, state=one.state | {"history": record}), keep=keep)


def test_a_folder_that_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match="There is no folder"):
        sharing.contents(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no run: model.json is missing"):
        sharing.contents(tmp_path)
    shutil.copytree(run.out, tmp_path / "damaged")
    weights = folders(tmp_path / "damaged")[-1] / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        sharing.contents(tmp_path / "damaged")


# There and back -----------------------------------------------------------------------------------


def test_a_run_goes_to_a_hub_and_comes_back(run, card, server, tmp_path):
    shown = []
    sent = sharing.push(
        run, "me/birds", private=True, card=card, token="hf_x",
        confirm=lambda items: not shown.extend(items),
    )  # fmt: skip
    files = server.files["me/birds"]
    assert paths(shown) == paths(sent.items) == sorted({*files} - {".gitattributes", "old.py"})
    assert {item.path: item.bytes for item in sent.items}.items() <= {
        path: len(content) for path, content in files.items()
    }.items()
    assert sent.url.endswith("/me/birds")
    assert server.private == {"me/birds": True}
    assert server.tokens == {"Bearer hf_x"}
    assert server.cards == [str(card)]
    assert not any(b"somebody" in content for content in files.values())

    place = sharing.pull("me/birds", tmp_path / "birds")
    fetched = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert fetched == set(paths(sent.items))  # no code, and nothing of the fetching itself
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_run(place)
    best = load_run(run.out)
    assert all(torch.equal(one, best.state_dict()[k]) for k, one in model.state_dict().items())
    assert Run.load(place).rows == Run.load(run.out).rows


def test_a_run_with_networks_of_its_own_needs_them_again(server, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    model = Model({"z": Normal(1), "x | z": Normal(3)}, {"z | x": Normal(net=net)})
    run = fit(model, {"x": X}, out=tmp_path / "run", **SETTINGS)
    with pytest.raises(ValueError, match=r"network of your own in q\(z\|x\), Linear"):
        sharing.contents(run.out)
    modules = {"q(z|x)": net}
    assert sharing.contents(run.out, modules=modules)
    sharing.push(run, "me/own")  # a run in memory knows its networks
    sharing.push(run.out, "me/own", modules=modules)
    with pytest.raises(ValueError, match="network of your own"):
        sharing.pull("me/own", tmp_path / "back")
    place = sharing.pull("me/own", tmp_path / "back", modules=modules)
    assert "aevb.load_run('own', modules={\"q(z|x)\": …})" in (place / "README.md").read_text()
    weights = load_run(place, modules=modules).state_dict()
    assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())


def test_a_private_push_into_a_public_repository_sends_nothing(run, card, server):
    sharing.push(run, "me/birds", card=card)
    before = dict(server.files["me/birds"])
    with pytest.raises(ValueError, match="me/birds is a public repository, so nothing was sent"):
        sharing.push(run, "me/birds", card=card, private=True, resumable=True)
    assert server.files["me/birds"] == before


def test_a_second_push_leaves_no_older_checkpoint(run, card, server, tmp_path):
    sharing.push(run, "me/birds", card=card)
    fit(small(), {"x": X}, out=tmp_path / "short", **SETTINGS | {"steps": 10})
    sharing.push(tmp_path / "short", "me/birds")  # with a card of its own
    place = sharing.pull("me/birds", tmp_path / "back")
    assert [read(one).step for one in folders(place)] == [10]
    text = (place / "README.md").read_text(encoding="utf-8")
    assert "aevb pull me/birds --out birds" in text
    assert "Not computed: the rows are not here." in text
    assert str(tmp_path) not in text


def test_a_saved_model_of_a_table_goes_to_a_hub_and_comes_back(server, tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    schema = aevb.Schema.read(frame)
    table = aevb.TableModel(schema, schema.mixture(2))
    table.save(tmp_path / "table")
    sharing.push(tmp_path / "table", "me/table")
    assert set(server.files["me/table"]) >= {"schema.json", "weights.safetensors", "manifest.json"}
    back = aevb.load_table(sharing.pull("me/table", tmp_path / "back"))
    before, after = (one.score(frame)["log_p"].to_numpy() for one in (table, back))
    assert np.array_equal(before, after)


def test_nothing_is_sent_without_consent(run, card, server):
    with pytest.raises(ValueError, match="Nothing was sent"):
        sharing.push(run, "me/birds", card=card, confirm=lambda items: False)
    assert server.files == {}


# What does not come back --------------------------------------------------------------------------


def test_a_repository_that_was_changed_is_refused_and_leaves_nothing(run, card, server, tmp_path):
    sharing.push(run, "me/birds", card=card)
    files = server.files["me/birds"]
    path = next(path for path in files if path.endswith("weights.safetensors"))
    whole, out = files[path], tmp_path / "birds"
    files[path] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(ValueError, match=r"me/birds was fetched, but cannot be used: .*SHA-256"):
        sharing.pull("me/birds", out)
    files[path] = whole
    declared = json.loads(files["model.json"])
    declared["p"]["x | z"]["net"] = {"name": "os.system"}
    files["model.json"] = json.dumps(declared).encode()
    with pytest.raises(ValueError, match="cannot be used"):
        sharing.pull("me/birds", out)
    del files["model.json"]
    with pytest.raises(ValueError, match="me/birds holds no run of aevb: model.json is missing"):
        sharing.pull("me/birds", out)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_too_large_is_refused_before_it_is_fetched(run, card, server, tmp_path):
    sent = sharing.push(run, "me/birds", card=card)
    total = sum(item.bytes for item in sent.items)
    server.fetched.clear()
    with pytest.raises(ValueError, match=f"allow it: most_bytes={total} .--most-bytes {total}."):
        sharing.pull("me/birds", tmp_path / "birds", most_bytes=total - 1)
    server.sizes["model.json"] = 3_000_000_000
    with pytest.raises(
        ValueError, match=r"has 3.0 GB \(its largest file, model.json, 3.0 GB\), but"
    ):
        sharing.pull("me/birds", tmp_path / "birds")
    server.sizes["model.json"] = None
    with pytest.raises(ValueError, match=r"does not say how large model.json of me/birds is"):
        sharing.pull("me/birds", tmp_path / "birds")
    assert (server.fetched, list(tmp_path.iterdir())) == ([], [])
    # What is not fetched does not count.
    server.sizes = {"old.py": 3_000_000_000}
    assert sharing.pull("me/birds", tmp_path / "birds", most_bytes=total).is_dir()


def test_what_is_not_there_is_named(server, run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="There is no repository me/nothing on the hub, or it is"):
        sharing.pull("me/nothing", tmp_path / "a")
    sharing.push(run.out, "me/birds")
    with pytest.raises(ValueError, match="me/birds has no such revision"):
        sharing.pull("me/birds", tmp_path / "a", revision="v7")
    with pytest.raises(ValueError, match="is no empty folder"):
        sharing.pull("me/birds", run.out)
    with pytest.raises(ValueError, match="name of a repository is \"user/name\", got 'birds'"):
        sharing.push(run.out, "birds")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="The hub cannot be reached"):
        sharing.pull("me/birds", tmp_path / "a")


def test_a_missing_package_is_named_with_the_command(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'aevb\[hub\]'"):
        sharing.push(run, "me/birds")


# The commands -------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="the extra hub is not installed")
def test_the_commands_list_ask_and_fetch(run, card, server, tmp_path, capsys, monkeypatch):
    from aevb.cli import main

    def call(*words) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["aevb", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    shutil.copytree(run.out, tmp_path / "birds")
    card.save(tmp_path / "birds" / "README.md")
    monkeypatch.chdir(tmp_path)
    code, out, err = call("push", "birds", "me/birds")
    assert code == 2
    assert "README.md (" in out
    assert err == "aevb: Nothing was sent. Add --yes to send these files.\n"
    assert server.files == {}
    code, out, err = call("push", "birds", "me/birds", "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("Sent ")
    code, out, err = call("pull", "me/birds", "--out", "back")
    assert (code, err) == (0, "")
    assert "The run is in back, and its files match their hashes." in out
    assert (Path("back") / "README.md").read_text(encoding="utf-8") == str(card)
    code, out, err = call("push", "birds", "me/birds", "--license", "mit")
    assert (code, err.startswith("aevb: birds/README.md is the card of the run.")) == (2, True)
