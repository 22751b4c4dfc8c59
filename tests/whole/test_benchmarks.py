"""The benchmarks run, all ways of writing a step compute one bound, and the page of numbers says
what the files say.
"""

import inspect
import json
import math
import re
import sys
from dataclasses import replace
from importlib.metadata import version

import contention
import fallbacks
import fits
import lean
import long_sequences
import particle_bound
import passes
import precision
import pytest
import scaling
import steps
import switches
import timing
import torch
from agreement import Bounds, bounds, disagreeing
from compiled_runs import compiles
from contenders import BASE, ENTRIES, FLOOR, OURS, build, contenders
from imports import startup
from library import declared, stepping, training
from problems import BATCH, QUICK, SIZES, Batches, Contender, Problem
from products import products
from studies import STUDIES, Place
from tables import DOCS, PAGES, rendered

from aevb.compiled_step import fused_adam, fusing, recording
from aevb.runtime import private_torch

OWN = [
    name
    for name, entry in ENTRIES.items()
    if entry.needs is None and not entry.slow and entry.device is None
]


def problem(model, **more):
    return Problem(model, QUICK[model], **more)


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """The benchmarks take cores away from their process, which here is the tests'."""
    for module in (steps, scaling, switches):
        monkeypatch.setattr(module, "use_cores", lambda threads: None)


def test_a_quick_run_times_every_own_way_and_writes_ratios(tmp_path, capsys):
    steps.main(
        [
            "--quick",
            "--models",
            *SIZES,
            "--ways",
            *OWN,
            "--threads",
            "1",
            "--json",
            str(tmp_path / "steps.json"),
        ]
    )
    found = json.loads((tmp_path / "steps.json").read_text())
    assert found["machine"]["versions"]["torch"] == version("torch")
    assert list(found["models"]) == list(SIZES)
    for model, one in found["models"].items():
        assert (one["rounds"], one["left out"]) == (1, {})
        assert set(one["ways"]) == set(contenders(model, "cpu", OWN))
        assert {BASE, OURS, FLOOR, "aevb, eager", "aevb, bfloat16"} <= set(one["ways"])
        assert one["ways"][BASE]["speed"] == one["ways"][FLOOR]["floor"] == 1.0
        assert all(
            row[key] > 0
            for row in one["ways"].values()
            for key in ("ms", "low", "high", "speed", "floor")
        )
    assert "aevb, eager" in capsys.readouterr().out


@pytest.mark.parametrize("model", SIZES)
def test_all_ways_compute_the_same_bound_at_the_same_weights(model):
    # Draws are seeded. At five standard errors another seed would fail about once in a million
    # comparisons.
    found = bounds(problem(model), OWN, steps=0, epochs=1)
    assert set(found) == set(contenders(model, "cpu", OWN)) - {FLOOR}
    assert disagreeing(found) == []
    assert found["aevb, eager"] == found[OURS]  # a recorded step is the step


def test_all_ways_of_a_vae_train_to_the_same_bound():
    found = bounds(problem("vae"), [BASE, OURS, "lean, by hand"], steps=100, epochs=1)
    assert disagreeing(found) == []
    assert found[OURS].trained > found[OURS].first + 1


@compiles
@pytest.mark.slow
def test_a_step_under_torchs_compiler_computes_the_same_bound():
    found = bounds(problem("vae"), [OURS, "lean, torch.compile"], steps=0, epochs=1)
    assert set(found) == {OURS, "lean, torch.compile"}
    assert disagreeing(found) == []


def test_steps_of_a_graph_are_all_taken_each_with_rows_of_its_own(monkeypatch):
    """Without a GPU: the work of a graph is done where the graph would be replayed."""
    monkeypatch.setattr(lean, "replayed", lambda work, warm_up=3: work)
    rows = torch.arange(1000.0).unsqueeze(1)
    seen = []

    def work(x):
        seen.append(x.clone())
        return x.sum()

    taken = lean.GraphsOfSteps(work, Batches(rows))
    for _ in range(23):
        last = taken.step()
    assert len(seen) == 20
    last.block_until_ready()
    assert len(seen) == 23
    for epoch in (seen[:10], seen[10:20]):
        assert torch.equal(torch.cat(epoch).sort(0).values, rows)
    assert taken.loss() == seen[-1].sum()
    assert len(seen) == 23


