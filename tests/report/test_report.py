"""The report, from results that were made up: what stands in it, and that a browser shows it."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aevb import zoo
from aevb.experiments.gmvae import WAYS
from aevb.experiments.lab import Result, check, declared, write
from aevb.report import figures
from aevb.report.page import SECTIONS, TASKS, build, number, settings

MACHINE = {"device": "a machine", "python": "3.0", "torch": "2.0", "aevb": "0.0"}
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def test_no_bound_is_drawn_above_its_evidence(monkeypatch):
    """A sampled ELBO may lie above the evidence by luck, at every look alike; what is drawn must
    not.
    """
    drawn: list[tuple[str, np.ndarray]] = []
    line = figures.Panel.line
    monkeypatch.setattr(
        figures.Panel,
        "line",
        lambda self, x, y, colour, **more: (
            drawn.append((colour, np.asarray(y))),
            line(self, x, y, colour, **more),
        )[1],
    )
    evidence, gap = ramp("validation evidence"), ramp("validation gap", low=2, high=0.0)
    lucky = {
        "validation elbo": evidence["validation evidence"] + 0.3,
        "validation elbo.step": evidence["validation evidence.step"],
    }
    numbers = {"truth": -3.9, "steps": 120, "length": 30}
    result = Result(numbers, evidence | gap | lucky)
    for figure in (figures.fa_joint, figures.fa_alternate):
        drawn.clear()
        figure(result, None)
        bounds = [values for colour, values in drawn if colour == figures.RED][:1]
        limits = [values for colour, values in drawn if colour == figures.GREEN]
        assert bounds
        assert limits
        assert all((bound <= limit).all() for bound in bounds for limit in limits)


def ramp(
    name: str, n: int = 12, low: float = -9.0, high: float = -4.0, every: int = 10
) -> dict[str, np.ndarray]:
    return {name: np.linspace(low, high, n), f"{name}.step": every * np.arange(1, n + 1)}


def invented() -> dict[str, Result]:
    """Results of every task, in the shapes that the experiments leave them in."""
    random = np.random.default_rng(0)
    models = {name: declared(zoo.zoo[name](**sizes)) for name, sizes in SIZES.items()}
    mixture = {
        "latex": r"\sum_{k} \pi_k(z) \Big\{ \log p_\theta(x \mid z^{s}) - \log q_\phi(z^{s} \mid "
        r"x) \Big\}"
    }
    evidence, gap, elbo = (
        ramp("validation evidence"),
        ramp("validation gap", low=2, high=0.01),
        ramp("validation elbo"),
    )
    images = lambda n: random.random((n, 4, 4))  # noqa: E731
    points = random.normal(size=(40, 3))
    terms = {"elbo": -5.5, "x": -4.25, "kl(z)": 1.25}
    short = {"lr": 3e-4, "decay": "constant", "batch": 100}
    square = [[1.0, 0.5], [0.5, 2.0]]
    seeds = {
        f"{seed} {key}": value
        for seed in (0, 1)
        for key, value in (
            ("accuracy", np.linspace(0.1, 0.6, 5)),
            ("entropy", np.linspace(2, 1, 5)),
        )
    }
    seeds |= {
        f"{seed} {key}": value
        for seed in (0, 1)
        for key, value in ramp("validation elbo", 5).items()
    }
    clusters = {
        "accuracy": [0.5, 0.7],
        "elbo": [-80.0, -82.0],
        "entropy": [1.0, 1.5],
        "epochs": 5,
        "settings": short,
    }
    exact = {
        f"{way} {key}": value for way in ("em", "mle") for key, value in (evidence | elbo).items()
    }
    way = {"elbo": -30.0, "kl(y)": 0.5, "accuracy": 0.4, "seconds": 2.0, "estimator": "Σ_y <&>"}
    look = {
        "parameters": images(30),
        "samples": images(30),
        "shown": images(15),
        "reconstructed": images(15),
    }
    look |= {"plane": random.normal(size=(60, 2)), "plane labels": np.arange(60) % 10}
    vae = {"elbo": -5.5, "terms": terms, "epochs": 12, "settings": short, **models["vae"]}
    cvae = {"elbo": -5.5, "terms": terms, "epochs": 12, "agreement": 0.9, **models["cvae"]}
    vrnn = {
        "elbo": -5.5,
        "kl": 1.25,
        "terms": terms,
        "epochs": 12,
        "settings": short,
        **models["vrnn"],
    }
    vrnn["doctor"] = {
        "worst": "problem",
        "rows": 31,
        "findings": [
            finding("problem", "z is dead <&>", "Attach it."),
            finding("ok", "The ELBO is −5."),
        ],
    }
    ways = {
        name: {"value": -4.75, "error": 0.01, "ess": 7.5, "notes": []}
        for name in ("importance", "particles")
    }
    vrnn["evidence"] = {"rows": 6, "draws": 1600, "repeats": 8, "elbo": -5.5, "ways": ways}
    chains: dict[str, Any] = {
        "error": 0.01,
        "worst": 0.25,
        "stderr": 0.05,
        "ess": 12.5,
        "of": 16,
        "notes": [],
    }
    prior = chains | {"error": -9.0, "of": 50, "khat": 3.5, "flagged": 1.0}
    followed = elbo | ramp("validation kl(z)", low=0, high=1)
    tight, split = tightness(random)
    predictive, replicates = replicated(random)
    return {
        "fa/data": Result(
            {"truth": -4.0, "loadings": [[1, 2]] * 3, "scale": [1, 1, 1]},
            {"train": points, "test": points + 1},
        ),
        "fa/joint": Result(
            {
                "truth": -4.0,
                "evidence": [-4.01, -4.0125],
                "gap": [0.001, 0.002],
                "reached": [420, None],
                "steps": 120,
                "lr": 0.1,
                "batch": 32,
                "V": square,
                "V exact": square,
                "Σ": square,
                "Σ exact": square,
                "covariance": square,
                "covariance true": square,
                **models["fa"],
                "checks": [
                    check(
                        "test evidence below the truth's", 0.0125, most=0.02, source="our defaults"
                    )
                ],
            },
            evidence | gap | elbo | {"generated 5": points, "generated 100": points},
        ),
        "fa/tutorial": Result(
            {
                "truth": -4.0,
                "behind": [0.5, 0.01],
                "gap after an E-phase": [0.2, 0.3],
                "share within 0.02": 0.5,
                "share of gaps below 0.01": 0.0,
            }
        ),
        "fa/alternate": Result(
            {
                "truth": -4.0,
                "length": 20,
                "gap": [0.003, 0.005],
                "gap after M": [0.5, 0.6],
                "rise in M": [1],
                "moved": [0],
                "reached": [None, 80],
            }
            | {"short length": 5, "reached short": [70, 75]}
            | {
                "checks": [
                    check(
                        "gap <after> the first E-phase",
                        0.005,
                        most=0.001,
                        source="tutorial, Figure 3",
                    )
                ]
            },
            evidence | gap | elbo,
        ),
        "fa/exact": Result(
            {
                "truth": -4.0,
                "em": {"reached": 14},
                "mle": {"reached": None},
                "centred": -3.9,
                "scikit-learn": -3.9,
            },
            exact,
        ),
        "fa/posteriors": Result(
            {"truth": -4.0, "variants": {"full covariance": {"evidence": -4.01, "gap": 0.001}}}
        ),
        "fa/naive": Result(
            {
                "samples": 20,
                "dimensions": {
                    str(d): {"error": -0.1 * d, "worst": d, "exact": -d, "stderr": 0.1}
                    for d in (1, 10)
                },
            }
        ),
        "vae/originals": Result({"train": 1234, "test": 567}, {"images": images(30)}),
        "fa/evidence": Result(
            {
                "samples": 50,
                "temperatures": 9,
                "rows": 3,
                "dimensions": {"10": {"prior": prior, "annealed": chains}},
            }
        ),
        "vae/exact": Result(
            vae | {"tight": tight, "predictive": predictive}, followed | look | split | replicates
        ),
        "vae/clamped": Result(vae, elbo),
        "vae/beta": Result(vae, elbo),
        "vae/mixture": Result(vae | mixture, elbo),
        "vae/ours": Result({"elbo": -5.0, "best": -5.0, "epochs": 6, "settings": short}, elbo),
        **{
            f"cvae/{name}": Result(dict(cvae), elbo | {"generated": images(150)})
            for name in TASKS["cvae"]
        },
        "gmvae/tutorial": Result(clusters | models["gmvae"], seeds | {"generated": images(150)}),
        "gmvae/ours": Result(
            {"elbo": -75.0, "accuracy": 0.5, "epochs": 5, "settings": short}, elbo
        ),
        "gmvae/estimators": Result(
            {
                "epochs": 3,
                "ways": dict.fromkeys(WAYS, way),
                "laboratory": laboratory_of(("y enumerate", "y gumbel <τ>")),
            }
        ),
        "gmvae/m2": Result(
            {
                "epochs": 3,
                "elbo": -85.0,
                "kl(y)": 0.01,
                "entropy": 2.3,
                "accuracy": 0.2,
                **models["m2"],
            }
        ),
        "gmvae/clustering": Result(
            {"accuracy": [0.7, 0.8], "elbo": [-81.0, -82.0], "recipe": "A small z & a warm start."},
            seeds | {"generated": images(150)},
        ),
        **{
            f"vrnn/{name}": Result(dict(vrnn), followed | {"generated": images(12)})
            for name in TASKS["vrnn"]
        },
    }


def tightness(random: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What is known of a bound's tightness, and the gaps of the rows."""
    gap = {
        "evidence": -4.0,
        "approximation": 0.75,
        "best": -4.75,
        "amortisation": 0.75,
        "elbo": -5.5,
        "total": 1.5,
    }
    numbers = {
        "rows": 6,
        "k": {"1": {"bound": -5.5, "error": 0.1}, "10": {"bound": -4.5, "error": 0.1}},
        "gap": gap,
        "gap errors": dict.fromkeys(gap, 0.0625),
        "annealing": {
            "chains": 7,
            "temperatures": 1234,
            "leapfrog": 5,
            "method": "ais from posterior",
        },
        "notes": ["1 of 6 rows <is> odd."],
        "both sides": {"lower": -4.125, "upper": -4.0625, "gap": 0.0625, "error": 0.0312},
    }
    return numbers, {
        f"tight {name}": random.random(6) for name in ("approximation", "amortisation")
    }


