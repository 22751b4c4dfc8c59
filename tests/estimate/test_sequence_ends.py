"""The first and the last step of a sequence: each row's own, for every rule of p and q, also where
a row has one step only.
"""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from aevb import Beta, Exact, Model, Normal, OneHot, Poisson
from aevb.training.objective import Objective
from aevb.training.settings import Settings

ENDS = [(), ("0",), ("T",), ("0", "T")]
X = torch.linspace(-1.5, 1.3, 18, dtype=torch.float64).sin().reshape(3, 3, 2)
LENGTHS = {"ragged": [1, 3, 2], "one step": [1, 1, 1], "whole": [3, 3, 3]}


def build(p, q, **given):
    torch.manual_seed(0)
    model = Model(p, q, **given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def data(lengths):
    if lengths == "ragged":
        return {"x": X, "lengths": LENGTHS[lengths]}
    length = LENGTHS[lengths][0]
    return {"x": X[:, :length], "lengths": length}


def raw_at(model, side, name, row, t, length, values):
    """A factor's raw numbers at one step of one row: the last step's rule, else the first one's,
    else that of every step.
    """
    rules = getattr(model.graph, side)[name]
    last, first = t == length - 1 and "last" in rules, t == 0 and "first" in rules
    entry = rules["last" if last else "first" if first else model.graph.main(name)]
    inputs = {
        ref.label: values[ref.name][row, t if ref.timed else 0].reshape(1, 1, -1)
        for ref in entry.key.parents
    }
    return model.factors[entry.id](inputs).reshape(-1)


def normal(raw):
    return td.Normal(raw[: len(raw) // 2], F.softplus(raw[len(raw) // 2 :]))


def over_rows(lengths, term):
    return torch.stack(
        [
            sum(term(row, t, length) for t in range(length))
            for row, length in enumerate(LENGTHS[lengths])
        ]
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("term", ["closed", "entropy", "sampled"])
def test_the_kl_of_a_gaussian_takes_each_sides_own_rule_at_the_ends(term, lengths):
    for p_ends, q_ends in itertools.product(ENDS, ENDS):
        model = build(
            {
                "z[t]": Normal(2, learned=True),
                **{f"z[{at}]": Normal(2, learned=True) for at in p_ends},
                "x[t] | z[t]": Normal(2),
            },
            {"z[t] | x[t]": Normal(), **{f"z[{at}] | x[{at}]": Normal() for at in q_ends}},
        )
        plan = model.plan(how={"z": term})
        noise = model.draw_noise(plan, model.prepare(**data(lengths)), seed=1)
        found = model.elbo(**data(lengths), how={"z": term}, noise=noise).terms["kl(z)"]

        def expected(row, t, length, model=model, noise=noise):
            q, p = (normal(raw_at(model, side, "z", row, t, length, {"x": X})) for side in "qp")
            z = q.loc + q.scale * noise["z"][0, t, row]
            log_q = -q.entropy() if term == "entropy" else q.log_prob(z)
            return (td.kl_divergence(q, p) if term == "closed" else log_q - p.log_prob(z)).sum()

        same(found, over_rows(lengths, expected))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("draw", ["enumerate", "gumbel", "straight-through", "relaxed"])
def test_the_kl_of_classes_takes_each_sides_own_rule_at_the_ends(draw, lengths):
    for p_ends, q_ends in itertools.product(ENDS, ENDS):
        model = build(
            {
                "y[t]": OneHot(3, learned=True),
                **{f"y[{at}]": OneHot(3, learned=True) for at in p_ends},
                "x[t] | y[t]": Normal(2),
            },
            {"y[t] | x[t]": OneHot(), **{f"y[{at}] | x[{at}]": OneHot() for at in q_ends}},
        )
        plan = model.plan(how={"y": draw})
        noise = model.draw_noise(plan, model.prepare(**data(lengths)), seed=1)
        found = model.elbo(**data(lengths), how={"y": draw}, noise=noise, temperature=0.7).terms[
            "kl(y)"
        ]

        def expected(row, t, length, model=model, noise=noise):
            q, p = (
                raw_at(model, side, "y", row, t, length, {"x": X}).log_softmax(-1) for side in "qp"
            )
            if draw != "relaxed":
                return (q.exp() * (q - p)).sum()
            log_y = ((q + noise["y"][0, t, row]) / 0.7).log_softmax(-1)
            tau = torch.tensor(0.7, dtype=torch.float64)
            return ExpRelaxedCategorical(tau, logits=q).log_prob(log_y) - ExpRelaxedCategorical(
                tau, logits=p
            ).log_prob(log_y)

        same(found, over_rows(lengths, expected))


@pytest.mark.parametrize(
    "labels", [None, [[0, 1, 0], [-1, -1, 1], [1, 0, -1]]], ids=["unknown", "some known"]
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("end", ["0", "T"])
def test_exact_takes_a_static_factor_at_the_end_that_it_reads_alone(end, lengths, labels):
    """q = p(y|·), so that the bound is the evidence: a sum over all paths of labels, by hand."""
    model = build(
        {"y[t]": OneHot(2, learned=True), "x[t] | y[t]": Normal(2), f"l | y[{end}], c": Normal(1)},
        {"y[t] | x[t], l, c": Exact()},
        given={"c": 1},
    )
    static = {
        "l": torch.tensor([[0.4], [-2.0], [1.1]], dtype=torch.float64),
        "c": torch.tensor([[0.3], [0.9], [-1.2]], dtype=torch.float64),
    }
    known = torch.tensor(labels)[:, : max(LENGTHS[lengths])] if labels else None

    def log_joint(row, path):
        y = torch.eye(2, dtype=torch.float64)[list(path)]
        values = {"y": y.expand(3, -1, -1), "c": static["c"].unsqueeze(1)}
        total = sum(
            raw_at(model, "p", "y", row, t, len(path), values).log_softmax(-1)[label]
            for t, label in enumerate(path)
        )
        total = total + sum(
            normal(raw_at(model, "p", "x", row, t, len(path), values)).log_prob(X[row, t]).sum()
            for t in range(len(path))
        )
        at = values | {"y": values["y"][:, :1] if end == "0" else values["y"][:, -1:]}
        return (
            total + normal(raw_at(model, "p", "l", row, 0, 1, at)).log_prob(static["l"][row]).sum()
        )

    def paths(row, length):
        choices = [
            range(2) if known is None or known[row, t] < 0 else [int(known[row, t])]
            for t in range(length)
        ]
        return itertools.product(*choices)

    expected = torch.stack(
        [
            torch.stack([log_joint(row, path) for path in paths(row, n)]).logsumexp(0)
            for row, n in enumerate(LENGTHS[lengths])
        ]
    )
    given = data(lengths) | static | ({} if known is None else {"y": known})
    same(model.elbo(**given).value, expected)
    same(model.log_evidence(**given).value, expected.detach())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_exact_where_an_end_of_the_data_reads_more(lengths):
    """p's rule for the first step reads a Gaussian latent, so that q(y[0]|·) differs from sample to
    sample.
    """
    model = build(
        {
            "z": Normal(1),
            "y[t]": OneHot(2, learned=True),
            "x[t] | y[t]": Normal(2),
            "x[0] | y[0], z": Normal(2),
        },
        {"z | c": Normal(), "y[t] | x[t], z": Exact()},
        given={"c": 1},
    )
    c = torch.tensor([[0.3], [0.9], [-1.2]], dtype=torch.float64)
    noise = model.draw_noise(model.plan(samples=2), model.prepare(**data(lengths), c=c), seed=1)
    found = model.elbo(**data(lengths), c=c, samples=2, noise=noise).value

    def given(row, length, k):
        q = normal(raw_at(model, "q", "z", row, 0, 1, {"c": c.unsqueeze(1)}))
        z = q.loc + q.scale * noise["z"][k, 0, row]
        total = -td.kl_divergence(q, td.Normal(0.0, 1.0)).sum()
        for t in range(length):
            parts = []
            for label in range(2):
                values = {
                    "y": torch.eye(2, dtype=torch.float64)[label].expand(3, length, 2),
                    "z": z.expand(3, 1, 1),
                }
                prior = raw_at(model, "p", "y", row, t, length, values).log_softmax(-1)[label]
                parts.append(
                    prior
                    + normal(raw_at(model, "p", "x", row, t, length, values))
                    .log_prob(X[row, t])
                    .sum()
                )
            total = total + torch.stack(parts).logsumexp(0)
        return total

    same(
        found,
        torch.stack(
            [(given(row, n, 0) + given(row, n, 1)) / 2 for row, n in enumerate(LENGTHS[lengths])]
        ),
    )


# Families that differ between the steps -----------------------------------------------------------


FAMILIES = {  # of every step, of an end; values of the first kind and of the second
    "counts at the end": (Normal(2), Poisson(2), [-0.5, 1.25], [3.0, 0.0]),
    "counts, but a number at the end": (Poisson(2), Normal(2), [2.0, 1.0], [-0.5, -3.0]),
    "shares, but a number at the end": (Beta(2), Normal(2), [0.25, 0.75], [2.5, -3.0]),
    "shares at the end": (Normal(2), Beta(2), [-0.5, 1.25], [0.25, 0.75]),
}


def mixed(name, end):
    usual, other, values, at_end = FAMILIES[name]
    p = {"z[t]": Normal(2), "x[t] | z[t]": usual, f"x[{end}] | z[{end}]": other}
    model = build(p, {"z[t] | x[t]": Normal()})
    lengths = [1, 3, 2]
    x = torch.tensor(values, dtype=torch.float64).expand(3, 3, 2).clone()
    for row, length in enumerate(lengths):
        x[row, 0 if end == "0" else length - 1] = torch.tensor(at_end, dtype=torch.float64)
    return model, x, lengths


@pytest.mark.parametrize("end", ["0", "T"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_step_has_the_density_of_its_own_rule_and_a_finite_gradient(name, end):
    model, x, lengths = mixed(name, end)
    x[1, 1, 0] = float("nan")  # missing; a step of the usual rule
    z = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 3, 2)
    found = model.elbo(x=x, z=z, lengths=lengths).terms["x"]

    def expected(row, t, length):
        raw = raw_at(model, "p", "x", row, t, length, {"z": z})
        spec = FAMILIES[name][1 if t == (0 if end == "0" else length - 1) else 0]
        if isinstance(spec, Normal):
            dist = normal(raw)
        else:
            dist = (
                td.Poisson(raw.exp())
                if isinstance(spec, Poisson)
                else td.Beta(F.softplus(raw[:2]), F.softplus(raw[2:]))
            )
        known = ~x[row, t].isnan()
        return torch.where(
            known,
            dist.log_prob(torch.where(known, x[row, t], 0.5 if isinstance(spec, Beta) else 0.0)),
            0.0,
        ).sum()

    same(
        found,
        torch.stack([sum(expected(row, t, n) for t in range(n)) for row, n in enumerate(lengths)]),
    )
    gradients = torch.autograd.grad(
        model.elbo(x=x, lengths=lengths, seed=0).value.sum(), list(model.parameters())
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("end", ["0", "T"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_particle_filter_takes_each_steps_own_density(name, end):
    """q is the prior and p(x|z) does not read z's value, so that every weight is p(x), whatever is
    drawn.
    """
    model, x, lengths = mixed(name, end)
    with torch.no_grad():
        for key, factor in model.factors.items():
            for parameter in factor.parameters():
                if key.startswith("p(x") and parameter.dim() == 2:
                    parameter.zero_()
    expected = (
        model.elbo(x=x, z=torch.zeros(3, 3, 2, dtype=torch.float64), lengths=lengths)
        .terms["x"]
        .detach()
    )
    found = model.log_evidence(x=x, lengths=lengths, method="prior", samples=3, seed=0).value
    same(found, expected)
    with torch.no_grad():
        for parameter in model.phi():
            parameter.zero_()
        bias = next(parameter for parameter in model.phi() if parameter.dim() == 1)
        bias[2:] = math.log(math.expm1(1.0))
    same(
        model.log_evidence(x=x, lengths=lengths, method="particles", samples=3, seed=0).value,
        expected,
    )


@pytest.mark.parametrize(("end", "step"), [("0", 0), ("T", 1)])
def test_values_outside_the_support_are_refused_at_the_step_whose_rule_they_break(end, step):
    model, x, lengths = mixed("counts at the end", end)
    model.prepare(x=x, lengths=lengths)
    x[2, step, 1] = -0.5
    label = f"x[{end}]"
    message = (
        f"x has 1 value outside Poisson's support (first, from 0: row 2, step {step}, column 1: "
        f"-0.5), but p gives {label} a Poisson."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        model.prepare(x=x, lengths=lengths)
    model, x, lengths = mixed("counts, but a number at the end", end)
    model.prepare(x=x, lengths=lengths)
    x[2, 1 - step, 1] = -0.5
    message = (
        f"x has 1 value outside Poisson's support (first, from 0: row 2, step {1 - step}, column "
        f"1: -0.5), but p gives x[t] a Poisson."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        model.prepare(x=x, lengths=lengths)


def test_a_step_that_is_first_and_last_follows_the_last_ones_rule():
    p = {
        "z[t]": Normal(1),
        "x[t] | z[t]": Normal(1),
        "x[0] | z[0]": Poisson(1),
        "x[T] | z[T]": Beta(1),
    }
    model = build(p, {"z[t] | x[t]": Normal()})
    model.prepare(x=[[[2.0], [-0.5], [0.5]], [[0.5], [0.0], [0.0]]], lengths=[3, 1])
    with pytest.raises(
        ValueError, match=re.escape("row 1, step 0, column 0: 2.0), but p gives x[T] a Beta")
    ):
        model.prepare(x=[[[2.0], [-0.5], [0.5]], [[2.0], [0.0], [0.0]]], lengths=[3, 1])
    x = torch.tensor([[[2.0], [-0.5], [0.5]], [[0.5], [0.0], [0.0]]], dtype=torch.float64)
    gradients = torch.autograd.grad(
        model.elbo(x=x, lengths=[3, 1], seed=0).value.sum(), list(model.parameters())
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_infinite_padding_does_not_hide_values_outside_the_support():
    model = build({"z[t]": Normal(1), "x[t] | z[t]": Poisson(1)}, {"z[t] | x[t]": Normal()})
    with pytest.raises(ValueError, match="outside Poisson's support"):
        model.prepare(x=[[[1.0], [-0.5]], [[1.0], [float("inf")]]], lengths=[2, 1])


# Labels at the ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS)
def test_labels_teach_the_rule_of_the_step_that_they_belong_to(ends):
    """The classification term is the sum of log q(y[t]|x[t]) over known labels, each by its own
    step's rule.
    """
    model = build(
        {"y[t]": OneHot(3, learned=True), "x[t] | y[t]": Normal(2)},
        {"y[t] | x[t]": OneHot(), **{f"y[{at}] | x[{at}]": OneHot() for at in ends}},
    )
    labels = torch.tensor([[2, 0, 0], [0, -1, 1], [-1, 1, 0]])
    batch = model.prepare(x=X, y=labels, lengths=LENGTHS["ragged"])
    objective = Objective(
        model, model.plan(), SimpleNamespace(like=X), 3, Settings(classify=1.0), ["y"], [], None
    )
    expected = sum(
        raw_at(model, "q", "y", row, t, length, {"x": X}).log_softmax(-1)[labels[row, t]]
        for row, length in enumerate(LENGTHS["ragged"])
        for t in range(length)
        if labels[row, t] >= 0
    )
    same(objective._classification(batch), expected)