@pytest.mark.parametrize("recorded", [True, False])
def test_eager_steps_are_not_recorded(recorded):
    run = training(declared(problem("vae")), {"x": problem("vae").rows()})
    contender = stepping(run, recorded=recorded)
    for _ in range(timing.WARM_UP):
        contender.step()
    assert bool(run.stepper.compiled) is recorded


def test_a_bound_that_is_another_is_found_out():
    ours = Bounds(-100.0, 0.1, -50.0)
    assert disagreeing({OURS: ours, "the same": Bounds(-100.3, 0.1, -51.0)}) == []
    wrong = disagreeing(
        {
            OURS: ours,
            "without a term": Bounds(-97.7, 0.1, -51.0),
            "stuck": Bounds(-100.0, 0.1, math.nan),
        }
    )
    assert [line.split(":")[0] for line in wrong] == [
        "without a term, at the first weights",
        "stuck, after training",
    ]


def test_a_contender_that_fails_is_left_out_with_its_reason(monkeypatch):
    def broken(problem):
        raise RuntimeError("no such kernel\nat some line")

    monkeypatch.setitem(ENTRIES, "Pyro", type(ENTRIES["Pyro"])(broken, ("vae",)))
    monkeypatch.setitem(
        ENTRIES, "pythae", type(ENTRIES["pythae"])(broken, ("vae",), needs="no_such_module")
    )
    found, left_out = build(problem("vae"), [FLOOR, "Pyro", "pythae", "aevb, compiled"], quick=True)
    assert list(found) == [FLOOR]
    assert left_out == {
        "Pyro": "RuntimeError: no such kernel",
        "pythae": "no_such_module is not installed (pip install 'aevb[bench]')",
        "aevb, compiled": "compiling takes longer than a quick run",
    }


@pytest.mark.parametrize("model", SIZES)
def test_the_floor_has_all_products_of_a_step(model):
    """A layer of a × b costs a·b multiplications a row in each of three products, less the gradient
    of the data.
    """
    s = SIZES[model]
    H, C, T, h = s.hidden[0], s.classes, s.steps, s.h
    a_row = {
        "vae": 2 * s.x * H + 3 * (H * H + H * 2 * s.z) + 3 * (s.z * H + H * H + H * s.x),
        "gmvae": 2 * s.x * H
        + 3 * (H * H + H * C)
        + 2 * s.x * H
        + 3 * C * (H * H + H * 2 * s.z)
        + 3 * C * (s.z * H + H * H + H * s.x),
        "vrnn": T * 2 * s.x * (4 * h + H)  # what the cells and q read of the data
        + 3 * (T - 1) * 4 * h * (s.z + 3 * h)  # two layers of cells: z, below, and twice the state
        + 3 * T * (h * H + H * H + H * 2 * s.z)  # q
        + 3 * T * (h * H + H * H + H * 2 * s.z)  # the prior of z
        + 3 * T * ((h + s.z) * H + H * H + H * s.x),
    }
    found = sum(
        p.rows * p.times * p.inputs * p.outputs * (3 if p.back else 2)
        for p in products(Problem(model, s))
    )
    assert found == BATCH * a_row[model.removesuffix("-tutorial")]


def test_times_are_ratios_within_rounds():
    found = timing.summary(
        {"slow": [4.0, 40.0, 8.0], "fast": [1.0, 10.0, 4.0]}, base="slow", floor="fast"
    )
    assert found["slow"] == {
        "ms": 8000.0,
        "low": 6000.0,
        "high": 24000.0,
        "speed": 1.0,
        "floor": 4.0,
    }
    assert found["fast"] == {
        "ms": 4000.0,
        "low": 2500.0,
        "high": 7000.0,
        "speed": 4.0,
        "floor": 1.0,
    }
    counted = []
    times = timing.interleaved(
        {"a": lambda: counted.append("a"), "b": lambda: counted.append("b")},
        3,
        0.0,
        "cpu",
        warm_up=2,
    )
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert sorted(counted[10:]) == ["a"] * 3 + ["b"] * 3