def replicated(random: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A predictive check of two statistics, one of which is not reproduced."""
    rows = [
        {"variable": "x", "statistic": name, "column": None, "observed": 0.5, "p": p}
        for name, p in (("mean", 0.5), ("sd", 0.001))
    ]
    return {"kind": "posterior", "rows": 77, "replicates": 30, "comparisons": rows}, {
        f"predictive {name}(x)": random.random(30) for name in ("mean", "sd")
    }


def laboratory_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Ways of estimating as the laboratory records them; the first is the best, the last biased."""
    part = {"variance": 2.5, "error": 0.1, "squared_bias": 0.5, "p": 0.3}
    one = {
        "bound": "elbo",
        "samples": 1,
        "bias": 0.01,
        "bias_error": 0.02,
        "seconds": 0.002,
        "theta": part,
        "phi": part,
        "noise": 5.0,
    }
    figures = [
        one
        | {
            "name": name,
            "full name": f"elbo K=1: {name}",
            "unbiased": name != names[-1],
            "squared bias": 0.0,
        }
        for name in names
    ]
    figures[-1] |= {"samples": 2, "squared bias": 321.25, "seconds": 0.001}
    return {
        "figures": figures,
        "rows": 50,
        "replicates": 32,
        "best": {"elbo": f"elbo K=1: {names[0]}"},
        "advice": "elbo: sum it.\n  No biased way is worth it.",
    }


def finding(level: str, text: str, remedy: str = "") -> dict[str, Any]:
    return {
        "level": level,
        "kind": "collapse",
        "about": "z",
        "text": text,
        "figures": {},
        "remedy": remedy,
    }


SIZES: dict[str, dict] = {
    "fa": {},
    "vae": {"x": 16, "z": 2, "hidden": (4,)},
    "cvae": {"x": 16, "z": 2, "hidden": (4,)},
    "gmvae": {"x": 16, "z": 2, "hidden": (4,)},
    "m2": {"x": 16, "z": 2, "hidden": (4,)},
    "vrnn": {"x": 4, "h": 3, "hidden": (4,), "layers": 1},
}


def laboratory(
    out: Path, results: dict[str, Result], data: str = "mnist", quick: bool = False
) -> Path:
    for task, result in results.items():
        result.numbers |= {"seconds": 1.5, "machine": MACHINE, "quick": quick, "data": data}
        write(out / "results" / task, result)
    return out


class Page(HTMLParser):
    """What a page is made of, and whether every element is closed."""

    EMPTY = frozenset({"meta", "img", "br", "input", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.words.append(
            " " if tag in ("td", "th", "p", "li", "dt", "dd", "div", "figcaption") else ""
        )
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = laboratory(tmp_path_factory.mktemp("laboratory"), invented())
    build(folder)
    return folder


@pytest.fixture(scope="module")
def page(out: Path) -> Page:
    return Page((out / "report.html").read_text(encoding="utf-8"))


def test_structure(out: Path, page: Page) -> None:
    assert page.open == []
    assert (out / "report.html").stat().st_size < 15_000_000
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert max(ids.values()) == 1
    assert set(SECTIONS) <= set(ids)
    assert len(page.all("h2")) == len(SECTIONS)
    contents = [link["href"] for link in page.all("a") if (link["href"] or "").startswith("#")]
    assert [f"#{section}" for section in SECTIONS] == contents[: len(SECTIONS)]
    assert {link.removeprefix("#") for link in contents if link} <= set(ids)
    used = {str(element["href"]).removeprefix("#") for element in page.all("use")}
    clips = set(re.findall(r"url\(#([^)]+)\)", (out / "report.html").read_text(encoding="utf-8")))
    assert used | clips <= set(ids)


def test_figures_are_numbered_named_and_described(out: Path, page: Page) -> None:
    numbers = re.findall(
        r"<b>Figure (\d+)\.</b>", (out / "report.html").read_text(encoding="utf-8")
    )
    assert list(map(int, numbers)) == list(range(1, 25))
    for n in range(1, 13):
        assert re.search(rf"tutorial's Figures? (\d+ and )?{n}\b", page.text), n
    assert all(image.get("alt") is not None for image in page.all("img"))
    drawings = [
        svg
        for svg in page.all("svg")
        if svg.get("role") == "img" or svg.get("aria-hidden") != "true"
    ]
    assert drawings
    assert all(svg.get("aria-label") for svg in drawings)


def test_nothing_is_fetched(out: Path, page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href", "xlink:href", "srcset", "poster"):
            assert re.match(r"data:image/png;base64,|#", attributes.get(name) or "#"), (
                tag,
                attributes,
            )
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


@pytest.mark.slow
def test_same_results_same_bytes(out: Path) -> None:
    before = (out / "report.html").read_bytes()
    assert build(out).read_bytes() == before


def test_numbers_come_from_the_results(page: Page) -> None:
    for words in (
        "MNIST",
        "4 × 4 pixels",
        "1,234 train and 567 test rows",
        "a machine",
        "0.600 ± 0.141",
        "−81.00 ± 1.41",
        "1 of 2 met",
        "≤ 0.02 0.0125 pass",
        "≤ 0.001 0.0050 falls short",
        "ap <after> the first E-phase",
        "A small z & a warm start.",
        "Σ_y <&>",
        "learning rate 0.0003, constant",
        "below 0.02 in 50 %",
        "aevb reproduce --data mnist --out",
        "±15.94",
        "aevb reproduce fa --data mnist --out again",
        "prior −9.000 0.250 0.050 12 of 50 3.50 100 %",
        "12 of 16 – –",
        "approximation gap 0.750 0.062",
        "1,234 temperatures",
        "forwards give −4.125 from below and chains backwards −4.062 from above",
        "0.0625 ± 0.0312 nats",
        "1 of 6 rows <is> odd.",
        "Here: sd.",
        "2 y gumbel <τ> 2",
        "321.2",
        "No biased way is worth it.",
        "problem z is dead <&> Attach it.",
        "particle filter, 8 of 200 particles −4.750 0.0100 7.5 at the worst step",
    ):
        assert re.search(re.sub(r"\\?\s+", r"\\s+", re.escape(words)), page.text), words
    assert "rehearsal" not in page.text
    assert "not run" not in page.text


def test_missing_tasks_are_left_out_with_a_note(tmp_path: Path) -> None:
    results = {
        task: result
        for task, result in invented().items()
        if task in ("fa/exact", "fa/joint", "vrnn/detached")
    }
    page = Page(
        build(laboratory(tmp_path, results, data="digits", quick=True)).read_text(encoding="utf-8")
    )
    assert len(page.all("h2")) == len(SECTIONS)
    assert re.search(
        r"were not run and are left out: fa/data, fa/tutorial, fa/alternate", page.text
    )
    assert re.search(r"This section was not run: vae/originals", page.text)
    assert "rehearsal" in page.text
    assert "scikit-learn's handwritten digits" in page.text
    assert "MNIST numbers are no targets here" in page.text


def test_every_task_alone_makes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.Panel, "svg", lambda self: "")  # the drawings are tested above
    for task, result in invented().items():
        out = laboratory(tmp_path / task.replace("/", "-"), {task: result})
        assert build(out).is_file()


def test_an_empty_laboratory_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results in .*aevb reproduce"):
        build(tmp_path)


def test_words_for_numbers() -> None:
    assert settings(
        {"epochs": 7, "settings": {"lr": 0.002, "decay": "cosine", "batch": 100, "clip": 100.0}}
    ) == ("learning rate 0.002, cosine; batches of 100; gradients clipped at 100; 7 epochs")
    assert settings({"truth": 1.0}) == ""
    assert [number(value) for value in (float("nan"), 0.0, 420, -0.25)] == [
        "–",
        "0",
        "420",
        "−0.250",
    ]


WIRED = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):  # where the browser expects them
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless browser with one page, spoken to through its debugging pipe."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self.to = os.pipe()
        self.answers, theirs_out = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        command = [
            sys.executable,
            "-c",
            WIRED,
            str(theirs_in),
            str(theirs_out),
            str(BROWSER),
            *flags,
            "about:blank",
        ]
        self.process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.read, self.count, self.complaints = b"", 0, []  # type: ignore[var-annotated]
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: object) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self.read:
            ready, _, _ = select.select([self.answers], [], [], 60)
            chunk = os.read(self.answers, 2**20) if ready else b""
            assert chunk, "the browser does not answer"
            self.read += chunk
        first, _, self.read = self.read.partition(b"\0")
        answer = json.loads(first)
        if answer.get("method") in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
            "Network.loadingFailed",
        ):
            self.complaints.append(answer)
        return answer

    def show(
        self, path: Path, width: int, *, scheme: str = "light", motion: str = "no-preference"
    ) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> str:
        return self.ask("Page.captureScreenshot", format="png")["data"]

    def close(self) -> None:
        self.session = None
        self.ask("Browser.close")
        self.process.wait(30)
        os.close(self.to)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no chromium is installed")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("width", "scheme", "paper"),
    [(390, "dark", "rgb(23, 24, 26)"), (1500, "light", "rgb(253, 252, 248)")],
)
def test_in_a_browser(out: Path, browser: Browser, width: int, scheme: str, paper: str) -> None:
    """Every image loads, nothing is wider than the screen, each figure shows one of its drawings,
    nothing is complained of.
    """
    browser.show(out / "report.html", width, scheme=scheme)
    assert (
        browser.value("[...document.images].filter(i => !(i.complete && i.naturalWidth)).length")
        == 0
    )
    assert browser.value("document.images.length") > 12
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 1)"
    )
    assert browser.value(f"{wide}.length") == 0
    empty = (
        "[...document.querySelectorAll('.panels > div')].filter(d => "
        "![...d.querySelectorAll('svg, img')].some(e => e.getBoundingClientRect().width))"
    )
    assert browser.value(f"{empty}.length") == 0
    assert browser.value("getComputedStyle(document.body).backgroundColor") == paper
    assert browser.complaints == []


