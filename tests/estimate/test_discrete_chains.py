"""Discrete latents in time: every enumerated bound equals the sum over all C^T paths, written out
here.

The reference evaluates complete assignments, one factor and one step at a time, and sums over all
of them. All in float64.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from aevb import GRU, Bernoulli, Deterministic, Exact, Model, Normal, OneHot, mlp

N, T = 3, 4
LENGTHS = [4, 2, 1]
X = torch.randn(N, T, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([[0, 2, 1, 0], [1, 1, 2, 0], [2, 0, 0, 1]])


def build(p, q, seed=0):
    """A model whose weights are large enough for the paths to differ."""
    torch.manual_seed(seed)
    model = Model(p, q).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


def same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=tolerance)


# All paths ----------------------------------------------------------------------------------------


def factor_at(model, side, name, t, steps):
    """The entry that holds at step t, as its parents' (label, name, index) and its module."""
    places = {name: True, f"{name}[T]": t == steps - 1, f"{name}[0]": t == 0, f"{name}[t]": True}
    found = {
        re.split(r"[(|)]", key)[1]: key
        for key in model.factors
        if key.startswith(f"{side}({name}") and key[2 + len(name)] in "[|)"
    }
    key = found[next(place for place, holds in places.items() if holds and place in found)]
    parents = []
    for label in key[:-1].partition("|")[2].split(", ") if "|" in key else ():
        parent, _, index = label.rstrip("]").partition("[")
        at = {"": None, "0": 0, "T": steps - 1}.get(
            index, t + int(index[1:] or 0) if index[:1] == "t" else None
        )
        parents.append((label, parent, at))
    return model.factors[key], parents


def value_at(values, name, at, steps, size):
    if at is None:
        return values[name]
    return values[name][:, at] if 0 <= at < steps else torch.zeros(1, size, dtype=torch.float64)


def raw_at(model, side, name, values, t, steps):
    factor, parents = factor_at(model, side, name, t, steps)
    if not parents:
        return factor, factor.root
    net = factor.net
    parts = [
        F.linear(
            value_at(values, parent, at, steps, net.blocks.weights[label].shape[1]),
            net.blocks.weights[label],
        )
        for label, parent, at in parents
    ]
    h = sum(parts) + net.blocks.bias
    return factor, h if net.heads is None else net.heads(torch.relu(h))


def log_prob_at(model, side, name, values, t, steps):
    """log p or log q of one variable at one step (None: static), [P]."""
    factor, raw = raw_at(model, side, name, values, t, steps)
    value = values[name] if t is None else values[name][:, t]
    if isinstance(factor.spec, OneHot):
        each = value * raw.log_softmax(-1)
    elif isinstance(factor.spec, Bernoulli):
        each = F.logsigmoid(torch.where(value > 0, raw, -raw))
    else:
        loc, scale = raw.chunk(2, -1)
        each = torch.distributions.Normal(loc, F.softplus(scale)).log_prob(value)
    return each.sum(-1)


def states(model, side, name, values, steps):
    """The values of a deterministic node, a GRU or a function, [P, T, d] or [P, d]; zeros where all
    it reads lies outside.
    """
    if not model.graph.timed[name]:
        return raw_at(model, side, name, values, None, steps)[1]
    factor, parents = factor_at(model, side, name, 0, steps)
    backward = f"{name}[t+1]" in [label for label, *_ in parents]
    state, found = torch.zeros(1, factor.d, dtype=torch.float64), {}
    for t in reversed(range(steps)) if backward else range(steps):
        inputs = [
            (label, parent, at)
            for label, parent, at in factor_at(model, side, name, t, steps)[1]
            if parent != name
        ]
        inside = any(at is None or 0 <= at < steps for *_, at in inputs)
        if not isinstance(factor.spec, GRU):
            state = raw_at(model, side, name, values, t, steps)[1] * inside
        elif inside:
            x = [
                value_at(values, parent, at, steps, factor.blocks.weights[label].shape[1])
                for label, parent, at in inputs
            ]
            x = torch.cat([part.expand(max(map(len, x)), -1) for part in x], -1)
            weights = {
                "weight_ih": torch.cat([factor.blocks.weights[label] for label, *_ in inputs], -1),
                "bias_ih": factor.blocks.bias,
                "weight_hh": factor.recurrent[0].weight,
                "bias_hh": factor.recurrent[0].bias,
            }
            cell = nn.GRUCell(x.shape[-1], factor.d, dtype=torch.float64)
            state = torch.func.functional_call(cell, weights, (x, state.expand(len(x), -1)))
        found[t] = state
    return torch.stack(torch.broadcast_tensors(*(found[t] for t in range(steps))), 1)


