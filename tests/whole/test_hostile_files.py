"""Hostile files and folders: each is read, or refused by a sentence; none takes much memory. Random
damage to a folder is never silent.
"""

import time
import tracemalloc

import faults
import hostile_folders
import pytest
from hostile_files import GROUPS, READ, outcome, write

FILES = [(group, name) for group, (_, files) in GROUPS.items() for name in files]


@pytest.mark.parametrize(("group", "name"), FILES, ids=[f"{group} {name}" for group, name in FILES])
def test_a_hostile_file_is_read_or_refused_by_a_sentence(tmp_path, group, name):
    build, files = GROUPS[group]
    content, words = files[name]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    write(tmp_path / name, content)
    tracemalloc.start()
    found, sentence = outcome(build(), tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == ("read" if words == READ else "refused"), sentence
    assert words in sentence
    assert peak < 2**26 + 64 * (tmp_path / name).stat().st_size


@pytest.fixture(scope="module")
def folders():
    """A run and a saved model in the current folder, to be damaged."""
    with faults.prepared():
        yield


# the other commands read folders by the same functions
QUICK = {"saved": ("load",), "run": ("load_run", "sample")}
LARGE = ("million", "100,000 tensors", "9,900", "many axes", "gigabytes")  # seconds of writing JSON
HOSTILE = [
    (kind, name)
    for kind, (named, _) in hostile_folders.KINDS.items()
    for name in named
    if not any(words in name for words in LARGE)
]


@pytest.mark.parametrize(
    ("kind", "name"), HOSTILE, ids=[f"{kind} {name}" for kind, name in HOSTILE]
)
def test_a_hostile_folder_is_read_or_refused_by_a_sentence(folders, kind, name):
    hostile_folders.make(kind, name)
    began = time.perf_counter()
    for what in QUICK[kind]:
        answer = hostile_folders.KINDS[kind][1][what]()
        assert not answer.raw, (what, answer.words)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("kind", "count", "commands"),
    [("run", 10, ("load_run", "Run.load", "sample", "train --resume")), ("saved", 40, ("load",))],
)
def test_random_damage_is_told_or_changes_nothing(folders, kind, count, commands):
    found = list(faults.damage(kind, count, 5, commands))
    assert len(found) == count * len(commands)
    assert [case for case in found if case[3] in ("raw", "silent")] == []
