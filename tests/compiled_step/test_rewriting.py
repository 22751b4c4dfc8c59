"""What a GPU is given instead of a recording says the same: fewer products, clusters in order, many
steps at a time.
"""

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled_runs import CASES, compiles, data, gmvae, trained, vrnn
from torch import fx
from torch.utils._pytree import tree_leaves

from aevb import LSTM, Bernoulli, Model, Normal, conv, deconv, fit, mlp
from aevb.compiled_step import cuda_streams, fusing, recording
from aevb.compiled_step.gradients import elementary
from aevb.compiled_step.rewriting import DEFERRED, PRODUCTS, UnchangeableError, rewritten
from aevb.compiled_step.tracing import traced
from aevb.declare import noise_kinds
from aevb.estimate import noise
from aevb.training import gradient_steps as stepping
from aevb.training import step_queue as capture
from aevb.training.row_order import Order

SUMS = ("mm", "addmm")


def count(graph, *names):
    return sum(
        getattr(node.target, "__name__", "").split(".")[0] in names for node in graph.graph.nodes
    )


@pytest.fixture
def replaced(monkeypatch):
    """Recordings are replaced by what is made of them; returns the pairs."""
    found = []

    def use(make):
        def replaced(*args, **choices):
            step = recording.compile_step(*args, **choices)
            before, step.run = step.run, make(step.run, len(step.parameters))
            found.append((before, step.run))
            return step

        monkeypatch.setattr(stepping, "compile_step", replaced)
        return found

    return use


def calls(clusters):
    return [
        node.target for node in clusters.graph.nodes if isinstance(node.target, fusing.Compiled)
    ]


def by_functions(graph, parameters):
    """In clusters, none of which is compiled."""
    clusters = fusing.fused(rewritten(graph, parameters), [])
    for part in calls(clusters):
        part.run = lambda arguments, function=part.function: function(*arguments)
    return clusters