def support(model, name):
    spec, d = model.graph.rule("p", name).spec, model.graph.size(name)
    return (
        torch.eye(d).double()
        if isinstance(spec, OneHot)
        else torch.tensor(list(itertools.product([0.0, 1.0], repeat=d))).double()
    )


def assignments(model, names, steps):
    """Every joint value of these latents: {name: [P, T, d] or [P, d]}."""
    tables = {name: support(model, name) for name in names}
    slots = [
        (name, t) for name in names for t in (range(steps) if model.graph.timed[name] else [None])
    ]
    index = torch.tensor(list(itertools.product(*(range(len(tables[name])) for name, _ in slots))))
    columns = {slot: tables[slot[0]][index[:, i]] for i, slot in enumerate(slots)}
    return {
        name: torch.stack([columns[name, t] for t in range(steps)], 1)
        if model.graph.timed[name]
        else columns[name, None]
        for name in names
    }


def paths(model, data, steps, known=()):
    """All paths of one row with their values, log p and log q; where a latent is known, paths agree
    with it and q has no say.
    """
    graph, names = model.graph, model.graph.latents
    values = assignments(model, names, steps)
    agrees = torch.ones(len(next(iter(values.values()))), dtype=torch.bool)
    for name, t, label in known:
        agrees &= values[name][:, t].argmax(-1) == label
    values = {name: value[agrees] for name, value in values.items()} | data
    for side, rules in (("p", graph.p), ("q", graph.q)):
        for name in rules:
            if graph.is_deterministic(name):
                values[name] = states(model, side, name, values, steps)
    seen = {(name, t) for name, t, _ in known}
    log_p = log_q = torch.zeros(int(agrees.sum()), dtype=torch.float64)
    for name in graph.stochastic:
        for t in range(steps) if graph.timed[name] else [None]:
            log_p = log_p + log_prob_at(model, "p", name, values, t, steps)
            if name in names and (name, t) not in seen:
                log_q = log_q + log_prob_at(model, "q", name, values, t, steps)
    assert abs(log_q.exp().sum() - 1) < 1e-12
    return values, log_p, log_q


def sum_over_paths(model, data, steps, known=()):
    _, log_p, log_q = paths(model, data, steps, known)
    return (log_q.exp() * (log_p - log_q)).sum()


def row_of(model, data, i, length):
    return {
        name: value[i : i + 1, :length] if model.graph.timed[name] else value[i : i + 1]
        for name, value in data.items()
    }


def gradients(value, model):
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return {
        name: gradient for (name, _), gradient in zip(model.named_parameters(), found, strict=True)
    }


def check(model, data=None, lengths=None, known=None):
    """The bound and its gradients against all paths of each row, cut to its length."""
    data, known = data or {"x": X}, known or {}
    value = model.elbo(**data, **known, lengths=lengths or data["x"].shape[1]).value
    expected = []
    for i, length in enumerate(lengths or [data["x"].shape[1]] * N):
        seen = [
            (name, t, int(labels[i, t]))
            for name, labels in known.items()
            for t in range(length)
            if labels[i, t] >= 0
        ]
        expected.append(sum_over_paths(model, row_of(model, data, i, length), length, seen))
    same(value, torch.stack(expected))
    wanted = gradients(sum(expected), model)
    for parameter, gradient in gradients(value.sum(), model).items():
        assert (gradient is None or not gradient.any()) == (
            wanted[parameter] is None or not wanted[parameter].any()
        ), parameter
        if gradient is not None and wanted[parameter] is not None:
            same(gradient, wanted[parameter])


