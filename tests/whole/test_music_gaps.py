"""The benchmark of gaps in music: its baseline is a Markov chain, and it runs on any collection."""

from __future__ import annotations

import itertools

import music_gaps
import numpy as np
import pytest
from music_gaps import Flips, Gappy


@pytest.fixture
def pieces() -> Gappy:
    random = np.random.default_rng(0)
    x = (random.random((6, 5, 88)) < 0.3).astype(float)
    removed = random.random((6, 5)) < 0.4
    removed[0] = [True, False, True, True, False]
    return Gappy(x, np.full(6, 5), removed)


def test_the_carried_value_is_scored_as_a_markov_chain(pieces):
    """One key of one piece against the sum over all of its paths."""
    flips = Flips(pieces)
    one = Gappy(pieces.x[:1], pieces.lengths[:1], pieces.removed[:1])
    gone = one.removed[0]
    total = 0.0
    for key in range(88):
        bits = one.x[0, :, key].astype(int)
        start = np.array([1 - flips.start[key], flips.start[key]])

        def log_p(kept: np.ndarray, bits: np.ndarray = bits, start: np.ndarray = start) -> float:
            # The chain starts at the first known step.
            first = int(np.flatnonzero(kept)[0])
            whole = 0.0
            for path in itertools.product((0, 1), repeat=5 - first):
                if all(path[t - first] == bits[t] for t in range(first, 5) if kept[t]):
                    steps = itertools.pairwise(path)
                    whole += start[path[0]] * np.prod([flips.step[a, b] for a, b in steps])
            return float(np.log(whole))

        total += log_p(np.ones(5, bool)) - log_p(~gone)
    assert flips.score(one, rest=True) == pytest.approx(total / gone.sum())


def test_gaps_are_filled_with_the_last_kept_step(pieces):
    x = pieces.carried()
    assert not x[0, 0].any()
    np.testing.assert_array_equal(x[0, 3], pieces.x[0, 1])
    assert np.isnan(pieces.with_gaps()[0, 2]).all()


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    random, content = np.random.default_rng(0), {}
    for part, lengths in (("train", (6, 5, 7)), ("validation", (5,)), ("test", (6, 4))):
        steps = (random.random((sum(lengths), 88)) < 0.5).astype(np.uint8)
        content |= {part: np.packbits(steps, axis=1), f"{part}_lengths": lengths}
    (tmp_path / "music").mkdir()
    np.savez(tmp_path / "music" / "jsb-chorales.npz", **content)
    monkeypatch.setenv("AEVB_DATA", str(tmp_path))
    sizes = {"hidden": 4, "latent": 2, "steps": 2, "segment": 4, "samples": 2, "particles": 4}
    music_gaps.main([word for name, value in sizes.items() for word in (f"--{name}", str(value))])
    printed = capsys.readouterr().out
    assert printed.count("±") == 2 + 3 * 2 + 2
    assert "nan" not in printed