def test_a_quick_study_of_growth_writes_a_file_and_a_picture(tmp_path):
    options = ["--quick", "--device", "cpu", "--threads", "1", "--out", str(tmp_path)]
    scaling.main([*options, "--only", "rows", "latent", "seeds"])
    scaling.main([*options, "--only", "classes"])
    found = json.loads((tmp_path / "scaling-cpu.json").read_text())
    # those before stay: the machine is the same
    assert list(found["studies"]) == ["rows", "latent", "classes"]
    assert list(found["left out"]) == ["seeds"]
    for study in found["studies"].values():
        for points in study["lines"].values():
            assert points[0]["times"] == 1.0
            assert all(point["ms"] > 0 for point in points)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    page = rendered("<!-- scaling-cpu.json: run this -->\n<!-- end -->\n", tmp_path)
    assert "| rows of data: memory-mapped | 1,000, 10,000 |" in page
    assert "(figures/scaling.png)" in page


def test_runs_together_and_sequences_are_steps_of_fit(tmp_path):
    place = Place("cpu", tmp_path, rounds=1, seconds=0.0, quick=True)
    for name in ("seeds", "length"):
        for points in STUDIES[name].lines(place).values():
            for piece in points.values():
                taken = piece()
                taken.block_until_ready()
                assert all(
                    run.step == 1 and float(run.stepper.tally.taken) == 1 for run in taken.runs
                )


def test_commands_are_timed_from_start_to_end():
    found = startup(1, {"short": [sys.executable, "-S", "-c", "pass"]})
    assert found["short"]["ms"] > 0


STEPS = {
    "machine": {
        "device": "a chip",
        "kind": "cpu",
        "cores": 4,
        "threads": 2,
        "float32 products": "highest",
        "versions": {"torch": "9"},
    },
    "models": {
        "vae": {
            "rounds": 3,
            "ways": {
                BASE: {"ms": 12.345, "speed": 1.0, "floor": 4.0},
                OURS: {"ms": 3.0, "speed": 4.1, "floor": 1.01},
            },
            "left out": {"Pyro": "it is not there"},
        }
    },
}


TIMES = {
    BASE: {"ms": 9.0, "speed": 1.0},
    OURS: {"ms": 0.1234, "speed": 73.0},
    "aevb, compiled": {"ms": 0.2, "speed": 45.0},
}
FITS = {
    "machine": STEPS["machine"],
    "models": {"vae": {"rounds": 2, "ways": TIMES}, "gmvae": {"rounds": 9, "ways": TIMES}},
}


def test_models_measured_earlier_on_the_same_machine_stay_in_the_file(tmp_path, monkeypatch):
    path, here = tmp_path / "steps.json", {"device": "one"}
    monkeypatch.setattr(timing, "machine", lambda device: dict(here))
    timing.keep(path, "cpu", {"vae": 1, "gmvae": 2})
    timing.keep(path, "cpu", {"gmvae": 3})
    assert json.loads(path.read_text()) == {
        "machine": {"device": "one"},
        "models": {"vae": 1, "gmvae": 3},
    }
    here["device"] = "another"
    timing.keep(path, "cpu", {"vrnn": 4})
    assert json.loads(path.read_text()) == {"machine": {"device": "another"}, "models": {"vrnn": 4}}


@pytest.mark.slow
def test_a_fit_and_the_tutorials_loop_take_turns(tmp_path, capsys):
    fits.main(
        [
            "--quick",
            "--models",
            "vae-tutorial",
            "--ways",
            OURS,
            "--device",
            "cpu",
            "--json",
            str(tmp_path / "fits.json"),
        ]
    )
    found = json.loads((tmp_path / "fits.json").read_text())["models"]["vae-tutorial"]
    assert (list(found["ways"]), found["rounds"], found["steps"]) == ([OURS, BASE], 1, 2)
    assert found["ways"][OURS]["speed"] == pytest.approx(
        found["ways"][BASE]["ms"] / found["ways"][OURS]["ms"], rel=1e-3
    )
    assert "times the tutorial's speed" in capsys.readouterr().out