# One chain ----------------------------------------------------------------------------------------

MARKOV, EMIT = (
    {"s[0]": OneHot(3, learned=True), "s[t] | s[t-1]": OneHot(3)},
    {"x[t] | s[t]": Normal(2)},
)
P = {
    "learned start": MARKOV | EMIT,
    "zeros before the start": {"s[t] | s[t-1]": OneHot(3)} | EMIT,
    "backward": {"s[t] | s[t+1]": OneHot(3), "s[T]": OneHot(3, learned=True)} | EMIT,
    "no chain": {"s[t]": OneHot(3, learned=True)} | EMIT,
    "x reads the step before": MARKOV
    | {"x[0] | s[0]": Normal(2), "x[t] | s[t], s[t-1]": Normal(2, net=mlp(4))},
    "x reads the step after": {
        "s[t] | s[t-1]": OneHot(3),
        "x[t] | s[t], s[t+1], x[t-1]": Normal(2),
    },
    "through features": {
        "s[t] | s[t-1]": OneHot(3),
        "u[t] | s[t], s[t-1]": Deterministic(2, net=mlp(4)),
        "x[t] | u[t]": Normal(2),
    },
    "through features of the step before": {
        "s[t] | s[t-1]": OneHot(3),
        "u[t] | s[t-1]": Deterministic(2),
        "x[t] | u[t], s[t]": Normal(2),
    },
    "Bernoulli": {
        "s[0]": Bernoulli(2, learned=True),
        "s[t] | s[t-1], x[t-1]": Bernoulli(2),
        "x[t] | s[t]": Normal(2, net=mlp(4)),
    },
}
READS = {
    "forward": ["s[t] | s[t-1], x[t]"],
    "independent": ["s[t] | x[t]"],
    "backward": ["s[t] | s[t+1], x[t]"],
    "forward, own ends": ["s[0] | x[0]", "s[t] | s[t-1], x[t], x[t+1]", "s[T] | x[T]"],
    "backward, own ends": ["s[0] | x[0]", "s[t] | s[t+1], x[t]", "s[T] | x[T]"],
    "independent of data": ["s[t]"],
}


def hmm(p, q):
    family = Bernoulli if p == "Bernoulli" else OneHot
    return build(P[p], {key: family(learned="|" not in key) for key in READS[q]})


@pytest.mark.parametrize("q", READS)
@pytest.mark.parametrize("p", P)
def test_a_chain_equals_the_sum_over_all_paths(p, q):
    model = hmm(p, q)
    assert model.plan().choices["s"].draw == "enumerate"
    check(model)
    check(model, lengths=LENGTHS)
    check(model, {"x": X[:, :1]})


@pytest.mark.parametrize("q", ["forward", "independent", "backward", "forward, own ends"])
@pytest.mark.parametrize("p", ["learned start", "backward", "x reads the step before"])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_partly_known_chain_equals_the_sum_over_the_paths_that_agree(p, q, lengths):
    labels = torch.tensor([[-1, 2, -1, 0], [1, -1, -1, -1], [-1, -1, -1, 1]])
    check(hmm(p, q), lengths=lengths, known={"s": labels})


def test_a_known_chain_has_no_q():
    model, values = hmm("learned start", "forward"), {"s": F.one_hot(LABELS, 3).double(), "x": X}
    expected = sum(log_prob_at(model, "p", name, values, t, T) for name in "sx" for t in range(T))
    same(model.elbo(x=X, s=LABELS).value, expected)
    same(model.log_prob(x=X, s=LABELS), expected)


# Several at once ----------------------------------------------------------------------------------

