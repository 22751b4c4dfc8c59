"""MLflow: a database in a local file, or a tracking server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aevb.trackers.packages import check_installed
from aevb.trackers.protocol import FAILED, FINISHED, STOPPED, RunInfo, Tracker, scalars

RUN_ID = "aevb.run_id"  # the tag by which a resumed run is found again
STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
LONGEST = 5000  # characters of a tag or a parameter; MLflow allows 6,000
AT_ONCE = 100  # parameters that MLflow takes in one call


@dataclass
class MLflow(Tracker):
    """Record runs in MLflow.

    A resumed run goes on in the same MLflow run. Runs of several seeds or of a sweep have the tag
    ``group``. MLflow allows no brackets in names: ``kl(z)`` is recorded as ``kl_z``.

    Arguments:
        uri: The tracking URI, such as ``sqlite:///mlflow.db`` or the address of a server. By
            default ``MLFLOW_TRACKING_URI`` or MLflow's own default, a database ``mlflow.db`` in the
            current folder.
        experiment: By default ``MLFLOW_EXPERIMENT_NAME`` or "aevb".
        files: Keep the declaration, the settings and the history as artifacts.
        weights: Keep the weights, too.

    >>> MLflow(experiment="digits")  # it needs the package mlflow     # doctest: +SKIP
    MLflow(uri=None, experiment='digits', files=True, weights=False)
    """

    uri: str | None = None
    experiment: str | None = None
    files: bool = True
    weights: bool = False
    _client: Any = field(default=None, init=False, repr=False, compare=False)
    _run: str | None = field(default=None, init=False, repr=False, compare=False)
    _events: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _known: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_installed("mlflow", "mlflow")

    def start(self, run: RunInfo) -> str | None:
        import mlflow

        # A client of its own leaves mlflow's global state, and runs of others, as they are.
        uri = self.uri or mlflow.get_tracking_uri()
        client = self._client = mlflow.MlflowClient(uri)
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "aevb"
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        self._events, self._known, self._run = [], {}, None
        if run.step:
            self._run = self._of_before(experiment, run.id)
        if self._run is None:
            tags = {RUN_ID: run.id} | ({"group": run.group} if run.group else {})
            made = client.create_run(experiment, tags=tags, run_name=run.name)
            self._run = made.info.run_id
            self._log_config(run.config)
        else:
            client.update_run(self._run, status="RUNNING")
        return f"MLflow: run {self._run} of experiment {name!r} in {uri}"

    def _of_before(self, experiment: str, identity: str) -> str | None:
        """Find the run that is resumed, and the last recorded step of each of its metrics."""
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{identity}'")
        if not found:
            return None
        run: str = found[0].info.run_id
        for name in found[0].data.metrics:
            history = self._client.get_metric_history(run, name)
            self._known[name] = max((one.step for one in history), default=-1)
        return run

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_allowed(name), str(value)[:LONGEST]) for name, value in config.items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + AT_ONCE])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        if "note" in values:
            self._events.append(f"step {step}: {values['note']}")
            self._client.set_tag(self._run, "events", "\n".join(self._events)[:LONGEST])
            return
        now = int(1000 * time.time())
        beside = {name: values[name] for name in ("epoch", "seconds") if name in values}
        metrics = [
            Metric(_allowed(name), float(value), now, step)
            for name, value in (scalars(values) | beside).items()
        ]
        # A resumed run repeats the steps after its last checkpoint.
        new = [one for one in metrics if step > self._known.get(one.key, -1)]
        if new:
            self._client.log_batch(self._run, metrics=new)

    def artifact(self, path: Path, kind: str) -> None:
        if self.weights if kind == "weights" else self.files:
            self._client.log_artifact(self._run, str(path))

    def end(self, status: str) -> None:
        if self._run is not None:
            self._client.set_terminated(self._run, STATUS[status])
            self._run = None


def _allowed(name: str) -> str:
    """Return a name without the characters that MLflow refuses.

    >>> _allowed("validation/kl(z)")
    'validation/kl_z'
    """
    return re.sub(r"[^\w.\- /]+", "_", name).strip("_")
