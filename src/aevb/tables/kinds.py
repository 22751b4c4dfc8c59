"""The kind of a column: which likelihood fits its values, and why.

Kinds are compared by the maximised log-likelihood per row of the column alone, with the Jacobian of
a logarithm counted, so that the densities have the same units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aevb.tables.amounts import MANY, Amounts, is_code, mixed_units
from aevb.tables.date_texts import DateTexts, why_no_dates
from aevb.tables.far_cells import few_far
from aevb.tables.reading import Cells

KINDS = ("real", "positive", "count", "binary", "category", "ordered", "date")
LEFT_OUT = "left out"
FREE = ("real", "positive", "count")  # kinds of numbers that are not levels
MOST_LEVELS = 256  # a category with more levels is left out unless asked for
MOST_ASKED = 10_000  # and with more than this it is refused
FEW = 10  # numbers with at most this many distinct values, each repeated, are levels
CLEAR = 0.01  # nats per row by which a logarithm must be better
# Nats by which levels must be better than a count, per row and in all: a new level is refused.
BETTER, DECISIVE = 0.05, 10.0
SPIKE = 0.2  # a share of equal cells that the reason of a density mentions
MOST_DECIMALS = 6  # numbers with more decimals have no fixed number of them
FEW_ZEROS = 0.05  # the largest share of zeros that a positive column may have
ZEROS_RAISE = 1.5  # the most by which they may raise the variance of its logarithms
LOWEST = 8.0  # standard deviations of the logarithms below which none may lie
NO_SIZE = 1e-3  # the part of its standard deviation below which a positive number is as good as 0
SMOOTH = 10  # whole numbers with a larger standard deviation may be modelled as a density
# Levels that may mark missing cells. They are levels, because in some columns they say something.
MARKS = ("unknown", "missing", "none", "null", "?", "-", "n.a.", "k.a.", "not available")

LIKELIHOODS = {
    "real": "Normal",
    "positive": "LogNormal",
    "count": "Poisson",
    "binary": "Bernoulli",
    "category": "OneHot",
    "ordered": "OneHot",
    "date": "Normal",
    LEFT_OUT: "",
}


@dataclass(frozen=True)
class Facts:
    """What is known of a column's cells: enough to choose and to change its kind.

    ``levels`` are the distinct values, in their order, if there are at most ``MOST_ASKED`` (for
    numbers ``MOST_LEVELS``). Moments are None if they do not exist. If all numbers are positive but
    for ``zeros`` of them, ``least`` is the smallest positive one, and the moments of the logarithms
    are those of the positive numbers alone.
    """

    type: str
    rows: int
    missing: int
    distinct: int
    levels: tuple[Any, ...] | None = None
    ordered: bool = False
    words: tuple[str, ...] = ()
    whole: bool = False
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    spread: float | None = None
    log_mean: float | None = None
    log_spread: float | None = None
    spike: float | None = None  # the most frequent number,
    spike_share: float = 0.0  # and its share of the known cells
    amounts: Amounts | None = None  # the form of numbers that are written as text
    dates: DateTexts | None = None  # and of dates
    # Older files lack these. A run of an older version has the same schema in spite of it.
    decimals: int | None = field(default=None, compare=False)  # of the numbers; None if too many
    zeros: int = field(default=0, compare=False)
    zero_share: float = field(default=0.0, compare=False)  # of the known cells
    least: float | None = field(default=None, compare=False)
    per_day: int | None = field(default=None, compare=False)  # steps of a day of times; 1 for days

    @property
    def form(self) -> Amounts | DateTexts | None:
        """The form of numbers or dates that are written as text; None without one."""
        return self.amounts or self.dates

    @property
    def not_negative(self) -> bool:
        """Whether filled and drawn numbers are at least 0: some cells are 0, or as good as that."""
        if self.low is None or self.spread is None:
            return False
        return self.zeros > 1 or 0 < self.low < NO_SIZE * self.spread

    @property
    def constant(self) -> bool:
        """Whether the known cells are equal, up to rounding, and float64 can represent them."""
        if self.whole and self.low is not None and _beyond(self):
            return False
        return self.distinct == 1 or _rounding(self)


@dataclass(frozen=True)
class Choice:
    """A kind with its likelihood and the reason for it."""

    kind: str
    likelihood: str
    reason: str


def facts_of(cells: Cells, form: Amounts | DateTexts | None = None) -> Facts:
    """Summarise a column. Raise ValueError for cells that are not finite."""
    known = cells.values[~cells.missing]
    rows, missing = len(cells.values), int(cells.missing.sum())
    if cells.type in ("text", "category"):
        seen = set(known.tolist())
        levels = ordered_levels(cells, seen)
        return Facts(
            cells.type,
            rows,
            missing,
            len(seen),
            levels if len(levels) <= MOST_ASKED else None,
            cells.ordered,
            tuple(sorted(cells.words)),
        )
    values = known.astype(float)
    if (infinite := np.isinf(values)).any():
        row = int(np.flatnonzero(~cells.missing)[np.argmax(infinite)])
        raise infinite_error(cells.name, int(infinite.sum()), row)
    if not len(values):
        return Facts(cells.type, rows, missing, 0)
    distinct, times = np.unique(values, return_counts=True)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, spread = float(values.mean()), float(values.std())
    check_moments(cells.name, mean, spread, float(np.abs(values).max()), len(distinct))
    logs = np.log(values[values > 0]) if values.min() >= 0 else np.zeros(0)
    zeros = len(values) - len(logs) if len(logs) else 0
    least = float(values[values > 0].min()) if zeros else None
    log_mean, log_spread = (float(logs.mean()), float(logs.std())) if len(logs) else (None, None)
    return Facts(
        cells.type,
        rows,
        missing,
        len(distinct),
        number_levels(cells, distinct),
        words=tuple(sorted(cells.words)),
        whole=bool((values == np.rint(values)).all()),
        low=float(values.min()),
        high=float(values.max()),
        mean=mean,
        spread=spread,
        log_mean=log_mean,
        log_spread=log_spread,
        spike=float(distinct[times.argmax()]),
        spike_share=float(times.max() / len(values)),
        amounts=form if isinstance(form, Amounts) else None,
        dates=form if isinstance(form, DateTexts) else None,
        decimals=decimals_of(values),
        per_day=steps_of_day(values) if cells.type in ("date", "datetime") else None,
        zeros=zeros,
        zero_share=zeros / len(values),
        least=least,
    )


def log_moments(facts: Facts) -> tuple[float, float]:
    """Mean and standard deviation of the logarithms of a column; a zero is read as least / 2."""
    assert facts.log_mean is not None
    assert facts.log_spread is not None
    if facts.least is None:
        return facts.log_mean, facts.log_spread
    share, apart = facts.zero_share, math.log(2) + facts.log_mean - math.log(facts.least)
    variance = (1 - share) * (facts.log_spread**2 + share * apart**2)
    return facts.log_mean - share * apart, math.sqrt(variance)


def decimals_of(values: np.ndarray) -> int | None:
    """The number of decimals that numbers are written with; None beyond ``MOST_DECIMALS``.

    >>> decimals_of(np.array([3.0, 0.25])), decimals_of(np.array([1 / 3]))
    (2, None)
    """
    with np.errstate(over="ignore"):
        return next(
            (n for n in range(MOST_DECIMALS + 1) if (np.round(values, n) == values).all()), None
        )


STEPS = (1, 24, 1440, 86_400)  # of a day: days, hours, minutes and seconds


def steps_of_day(days: np.ndarray) -> int | None:
    """The steps of a day that all times are written in; None for parts of seconds.

    >>> steps_of_day(np.array([19_000.0, 19_001.5]))
    24
    """
    return next((n for n in STEPS if (np.abs(days * n - np.rint(days * n)) < 1e-4).all()), None)


def infinite_error(name: str, count: int, row: int) -> ValueError:
    return ValueError(
        f"Column {name!r} has {count} infinite cell{'s' * (count > 1)} (row {row}, from 0). "
        f"Replace them by a number, or by a missing value."
    )


def check_moments(name: str, mean: float, spread: float, largest: float, distinct: int) -> None:
    """Raise ValueError for numbers whose variance is not finite, or 0 although they differ."""
    if not (math.isfinite(mean) and math.isfinite(spread)):
        raise ValueError(
            f"Column {name!r} has numbers up to {largest:.3g}, whose variance overflows. Use a "
            f"larger unit."
        )
    if spread == 0 < distinct - 1:
        raise ValueError(
            f"Column {name!r} has numbers up to {largest:.3g}, whose variance underflows. Use a "
            f"smaller unit."
        )


def number_levels(cells: Cells, distinct: np.ndarray) -> tuple[Any, ...] | None:
    """The distinct numbers of a column as levels; None if they are more than ``MOST_LEVELS``."""
    if len(distinct) > MOST_LEVELS:
        return None
    return tuple(_plain(cells, value) for value in distinct)


def _plain(cells: Cells, value: float) -> Any:
    """A level as it is written in JSON: a truth value, a whole number or a number."""
    if cells.type == "boolean":
        return bool(value)
    return int(value) if value == int(value) and "Float" not in cells.dtype else float(value)


def ordered_levels(cells: Cells, seen: set[Any]) -> tuple[Any, ...]:
    """The levels of a text, or of a categorical type, in their order."""
    if cells.levels is None:
        return tuple(sorted(seen))
    if len(cells.levels) > MOST_LEVELS:
        return tuple(level for level in cells.levels if level in seen)
    return cells.levels


def choose(cells: Cells, facts: Facts) -> Choice:
    """Choose the kind of a column by its type and its values."""
    choice = _chosen(cells, facts)
    if cells.type == "number" and choice.kind in FREE:
        choice = _without_far(cells, facts, choice)
    return with_remarks(choice, facts)


def _without_far(cells: Cells, facts: Facts, choice: Choice) -> Choice:
    """The choice that the column would get without the few cells that lie far from all others."""
    known = cells.values[~cells.missing].astype(float)
    far = few_far(known)
    if not far.any():
        return choice
    usual = replace(cells, values=known[~far], missing=np.zeros(int((~far).sum()), bool))
    other = _chosen(usual, facts_of(usual))
    if other.kind not in FREE or why_not(facts, other.kind) is not None:
        return choice
    which = f"{far.sum()} far cell{'s' * int(far.sum() > 1)} aside"
    return replace(other, reason=f"{other.reason} ({which}: {known[far][0]:g})")


def _chosen(cells: Cells, facts: Facts) -> Choice:
    known = facts.rows - facts.missing
    if not known:
        return Choice(LEFT_OUT, "", "every cell is missing")
    if facts.type == "number" and facts.whole and _beyond(facts):
        return Choice(LEFT_OUT, "", "whole numbers beyond 2^53, which look like identifiers")
    if facts.distinct == 1:
        value = cells.values[~cells.missing][0]
        return Choice(LEFT_OUT, "", f"constant: every known cell is {_short(value)}")
    if facts.type == "boolean":
        return Choice("binary", "Bernoulli", "truth values")
    if facts.type in ("text", "category"):
        choice = _choose_levels(cells, facts, known)
        texts = cells.values[~cells.missing].tolist() if facts.type == "text" else []
        mixed = mixed_units(texts) or why_no_dates(texts)
        return replace(choice, reason=f"{choice.reason}; {mixed}") if mixed else choice
    if facts.type in ("date", "datetime"):
        return Choice("date", "Normal", "dates, in days" if facts.dates is None else "in days")
    choice = _choose_number(cells.values[~cells.missing].astype(float), facts, known)
    if choice.kind in ("real", "positive") and facts.spike_share >= SPIKE and not facts.zeros:
        spike = f"{facts.spike_share:.0%} of the cells are {facts.spike:g}"
        return Choice(choice.kind, choice.likelihood, f"{choice.reason}; {spike}")
    return choice


def by_itself(reason: str) -> bool:
    """Whether a column has its kind by its cells, and not because a user asked for it."""
    return not reason.startswith("as asked")


def _beyond(facts: Facts) -> bool:
    """Whether float64 cannot tell neighbouring whole numbers apart."""
    assert facts.low is not None
    assert facts.high is not None
    return max(abs(facts.low), abs(facts.high)) >= 2**53  # 2^53 + 1 rounds to 2^53


def _rounding(facts: Facts) -> bool:
    """Whether numbers differ by no more than rounding."""
    if facts.spread is None or facts.mean is None:
        return False
    return facts.spread <= 1e-12 * abs(facts.mean)


def _choose_levels(cells: Cells, facts: Facts, known: int) -> Choice:
    what = "text" if facts.type == "text" else "a categorical type"
    if (
        facts.type == "text"
        and facts.distinct > MANY
        and _is_numeric_text(cells.values[~cells.missing])
    ):
        raise ValueError(
            f"Column {cells.name!r} holds numbers written as text ({facts.distinct} different "
            f"ones). Convert it to numbers (pandas.to_numeric(frame[{cells.name!r}])), or read "
            f'the schema with kinds={{{cells.name!r}: "category"}}.'
        )
    if facts.type == "text" and facts.distinct == known and known > FEW:
        return Choice(LEFT_OUT, "", "an identifier: text that differs in every row")
    if facts.type == "text" and facts.distinct > MANY and 2 * facts.distinct > known:
        return Choice(
            LEFT_OUT,
            "",
            f"text that differs in most rows ({facts.distinct:,} different ones in {known:,} "
            f"cells)",
        )
    if facts.distinct > MOST_LEVELS:
        return Choice(
            LEFT_OUT,
            "",
            f"{facts.distinct:,} levels in {known:,} known cells, more than {MOST_LEVELS}: most "
            f"levels are too rare to learn",
        )
    assert facts.levels is not None
    more = _remarks(facts)
    if facts.ordered and len(facts.levels) > 2:
        return Choice(
            "ordered",
            "OneHot",
            f"a type with {len(facts.levels)} ordered levels; order not used{more}",
        )
    if len(facts.levels) == 2:
        return Choice("binary", "Bernoulli", f"{what} with two levels{more}")
    return Choice("category", "OneHot", f"{what} with {len(facts.levels)} levels{more}")


def _remarks(facts: Facts) -> str:
    """What a user should know about the levels of a text."""
    return "".join(f"; {told}" for told in (case_text(facts), marks_text(facts)) if told)


def case_text(facts: Facts) -> str:
    """Say which levels differ only in spaces or capitals; "" if none do."""
    levels = facts.levels or ()
    plain = Counter(str(level).strip().casefold() for level in levels)
    alike = [level for level in levels if plain[str(level).strip().casefold()] > 1]
    if not alike:
        return ""
    return f"some levels differ only in spaces or capitals ({', '.join(map(repr, alike[:4]))})"


def marks_text(facts: Facts) -> str:
    """Say which levels of a text may mark missing cells; "" if none does."""
    levels = facts.levels or () if facts.type == "text" else ()
    found = [level for level in levels if level.strip().lower() in MARKS]
    if not found:
        return ""
    shown = " and ".join(map(repr, found))
    if len(found) == 1:
        return f"{shown} is a level; if it marks missing cells, declare it missing"
    return f"{shown} are levels; if they mark missing cells, declare them missing"


def with_remarks(choice: Choice, facts: Facts) -> Choice:
    """The same choice; its reason names the form of its texts, and those that were made missing."""
    form = [] if facts.form is None else [facts.form.described()]
    words = [words_text(facts)] if facts.words else []
    return replace(choice, reason="; ".join([*form, choice.reason, *words]))


def words_text(facts: Facts) -> str:
    """The texts that mark missing cells of a column."""
    more = f" and {len(facts.words) - 5} others" if len(facts.words) > 5 else ""
    return f"missing where the text is {', '.join(map(repr, facts.words[:5]))}{more}"


def _is_numeric_text(values: np.ndarray) -> bool:
    """Whether all texts are numbers, and none is a code with a leading zero (00123)."""
    if any(map(is_code, set(values.tolist()))):
        return False
    try:
        return all(math.isfinite(float(value)) for value in set(values.tolist()))
    except (TypeError, ValueError):
        return False


def _choose_number(values: np.ndarray, facts: Facts, known: int) -> Choice:
    assert facts.low is not None
    assert facts.high is not None
    if _rounding(facts):
        return Choice(LEFT_OUT, "", f"constant up to rounding: {facts.mean:g}")
    if facts.distinct == 2 and facts.levels is not None:
        low, high = facts.levels
        if (facts.whole or known >= FEW) and known > 2:
            return Choice("binary", "Bernoulli", f"two values, {low:g} and {high:g}")
    if facts.whole and known > FEW and bool((np.diff(values) == 1).all()):
        return Choice(LEFT_OUT, "", "row numbers: they rise by 1 from row to row")
    if facts.whole and facts.low >= 0:
        return _choose_whole(values, facts, known)
    if facts.distinct <= FEW and known >= 5 * facts.distinct:
        return _few_values(facts)
    return _choose_density(values, facts, "all positive")


def _few_values(facts: Facts) -> Choice:
    return Choice(
        "ordered", "OneHot", f"{facts.distinct} distinct numbers, no density; order not used"
    )


def _choose_density(values: np.ndarray, facts: Facts, what: str) -> Choice:
    assert facts.low is not None
    if facts.low < 0:
        return Choice("real", "Normal", "negative values")
    if facts.zeros:
        what = f"all positive but {facts.zeros} zero{'s' * (facts.zeros > 1)}"
    gain = log_normal_gain(facts)
    if gain > CLEAR and (why := why_no_logarithms(values, facts)) is not None:
        choice = Choice("real", "Normal", f"{what}: {why} for a LogNormal")
    elif gain > CLEAR:
        choice = Choice(
            "positive", "LogNormal", f"{what}: LogNormal beats Normal by {gain:.2f} nats/row"
        )
    elif gain < -CLEAR:
        choice = Choice("real", "Normal", f"{what}: Normal beats LogNormal by {-gain:.2f} nats/row")
    else:
        choice = Choice("real", "Normal", f"{what}: Normal is as likely as LogNormal")
    told = zeros_text(facts, choice.kind)
    return replace(choice, reason=f"{choice.reason}; {told}") if told else choice


def why_no_logarithms(values: np.ndarray, facts: Facts) -> str | None:
    """Say why a LogNormal would have wrong moments, whatever its likelihood; None if it has not.

    Its likelihood gains from a high density at zeros and at tiny numbers. Their logarithms lie far
    below the others, and make σ, and with it the mean exp(μ + σ²/2), too large.
    """
    if facts.log_mean is None or not facts.log_spread:
        return None
    if facts.zero_share > FEW_ZEROS:
        return "too many zeros"
    if facts.zeros and log_moments(facts)[1] ** 2 > ZEROS_RAISE * facts.log_spread**2:
        return "zeros too far below the other logarithms"
    least = facts.low if facts.least is None else facts.least
    assert least is not None
    assert facts.high is not None
    if facts.log_mean + facts.log_spread**2 / 2 > math.log(facts.high):
        return "logarithms that differ too much"  # the mean would lie above the largest number
    low, middle, high = np.quantile(np.log(values[values > 0]), (0.16, 0.5, 0.84))
    # Either distance is the standard deviation of a normal distribution; tails do not change it.
    if middle - math.log(least) > LOWEST * max(middle - low, high - middle):
        return f"the smallest, {least:g}, too far below the other logarithms"
    return None


def zeros_text(facts: Facts, kind: str) -> str:
    """How a density treats the zeros of a column without negative numbers; "" without zeros."""
    if kind == "positive" and facts.least is not None:
        told = f"a zero is read as {facts.least / 2:g}, half of the smallest positive number"
        many = "; with so many zeros, filled and drawn cells are far too large"
        return told + many * (facts.zero_share > FEW_ZEROS)
    if kind != "real" or not facts.not_negative:
        return ""
    many = (
        f"; {facts.zero_share:.0%} of the cells are 0; to model them apart, split the column in "
        f"two: whether a cell is 0, and its amount, missing where it is 0"
    )
    return "filled and drawn cells are not negative" + many * (facts.zero_share > FEW_ZEROS)


def log_normal_gain(facts: Facts) -> float:
    """Maximised log-likelihood per positive cell of LogNormal minus that of Normal.

    Both are −log σ − ½ log 2πe of their own σ; the logarithm adds the Jacobian −E[log x]. Zeros do
    not count: a LogNormal has no density there.
    """
    if facts.log_mean is None or not facts.log_spread:
        return -math.inf
    assert facts.mean is not None
    assert facts.spread is not None
    known = 1 - facts.zero_share
    # The variance of the positive cells alone, whose mean is mean / known.
    spread = math.sqrt(max(facts.spread**2 - (1 - known) * facts.mean**2 / known, 0.0) / known)
    return math.log(spread) - math.log(facts.log_spread) - facts.log_mean if spread else -math.inf


def _choose_whole(values: np.ndarray, facts: Facts, known: int) -> Choice:
    """Counts, levels or a density of whole numbers: all are probabilities of unit intervals."""
    assert facts.spread is not None
    assert facts.low is not None
    poisson = poisson_likelihood(values)
    negative, _ = negative_binomial_likelihood(values)
    count = max(poisson, negative)
    if facts.distinct <= 2 * FEW and known >= 5 * facts.distinct:
        share = np.unique(values, return_counts=True)[1] / known
        # Each probability but one is a parameter: the Bayesian information criterion.
        free = 0.5 * (facts.distinct - 2) * math.log(known) / known
        levels = float((share * np.log(share)).sum()) - free
        if levels - count > max(BETTER, DECISIVE / known):
            gain = levels - count
            return Choice(
                "ordered",
                "OneHot",
                f"{facts.distinct} whole numbers: levels beat counts by {gain:.2f} nats/row; "
                f"order not used",
            )
    if facts.spread > SMOOTH:
        normal = -math.log(facts.spread) - 0.5 * math.log(2 * math.pi * math.e)
        skewed = -math.inf if facts.zeros else normal + log_normal_gain(facts)
        if max(normal, skewed) >= count - BETTER:
            return _choose_density(values, facts, "large whole numbers")
    gain = negative - poisson
    if gain * known <= math.log(known):  # twice the penalty of one more parameter
        return Choice("count", "Poisson", "counts: no more spread than Poisson")
    return Choice(
        "count",
        "NegativeBinomial",
        f"counts: NegativeBinomial beats Poisson by {gain:.2f} nats/row",
    )


def poisson_likelihood(values: np.ndarray) -> float:
    """The maximised log-likelihood per row of a Poisson distribution."""
    from scipy import special  # type: ignore[import-untyped]

    mean = values.mean()
    return float(mean * math.log(mean) - mean - special.gammaln(values + 1).mean())


def negative_binomial_likelihood(values: np.ndarray) -> tuple[float, float]:
    """The maximised log-likelihood per row of a negative binomial, and its dispersion r.

    Its mean is the mean of the values for every r, so r alone is searched for.
    """
    from scipy import optimize, special

    mean, which, times = float(values.mean()), *np.unique(values, return_counts=True)
    share = times / len(values)

    def loss(log_r: float) -> float:
        r = math.exp(log_r)
        each = (
            special.gammaln(which + r)
            - special.gammaln(r)
            - special.gammaln(which + 1)
            + r * math.log(r / (r + mean))
            + which * math.log(mean / (r + mean))
        )
        return -float((share * each).sum())

    found = optimize.minimize_scalar(loss, bounds=(-7.0, 14.0), method="bounded")
    return -float(found.fun), math.exp(float(found.x))


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 30 else text[:29] + "…"


def why_not(facts: Facts, kind: str) -> str | None:
    """Why a column cannot have this kind; None if it can."""
    number = facts.type in ("number", "boolean")
    if facts.rows == facts.missing:
        return "every cell is missing"
    if kind in ("binary", "category", "ordered") and number and facts.whole and _beyond(facts):
        return (
            "its whole numbers lie beyond 2^53, where neighbours are one number in float64; "
            "convert it to text"
        )
    if facts.distinct == 1:
        return "its known cells are all equal"
    if kind == "date":
        return None if facts.type in ("date", "datetime") else "its cells are no dates"
    if kind in ("real", "positive", "count"):
        if not number:
            return "its cells are no numbers"
        if kind == "positive" and facts.log_mean is None:
            return f"its smallest value is {facts.low:g}, which has no logarithm"
        if kind == "positive" and facts.least is not None and not facts.least / 2:
            return f"half of its smallest positive number, {facts.least:g}, is 0"
        if kind == "count" and not (facts.whole and (facts.low or 0) >= 0):
            return "its values are not all whole numbers from 0 on"
        return None
    if facts.levels is None:
        most = MOST_LEVELS if number else MOST_ASKED
        return f"it has {facts.distinct:,} levels, more than {most:,}"
    if kind == "binary" and len(facts.levels) != 2:
        return f"it has {len(facts.levels)} levels"
    return None


def asked(facts: Facts, kind: str, likelihood: str | None = None) -> Choice:
    """The choice of a user."""
    many = kind == "positive" and facts.zero_share > FEW_ZEROS
    reason = f"as asked; {zeros_text(facts, kind)}" if many else "as asked"
    return with_remarks(Choice(kind, likelihood or LIKELIHOODS[kind], reason), facts)


def levels_text(levels: Sequence[Any], width: int = 40) -> str:
    """Levels in one short line."""
    shown: list[str] = []
    for i, level in enumerate(levels):
        text = str(level)
        if sum(len(one) + 2 for one in shown) + len(text) > width and i:
            return ", ".join(shown) + f", … ({len(levels)})"
        shown.append(text)
    return ", ".join(shown)