TWO = {"a[t] | a[t-1]": OneHot(2), "b[t] | b[t-1], a[t]": OneHot(3), "x[t] | a[t], b[t]": Normal(2)}
JOINT = {
    "both chains, b reads a": (TWO, ["a[t] | a[t-1], x[t]", "b[t] | b[t-1], a[t], x[t]"]),
    "both independent": (TWO, ["a[t] | x[t]", "b[t] | x[t]"]),
    "a independent, b reads its past": (TWO, ["a[t] | x[t]", "b[t] | b[t-1], a[t-1], x[t]"]),
    "a chain, b independent": (TWO, ["a[t] | a[t-1], x[t]", "b[t] | a[t], x[t]"]),
    "both backward": (TWO, ["a[t] | a[t+1], x[t]", "b[t] | b[t+1], a[t], x[t]"]),
    "b without a chain in p": (
        {"a[t] | a[t-1]": OneHot(2), "b[t] | a[t]": OneHot(3), "x[t] | a[t], b[t]": Normal(2)},
        ["a[t] | a[t-1], x[t]", "b[t] | a[t], x[t]"],
    ),
    "b reads the past of a": (
        {"a[t] | a[t-1]": OneHot(2), "b[t] | a[t-1]": OneHot(3), "x[t] | a[t], b[t]": Normal(2)},
        ["b[t] | x[t]", "a[t] | a[t-1], b[t], x[t]"],
    ),
    "b reads the future of a": (TWO, ["a[t] | x[t]", "b[t] | a[t+1], x[t]"]),
    "x reads the future of b": (
        {"a[t]": OneHot(2), "b[t]": OneHot(3), "x[t] | a[t], b[t], b[t+1]": Normal(2)},
        ["a[t] | x[t]", "b[t] | a[t-1], x[t]"],
    ),
}


@pytest.mark.parametrize("name", JOINT)
def test_two_chains_equal_the_sum_over_all_joint_paths(name):
    p, keys = JOINT[name]
    model = build(p, {key: OneHot() for key in keys})
    check(model, {"x": X[:, :3]})
    check(model, {"x": X[:, :3]}, [3, 2, 1])


CLASS = {
    "y": OneHot(2, learned=True),
    "s[0] | y": OneHot(3),
    "s[t] | s[t-1], y": OneHot(3),
    "x[t] | s[t], y": Normal(2),
}
SUMMARY = {"g[t] | g[t+1], x[t]": GRU(2)}
STATIC = {
    "chain given the class": (SUMMARY, ["y | g[0]", "s[t] | s[t-1], x[t], y"]),
    "backward chain given the class": (SUMMARY, ["y | g[0]", "s[t] | s[t+1], x[t], y"]),
    "class apart": (SUMMARY, ["y | g[0]", "s[t] | s[t-1], x[t]"]),
    "class and steps apart": ({}, ["y | x[0], x[T]", "s[t] | x[t]"]),
}


def classes(name):
    summary, keys = STATIC[name]
    return build(CLASS, summary | {key: OneHot() for key in keys})


@pytest.mark.parametrize("name", STATIC)
def test_a_class_over_chains_equals_the_sum_over_all_paths(name):
    check(classes(name))
    check(classes(name), lengths=LENGTHS)


@pytest.mark.parametrize("end", ["0", "T"])
@pytest.mark.parametrize("q", ["forward", "independent", "backward"])
def test_a_static_variable_of_p_reads_an_end_of_the_chain(end, q):
    """An observed y and a latent w that read the chain's first or last step: averaged with q's
    marginal there.
    """
    p = MARKOV | EMIT | {f"y | s[{end}]": Normal(2), f"w | s[{end}]": OneHot(2)}
    model = build(p, {key: OneHot() for key in [*READS[q], "w | y, x[0]"]})
    data = {"x": X, "y": torch.tensor([[0.3, -1.0], [2.0, 0.1], [-0.7, 0.5]]).double()}
    check(model, data)
    check(model, data, LENGTHS)


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        # What one step's value reaches at every step would need the joint of that step and all
        # others.
        (
            CLASS,
            ["s[t] | s[t-1], x[t]", "y | s[T], x[T]"],
            "reads an end of s, which is enumerated",
        ),
        (
            MARKOV | {"u | s[0]": Deterministic(2), "x[t] | s[t], u": Normal(2)},
            ["s[t] | x[t]"],
            "reads an end of s, which is enumerated",
        ),
        (
            MARKOV | EMIT | {"y | s[0], s[T]": Normal(2)},
            ["s[t] | x[t]"],
            "reads an end of s, which is enumerated",
        ),
        (
            TWO,
            ["a[t] | a[t-1], x[t]", "b[t] | b[t+1], x[t]"],
            "q runs a forward and b backward in time; they cannot be enumerated together. Draw "
            "one of them: how={'b': 'gumbel'}.",
        ),
        (
            {"s[t]": OneHot(3), "x[t] | s[t-1], s[t+1]": Normal(2)},
            ["s[t] | x[t]"],
            "depends on s[t-1] and s[t+1] at once, so s cannot be enumerated",
        ),
    ],
)
def test_what_the_sum_cannot_reach_is_refused(p, q, message):
    model = build(p, {key: OneHot() for key in q})
    with pytest.raises(ValueError, match=re.escape(message)):
        model.plan()


