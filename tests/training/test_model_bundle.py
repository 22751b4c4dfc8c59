"""Models that are trained as one are the models that are trained alone, up to rounding."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compiled_runs import CASES, as_written, data, gmvae, partly_frozen, vae, vrnn

from aevb import fit, joint
from aevb.compiled_step import cuda_graphs, cuda_streams, fusing, recording
from aevb.compiled_step import fused_adam as flat
from aevb.compiled_step.adam import Adam
from aevb.training import graph_steps as stepping
from aevb.training import model_bundle as bundle
from aevb.training import step_queue, steppers
from aevb.training.loop import Training
from aevb.training.settings import Settings
from aevb.training.step_inputs import Kind

SEEDS = (3, 5, 8)
TOGETHER = {
    name: case for name, case in CASES.items() if not case[2].keys() & {"schedule", "window"}
} | {"partly frozen": (partly_frozen, {}, {"schedule": joint()})}


@pytest.fixture(autouse=True)
def _ends_as_written(monkeypatch):
    """The end of a step is tested elsewhere; here it need not be compiled."""
    monkeypatch.setattr(flat, "compiled", as_written)


def trainings(name, **more):
    build, inputs, settings = TOGETHER[name]
    x = (
        data().reshape(60, 4, 4)
        if build in (vrnn, partly_frozen)
        else data() * 0.8 + 0.1
        if name == "Beta"
        else data()
    )
    torch.manual_seed(0)
    model = build() if name == "bfloat16" else build().double()
    found = []
    for seed in SEEDS:
        chosen = Settings(
            **{"steps": 2000, "batch": 20, "lr": 0.01, "seed": seed, **settings, **more}
        )
        found.append(
            Training(model.fresh(seed), {"x": x, **inputs}, None, chosen, None, False, ExitStack())
        )
        found[-1].model.train()
    return found


def steps(training, count):
    for _ in range(count):
        training._take_step(training.settings.schedule.phase(training.step, training.total))
        training.step += 1


def together(trainings):
    """The models as one, as they are on a GPU after their first steps."""
    for training in trainings:
        steps(training, stepping.WARM_UP)
        stepper = training.stepper
        stepper.rates = torch.full((1, flat.ALIGNED), training.settings.lr, dtype=stepper.dtype)
        stepper.load(training.step, [training.settings.lr])
    return bundle.bundled(
        [training.stepper for training in trainings], trainings[0].settings.schedule.phase(0, 1)
    )


def advance(whole, trainings, count):
    for _ in range(count):
        for training in trainings:
            phase = training.settings.schedule.phase(training.step, training.total)
            rate = training.settings.rate(training.step, phase)
            training.stepper.load(training.step, [rate])
            training.stepper.rates[0, 0] = rate  # which a GPU is told in single precision
            training.step += 1
        whole.advance(trainings[0].settings.schedule.phase(0, 1), 0, whole.inputs(0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "particles, score"))
        for name in TOGETHER
        if name != "bfloat16"
    ],
)
def test_models_as_one_are_the_models_alone(name):
    alone, one = trainings(name), trainings(name)
    whole = together(one)
    advance(whole, one, 6)
    for a, b in zip(alone, one, strict=True):
        steps(a, stepping.WARM_UP + 6)
        torch.testing.assert_close(
            dict(a.model.state_dict()), dict(b.model.state_dict()), rtol=1e-8, atol=1e-10
        )
        # what a checkpoint holds
        torch.testing.assert_close(a.stepper.state(), b.stepper.state(), rtol=1e-7, atol=1e-9)
        mine, theirs = a.stepper.read(), b.stepper.read()
        assert mine.keys() == theirs.keys()
        assert list(theirs.values()) == pytest.approx(list(mine.values()), rel=1e-8)


def test_products_of_models_as_one_are_in_half_precision_too():
    one = trainings("bfloat16")
    whole, phase = together(one), one[0].settings.schedule.phase(0, 1)
    inputs = whole.inputs(0)
    objectives, _, gradients = whole.compiled(inputs)
    for row, training in enumerate(one):
        objective, _, expected = training.stepper._evaluate(
            phase, {name: value[row] for name, value in inputs.items()}
        )
        assert float(objectives[row]) == pytest.approx(float(objective), rel=1e-2)
        ours, theirs = (
            torch.cat([part.flatten() for part in parts])
            for parts in ([gradient[row] for gradient in gradients], expected)
        )
        assert 0 < float((ours - theirs).norm()) < 2e-2 * float(theirs.norm())


def test_a_model_that_fails_or_has_ended_stays_where_it_is_and_the_others_go_on():
    one, reference = trainings("vae"), trainings("vae")
    whole = together(one)
    advance(whole, one, 2)
    before = [
        {name: value.clone() for name, value in training.model.state_dict().items()}
        for training in one
    ]
    with torch.no_grad():
        place = next(iter(one[1].model.parameters()))
        kept = place.clone()
        place.fill_(torch.nan)
    advance(whole, one, 2)
    with torch.no_grad():
        place.copy_(kept)
    assert one[1].stepper.failed()
    assert one[1].stepper.at == stepping.WARM_UP + 2
    assert not one[0].stepper.failed()
    assert not one[2].stepper.failed()
    torch.testing.assert_close(dict(one[1].model.state_dict()), before[1], rtol=0, atol=0)
    one[1].stepper.go_on()
    whole.only([training.stepper for training in one[:2]])
    advance(whole, one[:2], 2)
    for training, count in ((reference[0], 6), (reference[2], 4)):
        steps(training, stepping.WARM_UP + count)
    torch.testing.assert_close(
        dict(one[0].model.state_dict()),
        dict(reference[0].model.state_dict()),
        rtol=1e-8,
        atol=1e-10,
    )
    torch.testing.assert_close(
        dict(one[2].model.state_dict()),
        dict(reference[2].model.state_dict()),
        rtol=1e-8,
        atol=1e-10,
    )


def test_who_leaves_takes_its_weights_along():
    one = trainings("vae")
    whole = together(one)
    values = {name: value.clone() for name, value in one[1].model.state_dict().items()}
    one[1].stepper.alone = False
    one[1].stepper.close()
    whole.vector.values[0].zero_()
    torch.testing.assert_close(dict(one[1].model.state_dict()), values, rtol=0, atol=0)
    assert all(
        value.untyped_storage().nbytes() == value.numel() * 8
        for value in one[1].model.state_dict().values()
    )


def test_models_of_which_torch_cannot_make_one_run_side_by_side(monkeypatch):
    monkeypatch.setattr(
        stepping.GradientSteps,
        "record",
        lambda *_: (_ for _ in ()).throw(RuntimeError("no batching rule")),
    )
    one = trainings("vae")
    weights = [next(iter(training.model.parameters())) for training in one]
    assert together(one) is None
    assert all(
        weight is next(iter(training.model.parameters()))
        for weight, training in zip(weights, one, strict=True)
    )
    assert all(weight.untyped_storage().nbytes() == weight.numel() * 8 for weight in weights)


def test_only_models_that_differ_in_their_weights_alone_are_one():
    def some(count=2, **more):
        found = []
        for i in range(count):
            model = vae()
            model.register_buffer("own", torch.tensor(float(more.get("buffer", 0) * i)))
            found.append(SimpleNamespace(model=model, ends_compiled=True, captures=True))
            vars(found[-1]).update(more if i else {})
        return found

    everything, part = (
        SimpleNamespace(name="joint", theta=True, phi=True),
        SimpleNamespace(name="E", theta=False, phi=True),
    )
    assert bundle.can_bundle(some(), [everything] * 2)
    assert not bundle.can_bundle(some(1), [everything])
    assert not bundle.can_bundle(some(), [part] * 2)
    assert not bundle.can_bundle(some(buffer=1), [everything] * 2)
    for missing in ({"ends_compiled": False}, {"captures": False}):
        assert not bundle.can_bundle(some(**missing), [everything] * 2)


def test_adam_over_rows_is_adam_over_each():
    torch.manual_seed(0)
    sizes = ((5, 4), (3,), (7,), (2, 2))
    models = [
        [torch.nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in sizes]
        for _ in range(3)
    ]
    copies = [
        [torch.nn.Parameter(parameter.detach().clone()) for parameter in model] for model in models
    ]
    holders = [[Adam(1e-3) for _ in group] for group in (models, copies)]
    for group, optimisers in zip((models, copies), holders, strict=True):
        for model, optimiser in zip(group, optimisers, strict=True):
            optimiser.update(model, [torch.ones_like(parameter) for parameter in model])
    rows = flat.Vector(*zip(models, holders[0], strict=True), remarks=[])
    singly = [flat.Vector(pair, remarks=[]) for pair in zip(copies, holders[1], strict=True)]
    bad, sums, taken, moved = (
        torch.tensor([0.0, 1.0, 0.0]),
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(3),
        torch.zeros(3),
    )
    rates, totals, measured = (
        torch.tensor([0.1, 0.2, 0.3]),
        torch.randn(3, dtype=torch.float64),
        torch.randn(3, 1, dtype=torch.float64),
    )
    for _ in range(4):
        for gradient in rows.gradients.values():
            gradient.normal_()
        counts = [tuple(count[i].clone() for count in (bad, sums, taken, moved)) for i in range(3)]
        for i, vector in enumerate(singly):
            found = {
                copy: rows.gradients[model][i]
                for copy, model in zip(copies[i], models[0], strict=True)
            }
            vector.finish(found, rates[i], 0.5, totals[i], measured[i], counts[i])
        rows.finish(rows.gradients, rates, 0.5, totals, measured, (bad, sums, taken, moved))
        torch.testing.assert_close(
            (bad, sums, taken, moved), tuple(map(torch.stack, zip(*counts, strict=True)))
        )
    assert bad.tolist() == [0, 1, 0]
    assert taken.tolist() == moved.tolist() == [4, 0, 4]
    for model, copy, mine, theirs in zip(models, copies, *holders, strict=True):
        for a, b in zip(model, copy, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(mine.state[a], theirs.state[b], rtol=1e-12, atol=1e-12)


# From fit to fit ----------------------------------------------------------------------------------


class Stream:
    device = None

    def wait_stream(self, other):
        """All is done in order."""


@pytest.fixture
def gpu(monkeypatch):
    """What ``fit(compile=True)`` does on a GPU, done by the CPU: streams are nothing, a graph is
    its steps, clusters are functions.

    Returns the sizes of the bundles that were made, and 0 for each that could not be.
    """
    stream = Stream()
    lane = cuda_streams.CudaStreams(stream, stream, stream, (stream, stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for module in (stepping, bundle):
        monkeypatch.setattr(module, "streams_of", lambda device, number: lane)
    for module in (stepping, step_queue):
        monkeypatch.setattr(module, "AT_ONCE", 2)  # an epoch has three steps

    def captured(models, count):
        assert all(
            stepper.seen["joint"] >= stepping.WARM_UP
            for model, _ in models
            for stepper in getattr(model, "steppers", [model])
        )
        return SimpleNamespace(
            replay=lambda: [cuda_graphs._advance(model, phase, count) for model, phase in models]
        )

    def clusters(graph, remarks, **choices):
        graph = fusing.fused(graph, remarks, **choices)
        for node in graph.graph.nodes:
            if isinstance(node.target, fusing.Compiled):
                node.target.run = lambda arguments, function=node.target.function: function(
                    *arguments
                )
        return graph

    monkeypatch.setattr(step_queue, "captured", captured)
    monkeypatch.setattr(steppers, "can_capture", lambda job: job.settings.compile)
    monkeypatch.setattr(recording, "fused", clusters)
    begin, draw = stepping.GraphSteps.__init__, stepping.GraphSteps.inputs

    def begun(self, *arguments):
        begin(self, *arguments)
        self.waits, self.staged = True, None
        self.rates = torch.zeros(stepping.AT_ONCE, flat.ALIGNED)
        self.loaded = {}

    def seeded(self, generator, word, step):
        self.loaded[word] = step

    def inputs(self, place):
        for word, step in self.loaded.items():
            generator = self.noise if word == "noise" else self.drawing
            generator.manual_seed(stepping.seed_of(self.settings.seed, word, step + place))
        return draw(self, place)

    monkeypatch.setattr(stepping.GraphSteps, "__init__", begun)
    monkeypatch.setattr(stepping.GraphSteps, "_seed", seeded)
    monkeypatch.setattr(stepping.GraphSteps, "inputs", inputs)
    made, real = [], bundle.bundled
    monkeypatch.setattr(
        bundle,
        "bundled",
        lambda steppers, phase, number: (
            found := real(steppers, phase, number),
            made.append(len(steppers) if found else 0),
        )[0],
    )
    return made


def as_alone(model, rows, runs, *, broken=False, **choices):
    """Every run is the one that its seed gives alone, taken eagerly. One that was ``broken`` off
    recorded its metrics there.
    """
    for run in runs:
        seed = run.settings.seed
        alone = fit(model.fresh(seed), rows, seed=seed, **choices)
        assert run.step == alone.step
        torch.testing.assert_close(
            dict(run.model.state_dict()), dict(alone.model.state_dict()), rtol=1e-5, atol=1e-6
        )
        for name in (
            ()
            if broken
            else ("elbo", "gradient", *(["validation elbo"] if "validation" in choices else []))
        ):
            assert float(run.history[name][-1]) == pytest.approx(
                float(alone.history[name][-1]), rel=1e-5
            )
        for parameter in run.model.parameters():
            assert (
                parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bundles"),
    [("vae", [3]), ("dropout", [3]), ("mixture", [3]), ("sequence", [3]), ("partly frozen", [3])],
)
def test_seeds_that_are_compiled_are_the_seeds_alone(gpu, name, bundles):
    build, inputs, settings = TOGETHER[name]
    torch.manual_seed(0)
    model = build().double()
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    rows = {"x": data().reshape(60, 4, 4) if build in (vrnn, partly_frozen) else data(), **inputs}
    choices = {"steps": 47, "batch": 20, "log_every": 10, **settings}
    runs = fit(model, rows, seeds=[2, 5, 8], compile=True, **choices)
    assert gpu == bundles
    as_alone(model, rows, runs, **choices)
    for run in runs:
        assert [parameter.requires_grad for parameter in run.model.parameters()] == frozen


def test_seeds_end_each_in_its_time_and_have_their_best_weights(gpu):
    model = gmvae().double()
    rows, held = {"x": data(40)}, {"x": data(60)[40:]}
    choices = {
        "steps": 400,
        "batch": 20,
        "lr": 0.03,
        "patience": 2,
        "validate_every": 7,
        "log_every": 7,
        "validation": held,
    }
    runs = fit(model, rows, seeds=4, compile=True, **choices)
    assert gpu == [4]
    assert len({run.step for run in runs}) > 1
    as_alone(model, rows, runs, **choices)


def test_many_seeds_are_a_few_bundles(gpu, monkeypatch):
    monkeypatch.setattr(bundle, "MOST", 3)
    model, rows = vae().double(), {"x": data()}
    runs = fit(model, rows, seeds=7, compile=True, steps=30, batch=20, log_every=10)
    assert sorted(gpu) == [2, 2, 3]
    as_alone(model, rows, runs, steps=30, batch=20, log_every=10)


def test_where_not_everything_moves_seeds_run_side_by_side(gpu):
    model, rows = gmvae().double(), {"x": data(), "y": np.arange(60) % 3}  # nothing teaches q(y|x)
    runs = fit(model, rows, seeds=2, compile=True, steps=37, batch=20, log_every=10)
    assert gpu == [0]
    as_alone(model, rows, runs, steps=37, batch=20, log_every=10)


def test_seeds_that_were_interrupted_apart_go_on_as_one(gpu, tmp_path):
    model, rows = vae().double(), {"x": data()}
    choices = {"batch": 20, "decay": "constant", "log_every": 10}
    for seed, step in enumerate((40, 38, 12)):
        fit(
            model.fresh(seed),
            rows,
            seed=seed,
            steps=step,
            out=tmp_path / f"seed-{seed}",
            compile=True,
            **choices,
        )
    runs = fit(model, rows, seeds=3, compile=True, steps=40, out=tmp_path, resume=True, **choices)
    assert gpu == []  # the others end before the third is warm
    as_alone(model, rows, runs, broken=True, steps=40, **choices)
    more = fit(model, rows, seeds=3, compile=True, steps=80, out=tmp_path, resume=True, **choices)
    assert gpu == [3]
    as_alone(model, rows, more, broken=True, steps=80, **choices)


def test_a_step_of_one_seed_that_fails_is_left_out_and_said(gpu, monkeypatch):
    model, rows = vae().double(), {"x": data()}
    real = bundle.Bundle.inputs

    def spoiled(self, place):
        found = real(self, place)
        steps = [stepper.loaded["noise"] + place for stepper in self.steppers]
        for row, step in zip(found[Kind.NOISE, "z"][1:2], steps[1:2], strict=True):
            row.mul_(torch.nan if step == 25 else 1.0)
        return found

    monkeypatch.setattr(bundle.Bundle, "inputs", spoiled)
    monkeypatch.setattr(stepping.GraphSteps, "what_failed", lambda self, step, phase: "mine.")
    runs = fit(model, rows, seeds=3, compile=True, steps=60, batch=20, log_every=10, skip=1)
    assert [[row["note"] for row in run.rows if "note" in row] for run in runs] == [
        [],
        ["Step 25: mine. No step was taken. Skipped (1 of 1)."],
        [],
    ]
    as_alone(model, rows, [runs[0], runs[2]], steps=60, batch=20, log_every=10)
    assert runs[1].step == 60
