"""Collections of polyphonic music: the pieces that were packed, and files that are damaged."""

import numpy as np
import pytest

from aevb.data import music


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AEVB_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "music").mkdir()
    return tmp_path / "music"


def packed(pieces):
    return np.packbits(np.concatenate(pieces), axis=1)


def write(folder, **changes):
    random = np.random.default_rng(0)
    pieces = {
        part: [random.integers(0, 2, (n, 88), dtype=np.uint8) for n in lengths]
        for part, lengths in (("train", (3, 7, 1)), ("validation", (2,)), ("test", (4, 4)))
    }
    content = {part: packed(one) for part, one in pieces.items()}
    content |= {f"{part}_lengths": [len(x) for x in one] for part, one in pieces.items()}
    np.savez(folder / "jsb-chorales.npz", **(content | changes))
    return pieces


def test_pieces_are_unpacked_and_padded(folder):
    pieces = write(folder)
    assert music.at_hand("jsb-chorales")
    for part, found in zip(pieces, music.polyphonic("jsb-chorales"), strict=True):
        assert found.lengths.tolist() == [len(x) for x in pieces[part]]
        for x, row in zip(pieces[part], found.x, strict=True):
            np.testing.assert_array_equal(row[: len(x)], x)
            assert not row[len(x) :].any()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"train_lengths": [3, 7, 2]}, "the lengths sum to 12, but there are 11 steps"),
        ({"train_lengths": [3, 8, 0]}, "a piece has no steps"),
        ({"test": np.zeros((8, 10), np.uint8)}, "steps of 88 keys are 11 bytes, got"),
    ],
)
def test_a_damaged_collection_is_named(folder, changes, match):
    write(folder, **changes)
    with pytest.raises(ValueError, match=match):
        music.polyphonic("jsb-chorales")


def test_what_is_not_there_is_named(folder):
    assert not music.at_hand("jsb-chorales")
    with pytest.raises(ValueError, match=r"jsb-chorales.npz is not on this machine. Put it into"):
        music.polyphonic("jsb-chorales")
    with pytest.raises(ValueError, match="Unknown collection 'bach'. Choose one of jsb-chorales"):
        music.polyphonic("bach")
    (folder / "jsb-chorales.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="is no collection of music"):
        music.polyphonic("jsb-chorales")