# A chain that a state remembers -------------------------------------------------------------------

MEMORY = {"h[t] | h[t-1], s[t-1]": GRU(2), "s[t] | h[t]": OneHot(3), "x[t] | h[t], s[t]": Normal(2)}
MEMORY_Q = {"s[t] | h[t], x[t]": OneHot()}


def test_a_remembered_chain_is_not_enumerated():
    model = build(MEMORY, MEMORY_Q)
    for ask in (
        lambda: model.elbo(x=X),
        lambda: model.explain(),
        lambda: model.elbo(x=X, how={"s": "enumerate"}),
    ):
        with pytest.raises(
            ValueError,
            match=re.escape(
                "h[t] remembers s, so s cannot be enumerated (3^T paths). how={'s': 'gumbel'} "
                "draws it"
            ),
        ):
            ask()


@pytest.mark.parametrize("draw", ["gumbel", "straight-through", "relaxed"])
def test_a_remembered_chain_drawn_by_gumbel_equals_a_loop_over_time(draw):
    model, temperature = build(MEMORY, MEMORY_Q), 0.7
    noise = model.draw_noise(model.plan(how={"s": draw}), model.prepare(x=X), seed=3)
    bound = model.elbo(x=X, how={"s": draw}, noise=noise, temperature=temperature)
    values = {"x": X, "s": torch.zeros(N, T, 3).double(), "h": torch.zeros(N, T, 2).double()}
    likelihood = kl = 0
    for t in range(T):
        values = values | {"h": states(model, "p", "h", values, T)}
        log_q, log_p = (raw_at(model, side, "s", values, t, T)[1].log_softmax(-1) for side in "qp")
        soft = ((log_q + noise["s"][0, t]) / temperature).softmax(-1)
        s = F.one_hot(soft.argmax(-1), 3).double() if draw == "straight-through" else soft
        values["s"] = torch.cat([values["s"][:, :t], s[:, None], values["s"][:, t + 1 :]], 1)
        if draw == "relaxed":
            relaxed_q, relaxed_p = (
                ExpRelaxedCategorical(torch.tensor(temperature, dtype=torch.float64), logits=logits)
                for logits in (log_q, log_p)
            )
            kl = kl + relaxed_q.log_prob(soft.log()) - relaxed_p.log_prob(soft.log())
        else:
            kl = kl + (log_q.exp() * (log_q - log_p)).sum(-1)
        likelihood = likelihood + log_prob_at(model, "p", "x", values, t, T)
    same(bound.terms["x"], likelihood)
    same(bound.terms["kl(s)"], kl)


