"""The syntax of grids and the names of their folders."""

import pytest

from aevb.comparison.grid import combinations, folder_name, label, parse_grid


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("k=2..5", ["2", "3", "4", "5"]),
        ("k=-1..1", ["-1", "0", "1"]),
        ("k=3..3", ["3"]),
        ("k=2..4,8,16", ["2", "3", "4", "8", "16"]),
        ("k=1e-3,0.5", ["1e-3", "0.5"]),
        ("likelihood=Normal, StudentT", ["Normal", "StudentT"]),
        ("hidden=[64],[64,64],[]", ["[64]", "[64,64]", "[]"]),
        ("text=a=b", ["a=b"]),
    ],
)
def test_values_of_an_argument(item, values):
    assert list(parse_grid([item]).values()) == [values]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["components"], "--set takes NAME=VALUES"),
        (["=3"], "--set takes NAME=VALUES"),
        (["k="], "a value is empty"),
        (["k=1,,2"], "a value is empty"),
        (["k=5..2"], "the range 5..2 is empty. Did you mean 2..5"),
        (["k=1..2..3"], "a range of whole numbers"),
        (["k=0.5..2"], "a range of whole numbers"),
        (["k=1,2,1"], "1 is there twice"),
        (["k=1..3,2"], "2 is there twice"),
        (["k=1", "k=2"], "--set k is given twice"),
        (["k=1..100000"], "more than 10,000 values"),
        (["k=1..1000", "l=1..1000"], "1,000,000 combinations"),
    ],
)
def test_mistakes(items, message):
    with pytest.raises(ValueError, match=message.replace("..", r"\.\.")):
        parse_grid(items)


def test_combinations_are_all_of_them_in_order():
    grid = parse_grid(["k=1..2", "z=4,8"])
    assert [label(one) for one in combinations(grid)] == [
        "k=1 z=4",
        "k=1 z=8",
        "k=2 z=4",
        "k=2 z=8",
    ]
    assert combinations({}) == [{}]
    assert label({}) == "model"


def test_folders_of_different_combinations_differ():
    odd = [
        {"a": "x/y"},
        {"a": "x_y"},
        {"a": "x y"},
        {"a": "../x"},
        {"a": "[64,64]"},
        {"a": "é" * 200},
    ]
    names = [folder_name(one) for one in odd]
    assert len(set(names)) == len(odd)
    assert not any("/" in name or len(name.encode()) > 250 for name in names)
    assert folder_name({"a": "[64,64]"}) == "a=[64,64]"
