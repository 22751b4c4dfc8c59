"""Declarations: every wrong one is refused with the entry and the fix; what a right one means is
checked part by part.
"""

import re
import signal

import pytest
import torch

from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Beta,
    Conditional,
    Deterministic,
    Exact,
    Mixture,
    Model,
    Normal,
    OneHot,
    conv,
    deconv,
    linear,
    mlp,
    table,
)
from aevb.zoo import vrnn, zoo

Z, X = {"z": Normal(2)}, {"x | z": Normal(3)}
P, Q = Z | X, {"z | x": Normal()}
MIXTURE = {"y": OneHot(4), "z | y": Normal(2), "x | z": Normal(3)}
CHAIN = {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)}
FILTER = {"z[t] | z[t-1], x[t]": Normal()}


@pytest.fixture(autouse=True)
def _at_once():
    """A declaration is checked at once: one that the checks never finish reading is an error
    too.
    """

    def stop(*_):
        raise TimeoutError("the declaration was still being checked after 5 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# What is refused ----------------------------------------------------------------------------------

# name: (p, q, given, what the message says: the entry, then the fix)
BAD = {
    # names
    "p is empty": (
        {},
        Q,
        {},
        'p is empty. Declare the generative model, e.g. p={"z": Normal(20), "x | z": '
        "Bernoulli(784, net=mlp(500, 500))}.",
    ),
    "unknown parent in p": (
        Z | {"x | z, w": Normal(3)},
        Q,
        {},
        "p has \"x | z, w\": Normal(3), but 'w' is declared nowhere. Add it to p, or give its "
        'size: given={"w": 10}.',
    ),
    "unknown parent in q": (
        P,
        {"z | x, w": Normal()},
        {},
        "q has \"z | x, w\": Normal(), but 'w' is declared nowhere. Add it to p, or give its size",
    ),
    "given without a size": (
        {"z | y": Normal(2)} | X,
        Q,
        {},
        "p has \"z | y\": Normal(2), but 'y' is declared nowhere. Add it to p, or give its size",
    ),
    "given with no size": (
        {"z | y": Normal(2)} | X,
        Q,
        {"y": None},
        "given 'y': a size is a positive whole number or a tuple of them, got None.",
    ),
    "given of size zero": (
        {"z | y": Normal(2)} | X,
        Q,
        {"y": 0},
        "given 'y': a size is a positive whole number or a tuple of them, got 0.",
    ),
    "given is not a dictionary": (
        {"z | y": Normal(2)} | X,
        Q,
        ["y"],
        "given is a dictionary from a variable to its size, got list.",
    ),
    "given and declared in p": (
        P,
        Q,
        {"z": 2},
        "'z' is given, but p also declares it. Take it out of given=, or out of the declaration.",
    ),
    "given and declared in q": (
        P,
        {"h | x": Deterministic(4), "z | h": Normal()},
        {"h": 4},
        "'h' is given, but q also declares it. Take it out of given=",
    ),
    "given and unused": (
        P,
        Q,
        {"y": 2},
        "given names 'y', but nothing reads it. Drop it, or name it right of a bar.",
    ),
    "declared twice": (
        Z | {"x | z": Normal(3), "x|z": Normal(4)},
        Q,
        {},
        'p declares x twice: "x | z" and "x | z". Keep one.',
    ),
    "a word of the library": (
        {"seed": Normal(2), "x | seed": Normal(3)},
        {"seed | x": Normal()},
        {},
        "'seed' is a word of this library; call the variable",
    ),
    "a word of Python": (
        {"self": Normal(2), "x | self": Normal(3)},
        {"self | x": Normal()},
        {},
        "'self' is a word of this library; call the variable",
    ),
    # roles
    "latent missing from q": (
        P,
        {},
        {},
        "q has no factor for latent 'z'. Add one, e.g. \"z | x\": Normal(net=mlp(500, 500)).",
    ),
    "discrete latent missing from q": (
        {"y": OneHot(4), "x | y": Normal(3)},
        {},
        {},
        "q has no factor for latent 'y'. Add one, e.g. \"y | x\": OneHot(net=mlp(500, 500)).",
    ),
    "nothing observed": (
        P,
        Q | {"x | z": Normal()},
        {},
        "q has a factor for every variable of p (z, x), so nothing is observed. Take the "
        "data's variable out of q.",
    ),
    "drawn in q, unknown to p": (
        P,
        Q | {"u | x": Normal(2)},
        {},
        "q draws 'u', but p has no factor for it. Add one to p, or make it Deterministic.",
    ),
    "deterministic in p and q": (
        Z | {"h | z": Deterministic(4), "x | h": Normal(3)},
        {"h | x": Deterministic(4), "z | h": Normal()},
        {},
        "Both p and q declare the deterministic 'h'. Declare it once; q may read p's.",
    ),
    "deterministic in q, random in p": (
        P,
        {"z | x": Deterministic(2)},
        {},
        "q makes 'z' deterministic, but p gives it a distribution. Give q a distribution",
    ),
    "random at one step, deterministic at another": (
        {
            "h[t] | z[t-1]": Deterministic(2),
            "h[0]": Normal(2),
            "z[t]": Normal(2),
            "x[t] | z[t], h[t]": Normal(3),
        },
        {"z[t] | x[t]": Normal()},
        {},
        "p has \"h[t] | z[t-1]\": Deterministic(2): 'h' is stochastic at one step and "
        "deterministic at another. Make it one of the two.",
    ),
    "deterministic nobody reads": (
        P,
        Q | {"h | x": Deterministic(4)},
        {},
        "Nothing reads the deterministic 'h': its weights would never learn. Drop it, or",
    ),
    "recurrence only itself reads": (
        CHAIN,
        FILTER | {"b[t] | b[t+1], x[t]": GRU(4)},
        {},
        "Nothing reads the deterministic 'b': its weights would never learn. Drop it, or name it",
    ),
    "deterministic of nothing": (
        {"h": Deterministic(2), "z | h": Normal(2)} | X,
        Q,
        {},
        ('"h": Deterministic(2)', "reads nothing. Name its parents right of a bar."),
    ),
    "p reads what only q has": (
        Z | {"x | z, h": Normal(3)},
        {"h | z": Deterministic(4), "z": Normal()},
        {},
        (
            '"x | z, h": Normal(3)',
            "reads 'h', which only q declares. Move 'h' to p, or drop the parent.",
        ),
    ),
    # sizes and families
    "no size": ({"z": Normal()} | X, Q, {}, ('"z": Normal()', "State it once, in p: Normal(20).")),
    "no size in q": (
        P,
        {"h | x": Deterministic(), "z | h": Normal()},
        {},
        ('"h | x": Deterministic()', "State it once, in q: Deterministic(20)."),
    ),
    "another size in q": (
        P,
        {"z | x": Normal(4)},
        {},
        ('"z | x": Normal(4)', "'z' the size 4, but it is 2 already. State the size once, in p."),
    ),
    "another size at [0]": (
        CHAIN | {"z[0]": Normal(4)},
        FILTER,
        {},
        ('"z[0]": Normal(4)', "'z' the size 4, but it is 2 already. State the size once, in p."),
    ),
    "root with a network": (
        {"z": Normal(2, net=mlp(3))} | X,
        Q,
        {},
        (
            '"z": Normal(2, net=mlp(3))',
            "a network but no parents. Name the parents right of a bar, or",
        ),
    ),
    "learned with parents": (
        Z | {"x | z": Normal(3, learned=True)},
        Q,
        {},
        'p has "x | z": Normal(3, learned=True): learned=True is for a variable without parents; '
        "this one's network is learned anyway. Drop it.",
    ),
    "Normal for OneHot": (
        MIXTURE,
        {"y | x": Normal(), "z | x, y": Normal()},
        {},
        "q has \"y | x\": Normal(), but p gives 'y' a OneHot: their values differ. Use "
        "OneHot(net=…) in q.",
    ),
    "Beta for Normal": (
        P,
        {"z | x": Beta()},
        {},
        "q has \"z | x\": Beta(), but p gives 'z' a Normal: their values differ. Use "
        "Normal(net=…) in q.",
    ),
    "OneHot for Bernoulli": (
        {"y": Bernoulli(4), "x | y": Normal(3)},
        {"y | x": OneHot()},
        {},
        "but p gives 'y' a Bernoulli: their values differ. Use Bernoulli(net=…) in q.",
    ),
    "conv without an image": (
        P,
        {"z | x": Normal(net=conv(4))},
        {},
        'q has "z | x": Normal(net=conv(4)): conv needs a parent of shape (channels, height, '
        "width); the parents here are x (3,). Use mlp.",
    ),
    "deconv to a vector": (
        Z | {"x | z": Normal(3, net=deconv(4))},
        Q,
        {},
        'p has "x | z": Normal(3, net=deconv(4)): deconv makes an image (channels, height, '
        "width), but this variable has shape (3,). Use mlp.",
    ),
    "table by a vector": (
        P,
        {"z | x": Normal(net=table(5))},
        {},
        'table(5) is looked up by one parent of size 1, the row of each example: "z | i" with',
    ),
    # Exact
    "Exact in p": (
        {"y": Exact(4), "x | y": Normal(3)},
        {"y | x": OneHot()},
        {},
        "p has \"y\": Exact(4): Exact() is q's answer by Bayes' rule; p needs a distribution of "
        "its own.",
    ),
    "Exact for data": (
        Z | {"x | z": Exact(3)},
        Q,
        {},
        "Exact() is q's answer by Bayes' rule; p needs a distribution of its own.",
    ),
    "Exact, continuous": (
        P,
        {"z | x": Exact()},
        {},
        "but p gives 'z' a Normal, which cannot be enumerated. Use Normal(net=…).",
    ),
    "Exact with other parents": (
        MIXTURE,
        {"z | x": Normal(), "y | x": Exact()},
        {},
        'q has "y | x": Exact(), but by Bayes it depends on z. Write "y | z": Exact().',
    ),
    "Exact with parents too many": (
        MIXTURE,
        {"z | x": Normal(), "y | x, z": Exact()},
        {},
        'but by Bayes it depends on z. Write "y | z": Exact().',
    ),
    "Exact before a latent it needs": (
        MIXTURE,
        {"y | x": Exact(), "z | x, y": Normal()},
        {},
        "p's factor over 'y' and 'z' needs 'z' drawn first. Let 'y' come after it: \"y | z\": "
        "Exact().",
    ),
    "Exact of a chain": (
        {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)},
        {"y[t] | x[t]": Exact()},
        {},
        (
            "p(y) ties 'y' to",
            "another step",
            "so Bayes' rule has no answer step by step. Use OneHot(net=…).",
        ),
    ),
    "Exact through a lagged function": (
        {"y[t]": OneHot(3), "h[t] | y[t-1]": Deterministic(4), "x[t] | h[t]": Normal(2)},
        {"y[t] | x[t]": Exact()},
        {},
        (
            "p(x) ties 'y' to",
            "another step",
            "so Bayes' rule has no answer step by step. Use OneHot(net=…).",
        ),
    ),
    "Exact through a recurrence": (
        {"y[t]": OneHot(3), "h[t] | h[t-1], y[t]": GRU(4), "x[t] | h[t]": Normal(2)},
        {"y[t] | x[t]": Exact()},
        {},
        (
            "p(x) ties 'y' to",
            "another step",
            "so Bayes' rule has no answer step by step. Use OneHot(net=…).",
        ),
    ),
    "Exact for one step": (
        {"y[t]": OneHot(3), "x[t] | y[t]": Normal(2)},
        {"y[t] | x[t]": Exact(), "y[0] | x[0]": Exact()},
        {},
        'q has "y[0] | x[0]": Exact(): Exact() stands for every step; drop the entry for this one.',
    ),
    # cycles
    "cycle in p": (
        {"z | x": Normal(2)} | X,
        Q,
        {},
        "p: z → x → z read each other. Drop one of the arrows",
    ),
    "cycle in q": (
        MIXTURE,
        {"y | x, z": OneHot(), "z | x, y": Normal()},
        {},
        "q: y → z → y read each other. Drop one of the arrows",
    ),
    "cycle of p and q together": (
        Z | {"h | z": Deterministic(2), "x | h": Normal(3)},
        {"z | x, h": Normal()},
        {},
        "p and q together: h → z → h read each other. Drop one of the arrows",
    ),
    "its own parent": ({"z | z": Normal(2)} | X, Q, {}, "p: z is its own parent."),
    "its own parent at t": (
        {"z[t] | z[t]": Normal(2), "x[t] | z[t]": Normal(3)},
        FILTER,
        {},
        "p: z is its own parent. Read z[t-1] instead, or drop it.",
    ),
    "cycle at the same t": (
        {"h[t] | x[t]": Deterministic(2), "z[t] | h[t]": Normal(2), "x[t] | z[t]": Normal(3)},
        FILTER,
        {},
        "p: h[t] → x[t] → z[t] → h[t] read each other at the same t. Drop one of the arrows, or "
        "shift it to [t-1].",
    ),
    "a static variable in a loop over time": (
        {"z[t] | x[t-1]": Normal(1), "c | z[0]": Normal(1), "x[t] | c, z[t]": Normal(1)},
        {"z[t] | x[t]": Normal(), "c | x[0]": Normal()},
        {},
        (
            "p: c and ",
            " need each other across time, but c has no [t]: no loop over the steps computes it. "
            "Drop one of the arrows, or write c[t].",
        ),
    ),
    "a static function in a loop over time": (
        {
            "y[t]": OneHot(3),
            "z[t]": Normal(2),
            "h | y[0]": Deterministic(2),
            "x[t] | y[t], h": Normal(2),
        },
        {"z[t] | x[t], h": Normal(), "y[t] | x[t], z[t+1]": OneHot()},
        {},
        (
            "p and q together: h and ",
            " need each other across time, but h has no [t]: no loop over the steps computes it.",
        ),
    ),
    "both directions in one rule": (
        CHAIN,
        {"z[t] | z[t-1], z[t+1], x[t]": Normal()},
        {},
        "q: z[t] reads z[t-1] and z[t] reads z[t+1], and each needs the other: no order in time "
        "computes both. Use one direction.",
    ),
    "both directions in one group": (
        {
            "h[t] | h[t-1], x[t-1]": GRU(3),
            "z[t] | h[t]": Normal(2),
            "x[t] | x[t+1], z[t]": Normal(3),
        },
        {"z[t] | x[t]": Normal()},
        {},
        "p: h[t] reads h[t-1] and x[t] reads x[t+1], and each needs the other: no order in time "
        "computes both. Use one direction.",
    ),
    # time
    "static reads [t]": (
        CHAIN | {"c | x[t]": Normal(2)},
        FILTER,
        {},
        "'c | x[t]': c has no [t] but reads x[t]. Summarise the sequence first: \"b[t] | b[t+1], "
        'x[t]": GRU(256), then "c | b[0]".',
    ),
    "[t] here, none there": (
        CHAIN,
        {"z[t] | x": Normal()},
        {},
        '\'x\' has a time index in "x[t] | z[t]" but none in "z[t] | x". Write it with [t] '
        "everywhere, or nowhere.",
    ),
    "none in p, [t] in q": (
        P,
        {"z[t] | x": Normal()},
        {},
        '\'z\' has a time index in "z[t] | x" but none in "z". Write it with [t] everywhere, or '
        "nowhere.",
    ),
    "two steps back": (
        {"z[t] | z[t-2]": Normal(2), "x[t] | z[t]": Normal(3)},
        FILTER,
        {},
        "only the neighbours [t-1] and [t+1] can be read. Carry older steps",
    ),
    "[0] at every t": (
        CHAIN,
        {"z[t] | x[0]": Normal()},
        {},
        "'z[t] | x[0]' reads x[0] at every t. Read an end of the sequence from a static variable",
    ),
    "only z[0] in p": (
        {"z[0]": Normal(2), "x[t] | z[t]": Normal(3)},
        FILTER,
        {},
        "p declares an end of 'z' but no rule for every step. Add \"z[t] | …\".",
    ),
    "only z[0] in q": (
        CHAIN,
        {"z[0] | x[0]": Normal()},
        {},
        "q declares an end of 'z' but no rule for every step. Add \"z[t] | …\".",
    ),
    # recurrences
    "cell without its past": (
        CHAIN,
        {"b[t] | x[t]": GRU(4), "z[t] | b[t]": Normal()},
        {},
        'q has "b[t] | x[t]": GRU(4): a recurrence reads its own past (or future). Write "b[t] | '
        'b[t-1], …": GRU(4).',
    ),
    "cell at the same t": (
        CHAIN,
        {"b[t] | b[t], x[t]": LSTM(4), "z[t] | b[t]": Normal()},
        {},
        "a recurrence reads its own past (or future). Write",
    ),
    "cell with no input": (
        CHAIN,
        {"b[t] | b[t+1]": GRU(4), "z[t] | b[t]": Normal()},
        {},
        ('"b[t] | b[t+1]": GRU(4)', "reads nothing but itself. Give it an input"),
    ),
    "cell outside time": (
        P,
        {"h | x": GRU(4), "z | h": Normal()},
        {},
        'q has "h | x": GRU(4): a recurrence reads its own past (or future).',
    ),
    "cell of an image's shape": (
        CHAIN,
        {"b[t] | b[t+1], x[t]": GRU((2, 2)), "z[t] | b[t]": Normal()},
        {},
        "a recurrence has a single size, not the shape (2, 2).",
    ),
    # Bayes' rule
    "Exact of what nothing reads": (
        {"y": OneHot(3)} | P,
        {"z | x": Normal(), "y | z": Exact()},
        {},
        'q has "y | z": Exact(), but by Bayes it depends on nothing: no other factor of p has '
        "'y' in it. Write \"y\": Exact().",
    ),
    # values that are no conditionals
    "a network": (
        P,
        {"z | x": mlp(5)},
        {},
        "q gives 'z | x' the value mlp(5), which is not a conditional. Use e.g. Normal(20, "
        "net=mlp(500, 500)).",
    ),
    "a class": (
        P,
        {"z | x": Normal},
        {},
        "a class, which is not a conditional. Use e.g. Normal(20, net=mlp(500, 500)).",
    ),
    "a module": (
        P,
        {"z | x": torch.nn.Linear(3, 2)},
        {},
        "q gives 'z | x' the value Linear(in_features=3, out_features=2, bias=True), which is not "
        "a conditional.",
    ),
    "a number": ({"z": 2} | X, Q, {}, "p gives 'z' the value 2, which is not a conditional."),
    "q is a list": (
        P,
        ["z | x"],
        {},
        'q is a dictionary from "variable | parents" to a conditional, got list.',
    ),
    "p is None": (
        None,
        Q,
        {},
        'p is a dictionary from "variable | parents" to a conditional, got NoneType.',
    ),
    "a key that is no text": (
        P,
        {3: Normal()},
        {},
        '3 is not a key. Write "variable | parent, parent", e.g. "x | z".',
    ),
}