@pytest.mark.parametrize("labels", [None, [-1, 2, -1]])
def test_the_score_function_is_unbiased_for_a_remembered_chain(labels):
    """Value and gradient (along one random direction a parameter), 100 estimates of 64 rows each:
    within 4 s.e. of all paths.
    """
    model, steps, runs, rows = build(MEMORY, MEMORY_Q), 3, 100, 64
    x = X[:1, :steps]
    data = {"x": x.expand(rows, steps, 2)} | (
        {} if labels is None else {"s": torch.tensor(labels).expand(rows, steps)}
    )
    exact = sum_over_paths(
        model,
        {"x": x},
        steps,
        [("s", t, label) for t, label in enumerate(labels or []) if label >= 0],
    )
    directions = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}

    def project(value):
        return {
            name: float((gradient * directions[name]).sum())
            for name, gradient in gradients(value, model).items()
        } | {"": float(value.detach())}

    found = [
        project(model.elbo(**data, how={"s": "score"}, samples=4, seed=seed).value.mean())
        for seed in range(runs)
    ]
    for name, wanted in project(exact).items():
        estimates = torch.tensor([run[name] for run in found])
        assert abs(estimates.mean() - wanted) < 4 * estimates.std() / math.sqrt(runs), name


# A continuous latent drawn for each value of the chain --------------------------------------------


@pytest.mark.parametrize("term", ["closed", "sampled"])
@pytest.mark.parametrize("reads", ["s[t], x[t]", "s[t], s[t-1], x[t]"])
def test_a_latent_drawn_for_each_value_of_the_chain(reads, term):
    """Σ over paths q(s) { Σ_t log p(x_t|z_t) − KL_t(z) + log p(s) − log q(s) }, z_t the draw that
    belongs to the path's values.
    """
    p = MARKOV | {"z[t] | s[t]": Normal(2), "x[t] | z[t]": Normal(2)}
    model, pair = (
        build(p, {"s[t] | s[t-1], x[t]": OneHot(), f"z[t] | {reads}": Normal()}),
        "s[t-1]" in reads,
    )
    noise = model.draw_noise(model.plan(how={"z": term}), model.prepare(x=X), seed=1)
    bound = model.elbo(x=X, how={"z": term}, noise=noise)
    # a draw for each value of the step and, if it is read, of the one before
    table = noise["z"].reshape(3, -1, T, N, 2)
    expected = []
    for i in range(N):
        values = assignments(model, ["s"], T) | {"x": X[i : i + 1]}
        s, total = values["s"].argmax(-1), 0
        log_q = sum(log_prob_at(model, "q", "s", values, t, T) for t in range(T))
        log_p = sum(log_prob_at(model, "p", "s", values, t, T) for t in range(T))
        for t in range(T):
            before = s[:, t - 1] if t and pair else torch.zeros_like(s[:, t])
            q, p = (
                torch.distributions.Normal(loc, F.softplus(scale))
                for loc, scale in (
                    raw_at(model, side, "z", values, t, T)[1].chunk(2, -1) for side in "qp"
                )
            )
            draws = []
            for k in (
                range(3) if pair and not t else [before]
            ):  # before the start all three count alike
                z = q.loc + q.scale * table[s[:, t], k, t, i]
                kl = (
                    torch.distributions.kl_divergence(q, p)
                    if term == "closed"
                    else q.log_prob(z) - p.log_prob(z)
                )
                draws.append(
                    log_prob_at(model, "p", "x", values | {"z": z[:, None].expand(-1, T, -1)}, t, T)
                    - kl.sum(-1)
                )
            total = total + torch.stack(draws).mean(0)
        expected.append((log_q.exp() * (total + log_p - log_q)).sum())
    same(bound.value, torch.stack(expected))


