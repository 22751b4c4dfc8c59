"""Recommend an estimator from the measurements, as text."""

from __future__ import annotations

from collections.abc import Iterator

from aevb.derive.draws import Draw
from aevb.laboratory.result import Figures, Laboratory, Target

MOMENTUM = 10  # steps whose gradients Adam averages, with β₁ = 0.9
# Draws of a latent that could also be enumerated.
DISCRETE = tuple(draw for draw in Draw if draw.relaxes or draw is Draw.SCORE)


def advise(laboratory: Laboratory) -> Iterator[str]:
    """Yield sentences: a recommendation per target, then remarks.

    The remarks say when a biased way is worth it, what sampling a finite latent saves, and which
    measurement contradicts the derivation.
    """
    for target in laboratory.targets:
        best = laboratory.best(target)
        if best is None:
            remedy = (
                'gradient="score" is unbiased, for particles resampled independently'
                if target.name.startswith("particles")
                else "Use samples=2 or more for the unbiased score function"
            )
            yield (
                f"{target.name}: no unbiased way was measured here, so biases are unknown. "
                f"{remedy}."
            )
            continue
        yield f"{target.name}: {_described(best)}. {_why(laboratory, target, best)}"
        yield from _biased(laboratory, target, best)
    yield from _enumeration(laboratory)
    for one in laboratory.figures:
        if one.unbiased and one.bias_seen:
            yield (
                f"Unexpected: {one.full_name} is unbiased by derivation, but a bias was detected. "
                "This happens by chance for one figure in ten thousand; try another seed."
            )


def _described(one: Figures) -> str:
    return f"{one.name}, K = {one.samples}"


def _why(laboratory: Laboratory, target: Target, best: Figures) -> str:
    others = [
        one
        for one in laboratory.of(target)
        if one.unbiased and not one.bias_seen and one is not best
    ]
    if not best.noise:
        return "It has no variance at all."
    cost, error = laboratory.cost(best), _cost_error(laboratory, target, best)
    text = (
        f"Of the unbiased ways it has the least variance × time "
        f"({best.noise + target.rows_noise:.3g} × {1000 * best.seconds:.3g} ms)"
    )
    if target.rows_noise:
        text += (
            f"; the choice of rows alone gives the gradient a variance of "
            f"{target.rows_noise:.3g}, its own noise {best.noise:.3g}"
        )
    near = [
        one
        for one in others
        if laboratory.cost(one) - cost
        < 2 * (error**2 + _cost_error(laboratory, target, one) ** 2) ** 0.5
    ]
    if near:
        more = f"; {len(near) - 4} more" if len(near) > 4 else ""
        text += (
            f". Within the error of this measurement: {'; '.join(map(_described, near[:4]))}{more}"
        )
    elif others:
        second = min(others, key=laboratory.cost)
        text += (
            f". Next is {_described(second)}, at {laboratory.cost(second) / cost:.3g} times the "
            f"cost"
        )
    return text + "."


def _cost_error(laboratory: Laboratory, target: Target, one: Figures) -> float:
    noise = (one.theta.error**2 + one.phi.error**2) ** 0.5
    return (
        (one.seconds * noise) ** 2 + (one.seconds_error * (one.noise + target.rows_noise)) ** 2
    ) ** 0.5


def worth(laboratory: Laboratory, one: Figures, best: Figures) -> float:
    """Return after how many averaged steps of ``best`` a biased way stops being better.

    At that number its bias² outweighs the time that it saves. 0 if it saves nothing. In the time of
    n steps of ``best``, with variance V and t seconds per step, the mean gradient of ``best`` has
    squared error V/n, and that of the biased way b² + V' t' / (n t). They are equal at n = (V − V'
    t'/t) / b².
    """
    saved = (laboratory.cost(best) - laboratory.cost(one)) / best.seconds
    if saved <= 0:
        return 0.0
    return saved / one.squared_bias if one.squared_bias else float("inf")


def _biased(laboratory: Laboratory, target: Target, best: Figures) -> Iterator[str]:
    biased = [one for one in laboratory.of(target) if not one.unbiased]
    if not biased:
        return
    chosen = max(biased, key=lambda one: (worth(laboratory, one, best), -laboratory.cost(one)))
    steps, cost = (
        worth(laboratory, chosen, best),
        laboratory.cost(chosen) / laboratory.cost(best) if laboratory.cost(best) else float("inf"),
    )
    if steps == 0:
        yield (
            f"  No biased way is worth it: the best of them, {_described(chosen)}, saves nothing "
            f"({cost:.3g} times the cost) and is biased."
        )
    elif steps == float("inf"):
        yield (
            f"  {_described(chosen)} costs {cost:.3g} of that. It is biased, but by less than "
            f"this measurement can detect: worth trying."
        )
    else:
        count = max(1, round(steps))
        verdict = (
            "not worth it" if steps < MOMENTUM else "worth it, though not at the end of training"
        )
        yield (
            f"  {_described(chosen)} costs {cost:.3g} of that but is biased (‖bias‖² "
            f"{chosen.squared_bias:.3g}): {verdict}. The bias outweighs the saving in a mean over "
            f"{count} step{'s' if count > 1 else ''} or more, and Adam's is over about {MOMENTUM}."
        )


def _enumeration(laboratory: Laboratory) -> Iterator[str]:
    """Compare sampling a latent with enumerating it, in time and variance, all else equal."""
    for one in laboratory.figures:
        if one.how or not one.noise or one.gradient != "plain":
            continue
        for latent in one.enumerated:
            drawn: dict[str, Figures] = {}
            for other in laboratory.figures:
                word = other.how.get(latent, "")
                if (
                    set(other.how) != {latent}
                    or (other.bound, other.samples) != (one.bound, one.samples)
                    or word not in DISCRETE
                ):
                    continue
                if word not in drawn or _usual(other) < _usual(drawn[word]):
                    drawn[word] = other
            if drawn:
                parts = (
                    f"{word}{'' if other.temperature is None else f' τ={other.temperature:g}'} "
                    f"takes {other.seconds / one.seconds:.3g} of the time at "
                    f"{other.noise / one.noise:.3g} times the gradient's variance"
                    for word, other in drawn.items()
                )
                yield (
                    f"Drawing {latent} instead of enumerating it ({one.bound}, K = "
                    f"{one.samples}): {'; '.join(parts)}."
                )


def _usual(one: Figures) -> float:
    """Return the distance of the temperature from the usual 0.5."""
    return abs((one.temperature or 0.5) - 0.5)
