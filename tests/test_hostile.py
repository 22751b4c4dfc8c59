"""Hostile data files: each is read, or refused by a sentence; none takes much memory."""

import tracemalloc

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