@pytest.mark.parametrize("bound", ["elbo", "iwae"])
def test_a_static_continuous_latent_over_a_chain(bound):
    """Given each sample of c the chain is summed; then the samples are averaged, or their
    weights.
    """
    chain = {"s[0] | c": OneHot(3), "s[t] | s[t-1], c": OneHot(3), "x[t] | s[t], c": Normal(2)}
    model, k = (
        build(
            {"c": Normal(2)} | chain,
            {"c | x[0], x[T]": Normal(), "s[t] | s[t-1], x[t], c": OneHot()},
        ),
        3,
    )
    how = {"c": "sampled"}
    noise = model.draw_noise(
        model.plan(how=how, bound=bound, samples=k), model.prepare(x=X), seed=1
    )
    value = model.elbo(x=X, how=how, bound=bound, samples=k, noise=noise).value
    for i in range(N):
        row, weights = {"x": X[i : i + 1]}, []
        loc, scale = raw_at(model, "q", "c", row, None, T)[1].chunk(2, -1)
        for sample in noise["c"][:, 0, i]:
            c = loc + F.softplus(scale) * sample
            values = assignments(model, ["s"], T) | row | {"c": c}
            log_p, log_q = (
                sum(
                    log_prob_at(model, side, name, values, t, T) for name in names for t in range(T)
                )
                for side, names in (("p", "sx"), ("q", "s"))
            )
            prior = torch.distributions.Normal(0.0, 1.0).log_prob(c).sum()
            weights.append(
                (log_q.exp() * (log_p - log_q)).sum()
                + prior
                - log_prob_at(model, "q", "c", values, None, T)[0]
            )
        weights = torch.stack(weights)
        same(value[i], weights.mean() if bound == "elbo" else weights.logsumexp(0) - math.log(k))


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_bayes_rule_at_every_step(lengths):
    """q(s|z) ∝ p(s) p(z|s): the bound holds log Σ_s p(s) p(z|s), and the posterior is q(z|x)
    p(s|z).
    """
    p = {"s[t]": OneHot(3, learned=True), "z[t] | s[t]": Normal(2), "x[t] | z[t]": Normal(2)}
    model, how = build(p, {"z[t] | x[t]": Normal(), "s[t] | z[t]": Exact()}), {"z": "sampled"}
    noise = model.draw_noise(model.plan(how=how), model.prepare(x=X), seed=1)
    value = model.elbo(x=X, how=how, noise=noise, lengths=lengths).value
    log_q = model.posterior(x=X, lengths=lengths).log_prob(z=X, s=LABELS)
    for i, length in enumerate(lengths or [T] * N):
        values = {"x": X[i : i + 1], "s": torch.eye(3).double()[:, None].expand(3, T, 3)}
        total = asked = 0
        for t in range(length):
            loc, scale = raw_at(model, "q", "z", values, t, T)[1].chunk(2, -1)
            for z, drawn in (
                (loc + F.softplus(scale) * noise["z"][0, t, i], True),
                (X[i : i + 1, t], False),
            ):
                values["z"] = z[:, None].expand(1, T, 2)
                each = log_prob_at(model, "p", "s", values, t, T) + log_prob_at(
                    model, "p", "z", values, t, T
                )
                log_qz = log_prob_at(model, "q", "z", values, t, T)
                if drawn:
                    total = (
                        total
                        + log_prob_at(model, "p", "x", values, t, T)
                        + each.logsumexp(0)
                        - log_qz
                    )
                else:
                    asked = asked + log_qz + each.log_softmax(0)[LABELS[i, t]]
        same(value[i], total[0])
        same(log_q[i], asked[0].detach())


def test_a_continuous_chain_over_switches_is_not_enumerated():
    p = MARKOV | {"z[t] | z[t-1], s[t]": Normal(2), "x[t] | z[t], s[t]": Normal(2)}
    model = build(p, {"s[t] | s[t-1], x[t]": OneHot(), "z[t] | z[t-1], s[t], x[t]": Normal()})
    with pytest.raises(
        ValueError, match=re.escape("z[t] remembers s, so s cannot be enumerated (3^T paths)")
    ):
        model.plan()


# Use after training -------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("q", READS)
def test_posterior_marginals_and_log_prob(q, lengths):
    model = hmm("learned start", q)
    posterior = model.posterior(x=X, lengths=lengths)
    probs, drawn = posterior["s"].probs, posterior.sample()["s"][0]
    log_q, log_q_drawn = posterior.log_prob(s=LABELS), posterior.log_prob(s=drawn)
    assert probs.shape == (N, T, 3)
    for i, length in enumerate(lengths or [T] * N):
        values, _, log_weight = paths(model, {"x": X[i : i + 1, :length]}, length)
        same(probs[i, :length], torch.einsum("p,ptc->tc", log_weight.exp(), values["s"]).detach())
        for found, path in ((log_q, LABELS), (log_q_drawn, drawn.argmax(-1))):
            mine = (values["s"].argmax(-1) == path[i, :length]).all(-1)
            same(found[i], log_weight[mine][0].detach())


