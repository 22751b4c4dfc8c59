"""Settings are defined once: fit's keywords, the command line's options and config.toml follow from
the dataclass.
"""

import os
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import aevb
from aevb import Bernoulli, Model, Normal, Settings, alternate, em, fit, joint, linear, mle, wrap
from aevb.cli.options import FILE_ONLY
from aevb.data.preparation import Affine
from aevb.estimate.batch import FamilyError
from aevb.training import settings as definition
from aevb.training.settings_options import SettingsOptions

ROOT = Path(__file__).parents[2]


def factor_analysis():
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(1), "x | z": Normal(3, net=linear(), scale="learned")},
        q={"z | x": Normal(net=linear())},
    )


def rows(n=60):
    generator = np.random.default_rng(0)
    return (
        generator.normal(size=(n, 1)) @ [[1.0, -2.0, 0.5]] + 0.3 * generator.normal(size=(n, 3))
    ).astype(np.float32)


# One definition -----------------------------------------------------------------------------------


def test_the_keywords_of_fit_are_the_fields_of_settings():
    assert get_type_hints(SettingsOptions) == {
        name: hint
        for name, hint in get_type_hints(Settings, localns={"Affine": Affine}).items()
        if name in {f.name for f in fields(Settings)}
    }
    assert SettingsOptions.__required_keys__ == frozenset()
    written = Path(definition.__file__).with_name("settings_options.py").read_text(encoding="utf-8")
    assert written == definition.options_source(), (
        "run python -m aevb.training.settings > src/aevb/training/settings_options.py"
    )


def test_every_setting_is_documented_where_it_is_defined():
    for one in fields(Settings):
        text = definition.documentation(one)
        assert text.endswith(".")
        assert "[" not in text, "rich would take it for markup"
        assert f" {one.name} ({one.type}): " in Settings.__doc__
        assert text in " ".join(Settings.__doc__.split())