def test_rows_appear_one_by_one(out: Path, browser: Browser) -> None:
    browser.show(out / "report.html", 800)
    browser.value(
        "document.documentElement.style.scrollBehavior = 'auto'; "
        "document.querySelector('.appearing').scrollIntoView()"
    )
    pictures = set()
    for _ in range(3):
        pictures.add(browser.picture())
        time.sleep(0.9)
    assert len(pictures) > 1
    clip = "getComputedStyle(document.querySelector('.appearing img')).clipPath"
    at = "document.getAnimations().forEach(a => {{ a.pause(); a.currentTime = {}; }})"
    shown = [browser.value(f"{at.format(moment)}; {clip}") for moment in (0, 1500, 2500, 5000)]
    # rows of four
    assert shown == ["inset(0px 0px 75%)", "inset(0px 0px 50%)", "inset(0px 0px 25%)", "inset(0px)"]
    browser.value("document.querySelector('.hold input').click()")
    assert browser.value(clip) == "none"
    browser.show(out / "report.html", 800, motion="reduce")
    assert browser.value(clip) == "none"
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert browser.value(clip) == "none"
    assert browser.complaints == []


def test_shortened_coordinates_leave_the_labels_alone():
    panel = figures.Panel("ticks", "Numbers near each other")
    panel.line(np.arange(3), np.array([0.8212, 0.8334, 0.8456]), figures.BLUE)
    panel.axes.set_yticks([0.82, 0.8325, 0.845])
    drawn = str(panel.svg())
    for label in ("0.8200", "0.8325", "0.8450"):
        assert f">{label}<" in drawn
    assert not re.search(r'd="[^"]*\d\.\d{2,}', drawn)