def alike(monkeypatch, name, tolerance=2e-4):
    """Train a case eagerly, then again with what stands in for its recording; by few steps, since
    rounding grows from step to step.
    """
    build, more, settings = CASES[name]
    patched = stepping.compile_step
    eager, *_ = trained(monkeypatch, build, more, settings, after=1000)
    monkeypatch.setattr(stepping, "compile_step", patched)  # which training has undone
    other, _, some = trained(monkeypatch, build, more, settings, after=3)
    assert some
    for (key, a), b in zip(eager.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_step_is_the_step(monkeypatch, replaced, name):
    replaced(rewritten)
    alike(monkeypatch, name, tolerance=1e-2 if name == "bfloat16" else 2e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_clusters_is_the_step(monkeypatch, replaced, name):
    found = replaced(by_functions)
    with elementary():
        alike(monkeypatch, name, tolerance=1e-2 if name == "bfloat16" else 2e-4)
    for _, graph in found:  # beside products and views there are functions alone
        left = {
            node.target.__name__
            for node in graph.graph.nodes
            if node.op == "call_function" and DEFERRED not in node.meta
        }
        assert not left & {
            "add.Tensor",
            "mul.Tensor",
            "relu.default",
            "sigmoid.default",
            "threshold_backward.default",
            "sum.dim_IntList",
        }


@compiles
def test_compiled_clusters_are_the_step(monkeypatch, replaced):
    replaced(lambda graph, parameters: fusing.fused(rewritten(graph, parameters), []))
    alike(monkeypatch, "vae")


def recorded(model, x, *, cells):
    """A step's recording, its arguments, and how many of them are weights."""
    batch, plan = model.prepare(x=x), model.plan()
    n, steps = model._extent(batch)
    given = batch | noise.draw(
        plan.layout(n, steps, dropout=True),
        generator=None,
        device=torch.device("cpu"),
        dtype=x.dtype,
    )
    named = set(batch)

    def function(inputs):
        from aevb.estimate.estimators import estimate

        bound = estimate(
            plan,
            model.factors,
            {k: v for k, v in inputs.items() if k in named},
            {k: v for k, v in inputs.items() if k not in named},
        )
        return bound.value.mean(), bound.value.mean().reshape(1)

    with elementary() if cells else nullcontext():
        made = recording.compile_step(function, model, given, list(model.parameters()))
    return made.run, [*made.parameters, *given.values()], len(made.parameters)


def sequences(steps):
    return (
        torch.rand(5, steps, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        < 0.3
    ).double()


def test_products_of_one_input_become_one_and_gradients_lie_beside(monkeypatch):
    model = vrnn().double()
    graph, arguments, weights = recorded(model, sequences(12), cells=False)
    with torch.no_grad():
        before = graph(*arguments)
        products = count(graph, *SUMS)
        smaller = rewritten(graph, weights)
        for a, b in zip(smaller(*arguments), before, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # of each step at least one forwards and one backwards
    assert count(smaller, *SUMS) < products - 2 * 12
    groups = {node.meta[DEFERRED] for node in smaller.graph.nodes if DEFERRED in node.meta}
    assert len(groups) > 5
    for node in smaller.graph.nodes:
        if DEFERRED in node.meta:
            assert all(
                user.op == "output" or user.meta.get(DEFERRED) == node.meta[DEFERRED]
                for user in node.users
            )


def test_a_longer_sequence_needs_no_more_functions():
    made = {}
    for steps in (6, 14):
        p = {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(6),
            "z[t] | h[t]": Normal(5),
            "x[t] | h[t], z[t]": Bernoulli(4, net=mlp(5)),
        }
        model = Model(p, {"z[t] | h[t], x[t]": Normal(net=mlp(9, 9))}).double()
        graph, arguments, weights = recorded(model, sequences(steps), cells=True)
        with torch.no_grad():
            before = graph(*arguments)
            clusters = by_functions(graph, weights)
            for a, b in zip(clusters(*arguments), before, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        made[steps] = len({id(part.function) for part in calls(clusters)}), len(calls(clusters))
    assert made[14][0] == made[6][0]
    assert made[14][1] > made[6][1]


@compiles
def test_compiled_code_is_called_directly_where_that_gives_the_same_tensors():
    x, y = torch.randn(3, 4), torch.randn(3, 4)

    def compiled(function):
        found = fusing._compiled(fx.symbolic_trace(function), [x, y])
        for a, b in zip(found([x, y]), function(x, y), strict=True):
            torch.testing.assert_close(a, b)
        return found

    assert compiled(lambda x, y: (x + y, (x * y).sum(1))).__module__ != fusing.__name__
    # torch makes such a view beside the code
    assert compiled(lambda x, y: (x.view(4, 3), x + y))([x, y])[0].data_ptr() == x.data_ptr()
    # no code at all
    assert compiled(lambda x, y: (torch.ops.aten.alias.default(x),)).__module__ == fusing.__name__
    x[0, 0] = torch.nan
    assert (
        fusing._compiled(fx.symbolic_trace(lambda x, y: (x + y,)), [x, y]).__module__
        != fusing.__name__
    )


@compiles
@pytest.mark.slow
def test_convolutions_without_an_activation_are_compiled():
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        p = {"z": Normal(6), "x | z": Bernoulli((1, 8, 8), net=deconv(4, activation="identity"))}
        model = Model(p, {"z | x": Normal(net=conv(4, hidden=9, activation="identity"))}).double()
        fit(
            model,
            {"x": data(24, 64).double().reshape(24, 1, 8, 8)},
            steps=3,
            batch=12,
            compile=compile,
        )
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_relu_is_taken_along_by_the_product_that_it_follows_alone():
    model = Model(
        {"z": Normal(2), "x | z": Bernoulli(16, net=mlp(9, 9))}, {"z | x": Normal(net=mlp(9, 9))}
    )
    graph, _, weights = recorded(model, data(30), cells=False)
    before = sum(node.target is torch.ops.aten.relu.default for node in graph.graph.nodes)
    smaller = rewritten(graph, weights)
    assert before == 2
    assert not any(node.target is torch.ops.aten.relu.default for node in smaller.graph.nodes)


def test_small_products_are_sums_in_the_clusters():
    model = Model(
        {"z": Normal(2), "x | z": Bernoulli(16, net=mlp(9))}, {"z | x": Normal(net=mlp(9))}
    )
    graph, arguments, weights = recorded(model, data(30), cells=False)
    clusters = by_functions(graph, weights)
    for node in clusters.graph.nodes:
        if node.target in PRODUCTS and DEFERRED not in node.meta:
            assert node.args[-1].meta["val"].shape[0] > fusing.NARROW
            assert node.meta["val"].shape[1] > 2 * fusing.NARROW
    with torch.no_grad():
        for a, b in zip(clusters(*arguments), graph(*arguments), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def numbers(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def many_inputs(w, v, *inputs):
    """Each input is multiplied twice by the same two weights, four inputs by one pair and four by
    another.
    """
    pairs = ((w, v), (w.t() @ w, v * 2)), inputs
    return (
        tuple(x @ a for x in inputs[:4] for a in (w, v))
        + tuple(x @ a for x in inputs[4:] for a in (v, w))
        + (pairs[0][1][1],)
    )


# (how many of the arguments are weights, the function, the arguments): what recordings of models
# happen not to contain, and others may
SHAPES = {
    "a product's transpose is added": (
        1,
        lambda w, x, c: (c * 2 + (x @ w).t(),),
        (numbers(5, 6), numbers(6, 5), numbers(6, 6)),
    ),
    "a part of a product is added": (
        1,
        lambda w, x, c: (c * 2 + (x @ w)[:, :4],),
        (numbers(5, 9), numbers(6, 5), numbers(6, 4)),
    ),
    "a repeated product is added": (
        1,
        lambda w, x, c: (c * 2 + (x @ w).expand(6, 9),),
        (numbers(5, 9), numbers(1, 5), numbers(6, 9)),
    ),
    "a product is added to a product": (
        2,
        lambda w, v, x: ((x @ w) + (x @ v), (x @ v).sum(0)),
        (numbers(5, 9), numbers(6, 9)[:5], numbers(4, 5)),
    ),
    "what is added to is read elsewhere": (
        1,
        lambda w, x: ((h := x @ w) + x @ w, h.sum()),
        (numbers(5, 9), numbers(6, 5)),
    ),
    "parts counted from the end": (
        2,
        lambda w, v, x: ((h := x @ w)[-5:-2] + x[:3] @ v, h[0:3] * 2),
        (numbers(5, 9), numbers(5, 9) + 1, numbers(6, 5)),
    ),
    "factors of a product": (
        1,
        lambda w, b, x: (torch.addmm(b, x, w, beta=2, alpha=3),),
        (numbers(3, 20), numbers(20), numbers(6, 3)),
    ),
    "a bias for every row": (
        1,
        lambda w, b, x: (torch.addmm(b, x, w),),
        (numbers(3, 20), numbers(6, 20), numbers(6, 3)),
    ),
    "nothing but products": (
        2,
        many_inputs,
        (numbers(5, 5), numbers(5, 5) + 1, *(numbers(6, 5) + i for i in range(8))),
    ),
    "a product in another shape": (
        2,
        lambda w, v, *xs: tuple((x @ w).view(-1, 3) + (x @ v).sum() for x in xs),
        (numbers(5, 9), numbers(5, 4), *(numbers(6, 5) + i for i in range(6))),
    ),
    "no product": (1, lambda w, x: (torch.sigmoid(w) * x, x.sum()), (numbers(5), numbers(5) + 1)),
    "an argument and the same result twice": (
        1,
        lambda w, x: (x, (y := x @ w), y, w),
        (numbers(5, 9), numbers(6, 5)),
    ),
}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_whatever_a_recording_contains_stays_what_it_was(name, beside):
    weights, function, arguments = SHAPES[name]
    kept = [argument.clone() for argument in arguments]
    expected = function(*arguments)
    small = rewritten(traced(function, *arguments), weights, defer=beside)
    for graph in (small, by_functions(traced(function, *arguments), weights)):
        for _ in range(2):
            for a, b in zip(graph(*arguments), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(arguments, kept, strict=True))


@compiles
def test_what_a_compiler_hands_on_is_not_written_over():
    def function(w, v, x):
        h = x @ w
        return h * torch.ones_like(h) + x @ v, torch.sigmoid(h)

    arguments = numbers(5, 9), numbers(5, 9) + 1, numbers(6, 5)
    graph = fusing.fused(rewritten(traced(function, *arguments), 2))
    for a, b in zip(graph(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("on_gpu", "left"), [(False, 2), (True, 0)])
def test_narrow_products_are_sums_and_on_a_gpu_those_of_several_pairs_also_where_they_are_wider(
    on_gpu, left
):
    def function(w, v, x, y):
        return (
            (x @ w).exp(),
            torch.bmm(x[None], v).exp(),
            (y @ w.t()).exp(),
            torch.bmm(y[None], v.mT).exp(),
            (x @ w[:, :6]).exp(),
        )

    arguments = (
        numbers(40, 10).float(),
        numbers(1, 40, 10).float(),
        numbers(6, 40).float(),
        numbers(6, 10).float(),
    )
    graph = fusing.fused(rewritten(traced(function, *arguments), 2), on_gpu=on_gpu)
    for part in calls(graph):
        part.run = lambda given, function=part.function: function(*given)
    assert (count(graph, "mm"), count(graph, "bmm")) == (2, left)
    for a, b in zip(graph(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_writes_into_a_view_is_not_rewritten():
    def function(w, x):
        h = x @ w
        h.view(-1).relu_()
        return (h * 2,)

    with pytest.raises(
        UnchangeableError, match="writes into a value that other operations may read"
    ):
        rewritten(traced(function, numbers(5, 9), numbers(6, 5)), 1)


def test_a_step_that_cannot_be_rewritten_runs_as_it_was_recorded():
    layer, x = torch.nn.Linear(5, 9), torch.randn(6, 5)

    def function(inputs):
        h = layer(inputs["x"]).clone()
        h[:, 0].mul_(2.0)
        return h.square().mean(), h.mean().reshape(1)

    made = recording.compile_step(function, layer, {"x": x}, list(layer.parameters()), fuse=True)
    objective, measured, gradients = made({"x": x})
    expected, also = function({"x": x})
    torch.testing.assert_close((objective, measured), (expected.detach(), also.detach()))
    torch.testing.assert_close(
        tuple(gradients), torch.autograd.grad(-expected, list(layer.parameters()))
    )
    assert "writes into a value that other operations may read" in made.remarks[0]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1],
        lambda t: t.transpose(0, 1),
        lambda t: t.diagonal(),
        lambda t: t.permute(1, 0),
        lambda t: t.as_strided((2,), (1,)),
        lambda t: t[1:],
        lambda t: t.split(3)[1],
    ],
)
def test_what_is_written_through_a_view_is_not_made_anew(view):
    def function(w, x):
        t = x @ w
        view(t).add_(1)
        return t * 2, t.sum()

    arguments = numbers(5, 9), numbers(6, 5)
    with pytest.raises(
        UnchangeableError, match="writes into a value that other operations may read"
    ):
        rewritten(traced(function, *arguments), 1)


def test_what_is_written_into_as_one_of_several_is_not_made_anew():
    def function(w, x):
        kept = [x @ w, x @ w]
        torch._foreach_add_(kept, 1.0)
        return kept[0] * 2, kept[1]

    with pytest.raises(UnchangeableError):
        rewritten(traced(function, numbers(5, 9), numbers(6, 5)), 1)


# Streams ------------------------------------------------------------------------------------------


class Stream:
    """Knows how far each stream was when it last waited for it."""

    device = None

    def __init__(self, name):
        self.name, self.seen, self.done = name, {}, 0

    def wait_stream(self, other):
        for name, done in (other.seen | {other.name: other.done}).items():
            self.seen[name] = max(done, self.seen.get(name, 0))


class Watched(cuda_streams.ConcurrentRun):
    """Checks that an operation waits for what it reads, and that nobody gives away what a stream
    may still read.
    """

    def __init__(self, graph, own, streams):
        super().__init__(graph, own)
        self.stack, self.made, self.reading, self.used = streams, {}, [], set()

    def call_function(self, target, args, kwargs):
        here, chain = self.stack[-1], self.stack[0]
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        for value in given:
            name, when = self.made.get(id(value), (here.name, 0))
            assert name == here.name or here.seen.get(name, 0) >= when, (
                f"{target} does not wait for what it reads"
            )
        for name, when, reads in self.reading:
            assert chain.seen.get(name, 0) >= when or all(read() is not None for read in reads), (
                f"memory of {name} is taken before {target}"
            )
        foreign = [
            weakref.ref(value)
            for value in given
            if self.made.get(id(value), ("chain", 0))[0] != here.name
        ]
        result = super().call_function(target, args, kwargs)
        here.done += 1
        self.used.add(here.name)
        self.made |= {id(value): (here.name, here.done) for value in tree_leaves(result)}
        if here is not chain:
            # what a stream has made itself goes back to it, and is used in order
            self.reading.append((here.name, here.done, foreign))
        return result


@pytest.fixture
def watched(monkeypatch):
    """Runs a graph as on a GPU, and watches its streams."""
    streams = [Stream("chain")]

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    own = cuda_streams.CudaStreams(
        streams[0], Stream("concurrent"), None, tuple(Stream(f"branch {i}") for i in range(3))
    )

    def run(graph, *arguments):
        for part in calls(graph):
            part.run = lambda given, function=part.function: function(*given)
        watching = Watched(graph, own, streams)
        torch.testing.assert_close(list(watching.run(*arguments)), list(graph(*arguments)))
        assert all(
            streams[0].seen.get(stream.name, 0) == stream.done
            for stream in (own.concurrent, *own.branches)
        )
        return watching.used

    return run


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("build", [gmvae, vrnn])
def test_streams_wait_for_each_other(watched, build, compiled):
    x = data().reshape(60, 4, 4) if build is vrnn else data()
    graph, arguments, weights = recorded(build(), x, cells=False)
    graph = rewritten(graph, weights, values=not compiled)
    used = watched(fusing.fused(graph, on_gpu=True) if compiled else graph, *arguments)
    assert used >= ({"chain", "concurrent"} if compiled else {"chain"}) | {"branch 0", "branch 1"}


def straight_on(w1, w2, w3, w4, x):
    """Products of products, with nothing between them."""
    a, b = x @ w1, x @ w2
    return b @ w4, a @ w3, x.sum()


def put_to_what_is_there(w1, w2, w3, x, y):
    first, second, third = x @ w1, x @ w2, y @ w3
    return (first + y @ w3).tanh(), (second + y @ w3).tanh(), third.tanh()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (straight_on, [(5, 9), (5, 9), (9, 7), (9, 7), (20, 5)]),
        (put_to_what_is_there, [(15, 9), (15, 9), (15, 9), (20, 15), (20, 15)]),
    ],
)
def test_products_wait_for_those_of_the_level_below(watched, function, shapes):
    arguments = [numbers(*shape) for shape in shapes]
    graph = fusing.fused(
        rewritten(traced(function, *arguments), len(shapes) - 1, defer=False), on_gpu=True
    )
    assert watched(graph, *arguments) == {"chain", "concurrent"}


def test_a_value_that_a_gradient_needs_stays_on_the_chain(watched):
    def function(w, x):
        objective = torch.logsumexp(x @ w, 0).sum().exp()
        return objective, objective * 2, (x.T @ (x @ w)) * objective

    arguments = numbers(5, 9), numbers(6, 5)
    graph = rewritten(traced(function, *arguments), 1, values=True)
    assert watched(graph, *arguments) == {"chain", "branch 0"}  # the second value alone is nobody's


# Many steps at a time -----------------------------------------------------------------------------


class Stepper:
    """What :class:`StepQueue` wants of one."""

    captures, ends_compiled, alone = True, False, True

    def __init__(self, log, name):
        self.log, self.name, self.seen, self.number, self.take, self.moving = (
            log,
            name,
            {},
            None,
            lambda: None,
            {},
        )

    def step(self, step, phase, rate):
        self.seen[phase.name] = self.seen.get(phase.name, 0) + 1
        self.log.append((self.name, step, rate))

    def join(self, number, take, *, alone):
        self.number, self.take, self.alone = number, take, alone

    def load(self, step, rates):
        self.loaded = [(self.name, step + i, rate) for i, rate in enumerate(rates)]


@pytest.fixture
def steps(monkeypatch):
    graphs = []

    def captured(models, count):
        graphs.append(count)

        def replay():
            for place in range(count):
                for stepper, _ in models:
                    stepper.log.append(stepper.loaded[place])

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(capture, "captured", captured)
    return capture.StepQueue(), graphs


def test_steps_are_taken_many_at_a_time_each_once_and_in_order(steps):
    taken, graphs = steps
    log = []
    one = Stepper(log, "a")
    for i in range(38):
        phase = SimpleNamespace(name="joint")
        taken.step([(one, i, phase, 0.1 * i)])
        if i in (2, 3, 26):  # someone looks
            one.take()
    assert len(log) < 38
    one.take()
    assert log == [("a", i, 0.1 * i) for i in range(38)]
    assert sorted(graphs) == [1, capture.AT_ONCE]


def test_steps_of_several_models_and_phases_keep_their_order(steps):
    taken, graphs = steps
    log = []
    both = [Stepper(log, "a"), Stepper(log, "b")]
    for i in range(40):
        phase = SimpleNamespace(name="E" if i % 20 < 13 else "M")
        taken.step([(stepper, i, phase, float(i)) for stepper in (both if i < 30 else both[:1])])
    both[0].take()
    for name, last in (("a", 40), ("b", 30)):
        assert [entry for entry in log if entry[0] == name] == [
            (name, i, float(i)) for i in range(last)
        ]
    assert [stepper.number for stepper in both] == [0, 1]
    assert capture.AT_ONCE in graphs


def test_steps_are_captured_anew_where_weights_have_moved(steps):
    taken, graphs = steps
    log, phase = [], SimpleNamespace(name="E")
    one = Stepper(log, "a")
    for i in range(3 + 2 * capture.AT_ONCE):
        taken.step([(one, i, phase, 0.1)])
    assert graphs == [capture.AT_ONCE]
    one.moving["M"] = object()
    for i in range(3 + 2 * capture.AT_ONCE, 3 + 4 * capture.AT_ONCE):
        taken.step([(one, i, phase, 0.1)])
    assert graphs == [capture.AT_ONCE, capture.AT_ONCE]
    assert len(taken.graphs) == 1
    assert [step for _, step, _ in log] == list(range(3 + 4 * capture.AT_ONCE))


def test_masks_of_one_kind_are_drawn_at_once():
    layout = {
        "a": (noise_kinds.keep(0.75), (40, 30)),
        "eps": ("normal", (40, 2)),
        "b": (noise_kinds.keep(0.75), (40, 50)),
        "c": (noise_kinds.keep(0.5), (40, 10)),
    }
    found = noise.draw(
        layout,
        generator=torch.Generator().manual_seed(0),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        name: shape for name, (_, shape) in layout.items()
    }
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    assert found["a"].untyped_storage().data_ptr() != found["c"].untyped_storage().data_ptr()
    for name, share in (("a", 0.75), ("b", 0.75), ("c", 0.5)):
        assert set(found[name].unique().tolist()) == {0.0, 1.0}
        assert (
            abs(found[name].mean().item() - share)
            < 4 * (share * (1 - share) / found[name].numel()) ** 0.5
        )


def test_a_run_is_the_same_whether_its_rows_are_asked_for_singly_or_together():
    order = fit(
        CASES["vae"][0](), {"x": data()}, steps=1, batch=25
    ).settings  # any run: only its batches matter
    rows = Order(60, order.batch, seed=4)
    assert torch.equal(rows.rows(3, 10), torch.cat([rows.rows(3 + i) for i in range(10)]))


@compiles
def test_what_was_compiled_once_is_found_again():
    from torch._dynamo.utils import counters

    def function(x, y):
        return ((x * y).sin().sum(-1),)

    arguments = [numbers(3, 5), numbers(3, 5)]
    found = []
    for _ in range(2):
        before = counters["inductor"]["fxgraph_cache_hit"]
        torch.testing.assert_close(
            fusing.compiled(function, arguments)(list(arguments)), function(*arguments)
        )
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert found[-1] == 1
