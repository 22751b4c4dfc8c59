"""The figures of the report: arrays become inline SVG and embedded images.

A figure has a few panels, and each panel is one drawing. Panels are therefore side by side on a
wide screen, and below each other on a narrow one. Colours are names of the page's style sheet,
which has a light and a dark value for each.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from markupsafe import Markup

from aevb.estimate.metric_names import Metric
from aevb.experiments.lab import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Placeholders for the style sheet's colours. No figure uses these colours otherwise.
INK, MUTED, RULE, BAND = "#010101", "#020202", "#030303", "#040404"
BLUE, RED, GREEN, OCHRE, VIOLET = "#050101", "#050202", "#050303", "#050404", "#050505"
NAMES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    BAND: "band",
    BLUE: "blue",
    RED: "red",
    GREEN: "green",
    OCHRE: "ochre",
    VIOLET: "violet",
}
CLASSES = (
    "#4e79a7",
    "#e0812c",
    "#c94b4e",
    "#5aa39e",
    "#52964a",
    "#c79f24",
    "#a36d97",
    "#e47f8d",
    "#93704f",
    "#8a8580",
)
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "aevb",
    "path.simplify": False,
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.titlesize": 11,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
}
PLANES = ((0, 1), (0, 2), (1, 2))
SUBSCRIPTS = "₁₂₃"
AXIS = "nats per example"


@dataclass(frozen=True)
class Picture:
    """Panels, the meaning of their colours, and the minimum width of a panel."""

    panels: Sequence[Markup]
    legend: Sequence[tuple[str, str]] = ()
    least: str = "17rem"


# Drawing ------------------------------------------------------------------------------------------


class Panel:
    """A drawing with one or several axes; sizes are in pixels."""

    def __init__(
        self,
        name: str,
        label: str,
        *,
        width: float = 330,
        height: float = 230,
        rows: int = 1,
        columns: int = 1,
        **options: Any,
    ) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.name, self.label = name, label
        with matplotlib.rc_context(STYLE):
            self.figure: Figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            FigureCanvasSVG(self.figure)
            self.grid = np.atleast_1d(
                np.asarray(self.figure.subplots(rows, columns, **options))
            ).ravel()

    @property
    def axes(self) -> Axes:
        return self.grid[0]

    def line(
        self,
        x: Any,
        y: Any,
        colour: str,
        *,
        width: float = 1.6,
        alpha: float = 1.0,
        dashed: bool = False,
    ) -> None:
        """Draw a curve; a single point becomes a dot."""
        marker = "o" if np.size(x) == 1 else ""
        self.axes.plot(
            x,
            y,
            color=colour,
            lw=width,
            alpha=alpha,
            ls=(0, (4, 3)) if dashed else "-",
            marker=marker,
            ms=4,
            solid_capstyle="round",
        )

    def level(self, y: float, colour: str = INK) -> None:
        self.axes.axhline(y, color=colour, lw=1, ls=(0, (1, 2.5)))

    def svg(self) -> Markup:
        """Return the drawing as an SVG element with named colours and short numbers.

        Its identifiers are unique on the page.
        """
        text = io.StringIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(
                text,
                format="svg",
                transparent=True,
                metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            )
        return Markup(_clean(text.getvalue(), self.name, self.label))


def _clean(svg: str, name: str, label: str) -> str:
    svg = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>",
        "",
        svg[svg.index("<svg") :],
        flags=re.DOTALL,
    )
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    widest = 1.2 * float(box[1].split()[2])  # beyond this its text would look too large
    head = Markup(
        '<svg class="plot" role="img" aria-label="{}" viewBox="{}" style="max-width:{:.0f}px">'
    ).format(label, box[1], widest)
    svg = str(head) + svg[svg.index(">") + 1 :]
    used = set(re.findall(r'url\(#([^)]+)\)|xlink:href="#([^"]+)"', svg))
    own = {
        identifier: f"{name}-{i}"
        for i, identifier in enumerate(sorted("".join(pair) for pair in used))
    }
    svg = re.sub(
        r' id="([^"]*)"', lambda match: f' id="{own[match[1]]}"' if match[1] in own else "", svg
    )
    svg = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{own[match[1]]})", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', lambda match: f'href="#{own[match[1]]}"', svg)
    svg = re.sub(r"font: (?:\w+ )?(\d+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    # Shorten coordinates, but not the labels of ticks.
    svg = re.sub(r'"[^"<>]*"', lambda match: re.sub(r"(\d\.\d)\d+", r"\1", match[0]), svg)
    svg = re.sub(r"M (\S+ \S+)\s+L \1\s+(?=M|\")", r"M\1h0", svg)
    for colour, variable in NAMES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r"\s*\n\s*", " ", svg).strip()


def _both(
    draw: Callable[[float, float, str], Panel],
    width: float,
    height: float,
    tight: float | None = None,
) -> Markup:
    """Return a large drawing twice, for wide and for narrow screens.

    If it were scaled down, its text would be too small. The style sheet shows one of the two.
    """
    drawn = draw(width, height, "").svg(), draw(360, tight or min(height, 250), "-tight").svg()
    return Markup('<div class="roomy">{}</div><div class="tight">{}</div>').format(*drawn)


def _dots(
    axes: Axes, points: np.ndarray, colour: str, *, size: float = 1.8, alpha: float = 0.55
) -> None:
    """Draw points as one path of empty strokes with round ends.

    This takes a tenth of the bytes of as many markers.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    vertices = np.repeat(points.astype(float), 2, 0)
    vertices[1::2, 0] += 1e-4 * np.ptp(points[:, 0])  # matplotlib omits strokes of length 0
    codes = np.tile([Path.MOVETO, Path.LINETO], len(points)).astype(np.uint8)
    marks = PathCollection(
        [Path(vertices, codes)],
        facecolors="none",
        edgecolors=colour,
        linewidths=size,
        alpha=alpha,
        capstyle="round",
    )
    marks.set_transform(axes.transData)
    axes.add_collection(marks)


