"""Model cards: every number is that of the run or of a computation, and no cell of the data."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import aevb
from aevb import Model, Normal, Run, fit, mlp
from aevb.cli.options import record_command
from aevb.data.datasets import Recipe
from aevb.model_card import parts
from aevb.model_card.markdown import block, front_matter, plain, table
from aevb.model_card.parts import COMMAND
from aevb.page import checks
from aevb.page.notebook import opened_subject, subject_of_run

X = 1000 + np.random.default_rng(0).normal(size=(60, 3)).round(6)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(1), "x | z": Normal(3, net=aevb.linear(), scale="learned")},
        q={"z | x": Normal(net=aevb.linear(), scale="learned")},
    )
    out = tmp_path_factory.mktemp("cards") / "birds"
    recipe = Recipe("/home/somebody/birds.csv", columns={"x": ["wing", "beak <b>", "a|b"]})
    z = X - 1000
    return fit(model, {"x": z[:40]}, validation={"x": z[40:]}, steps=30, out=out, recipe=recipe)


@pytest.fixture(scope="module")
def few():
    """Fewer simulated data sets and steps of ascent: the same texts with other errors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ITERATIONS": 3, "GAP_SAMPLES": 20, "REPLICATES": 20}.items():
            patch.setattr(checks, name, value)
        yield


@pytest.fixture(scope="module")
def card(run, few):
    return run.card({"x": X[40:] - 1000}, about="For *tests*.", license="mit")


def section(card, title: str) -> str:
    return str(card).split(f"\n## {title}\n")[1].split("\n## ")[0].strip()


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the tables in a section by their first cell."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0]: line[1:] for line in cells}


def test_the_card_has_all_parts_and_front_matter_that_hubs_read(card):
    text = str(card)
    assert text.startswith('---\nlibrary_name: aevb\nlicense: "mit"\ntags:\n- "aevb"\n')
    assert re.findall("^## (.*)", text, re.M) == [
        "Model", "Bound", "Data", "Training", "Results", "Findings", "Limits", "Use", "Reproduce",
    ]  # fmt: skip
    assert "\n# birds\n" in text
    assert "For \\*tests\\*." in text
    assert card._repr_markdown_().lstrip().startswith("# birds")


def test_the_declaration_and_the_derivation_are_the_models(card, run):
    assert section(card, "Model") == block(str(run.model))
    assert section(card, "Bound") == block(str(run.model.explain()))


def test_the_results_are_those_of_the_evidence_and_the_gap(card, run):
    rows = rows_of(section(card, "Results"))
    exact = run.model.log_evidence(x=X[40:] - 1000)
    assert rows["log p (evidence)"][:2] == [f"{exact.mean:.3f}", "exact"]
    assert rows["log p (evidence)"][3] == "exact, 20 rows"
    bound = run.model.elbo(x=X[40:] - 1000, samples=2000, seed=0).value.mean().item()
    assert float(rows["ELBO"][0]) == pytest.approx(bound, abs=0.3)
    gap = float(rows["gap: log p − ELBO"][0])
    assert gap == pytest.approx(exact.mean - float(rows["ELBO"][0]), abs=2e-3)
    shares = [float(rows[f"… of {part}"][0]) for part in ("q's family", "one network for all rows")]
    assert gap == pytest.approx(sum(shares), abs=2e-3)


def test_the_training_is_that_of_the_run(card, run):
    text = section(card, "Training")
    rows = rows_of(text)
    assert rows["steps"][0] == "30"
    assert "patience" not in rows
    assert rows["elbo"][1] == f"{run.history['validation elbo'][-1]:.4f}"
    assert f"The best validation was {run.best.value:.4f} (elbo), at step {run.best.step}" in text
    assert text.startswith(f"30 steps in {run.seconds:.1f} s")


def test_the_data_are_described_without_a_cell_or_a_folder(card):
    text = section(card, "Data")
    assert rows_of(text)["data"] == ["birds.csv"]
    assert rows_of(text)["x"] == ["3", "Normal", "wing, beak &lt;b&gt;, a\\|b"]
    assert re.search(r"rows of the training \| 40 rows, hash [0-9a-f]{12}…", text)
    assert "somebody" not in str(card)
    cells = {f"{value:.6f}".rstrip("0") for value in (X - 1000).ravel()}
    assert not any(cell in str(card) for cell in cells)