def test_both_precisions_train_from_the_same_seeds(tmp_path, capsys):
    arguments = [
        "--data",
        "digits",
        "--models",
        "vae",
        "--seeds",
        "2",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    precision.main([*arguments, "--json", str(tmp_path / "precision.json")])
    found = json.loads((tmp_path / "precision.json").read_text())
    row = found["models"]["vae"]
    full, half = row["bounds"].values()
    assert full != half
    assert len(set(full)) == 2
    better = [100 * (b - a) / abs(a) for a, b in zip(full, half, strict=True)]
    assert row["better"] == pytest.approx(sum(better) / 2)
    assert row["error"] == pytest.approx(abs(better[0] - better[1]) / 2)
    assert "2 seeds: bfloat16 is better by" in capsys.readouterr().out
    page = rendered("<!-- precision.json: run it -->\n<!-- end -->\n", tmp_path)
    assert (
        f"| 2 | {sum(full) / 2:.2f} | {sum(half) / 2:.2f} | {row['better']:+.2f} ± "
        f"{row['error']:.2f} |" in page
    )


def operations(variant):
    """The names of a recorded step's operations; None if it was not recorded."""
    (step,) = variant.run.stepper.compiled.values() or [None]
    return step and [getattr(node.target, "__name__", "") for node in step.run.graph.nodes]


def taken(variant, count=15):
    for _ in range(count):
        variant.step()
    return variant


@pytest.mark.slow
@pytest.mark.parametrize("mode", switches.MODES)
@pytest.mark.parametrize("model", ["gmvae", "vrnn"])
def test_without_a_pass_a_step_has_the_same_numbers_and_lacks_the_pass(model, mode, monkeypatch):
    for module in (fusing, fused_adam):  # torch's compiler takes long
        monkeypatch.setattr(
            module, "or_plain", lambda compile, function, *_: lambda given: function(*given)
        )
    products = []  # of each step after it was rewritten; fusing then puts some into batches

    def counted(graph, *given, rewrite=recording.rewritten, **options):
        done = rewrite(graph, *given, **options)
        names = [getattr(node.target, "__name__", "") for node in done.graph.nodes]
        products.append(sum("mm" in name.partition(".")[0] for name in names))
        return done

    monkeypatch.setattr(recording, "rewritten", counted)
    sizes = replace(QUICK[model], steps=2 * QUICK[model].steps)  # enough steps to merge products
    everything = list(passes.PASSES)
    found = {
        name: taken(build())
        for name, build in passes.variants(Problem(model, sizes), mode, everything).items()
    }
    assert set(found) - {passes.ALL} == (
        {"recording", "hand-written gradients"}
        if mode == "recorded"
        else set(everything) - {"recording", "deferral and streams", "CUDA graphs"}
    )
    read = {name: one.run.stepper.read() for name, one in found.items()}
    for name, values in read.items():
        assert values == pytest.approx(read[passes.ALL], rel=1e-4), name
        assert found[name].notes() == []
    done = {name: operations(one) for name, one in found.items()}
    full = done[passes.ALL]
    if mode == "recorded":
        assert done["recording"] is None
        assert done["hand-written gradients"] != full
        return
    assert full.count("compiled") > 2
    assert "compiled" not in done["fusing"]
    assert "_addmm_activation.default" in full
    assert "_addmm_activation.default" not in done["ReLU in the product"]
    assert not found["fused Adam"].run.stepper.moving
    assert found["fusing"].run.stepper.moving
    if model == "vrnn":
        merged = dict(zip(found, products, strict=True))
        assert merged["merging of products"] > merged[passes.ALL] + sizes.steps


def test_switches_change_nothing_outside_their_steps():
    plain = private_torch.fused_adam
    step = switches.Switched(
        lambda: switches.begin(problem("vae"), "recorded"),
        (switches.Change(private_torch, "fused_adam", None),),
    )
    step.step()
    assert private_torch.fused_adam is plain is not None


def test_lines_of_code_are_those_without_comments_and_docstrings():
    def documented(x):
        """A docstring of
        two lines.
        """
        # a comment

        return [
            x,  # another comment
            """a text of
            two lines""",
        ]

    assert passes.lines_of_code(documented) == 6


@pytest.mark.slow
def test_a_quick_run_says_what_each_pass_earns_and_costs(tmp_path, capsys):
    file = tmp_path / "passes-cpu.json"
    models = ["--models", "vae", "vrnn"]
    passes.main(["--quick", "--modes", "recorded", "--device", "cpu", *models, "--json", str(file)])
    found = json.loads(file.read_text())["models"]
    for one in found.values():
        assert list(one["recorded"]) == [
            switches.AGAIN,
            passes.ALL,
            "recording",
            "hand-written gradients",
        ]
        assert one["recorded"][passes.ALL]["floor"] == 1.0
        assert one["lines"]["recording"] > one["lines"]["ReLU in the product"] > 10
    assert "lines of code" in capsys.readouterr().out
    page = rendered("<!-- passes-cpu.json: run it -->\n<!-- end -->\n", tmp_path)
    ratios = " | ".join(f"{one['recorded']['recording']['floor']:.2f}" for one in found.values())
    assert f"| recording | {found['vae']['lines']['recording']} | {ratios} |" in page
    assert "CUDA graphs" not in page


def test_every_private_api_is_taken_away():
    source = inspect.getsource(private_torch)
    found = set(re.findall(r"^(\w+)(?:: Any)? = _(?:find|module)\(", source, re.MULTILINE))
    operations = {name for name in found if name.isupper()}  # found in a graph, never called
    assert len(operations) == 4
    of_several_models = {"vmap_fallback_enabled", "set_vmap_fallback"}
    others = {"HOOKS", "inductor", "cpp_kernels"}
    assert set(fallbacks.MISSING) == found - operations - of_several_models | others


@pytest.mark.slow
def test_a_quick_run_says_what_is_slower_without_a_private_api(tmp_path, capsys):
    file = tmp_path / "fallbacks-cpu.json"
    fallbacks.main(["--quick", "--modes", "recorded", "--device", "cpu", "--json", str(file)])
    assert "the run says" in capsys.readouterr().out
    found = json.loads(file.read_text())["models"]
    assert set(found["vae"]["recorded"]) == {fallbacks.UNTOUCHED, switches.AGAIN} | {
        name
        for name, api in fallbacks.MISSING.items()
        if not api.student and "recorded" in api.modes
    }
    assert set(found[fallbacks.STUDENT]["recorded"]) == {
        fallbacks.UNTOUCHED,
        switches.AGAIN,
        "standard_gamma",
    }
    assert found["vae"]["recorded"][fallbacks.UNTOUCHED]["notes"] == []
    for name, what in private_torch.SLOWER.items():
        model = fallbacks.STUDENT if fallbacks.MISSING[name].student else "vrnn"
        assert what in found[model]["recorded"][name]["notes"][0]
    page = rendered("<!-- fallbacks-cpu.json: run it -->\n<!-- end -->\n", tmp_path)
    row = found["vae"]["recorded"]["fused_adam"]
    assert f"| fused_adam | {row['floor']:.2f} | " in page
    assert f"| {row['notes'][0]} |" in page


def test_a_variant_that_stops_says_why(monkeypatch):
    monkeypatch.setattr(switches, "WARM_UP", 2)
    given = switches.options(None, [], [], []).parse_args(["--quick", "--device", "cpu"])
    switches.prepare(given)

    def stopping():
        raise ValueError("no such function")

    untouched = fallbacks.variants(problem("vae"), "recorded", [], heavy=False)
    builders = untouched | {"broken": lambda: switches.Switched(stopping)}
    found = switches.measured(builders, fallbacks.UNTOUCHED, given)
    assert found["broken"]["notes"] == ["Stops with ValueError: no such function"]
    assert (switches.ratio(found["broken"]), switches.ratio(None)) == ("stops", "–")


def test_the_page_is_filled_from_the_files(tmp_path):
    page = (
        "before\n<!-- steps-cpu.json: run this -->\nold\n<!-- end -->\nbetween\n<!-- race.json: "
        "and that -->\n<!-- end -->\nafter\n"
    )
    page += "<!-- fits-cpu.json: last -->\n<!-- end -->\n<!-- fits.json: all -->\n<!-- end -->\n"
    (tmp_path / "steps-cpu.json").write_text(json.dumps(STEPS))
    (tmp_path / "fits-cpu.json").write_text(json.dumps(FITS))
    new = rendered(page, tmp_path)
    assert "old" not in new
    assert "a chip, 2 of 4 cores; 3 rounds; torch 9." in new
    assert "| aevb | 3 | 4.10 | 1.01 |" in new
    assert "| aevb | 0.123 | 73.00 |" in new
    assert "2 to 9 rounds" in new
    assert "784-500-500-20 | a chip, 2 of 4 cores | 9 | 0.2 | 45 |" in new
    assert "Left out: Pyro, because it is not there." in new
    assert "```sh\nand that\n```\n\nNot measured yet.\n<!-- end -->\nafter" in new
    assert rendered(new, tmp_path) == new


def test_the_page_of_numbers_says_what_the_files_say():
    for page in PAGES:
        text = page.read_text()
        assert rendered(text, DOCS / "figures") == text


def test_a_contender_reads_a_loss_as_a_bound():
    assert Contender(lambda: 0).bound(torch.tensor(2.5)) == -2.5


@pytest.mark.parametrize("model", contention.MODELS)
def test_runs_beside_busy_processes_are_timed(model):
    wall, cpu = contention.train(model, 1, None, spin=False)
    assert wall > 0
    assert cpu > 0


def test_times_beside_busy_processes_are_compared_with_the_share_of_the_cores():
    alone = {"one thread": [3.0, 3.0], "before": [2.0, 2.0], "after": [2.0, 2.0]}
    beside = {"one thread": [4.0, 4.0], "before": [60.0, None], "after": [6.0, 6.0]}
    assert contention.rows({"alone": alone, "two": beside}, limit=60.0) == [
        ("alone", "3.00", "2.00", "2.00", "1.00", "1.00"),
        ("two", "4.00", ">60.00", "6.00", "10.00", "1.50"),
    ]


def test_particles_are_tighter_than_importance_weights(capsys):
    found = dict(particle_bound.rows(steps=20, sequences=10, repeats=4))
    elbo, iwae, always, half = (
        found[name]
        for name in (
            "ELBO",
            "importance weights (iwae)",
            "particles, resample=1",
            "particles, resample=0.5",
        )
    )
    for k in range(3):
        assert elbo[k][0] > iwae[k][0] > 1.2 * max(always[k][0], half[k][0]) > 0
    assert half[0][0] > 2 * half[1][0] > 4 * half[2][0]
    particle_bound.main(["--steps", "3", "--sequences", "2", "--repeats", "2"])
    assert capsys.readouterr().out.count("±") == 12


def test_the_encoder_by_hand_has_the_parameters_of_the_model_that_is_measured():
    hand, model = long_sequences.encoder_by_hand(), long_sequences.model_of("encoder")
    sizes = [sum(one.numel() for one in each.parameters()) for each in (hand, model)]
    assert sizes[0] == sizes[1]
    x = torch.randn(3, 7, 8)
    assert torch.isfinite(hand(x))


@pytest.mark.slow
def test_a_quick_run_over_long_sequences_prints_slopes(tmp_path, capsys):
    long_sequences.main(["--quick", "--json", str(tmp_path / "long.json")])
    rows = json.loads((tmp_path / "long.json").read_text())["rows"]
    assert [(row["way"], row["T"]) for row in rows] == [("recorded", 4), ("recorded", 8)]
    for row in rows:
        assert row["step"] > 0
        assert row["first"] > 0
    assert "slope" in capsys.readouterr().out