def _png(pixels: np.ndarray) -> str:
    """Return ink of this strength on a transparent background, as a data URI.

    The background of the page, light or dark, shows through.
    """
    from PIL import Image

    strength = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.stack([np.zeros_like(strength), strength], -1), "LA").save(
        file, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _zoom(side: int) -> int:
    return max(1, round(84 / side))


def image(pixels: np.ndarray, alt: str = "") -> Markup:
    """Return one image, with pixels enlarged to squares."""
    zoom = _zoom(pixels.shape[0])
    return Markup('<img class="ink" alt="{}" src="{}">').format(
        alt, _png(pixels.repeat(zoom, 0).repeat(zoom, 1))
    )


def grid(images: np.ndarray, columns: int, alt: str) -> Markup:
    """Return a grid of images [N, height, width] in [0, 1], ``columns`` per line."""
    n, height, width = images.shape
    gap = max(1, height // 9)
    canvas = np.zeros(
        (math.ceil(n / columns) * (height + gap) - gap, columns * (width + gap) - gap)
    )
    for i, picture in enumerate(images):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        canvas[top : top + height, left : left + width] = picture
    zoom = max(1, _zoom(height) // (2 if columns > 10 and height > 14 else 1))
    return Markup('<img class="ink" alt="{}" src="{}">').format(
        alt, _png(canvas.repeat(zoom, 0).repeat(zoom, 1))
    )


def _history(result: Result, name: str, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a recorded curve."""
    return result.arrays[f"{prefix}{Metric.of(name).steps}"], result.arrays[f"{prefix}{name}"]


def _epochs(result: Result, name: str, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return epochs and values of a recorded curve; the last step ends the last epoch."""
    step, values = _history(result, name, prefix)
    return step / max(step[-1], 1) * result.numbers["epochs"], values


def _focus(axes: Axes, curves: Sequence[np.ndarray], levels: Sequence[float] = ()) -> None:
    """Set the limits of the y axis without the first tenth of the curves."""
    values = np.concatenate(
        [
            *(np.asarray(curve, float)[len(curve) // 10 :] for curve in curves),
            np.asarray(levels, float),
        ]
    )
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    margin = 0.08 * (high - low) + 1e-6 * max(1.0, abs(low))
    axes.set_ylim(low - margin, high + margin)


# 2 Factor analysis --------------------------------------------------------------------------------


def fa_data(data: Result) -> Picture:
    panels = []
    for a, b in PLANES:
        label = f"Scatter plot of x{SUBSCRIPTS[b]} against x{SUBSCRIPTS[a]}: the training points"
        panel = Panel(f"data{a}{b}", label, width=230, height=210)
        _dots(panel.axes, data.arrays["train"][:, [a, b]], BLUE)
        panel.axes.autoscale_view()
        panel.axes.set(xlabel=f"x{SUBSCRIPTS[a]}", ylabel=f"x{SUBSCRIPTS[b]}")
        panels.append(panel.svg())
    return Picture(panels, least="12rem")


def bound_and_evidence(result: Result) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, ELBO and evidence on the test rows.

    The ELBO is the evidence minus the gap, a KL divergence in closed form. A sampled ELBO could lie
    above the evidence for a while, because its noise is the same at every validation.
    """
    step, evidence = _history(result, "validation evidence")
    _, gap = _history(result, "validation gap")
    return step, evidence - gap, evidence


def fa_joint(joint: Result, exact: Result | None) -> Picture:
    """Draw ELBO and evidence of joint training, with exact EM and ascent on the evidence."""

    def draw(width: float, height: float, suffix: str) -> Panel:
        label = (
            "Test ELBO and evidence over the steps of joint training, with the evidence of the "
            "true model"
        )
        panel = Panel(f"joint{suffix}", label, width=width, height=height)
        _beside(panel, exact)
        step, bound, evidence = bound_and_evidence(joint)
        panel.line(step, bound, RED)
        panel.line(step, evidence, GREEN)
        panel.level(joint.numbers["truth"])
        _focus(panel.axes, [bound, evidence], [joint.numbers["truth"]])
        panel.axes.set(xlabel="step", ylabel=AXIS, xlim=(0, joint.numbers["steps"]))
        return panel

    return Picture([_both(draw, 700, 310)], [*BOUNDS, *(BESIDE if exact else ()), TRUTH])


BOUNDS = (("red", "ELBO"), ("green", "evidence"))
BESIDE = (
    ("violet dashed", "exact EM, one step per iteration"),
    ("ochre dashed", "gradient ascent on the evidence"),
)
TRUTH = ("ink dotted", "evidence of the true model")


def _beside(panel: Panel, exact: Result | None) -> None:
    """Draw the evidence of the two exact methods."""
    for name, colour in (("em", VIOLET), ("mle", OCHRE)) if exact else ():
        assert exact is not None
        panel.line(
            *_history(exact, "validation evidence", f"{name} "), colour, width=1.2, dashed=True
        )


def fa_snapshots(joint: Result, data: Result) -> Picture:
    """Draw generated points over test points, one row per step and one column per plane."""
    steps = sorted(
        int(name.removeprefix("generated "))
        for name in joint.arrays
        if name.startswith("generated ")
    )
    label = "Points generated by the model over test points, at " + ", ".join(
        f"step {step}" for step in steps
    )
    test = data.arrays["test"]
    low, high = 1.25 * np.quantile(test, 0.001, axis=0), 1.25 * np.quantile(test, 0.999, axis=0)

    def draw(width: float, height: float, suffix: str) -> Panel:
        panel = Panel(
            f"snapshots{suffix}",
            label,
            width=width,
            height=height,
            rows=len(steps),
            columns=3,
            sharex="col",
            sharey="col",
        )
        every = 2 if suffix else 1
        for (i, step), (j, (a, b)) in itertools.product(enumerate(steps), enumerate(PLANES)):
            axes = panel.grid[3 * i + j]
            _dots(axes, test[::every, [a, b]], BLUE, alpha=0.45)
            _dots(axes, joint.arrays[f"generated {step}"][::every, [a, b]], OCHRE, alpha=0.6)
            axes.set(xlim=(low[a], high[a]), ylim=(low[b], high[b]))
            axes.tick_params(labelsize=9)
            axes.locator_params(nbins=4)
            axes.set_ylabel(f"x{SUBSCRIPTS[b]}", labelpad=1)
            if i == len(steps) - 1:
                axes.set_xlabel(f"x{SUBSCRIPTS[a]}")
            if j == 0:
                axes.set_title(f"after step {step:,}", loc="left")
        return panel

    return Picture(
        [_both(draw, 600, 180 * len(steps), 125 * len(steps))],
        [("blue dot", "test"), ("ochre dot", "generated")],
    )


def fa_alternate(alternate: Result, exact: Result | None) -> Picture:
    """Draw ELBO and evidence with the phases of φ shaded; below, the gap on a log axis."""
    length, truth = alternate.numbers["length"], alternate.numbers["truth"]
    step, bound, evidence = bound_and_evidence(alternate)

    def shaded(panel: Panel) -> Panel:
        for start in range(0, int(step[-1]), 2 * length):
            panel.axes.axvspan(start, start + length, color=BAND, lw=0, zorder=0)
        panel.axes.set(xlim=(0, step[-1]))
        panel.axes.locator_params(axis="x", nbins=5)
        return panel

    def above(width: float, height: float, suffix: str) -> Panel:
        label = "Test ELBO and evidence while φ and θ are trained in alternating phases"
        panel = shaded(Panel(f"phases{suffix}", label, width=width, height=height))
        _beside(panel, exact)
        panel.line(step, bound, RED)
        panel.line(step, evidence, GREEN)
        panel.level(truth)
        _focus(panel.axes, [bound, evidence], [truth])
        panel.axes.set(ylabel=AXIS)
        return panel

    def below(width: float, height: float, suffix: str) -> Panel:
        panel = Panel(
            f"gap{suffix}",
            "The gap between evidence and ELBO over the same steps, on a logarithmic axis",
            width=width,
            height=height,
        )
        panel.line(step, np.maximum(evidence - bound, 1e-7), RED)
        shaded(panel).axes.set(yscale="log", xlabel="step", ylabel="gap, nats")
        return panel

    legend = [*BOUNDS, *(BESIDE if exact else ()), TRUTH, ("band box", "E: only φ is trained")]
    return Picture([_both(above, 700, 300), _both(below, 700, 190)], legend, "36rem")


def decomposition(alternate: Result) -> Picture:
    """Draw evidence and ELBO at the end of each E-phase and M-phase."""
    length = alternate.numbers["length"]
    step, bound, evidence = bound_and_evidence(alternate)
    ends = [at for at in range(length, int(step[-1]) + 1, length) if at in step][:6]
    rows = [int(np.flatnonzero(step == at)[0]) for at in [int(step[0]), *ends]]

    def draw(width: float, height: float, suffix: str) -> Panel:
        label = "Evidence and ELBO after each E-phase and M-phase, the gap between them as a bar"
        panel = Panel(f"ladder{suffix}", label, width=width, height=height)
        for x, row in enumerate(rows):
            panel.axes.plot(
                [x, x],
                [bound[row], evidence[row]],
                color=MUTED,
                lw=5,
                alpha=0.35,
                solid_capstyle="butt",
            )
            panel.axes.plot([x], [evidence[row]], "o", color=GREEN, ms=8, mec="none")
            panel.axes.plot([x], [bound[row]], "o", color=RED, ms=4.5, mec="none")
        panel.level(alternate.numbers["truth"])
        names = ["start", *(f"{'EM'[i % 2]} {i // 2 + 1}" for i in range(len(ends)))]
        panel.axes.set_xticks(range(len(rows)), names)
        panel.axes.set(ylabel=AXIS, xlim=(-0.5, len(rows) - 0.5))
        return panel

    legend = [
        ("green dot", "evidence"),
        ("red dot", "ELBO"),
        ("muted box", "gap: KL(q ‖ posterior)"),
        TRUTH,
    ]
    return Picture([_both(draw, 600, 240)], legend)


def fa_naive(naive: Result) -> Picture:
    found = {int(size): row for size, row in naive.numbers["dimensions"].items()}
    sizes = sorted(found)
    panel = Panel(
        "naive",
        "Error of naive Monte Carlo against the latent dimension, both axes logarithmic",
        width=420,
        height=250,
    )
    for key, colour in (("worst", RED), ("error", BLUE)):
        values = [max(abs(found[size][key]), 1e-6) for size in sizes]
        panel.axes.plot(sizes, values, color=colour, lw=1.6, marker="o", ms=4)
    panel.axes.set(
        xscale="log", yscale="log", xlabel="latent dimension", ylabel="error of log p(x), nats"
    )
    panel.axes.set_xticks(sizes, [str(size) for size in sizes])
    panel.axes.minorticks_off()
    return Picture([panel.svg()], [("red", "largest error of a row"), ("blue", "mean error")])


@dataclass(frozen=True)
class Start:
    """Results of the seeds of one initialisation: values, their limit, and the share below it."""

    words: str
    values: np.ndarray
    limit: float
    share: float


def starts(tutorial: Result) -> list[Start]:
    """Return two measures of the tutorial's initialisation; the names of the shares have limits."""
    found = []
    for prefix, key, words in (
        ("share within ", "behind", "distance to the true model's evidence after joint training"),
        ("share of gaps below ", "gap after an E-phase", "gap after the first E-phase"),
    ):
        name = next(name for name in tutorial.numbers if name.startswith(prefix))
        found.append(
            Start(
                words,
                np.asarray(tutorial.numbers[key], float),
                float(name.removeprefix(prefix)),
                tutorial.numbers[name],
            )
        )
    return found


def fa_starts(tutorial: Result) -> Picture:
    """Draw every seed, with the limit."""
    panels = []
    for i, start in enumerate(starts(tutorial)):
        values = np.maximum(np.sort(start.values), 1e-5)
        panel = Panel(f"start{i}", f"The {start.words}, one dot per seed", width=300, height=120)
        colours = [GREEN if value < start.limit else RED for value in values]
        panel.axes.scatter(values, np.arange(len(values)) % 3, s=22, c=colours, lw=0, alpha=0.9)
        panel.axes.axvline(start.limit, color=INK, lw=1, ls=(0, (1, 2.5)))
        panel.axes.set(
            xscale="log",
            xlabel=("distance to the true evidence", "gap after the first E-phase")[i] + ", nats",
            yticks=[],
            ylim=(-0.8, 2.8),
        )
        panel.axes.spines["left"].set_visible(False)
        panels.append(panel.svg())
    return Picture(
        panels,
        [("green dot", "below the limit"), ("red dot", "above it"), ("ink dotted", "the limit")],
        "16rem",
    )


# 3 VAE, 4 CVAE ------------------------------------------------------------------------------------


def elbos(
    name: str, runs: Mapping[str, Result], curve: str = "validation elbo", ylabel: str = AXIS
) -> Picture:
    """Draw one curve of several runs over epochs."""
    colours = (RED, BLUE, GREEN, OCHRE, VIOLET)

    def draw(width: float, height: float, suffix: str) -> Panel:
        words = f"{Metric.of(curve).name} on the test rows over epochs: {', '.join(runs)}"
        panel = Panel(f"{name}{suffix}", words, width=width, height=height)
        drawn = []
        for colour, result in zip(colours, runs.values()):
            epoch, values = _epochs(result, curve)
            panel.line(epoch, values, colour)
            drawn.append(values)
        _focus(panel.axes, drawn)
        panel.axes.set(xlabel="epoch", ylabel=ylabel)
        panel.axes.set_xlim(left=0)
        return panel

    return Picture(
        [_both(draw, 600, 260)], [(NAMES[colour], words) for colour, words in zip(colours, runs)]
    )


def plane(vae: Result) -> Picture:
    """Draw latent means in two dimensions, one colour per label, each label at its median."""
    points, labels = vae.arrays["plane"], vae.arrays["plane labels"]
    panel = Panel(
        "plane",
        "Latent means of test images projected to a plane by t-SNE, coloured by label",
        width=560,
        height=500,
    )
    axes = panel.axes
    for label in range(10):
        _dots(
            axes,
            points[labels == label],
            CLASSES[label],
            size=2.6 if len(points) > 1500 else 4,
            alpha=0.75,
        )
    axes.autoscale_view()
    for label in np.unique(labels):
        x, y = np.median(points[labels == label], 0)
        axes.text(
            x, y, str(label), ha="center", va="center", fontsize=17, fontweight="bold", color=INK
        )
    axes.set_axis_off()
    return Picture([panel.svg()], least="24rem")


def iwae(vae: Result) -> Picture:
    found = {int(k): value for k, value in vae.numbers["iwae"].items()}
    panel = Panel(
        "iwae", "The importance-weighted bound against the number of samples", width=420, height=230
    )
    panel.axes.plot(
        sorted(found), [found[k] for k in sorted(found)], color=BLUE, lw=1.6, marker="o", ms=4
    )
    panel.axes.set(xscale="log", xlabel="samples K", ylabel=AXIS)
    panel.axes.set_xticks(sorted(found), [f"{k:,}" for k in sorted(found)])
    panel.axes.minorticks_off()
    return Picture([panel.svg()])


def pairs(vae: Result) -> Picture:
    """Draw test images above their reconstructions."""
    shown, again = vae.arrays["shown"], vae.arrays["reconstructed"]
    alt = f"{len(shown)} test images above their reconstructions"
    return Picture([grid(np.concatenate([shown, again]), len(shown), alt)], least="30rem")


# 5 GMVAE ------------------------------------------------------------------------------------------


def seeds(name: str, result: Result) -> Picture:
    """Draw bound, conditional entropy and accuracy over epochs: seeds, their range and mean."""
    count = sum(1 for key in result.arrays if key.endswith(" validation elbo"))
    panels = []
    for curve, words in (
        ("validation elbo", "test ELBO, nats"),
        ("entropy", "entropy of q(y|x), nats"),
        ("accuracy", "accuracy"),
    ):
        if f"0 {curve}" not in result.arrays:
            continue
        length = min(len(result.arrays[f"{seed} {curve}"]) for seed in range(count))
        values = np.stack([result.arrays[f"{seed} {curve}"][:length] for seed in range(count)])
        epoch = np.arange(1, length + 1) / length * result.numbers.get("epochs", length)
        panel = Panel(
            f"{name}-{curve.replace(' ', '-')}",
            f"{words} over epochs, {count} seeds and their mean",
            width=300,
            height=230,
        )
        panel.axes.fill_between(epoch, values.min(0), values.max(0), color=BLUE, alpha=0.16, lw=0)
        for row in values:
            panel.line(epoch, row, BLUE, width=0.7, alpha=0.6)
        panel.line(epoch, values.mean(0), RED, width=2)
        if curve == "validation elbo":
            _focus(panel.axes, list(values))
        panel.axes.set_title(words, loc="left")
        panel.axes.set(xlabel="epoch")
        panel.axes.set_xlim(left=0)
        panels.append(panel.svg())
    return Picture(panels, [("red", "mean"), ("blue", f"{count} seeds and their range")], "15rem")


# 6 VRNN -------------------------------------------------------------------------------------------


def appearing(result: Result) -> Markup:
    """Return generated images that the style sheet uncovers row by row."""
    images = result.arrays["generated"]
    boxes = Markup("").join(Markup("<span>{}</span>").format(image(pixels)) for pixels in images)
    label = f"{len(images)} generated images; their rows appear one by one"
    return Markup(
        '<div class="appearing" role="img" aria-label="{}" style="--rows:{}">{}</div>'
    ).format(label, images.shape[1], boxes)