def test_limits_and_findings_say_what_is_known_and_what_is_not(card, run):
    told = "By the recorded hash, the rows of the results are not the training rows."
    assert told in section(card, "Limits")
    opened = opened_subject(subject_of_run(run, {"x": X[:40] - 1000}, None), run)
    assert parts.limits(opened, {}, ()).startswith(
        "- The results are of rows that the model was trained on"
    )
    found = rows_of(section(card, "Findings"))
    assert {"level", "ok"} <= set(found)
    bare = run.card()
    assert section(bare, "Results") == "Not computed: the rows are not here."
    assert 'Not computed: the results, without rows: run.card({"x": X}).' in section(
        bare, "Limits"
    ).replace("\\", "")
    assert "has not stated what the model is for" in str(bare)


def test_the_example_of_the_card_loads_the_run(card, run, monkeypatch):
    code = section(card, "Use").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(run.out.parent)
    names = {"aevb": aevb}
    exec(code.replace("x=…", "x=X").replace("import aevb", ""), names | {"X": X[:3] - 1000})


def test_a_card_of_a_table_lists_columns_and_says_the_units(few, tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"wing": X[:, 0], "sort": ["tit", "owl"] * 30})
    schema = aevb.Schema.read(frame)
    fitted = schema.fit(schema.mixture(1), frame, progress=False)
    card = fitted.card(frame, out=tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == str(card)
    rows = rows_of(section(card, "Data"))
    assert rows["wing"][:2] == ["real", "Normal"]
    assert "tit" not in section(card, "Data")
    assert '- "tabular"' in str(card)
    text = section(card, "Results")
    score = fitted.score(frame)["log_p"].mean()
    assert rows_of(text)["log p (evidence)"][:2] == [f"{score:.3f}", "exact"]
    assert "densities of the data in their own units" in text
    assert "maximised the exact evidence" in section(card, "Bound")


def test_the_command_writes_the_card_beside_the_run(run, tmp_path, monkeypatch, capsys):
    from aevb.cli import main

    shutil.copytree(run.out, tmp_path / "birds")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/usr/bin/aevb", "train", "/home/somebody/birds.csv", "--x=3"])
    record_command(tmp_path / "birds")
    monkeypatch.setattr("sys.argv", ["/usr/bin/aevb", "card", "birds", "--license", "mit"])
    record_command(tmp_path / "birds")  # the first command stays
    assert (tmp_path / "birds" / COMMAND).read_text() == (
        "aevb train /home/somebody/birds.csv --x=3\n"
    )
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    text = (tmp_path / "birds" / "README.md").read_text(encoding="utf-8")
    assert "aevb train birds.csv --x=3" in text
    assert "aevb card birds --license mit" in text
    assert "birds.csv" in out  # the rows are not here, and the command says so
    assert "somebody" not in text
    with pytest.raises(SystemExit):
        main()
    assert "README.md exists, and may have been edited." in capsys.readouterr().err


def test_texts_cannot_break_out_of_the_card():
    assert plain("a\n# b [x](y) <script>") == "a \\# b \\[x\\](y) &lt;script&gt;"
    assert table(["a"], [["x | y\nz"]]).splitlines()[-1] == "| x \\| y z |"
    assert block("```\nend") == "````text\n```\nend\n````"
    assert json.loads(front_matter([], 'a"\nb: c').splitlines()[2].removeprefix("license: ")) == (
        'a"\nb: c'
    )


def test_a_card_is_a_markdown_file(card, tmp_path):
    with pytest.raises(ValueError, match=r"is no Markdown file. Name one, e.g. card.save"):
        card.save(tmp_path / "card.html")


def test_the_numbers_of_a_card_agree(tmp_path):
    rows = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()})
    run = fit(
        model,
        {"x": rows[:50]},
        validation={"x": rows[50:]},
        steps=20,
        seed=0,
        progress=False,
        out=tmp_path / "run",
        after=lambda step, model: {"rmse": 0.5},
    )
    text = run.card({"x": rows[50:]}).text
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    values = {row[0]: row[1] for row in cells}
    log_p, elbo, gap = (
        float(values[name]) for name in ("log p, from the best q", "ELBO", "gap: log p − ELBO")
    )
    assert abs(log_p - elbo - gap) < 2e-3
    assert ["rmse", "0.5000"] in cells  # a number of after=, not one of training
    assert "The ELBO is" not in text
    assert "By the recorded hash, the rows of the results are not the training rows." in text
    assert (
        "The results are of rows that the model was trained on" in run.card({"x": rows[:50]}).text
    )