@pytest.mark.parametrize(("p", "q", "given", "message"), BAD.values(), ids=BAD)
def test_a_bad_declaration_is_refused_with_its_fix(p, q, given, message):
    fragments = (message,) if isinstance(message, str) else message
    with pytest.raises(ValueError, match=".*".join(map(re.escape, fragments))):
        Model(p, q, given)


def test_missing_is_one_of_two_words():
    with pytest.raises(ValueError, match=re.escape('missing is "zeros" or "mask", got \'drop\'.')):
        Model(P, Q, missing="drop")


@pytest.mark.parametrize(
    ("p", "q", "irrelevant"),
    [
        ({"z | x": Normal(2)} | X, Q, "[t"),  # a static cycle is not cured by a shift in time
        ({"z | z": Normal(2)} | X, Q, "[t"),
        (P, {"h | x": Deterministic(), "z | h": Normal()}, "in p:"),  # p knows nothing of h
        (
            {"y": OneHot(2), "z[t] | y": Normal(2), "x[t] | z[t]": Normal(3)},
            {"b[t] | b[t+1], x[t]": GRU(3), "z[t] | x[t]": Normal(), "y | b[0]": Exact()},
            'Write "y | z[t]"',  # a key that the notation refuses
        ),
    ],
    ids=["static cycle", "static self-parent", "size of q's own node", "Exact of a whole sequence"],
)
def test_a_message_names_no_fix_that_cannot_work(p, q, irrelevant):
    with pytest.raises(ValueError) as error:
        Model(p, q)
    assert irrelevant not in str(error.value)