def test_type_checkers_know_the_keywords_of_fit(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(
        "from aevb import Model, Run, fit\n"
        "def calls(m: Model) -> tuple[Run, list[Run]]:\n"
        "    fit(m, {}, stpes=3)\n"
        '    fit(m, {}, steps="3")\n'
        "    return fit(m, {}, steps=3, how={'y': 'gumbel'}), fit(m, {}, steps=3, seeds=2)\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--no-error-summary",
        str(tmp_path / "calls.py"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == {"3", "4"}, done.stdout + done.stderr
    assert 'Unexpected keyword argument "stpes"' in done.stdout


def test_every_setting_is_an_option_with_the_same_words():
    import typer.main

    from aevb.cli import app

    options = {
        option.name: option for option in typer.main.get_command(app).commands["train"].params
    }
    for one in fields(Settings):
        if one.name not in FILE_ONLY:
            assert options[one.name].help.startswith(definition.documentation(one))
            assert options[one.name].opts == [f"--{one.name.replace('_', '-')}"]
            assert options[one.name].default is None
    assert [name for name in FILE_ONLY if name in options] == []


# Files --------------------------------------------------------------------------------------------

small = st.floats(0, 10, exclude_min=True)
counts = st.integers(1, 10**9)
names = st.text(min_size=1, max_size=6)
schedules = st.one_of(
    st.builds(joint),
    st.builds(alternate, counts, counts),
    st.builds(
        em,
        m_steps=counts,
        tol=st.floats(0, 1),
        start=st.sampled_from(["auto", "data", "keep"]),
        accelerate=st.booleans(),
        least=st.none() | st.floats(1e-12, 0.5) | st.lists(st.floats(1e-12, 0.5), min_size=1),
    ),
    st.builds(mle, tol=st.floats(0, 1), optimiser=st.sampled_from(["auto", "lbfgs", "adam"])),
)
lengths = st.sampled_from(
    [{}, {"steps": 7}, {"epochs": 0.5}, {"epochs": 20}, {"kl_warmup": 3, "kl_cycles": 4}]
)
by_latent = st.dictionaries(names, st.floats(0, 1e300), max_size=3)
choices = st.fixed_dictionaries(
    {"schedule": schedules},
    optional={
        "batch": counts,
        "lr": small,
        "warmup": st.integers(0, 99),
        "decay": st.sampled_from(["cosine", "constant"]),
        "clip": small,
        "kl_warmup": st.integers(0, 99),
        "beta": st.one_of(st.floats(0, 10), by_latent),
        "free_bits": st.one_of(st.floats(0, 10), by_latent),
        "classify": st.floats(0, 1e300),
        "agree": st.floats(0, 1),
        "patience": counts,
        "seed": st.integers(0, 2**63 - 1),
        "distort": st.dictionaries(
            names,
            st.builds(Affine, st.tuples(counts, counts), small, small, small, small),
            max_size=2,
        ),
        "how": st.dictionaries(names, names, max_size=3),
        "bound": st.sampled_from(["elbo", "iwae"]),
        "samples": counts,
        "gradient": st.sampled_from(["plain", "stl", "dreg"]),
        "temperature": small,
        "validate_every": counts,
        "log_every": counts,
        "checkpoint_every": counts,
        "precision": st.sampled_from(["float32", "bf16"]),
        "compile": st.booleans(),
        "skip": st.integers(0, 9),
    },
)


@given(choices, lengths)
def test_settings_come_back_from_a_file_as_they_were(tmp_path_factory, chosen, length):
    settings = Settings(**(chosen | length))
    path = tmp_path_factory.mktemp("settings") / "run.toml"
    settings.to_toml(path)
    assert Settings.from_toml(path) == settings


@pytest.mark.parametrize(
    "schedule",
    [joint(), alternate(3, 2), em(tol=0.0, start="keep"), mle(optimiser="lbfgs"), mle()],
    ids=str,
)
def test_a_runs_config_gives_the_run_again(tmp_path, schedule):
    first, again = factor_analysis(), factor_analysis()
    fit(first, {"x": rows()}, steps=10, seed=3, schedule=schedule, out=tmp_path / "first")
    settings = Settings.from_toml(tmp_path / "first" / "config.toml")
    fit(again, {"x": rows()}, **vars(settings), out=tmp_path / "again")
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    configs = [
        tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in ("first", "again")
    ]
    assert configs[0] == configs[1]


def test_a_file_written_by_hand_may_name_a_schedule_alone(tmp_path):
    (tmp_path / "run.toml").write_text(
        'steps = 5\nschedule = "alternate:3,2"\n[how]\ny = "gumbel"\n[distort]\nx = [8, 8, 0.1]\n'
    )
    found = Settings.from_toml(tmp_path / "run.toml")
    assert found == Settings(
        steps=5, schedule=alternate(3, 2), how={"y": "gumbel"}, distort={"x": Affine((8, 8), 0.1)}
    )


WRONG = {
    "unknown": (
        "stpes = 3\nlearning_rate = 1",
        "has unknown settings: stpes, learning_rate. Did you mean 'steps'? The settings are epochs",
    ),
    "value": ("batch = 0", "batch is a whole number, 1 or more, got 0."),
    "both": ("epochs = 2\nsteps = 5", "Pass epochs= or steps=, not both."),
    "no TOML": ("steps 3", "is no valid TOML"),
    "unknown schedule": (
        'schedule = "slow"',
        "Unknown schedule 'slow'. Choose one of joint, alternate, em, mle",
    ),
    "schedule without a name": ("[schedule]\ne_steps = 3", "Unknown schedule None."),
    "schedule of another kind": (
        "schedule = 3",
        'schedule is a text, e.g. "alternate:500,500", or a table with a name, got 3.',
    ),
    "argument of a schedule": (
        '[schedule]\nname = "alternate"\nsteps = 3',
        "alternate has no steps. It takes e_steps, m_steps.",
    ),
    "value of a schedule": (
        '[schedule]\nname = "alternate"\ne_steps = "3"',
        "alternate takes positive numbers of steps, got 3 and 1000.",
    ),
    "numbers of a schedule": (
        'schedule = "alternate:a"',
        "alternate takes whole numbers, got 'a'.",
    ),
    "too many numbers": ('schedule = "joint:3"', "joint takes no numbers, got '3'."),
    "distortion": (
        "[distort]\nx = [8]",
        "distort gives height, width, rotate, shear, scale and shift by variable",
    ),
    "distortions": ("distort = 3", "distort gives height, width"),
    "how": ("how = 3", "how is a dictionary from latent to choice"),
    "choice": ("[how]\ny = 3", "how is a dictionary from latent to choice"),
    "beta": ("beta = -1.0", "beta is a number, 0 or more, or numbers by latent, e.g. 4.0 or"),
    "beta of a latent": ('[beta]\nz = "4"', 'e.g. 4.0 or {"z": 4.0}, got'),
    "free bits": ("free_bits = true", "free_bits is a number, 0 or more, or numbers by latent"),
    "cycles of no warm-up": ("kl_cycles = 4", "kl_cycles=4 repeats the warm-up of the KL terms"),
    "bound": ('bound = ["elbo"]', "bound is a word, got ['elbo']."),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, case):
    text, message = WRONG[case]
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        Settings.from_toml(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere.toml cannot be read: No such file or directory."):
        Settings.from_toml(tmp_path / "nowhere.toml")


def test_settings_are_exported_and_fit_takes_them():
    chosen = aevb.Settings(steps=4, seed=1)
    run = fit(factor_analysis(), {"x": rows()}, **vars(chosen))
    assert run.settings == replace(chosen, lr=0.05, samples=1, compile=False)


@pytest.mark.parametrize(
    ("bound", "asked", "samples"),
    [("elbo", None, 1), ("iwae", None, 5), ("particles", None, 5), ("iwae", 1, 1)],
)
def test_weighted_bounds_take_several_samples_by_default(bound, asked, samples):
    """One sample would make them the ELBO. The number is recorded, and read again."""
    chosen = replace(Settings(), bound=bound, samples=asked)
    assert chosen.samples == asked
    assert Settings.from_record(chosen.record()) == chosen
    if bound != "particles":  # a static model
        plan = factor_analysis().plan(bound=bound, samples=asked)
        run = fit(factor_analysis(), {"x": rows()}, **(vars(chosen) | {"steps": 1}))
        assert plan.samples == run.settings.samples == samples
        elbo = "The run maximises the ELBO: with 1 sample, the bound iwae is that."
        assert any(elbo in note for note in run.notes) == ((bound, samples) == ("iwae", 1))


def test_a_network_of_the_user_has_the_rate_of_hidden_layers():
    nets = {
        "module": (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 2e-3),
        "wrapped": (wrap(nn.Sequential(nn.Linear(3, 8), nn.Tanh())), 2e-3),
        "function": (lambda x: torch.tanh(x), 2e-3),
        "linear": (nn.Linear(3, 2), 0.05),
    }
    for name, (net, rate) in nets.items():
        model = Model(
            p={"z": Normal(1), "x | z": Normal(3, net=linear(), scale="learned")},
            q={"z | x": Normal(net=net)},
        )
        assert fit(model, {"x": rows()}, steps=1).settings.lr == rate, name


# The command line ---------------------------------------------------------------------------------


def train(monkeypatch, folder, *arguments):
    from aevb.cli import main

    monkeypatch.setattr("sys.argv", ["aevb", "train", *map(str, arguments)])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def test_a_recorded_recipe_is_run_again_and_options_override_it(tmp_path, monkeypatch, capsys):
    np.savetxt(tmp_path / "x.csv", rows(), delimiter=",", header="a,b,c", comments="")
    asked = ["fa", "--data", "x.csv", "--set", "z=1"]
    own = [
        "--steps",
        "6",
        "--batch",
        "20",
        "--lr",
        "0.03",
        "--seed",
        "5",
        "--schedule",
        "alternate:2,1",
        "--how",
        "z=detached",
        "--samples",
        "2",
    ]
    assert train(monkeypatch, tmp_path, *asked, *own, "--out", "first") == 0
    assert (
        train(monkeypatch, tmp_path, *asked, "--config", "first/config.toml", "--out", "again") == 0
    )
    first, again = (aevb.load_run(tmp_path / name).state_dict() for name in ("first", "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert (
        train(
            monkeypatch,
            tmp_path,
            *asked,
            "--config",
            "first/config.toml",
            "--epochs",
            "1",
            "--schedule",
            "joint",
            "--out",
            "other",
        )
        == 0
    )
    other = Settings.from_toml(tmp_path / "other" / "config.toml")
    assert other == replace(
        Settings.from_toml(tmp_path / "first" / "config.toml"),
        steps=None,
        epochs=1.0,
        schedule=joint(),
    )
    assert (
        train(
            monkeypatch,
            tmp_path,
            *asked,
            "--config",
            "first/config.toml",
            "--seeds",
            "2",
            "--out",
            "seeds",
        )
        == 0
    )
    assert Settings.from_toml(tmp_path / "seeds" / "seed-1" / "config.toml").seed == 1
    capsys.readouterr()


def test_the_command_line_says_errors_of_the_library_in_its_own_words(
    tmp_path, monkeypatch, capsys
):
    np.savetxt(tmp_path / "x.csv", rows(), delimiter=",", header="a,b,c", comments="")
    asked = ["--data", "x.csv", "--set", "z=1", "--steps", "2", "--out", "run"]
    assert train(monkeypatch, tmp_path, "fa", *asked, "--patience", "3") == 2
    assert (
        "aevb: patience counts validations; add --validation FILE, or --hold-out 0.1."
        in capsys.readouterr().err
    )
    assert train(monkeypatch, tmp_path, "vae", *asked, "--set", "likelihood=Bernoulli") == 2
    assert "but p gives x a Bernoulli. " in (told := capsys.readouterr().err)
    assert "On the command line, --set 'likelihood=Normal(scale=" in told


def test_errors_of_a_family_name_the_variable():
    with pytest.raises(FamilyError) as raised:
        fit(
            Model(
                p={"z": Normal(1), "x | z": Bernoulli(3, net=linear())},
                q={"z | x": Normal(net=linear())},
            ),
            {"x": rows()},
        )
    assert raised.value.variable == "x"
    with pytest.raises(FamilyError) as raised:
        fit(factor_analysis(), {"x": np.ones((9, 3), dtype=np.float32)})
    assert raised.value.variable == "x"
    with pytest.raises(ValueError) as infinite:
        fit(factor_analysis(), {"x": np.where(rows() > 1, np.inf, rows()).astype(np.float32)})
    assert not isinstance(infinite.value, FamilyError)


def test_a_short_recipe_leaves_the_models_usual_rate(tmp_path, monkeypatch, capsys):
    np.savetxt(tmp_path / "x.csv", rows(), delimiter=",", header="a,b,c", comments="")
    (tmp_path / "run.toml").write_text("steps = 3\n")
    assert (
        train(
            monkeypatch,
            tmp_path,
            "fa",
            "--data",
            "x.csv",
            "--set",
            "z=1",
            "--config",
            "run.toml",
            "--out",
            "run",
        )
        == 0
    )
    found = Settings.from_toml(tmp_path / "run" / "config.toml")
    assert (found.steps, found.lr, found.batch) == (3, 0.1, 32)
    (tmp_path / "run.toml").write_text("stpes = 3\n")
    assert (
        train(
            monkeypatch, tmp_path, "fa", "--data", "x.csv", "--config", "run.toml", "--out", "wrong"
        )
        == 2
    )
    assert (
        "run.toml has unknown settings: stpes. Did you mean 'steps'? The settings are"
        in capsys.readouterr().err
    )


def test_the_few_steps_of_small_data_are_noted():
    said = "By default fit makes at most 200 epochs, and with these data that is only 200 steps"
    model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()}, seed=0)
    rows = {"x": torch.randn(8, 2, generator=torch.Generator().manual_seed(0))}
    (note,) = fit(model, rows, progress=False).notes
    assert note.startswith(said)
    assert fit(model, rows, steps=200, progress=False).notes == ()
