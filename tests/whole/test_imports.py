"""Imports: every public name is found, and nothing is loaded before it is needed."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import aevb


def test_importing_the_library_imports_nothing_heavy():
    heavy = ("scipy", "sklearn", "matplotlib", "typer", "rich", "pandas")
    code = (
        f"import sys; from aevb import *; print([name for name in {heavy!r} if name in "
        f"sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_a_fit_does_not_load_torchs_compiler_unless_it_compiles():
    """It takes as long to load as torch itself. 1,020 steps: enough for one to be recorded."""
    code = (
        "import sys, torch; from aevb import fit, zoo; from aevb.training import gradient_steps "
        "as step; made = step.compile_step; count = []\nstep.compile_step = lambda *given, "
        "**more: (count.append(1), made(*given, **more))[1]\nfit(zoo.vae(16, 2, hidden=(8,)), "
        "{'x': torch.rand(60, 16)}, steps=1020, batch=20, progress=False)\nprint(len(count), "
        "[name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "1 []\n"
    )


def test_public_names_are_imported_when_they_are_asked_for():
    """Those who check types read other lines than Python does: both say the same."""
    stub = ast.parse(Path(aevb.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = next(
        ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)
    )
    assert set(aevb.__all__) == set(told) == set(exported)
    for name, module in told.items():
        assert getattr(aevb, name) is getattr(importlib.import_module(module), name)
    assert set(aevb.__all__) <= set(dir(aevb))
    for odd in ("Norml", "", "zoo.vae", "training.fit", "_HOM"):
        with pytest.raises(AttributeError, match=f"module 'aevb' has no attribute {odd!r}"):
            getattr(aevb, odd)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from aevb import nothing")


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["train", "--help"], ["trian"]])
def test_help_does_not_wait_for_torch(asked):
    code = (
        f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv[1:] = {asked}; from aevb.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
    assert done.returncode == (2 if asked == ["trian"] else 0)


def test_a_module_is_found_by_its_name_too():
    code = "import aevb; print(aevb.zoo.vae(4, 2).graph.latents)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "('z',)\n"


def test_the_zoo_is_one_object_under_all_its_names():
    code = (
        "from aevb import *; import aevb; from aevb.zoo import zoo as other; "
        "import aevb.zoo as third; "
        "print(zoo is other is third is aevb.zoo, zoo['vae'] is zoo.vae, list(zoo)[:2], 'x' in zoo)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True ['fa', 'vae'] False\n"