SETTINGS = {
    "size 0": (
        lambda: Normal(0),
        "Normal: a size is a positive whole number or a tuple of them, got 0.",
    ),
    "size -1": (
        lambda: Normal(-1),
        "Normal: a size is a positive whole number or a tuple of them, got -1.",
    ),
    "size True": (
        lambda: OneHot(True),
        "OneHot: a size is a positive whole number or a tuple of them, got True.",
    ),
    "size 2.5": (
        lambda: Bernoulli(2.5),
        "Bernoulli: a size is a positive whole number or a tuple of them, got 2.5.",
    ),
    "size '2'": (
        lambda: Normal("2"),
        "Normal: a size is a positive whole number or a tuple of them, got '2'.",
    ),
    "size (1, 0)": (
        lambda: Normal((1, 0)),
        "Normal: a size is a positive whole number or a tuple of them, got (1, 0).",
    ),
    "size ()": (
        lambda: Model({"z": Normal(())} | X, Q),
        "a size is a positive whole number or a tuple of them, got ().",
    ),
    "size is a network": (
        lambda: Normal(mlp(3)),
        "Normal: a size is a positive whole number or a tuple of them, got mlp(3).",
    ),
    "net is a number": (
        lambda: Normal(2, net=500),
        "Normal: net=500 is not a network. Use linear(), mlp(500, 500), conv(...), deconv(...), "
        "or any torch module or function of the parents' tensors.",
    ),
    "net is the class": (
        lambda: Normal(2, net=mlp),
        "is not a network. Use linear(), mlp(500, 500)",
    ),
    "net is a conditional": (
        lambda: Normal(2, net=Normal(2)),
        "Normal: net=Normal(2) is not a network.",
    ),
    "net of a cell": (lambda: GRU(4, net=mlp(3)), "GRU takes no net; its parents feed its gates."),
    "net of Exact": (
        lambda: Exact(net=mlp(3)),
        "Exact takes no net; it is computed from p by Bayes' rule.",
    ),
    "Exact learned": (
        lambda: Exact(learned=True),
        "Exact has nothing to learn; it is computed from p by Bayes' rule. Drop learned=True.",
    ),
    "no layers": (lambda: LSTM(4, layers=0), "LSTM: layers is a positive whole number, got 0."),
    "scale 0": (
        lambda: Normal(2, scale=0),
        'Normal: scale must be positive, got 0. Or use "network" or "learned".',
    ),
    "scale unknown": (
        lambda: Normal(2, scale="fixed"),
        'Normal: scale is "network", "learned", "isotropic" or a number, got \'fixed\'.',
    ),
    "scale True": (
        lambda: Normal(2, scale=True),
        'Normal: scale is "network", "learned", "isotropic" or a number, got True.',
    ),
    "no components": (
        lambda: Mixture(2, components=0),
        "Mixture: components is a positive whole number, got 0.",
    ),
    "components 1.5": (
        lambda: Mixture(2, components=1.5),
        "Mixture: components is a positive whole number, got 1.5.",
    ),
    "activation": (
        lambda: mlp(5, activation="rel"),
        "Unknown activation 'rel'. Choose one of relu, tanh,",
    ),
    "initialiser": (
        lambda: mlp(5, init="xavier"),
        "Unknown initialiser 'xavier'. Choose one of default, glorot_normal,",
    ),
    "hidden size": (lambda: mlp(500, 0), "mlp takes positive whole numbers, got 0."),
    "hidden sizes as a tuple": (
        lambda: mlp((500, 500)),
        "mlp takes positive whole numbers, got (500, 500).",
    ),
    "dropout": (lambda: mlp(5, dropout=1.0), "dropout is a probability below 1, got 1.0."),
    "mlp without bias": (
        lambda: mlp(5, bias=False),
        "mlp with hidden layers always has biases; only linear() takes bias=False.",
    ),
    "conv of nothing": (
        lambda: conv(),
        "conv needs at least one number of channels, e.g. conv(32, 64).",
    ),
}