@pytest.mark.parametrize("name", STATIC)
def test_posterior_of_a_class_and_of_the_chain_given_it(name):
    model = classes(name)
    posterior = model.posterior(x=X)
    for i in range(N):
        values, _, log_weight = paths(model, {"x": X[i : i + 1]}, T)
        same(posterior["y"].probs[i], (log_weight.exp() @ values["y"]).detach())
        same(
            posterior["s"].probs[i],
            torch.einsum("p,ptc->tc", log_weight.exp(), values["s"]).detach(),
        )


def frequencies(s):
    """How often each path comes up, in the order of ``assignments``."""
    codes = (s.argmax(-1) * 3 ** torch.arange(s.shape[-2] - 1, -1, -1)).sum(-1)
    return torch.bincount(codes, minlength=3 ** s.shape[-2]).double() / len(s)


@pytest.mark.parametrize("q", ["forward", "backward"])
def test_drawn_paths_have_their_probabilities(q):
    """Samples from p and from q: each of the 27 paths within 4 s.e. of its probability."""
    model, steps, n = hmm("learned start", q), 3, 20_000
    values, _, log_q = paths(model, {"x": X[:1, :steps]}, steps)
    log_p = sum(log_prob_at(model, "p", "s", values, t, steps) for t in range(steps))
    drawn = model.sample(n, steps=steps, seed=0)
    assert drawn["x"].shape == (n, steps, 2)
    posterior = model.posterior(x=X[:1, :steps], seed=0).sample(n)["s"]
    assert posterior.shape == (n, 1, steps, 3)
    for s, log_weight in ((drawn["s"], log_p), (posterior[:, 0], log_q)):
        weight = log_weight.exp().detach()
        assert (abs(frequencies(s) - weight) < 4 * (weight * (1 - weight) / n).sqrt()).all()


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_reconstruction_is_the_mean_at_a_drawn_path(lengths):
    model = hmm("learned start", "forward")
    s = model.posterior(x=X, lengths=lengths, seed=4).sample()["s"][0]
    found = model.reconstruct(x=X, lengths=lengths, seed=4)["x"]
    assert found.shape == X.shape
    for i, length in enumerate(lengths or [T] * N):
        for t in range(length):
            loc, _ = raw_at(model, "p", "x", {"s": s[i : i + 1]}, t, T)[1].chunk(2, -1)
            same(found[i, t], loc[0].detach())


@pytest.mark.parametrize("n", [2, T])
def test_a_fixed_path_is_one_row_or_one_for_each_sample(n):
    model = hmm("learned start", "forward")
    loc = torch.stack(
        [
            raw_at(model, "p", "x", {"s": F.one_hot(LABELS[:1], 3).double()}, t, T)[1][0, :2]
            for t in range(T)
        ]
    ).detach()
    for fixed in (LABELS[0], LABELS[:1].expand(n, T), F.one_hot(LABELS[0], 3)):
        same(model.sample(n, steps=T, s=fixed, mean=True)["x"], loc.expand(n, T, 2))


@pytest.mark.parametrize("lag", ["t-1", "t+1"])
def test_a_latent_of_each_step_beside_a_chain_changes_nothing_for_the_chain(lag):
    """q runs one way in time and p may read the other way; a second enumerated latent, in which
    nothing differs, costs nothing.
    """
    p, q = (
        {"b[t] | b[t-1]": Bernoulli(1), "x[t] | b[t]": Normal(2)},
        {f"b[t] | b[{lag}], x[t]": Bernoulli()},
    )
    torch.manual_seed(0)
    alone = Model(p, q).double()
    both = Model({"y[t]": OneHot(3), **p}, {"y[t]": OneHot(), **q}).double()
    both.load_state_dict(alone.state_dict(), strict=False)
    x = torch.randn(4, 5, 2, dtype=torch.float64)
    assert torch.allclose(both.elbo(x=x).value, alone.elbo(x=x).value, rtol=0, atol=1e-12)
