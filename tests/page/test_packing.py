"""Packing of arrays, the HTML of a page, and what it holds against hostile texts."""

import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from aevb.page.contents import pack_numbers
from aevb.page.html import asset, document, page, shell, to_json, write_page
from aevb.page.packing import TYPES, pack, quantised, unpack


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), (100, 40, 5)])
def test_a_packed_array_is_the_array_again(dtype, shape):
    values = (np.random.default_rng(0).integers(0, 200, size=shape)).astype(TYPES[dtype])
    packed = json.loads(json.dumps(pack(values, dtype)))
    found = unpack(packed)
    assert found.dtype == np.dtype(TYPES[dtype]).newbyteorder("<")
    assert found.shape == shape
    assert (found == values).all()


def test_arrays_that_shrink_are_deflated_and_others_are_not():
    generator = np.random.default_rng(0)
    assert pack(np.zeros(1000), "f4")["z"]
    assert not pack(generator.normal(size=1000), "f4")["z"]


@pytest.mark.parametrize(("values", "dtype"), [([256], "u1"), ([-1], "u4"), ([np.nan], "u2")])
def test_numbers_that_a_type_cannot_hold_are_refused_and_never_wrapped(values, dtype):
    with pytest.raises(ValueError, match=f"{dtype} holds numbers from"):
        pack(np.array(values), dtype)


@given(
    arrays(
        np.float64,
        array_shapes(max_dims=2, max_side=30),
        elements=st.floats(width=64, allow_subnormal=False),
    )
)
def test_quantised_numbers_are_right_to_half_a_step(values):
    found = quantised(values)
    numbers = unpack(found["values"])
    finite = np.isfinite(values)
    assert ((numbers == 65535) == ~finite).all()
    # Halves, because high − low may overflow.
    span = found["high"] / 2 - found["low"] / 2
    back = found["low"] / 2 + span * (numbers[finite] / 65534)
    assert (np.abs(back - values[finite] / 2) <= span / 65534 * 0.5001).all()


def test_numbers_of_a_column_that_differ_little_keep_their_differences():
    times = 1.7e9 + np.arange(50.0)[:, None]
    assert (unpack(pack_numbers(times)["values"]) == times).all()
    plain = np.random.default_rng(0).normal(size=(50, 2))
    assert pack_numbers(plain)["values"]["$"] == "f4"
    assert pack_numbers(np.full((3, 1), np.nan))["values"]["$"] == "f4"
    assert (unpack(pack_numbers(np.full((3, 1), 1e300))["values"]) == 1e300).all()


def test_grey_levels_take_a_byte_and_others_two():
    grey = np.array([[0.0, 0.5, 1.0]])
    assert pack_numbers(grey, unit=True)["values"]["$"] == "u1"
    for values in (np.array([[0.0, np.nan]]), np.array([[-0.5, 2.0]])):
        assert pack_numbers(values, unit=True)["values"]["$"] == "u2"


# The file -----------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<script",
    "]]>",
    "\u2028",
    "& < > \"'",
    "\x00",
]


def content(name="run"):
    return document([{"name": name, "problems": HOSTILE, "x": [1.5, float("nan"), -float("inf")]}])


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def test_the_policy_names_exactly_the_script_and_the_style_of_the_page():
    text = page(content())
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    script = re.search(r'<script type="module">(.*)</script>\n</body>', text, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    for kind, inner in {"script-src": script, "style-src": style}.items():
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
        assert "\r" not in inner  # a browser would read a line feed, and another hash
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "</script" not in asset("app.js")
    assert "</style" not in asset("app.css")


def test_no_text_breaks_out_of_the_data_and_every_text_comes_back():
    text = page(content())
    assert data_of(text)["runs"][0]["problems"] == HOSTILE
    inner = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in inner
    assert text.count("<script") == asset("app.js").count("<script") + 2


def test_the_title_is_escaped_once():
    title = re.search(r"<title>(.*?)</title>", page(content("a & <b>")))[1]
    assert title == "a &amp; &lt;b&gt; – aevb"
    assert html.unescape(title) == "a & <b> – aevb"


def test_numbers_that_json_does_not_have_become_null():
    assert data_of(page(content()))["runs"][0]["x"] == [1.5, None, None]
    assert json.loads(to_json({1: (float("nan"), np.float64("inf"), 2.0)})) == {
        "1": [None, None, 2]
    }


def test_equal_content_gives_equal_bytes_and_the_file_is_written_whole(tmp_path, monkeypatch):
    a, b = tmp_path / "a.html", tmp_path / "b.html"
    for out in (a, b):
        write_page(content(), out)
    assert a.read_bytes() == b.read_bytes()
    before = a.read_bytes()

    def fail(self, *_, **__):
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(OSError, match="nothing was written"):
        write_page(content("other"), a)
    assert a.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_name_that_is_no_text_does_not_stop_the_page(tmp_path):
    write_page(content("run \udcff"), tmp_path / "page.html")
    assert "run ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_shell_of_the_server_has_no_inline_script():
    assert re.findall(r"<script[^>]*>([^<]*)</script>", shell()) == [""]