@pytest.mark.parametrize(("build", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_bad_setting_is_refused_with_its_fix(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


# What a good one means ----------------------------------------------------------------------------

ROLES = {
    # name: (model, latents in q's order, observed, given, deterministic)
    "fa": (lambda: zoo["fa"](), ("z",), ("x",), (), ()),
    "cvae": (lambda: zoo["cvae"](5, 2, 3, hidden=(4,)), ("z",), ("x",), ("y",), ()),
    "gmvae": (lambda: zoo["gmvae"](5, 2, 3, hidden=(4,)), ("y", "z"), ("x",), (), ()),
    "gmvae by z first": (
        lambda: Model(MIXTURE, {"y | x, z": OneHot(), "z | x": Normal()}),
        ("z", "y"),
        ("x",),
        (),
        (),
    ),
    "mixture prior": (
        lambda: Model(MIXTURE, {"y | z": Exact(), "z | x": Normal()}),
        ("z", "y"),
        ("x",),
        (),
        (),
    ),
    "gmvae with known y": (
        lambda: Model(MIXTURE, {"z | x, y": Normal()}),
        ("z",),
        ("y", "x"),
        (),
        (),
    ),
    "ladder": (
        lambda: Model(
            {"a": Normal(2), "b | a": Normal(2), "x | b": Normal(3)},
            {"a | b": Normal(), "b | x": Normal()},
        ),
        ("b", "a"),
        ("x",),
        (),
        (),
    ),
    "features": (
        lambda: Model(P, {"h | x": Deterministic(4), "z | h": Normal()}),
        ("z",),
        ("x",),
        (),
        ("h",),
    ),
    "vrnn": (lambda: vrnn(4, 2, 3, hidden=(4,)), ("z",), ("x",), (), ("h",)),
    "vrnn smoothing": (
        lambda: vrnn(4, 2, 3, posterior="smoothing", hidden=(4,)),
        ("z",),
        ("x",),
        (),
        ("h", "b"),
    ),
    "two sequences and a static class": (
        lambda: Model(
            {"c": OneHot(3), "z[t] | z[t-1], c": Normal(2), "x[t] | z[t], u[t]": Normal(3)},
            {
                "b[t] | b[t+1], x[t]": GRU(4),
                "c | b[0]": OneHot(),
                "z[t] | z[t-1], b[t], c": Normal(),
            },
            given={"u": 2},
        ),
        ("c", "z"),
        ("x",),
        ("u",),
        ("b",),
    ),
}


@pytest.mark.parametrize(
    ("build", "latents", "observed", "given", "deterministic"), ROLES.values(), ids=ROLES
)
def test_roles_follow_from_where_a_variable_stands(build, latents, observed, given, deterministic):
    graph = build().graph
    assert (graph.latents, graph.observed, tuple(graph.given), graph.deterministic) == (
        latents,
        observed,
        given,
        deterministic,
    )


def test_sizes_are_stated_once_in_p_and_taken_by_q():
    model = Model({"z": Normal(2), "x | z": Normal((1, 4, 4))}, {"z | x": Normal()})
    assert model.graph.shapes == {"z": (2,), "x": (1, 4, 4)}
    assert model.factors["q(z|x)"].sizes == {"loc": 2, "scale": 2}
    assert model.factors["p(x|z)"].sizes == {"loc": 16, "scale": 16}


def test_a_conditional_without_net_is_affine_and_a_root_is_fixed_and_standard():
    model = Model(
        {"y": OneHot(4), "z": Normal(2), "x | y, z": Normal(3, scale="learned")},
        {"y | x": OneHot(), "z | x": Normal()},
    )
    blocks = model.factors["p(x|y, z)"].net.blocks
    assert {name: tuple(weight.shape) for name, weight in blocks.weights.items()} == {
        "y": (3, 4),
        "z": (3, 2),
    }
    assert tuple(blocks.bias.shape) == (3,)
    assert (
        sum(parameter.numel() for parameter in model.factors["p(x|y, z)"].parameters())
        == 12 + 6 + 3 + 3
    )
    assert not list(model.factors["p(y)"].parameters())
    assert not list(model.factors["p(z)"].parameters())
    normal = model.factors["p(z)"].distribution(model.factors["p(z)"]({}))
    assert torch.equal(normal.loc, torch.zeros(1, 1, 2))
    assert torch.allclose(normal.scale, torch.ones(1, 1, 2), atol=1e-7)
    uniform = model.factors["p(y)"].distribution(model.factors["p(y)"]({}))
    assert torch.allclose(uniform.probs, torch.full((1, 1, 4), 0.25))


def test_a_learned_root_and_a_learned_scale_start_standard():
    model = Model({"z": Normal(2, learned=True), "x | z": Normal(3, scale="learned")}, Q)
    prior = model.factors["p(z)"]
    assert [tuple(parameter.shape) for parameter in prior.parameters()] == [(4,)]
    dist = prior.distribution(prior({}))
    assert torch.equal(dist.loc, torch.zeros(1, 1, 2))
    assert torch.allclose(dist.scale, torch.ones(1, 1, 2), atol=1e-7)
    likelihood = model.factors["p(x|z)"]
    assert torch.allclose(
        likelihood.distribution(torch.zeros(1, 1, 3)).scale, torch.ones(3), atol=1e-7
    )


SPLIT = {
    # name: (model, the factors whose parameters are θ; all others are φ)
    "gmvae": (lambda: zoo["gmvae"](5, 2, 3, hidden=(4,)), {"p(y)", "p(z|y)", "p(x|z)"}),
    "vrnn, whose h q reads": (
        lambda: vrnn(4, 2, 3, hidden=(4,)),
        {"p(h[t]|h[t-1], x[t-1], z[t-1])", "p(z[t]|h[t])", "p(x[t]|h[t], z[t])"},
    ),
    "smoothing, whose b is q's": (
        lambda: vrnn(4, 2, 3, posterior="smoothing", hidden=(4,)),
        {"p(h[t]|h[t-1], x[t-1], z[t-1])", "p(z[t]|h[t])", "p(x[t]|h[t], z[t])"},
    ),
    "Exact": (
        lambda: Model(MIXTURE, {"z | x": Normal(), "y | z": Exact()}),
        {"p(y)", "p(z|y)", "p(x|z)"},
    ),
}


@pytest.mark.parametrize(("build", "generative"), SPLIT.values(), ids=SPLIT)
def test_theta_and_phi_partition_the_parameters(build, generative):
    model = build()
    theta, phi = model.theta(), model.phi()
    assert {id(parameter) for parameter in (*theta, *phi)} == {
        id(parameter) for parameter in model.parameters()
    }
    assert len(theta) + len(phi) == len(list(model.parameters()))
    expected = [
        parameter
        for name, factor in model.factors.items()
        if name in generative
        for parameter in factor.parameters()
    ]
    assert {id(parameter) for parameter in theta} == {id(parameter) for parameter in expected}


def test_one_specification_used_twice_shares_no_weights():
    net = mlp(4)
    spec = Normal(2, net=net)
    model = Model({"a": Normal(2), "b | a": spec, "x | b": spec}, {"a | b": spec, "b | x": spec})
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(pointers) == len(set(pointers)) == 4 * 4
    before = [parameter.clone() for parameter in model.factors["q(b|x)"].parameters()]
    with torch.no_grad():
        for parameter in model.factors["p(x|b)"].parameters():
            parameter.add_(1)
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.factors["q(b|x)"].parameters(), strict=True)
    )


def test_a_specification_reused_in_a_second_model_leaves_the_first_alone():
    q = {"z | x": Normal(net=mlp(4))}
    first = Model({"z": Normal(2), "x | z": Normal(3)}, q)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    before = first.elbo(x=x, seed=0).value
    second = Model({"z": Normal(5), "x | z": Normal(7)}, q)
    assert torch.equal(first.elbo(x=x, seed=0).value, before)
    assert q == {"z | x": Normal(net=mlp(4))}  # and the specification still says what it said
    assert second.factors["q(z|x)"].net.blocks.weights["x"].shape == (4, 7)
    assert first.factors["q(z|x)"].net.blocks.weights["x"].shape == (4, 3)


def test_specifications_are_values():
    assert Normal(2, net=mlp(5)) == Normal(2, net=mlp(5))
    assert hash(Normal(2, net=mlp(5))) == hash(Normal(2, net=mlp(5)))
    assert Normal(2) != Normal(3)
    assert Normal([1, 2, 2]) == Normal((1, 2, 2))
    assert linear() == mlp()
    with pytest.raises(AttributeError, match="cannot assign to field 'size'"):
        Normal(2).size = 3


WORDS = [
    "values",
    "keys",
    "items",
    "type",
    "copy",
    "update",
    "training",
    "weights",
    "data",
    "name",
    "T",
    "t",
    "_x",
]


@pytest.mark.parametrize("name", WORDS)
def test_a_variable_may_have_any_name_the_library_does_not_use_itself(name):
    """Names of attributes of torch's containers and of Python's dictionaries are names like any
    other.
    """
    torch.manual_seed(0)
    plain = Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()})
    torch.manual_seed(0)
    named = Model({name: Normal(2), f"x | {name}": Normal(3)}, {f"{name} | x": Normal()})
    torch.manual_seed(0)
    data = Model({"z": Normal(2), f"{name} | z": Normal(3)}, {f"z | {name}": Normal()})
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    expected = plain.eval().elbo(x=x, seed=0).value
    assert torch.equal(named.eval().elbo(x=x, seed=0).value, expected)
    assert torch.equal(data.eval().elbo(**{name: x}, seed=0).value, expected)


