"""The notation: what a key says, what it may not say, and that printing it loses nothing."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aevb.declare.notation import Key, Ref, parse_key

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@st.composite
def keys(draw) -> Key:
    """Any key that time allows: the place of the target says which parents it may read."""
    at = draw(st.sampled_from(["static", "t", "first", "last"]))
    places = {
        "static": [("static", 0), ("first", 0), ("last", 0)],
        "t": [("static", 0), ("t", 0), ("t", -1), ("t", 1)],
        "first": [("static", 0), ("first", 0)],
        "last": [("static", 0), ("last", 0)],
    }[at]
    parents = st.builds(lambda name, place: Ref(name, *place), NAMES, st.sampled_from(places))
    return Key(Ref(draw(NAMES), at), tuple(draw(st.lists(parents, max_size=4, unique=True))))


@settings(max_examples=200, deadline=None)
@given(keys())
def test_printing_and_parsing_are_inverse(key):
    assert parse_key(str(key)) == key
    assert str(parse_key(str(key))) == str(key)


@settings(max_examples=100, deadline=None)
@given(keys(), st.lists(st.sampled_from(["", " ", "  ", "\t", "\n"]), min_size=40, max_size=40))
def test_whitespace_between_words_says_nothing(key, blanks):
    words = re.findall(r"\w+|[^\w\s]", str(key))
    spaced = "".join(blank + word for blank, word in zip(blanks, words)) + "".join(
        words[len(blanks) :]
    )
    assert parse_key(spaced) == key


READ = [
    ("z", Key(Ref("z"))),
    ("x | z", Key(Ref("x"), (Ref("z"),))),
    ("x|y,z", Key(Ref("x"), (Ref("y"), Ref("z")))),
    ("h[t] | h[t-1], x[t-1]", Key(Ref("h", "t"), (Ref("h", "t", -1), Ref("x", "t", -1)))),
    ("b[t] | b[t+1], x[t]", Key(Ref("b", "t"), (Ref("b", "t", 1), Ref("x", "t")))),
    ("z[0] | x[0], c", Key(Ref("z", "first"), (Ref("x", "first"), Ref("c")))),
    ("z[T] | x[T]", Key(Ref("z", "last"), (Ref("x", "last"),))),
    ("c | b[0], f[T]", Key(Ref("c"), (Ref("b", "first"), Ref("f", "last")))),
    ("x[t] | z[t], z[t-1], c", Key(Ref("x", "t"), (Ref("z", "t"), Ref("z", "t", -1), Ref("c")))),
    ("z_1 | x2", Key(Ref("z_1"), (Ref("x2"),))),
    ("z[t-0]", Key(Ref("z", "t"))),
]


@pytest.mark.parametrize(("text", "key"), READ, ids=[text for text, _ in READ])
def test_a_key_is_read_as_the_mathematics_says(text, key):
    assert parse_key(text) == key


def test_the_parts_of_a_key():
    key = parse_key("z[t] | h[t], x[t-1], c")
    assert (key.name, key.at, repr(key)) == ("z", "t", "Key('z[t] | h[t], x[t-1], c')")
    assert [(ref.name, ref.at, ref.lag, ref.timed) for ref in key.parents] == [
        ("h", "t", 0, True), ("x", "t", -1, True), ("c", "static", 0, False),
    ]  # fmt: skip


BAD = [
    ("", "Cannot read '' in ''. A variable is a name such as z, z[t], z[t-1], z[0] or z[T]."),
    ("| z", "Cannot read '' in '| z'. A variable is a name"),
    ("x |", "'x |' has a bar but no parents. Drop the bar, or name the parents right of it."),
    ("x | ", "has a bar but no parents. Drop the bar"),
    ("x | y | z", '\'x | y | z\' is not a key. Write "variable | parent, parent", e.g. "x | z".'),
    ("x || z", "'x || z' is not a key."),
    ("x | y,, z", "Cannot read '' in 'x | y,, z'."),
    ("x | y,", "Cannot read '' in 'x | y,'."),
    ("x | y z", "Cannot read 'y z' in 'x | y z'."),
    ("x, y | z", "Cannot read 'x, y' in 'x, y | z'."),
    ("1x | z", "Cannot read '1x' in '1x | z'."),
    ("x-y | z", "Cannot read 'x-y'"),
    ("p(x|z)", "Cannot read 'p(x'"),
    ("x? | z", "Cannot read 'x?'"),
    ("x[t | z", "Cannot read 'x[t'"),
    ("x]t[ | z", "Cannot read 'x]t['"),
    ("x[t][t]", "Cannot read 'x[t][t]'"),
    ("x[] | z", "Cannot read the time index [] in 'x[] | z'. Use [t], [t-1], [t+1], [0] or [T]."),
    ("x[1] | z", "Cannot read the time index [1] in 'x[1] | z'."),
    ("x[s] | z", "Cannot read the time index [s]"),
    ("x[t*2]", "Cannot read the time index [t*2]"),
    ("x[T-1] | z", "Cannot read the time index [T-1]"),
    (
        "z[t] | z[t-2]",
        "'z[t] | z[t-2]' reads z[t-2]; only the neighbours [t-1] and [t+1] can be read. Carry "
        "older steps in a state, e.g. "
        '"h[t] | h[t-1], z[t-1]": GRU(64).',
    ),
    ("z[t] | z[t + 3]", "only the neighbours [t-1] and [t+1] can be read."),
    (
        "z[t-1] | x[t]",
        "'z[t-1] | x[t]' declares z[t-1]. Declare the rule for [t] and shift its parents instead.",
    ),
    ("z[t+1] | z[t]", "declares z[t+1]. Declare the rule for [t]"),
    ("x | z, z", "'x | z, z' names the parent z twice. Name it once."),
    ("x[t] | z[t], y, z[t]", "names the parent z[t] twice. Name it once."),
    (
        "c | x[t]",
        "'c | x[t]': c has no [t] but reads x[t]. Summarise the sequence first: \"b[t] | b[t+1], "
        'x[t]": GRU(256), then "c | b[0]".',
    ),
    ("c | x[t-1]", "c has no [t] but reads x[t-1]. Summarise the sequence first"),
    (
        "z[t] | x[0]",
        "'z[t] | x[0]' reads x[0] at every t. Read an end of the sequence from a static variable "
        '("c | x[0]", then z[t] | c) or',
    ),
    ("z[t] | x[T]", "'z[t] | x[T]' reads x[T] at every t."),
    (
        "z[0] | x[t]",
        "'z[0] | x[t]': the entry for step [0] reads x[t]. It may read static variables and x[0].",
    ),
    ("z[0] | x[T]", "the entry for step [0] reads x[T]. It may read static variables and x[0]."),
    (
        "z[T] | h[t-1]",
        "the entry for step [T] reads h[t-1]. It may read static variables and h[T].",
    ),
    (3, '3 is not a key. Write "variable | parent, parent", e.g. "x | z".'),
    (None, "None is not a key."),
    (("x", "z"), "('x', 'z') is not a key."),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[repr(text) for text, _ in BAD])
def test_a_bad_key_is_named_with_its_fix(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_key(text)