# Printing -----------------------------------------------------------------------------------------

GMVAE = """\
p:  p(y) p(z|y) p(x|z)   (699,536 parameters θ)
    y               10           0   OneHot(10)
    z | y           64       1,408   Normal(64)
    x | z          784     698,128   Bernoulli(784, net=mlp(512, 512))
q:  q(y|x) q(z|x, y)   (1,405,066 parameters φ)
    y | x           10     669,706   OneHot(net=mlp(512, 512))
    z | x, y        64     735,360   Normal(net=mlp(512, 512))
latent y, z; observed x"""

VRNN = """\
p:  p(z[t]|h[t]) p(x[t]|h[t], z[t]); h[t] = f(h[t-1], x[t-1], z[t-1])   (212 parameters θ)
    h[t] | h[t-1], x[t-1], z[t-1]         3         132   LSTM(3)
    z[t] | h[t]                           2          36   Normal(2, net=mlp(4))
    x[t] | h[t], z[t]                     4          44   Bernoulli(4, net=mlp(4))
q:  q(z[t]|h[t], x[t], c)   (60 parameters φ)
    z[t] | h[t], x[t], c                  2          60   Normal(net=mlp(4))
given: c (2)
latent z; observed x"""


def test_the_gmvae_prints_its_factorization_sizes_and_counts():
    gmvae = Model(
        p={"y": OneHot(10), "z | y": Normal(64), "x | z": Bernoulli(784, net=mlp(512, 512))},
        q={"y | x": OneHot(net=mlp(512, 512)), "z | x, y": Normal(net=mlp(512, 512))},
    )
    # By hand: weights and biases, layer by layer; Normal has two heads.
    assert (64 * 512 + 512) + (512 * 512 + 512) + (512 * 784 + 784) == 698_128
    assert 2 * (10 * 64 + 64) == 1_408
    assert (784 * 512 + 512) + (512 * 512 + 512) + (512 * 10 + 10) == 669_706
    assert ((784 + 10) * 512 + 512) + (512 * 512 + 512) + 2 * (512 * 64 + 64) == 735_360
    assert str(gmvae) == repr(gmvae) == GMVAE
    assert sum(parameter.numel() for parameter in gmvae.theta()) == 699_536
    assert sum(parameter.numel() for parameter in gmvae.phi()) == 1_405_066


def test_a_sequence_model_prints_its_recurrence_and_what_is_given():
    model = Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(3),
            "z[t] | h[t]": Normal(2, net=mlp(4)),
            "x[t] | h[t], z[t]": Bernoulli(4, net=mlp(4)),
        },
        q={"z[t] | h[t], x[t], c": Normal(net=mlp(4))},
        given={"c": 2},
    )
    # An LSTM of 3 units: four gates of inputs (4 + 2), bias, state, bias.
    assert 12 * 6 + 12 + 12 * 3 + 12 == 132
    assert str(model) == VRNN


def test_specifications_print_as_they_are_written():
    for text in (
        "Normal(2)",
        "Normal(64, net=mlp(512, 512))",
        "Normal((1, 28, 28), net=deconv(64, 32))",
        "Normal(net=mlp(5, dropout=0.1), scale='learned')",
        "OneHot(10, learned=True)",
        "LSTM(256, layers=2)",
        "Exact()",
        "Normal(net=conv(32, 64, hidden=128))",
        "Mixture(2, components=3)",
    ):
        assert repr(eval(text)) == text


def test_the_base_class_is_no_distribution():
    with pytest.raises(TypeError, match=re.escape("Conditional has no heads(d).")):
        Model({"z": Conditional(2), "x | z": Normal(3)}, {"z | x": Conditional()})
