from aevb.arviz import to_arviz
from aevb.comparison import Comparison, compare
from aevb.data.sequences import Sequences, sequences
from aevb.declare.conditionals import Conditional
from aevb.declare.deep_networks import attention, residual
from aevb.declare.deterministic import GRU, LSTM, Deterministic
from aevb.declare.families import (
    Bernoulli,
    Beta,
    ContinuousBernoulli,
    Exact,
    Laplace,
    Mixture,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHot,
    Poisson,
    StudentT,
)
from aevb.declare.networks import (
    Network,
    conv,
    deconv,
    linear,
    mlp,
    table,
)
from aevb.declare.own_networks import wrap
from aevb.declare.registry import register
from aevb.declare.switching import switching
from aevb.derive.divergences import register_kl
from aevb.diagnostics import Diagnosis, diagnose
from aevb.estimate.bound import Bound
from aevb.estimate.family_check import FamilyCheck, check_family
from aevb.evidence import AIS, Evidence, Particles, bidirectional
from aevb.evidence.amortisation import Gap
from aevb.forecasting import Beliefs, Forecast
from aevb.laboratory import compare_estimators
from aevb.loading import from_declaration, load
from aevb.model import Model
from aevb.posterior import Posterior
from aevb.predictive import PredictiveCheck, predictive_check
from aevb.tables import Schema, TableModel, load_table
from aevb.training.fit import fit
from aevb.training.run import Run, load_run
from aevb.training.schedules import alternate, em, joint, mle
from aevb.training.settings import Settings
from aevb.version import __version__
from aevb.zoo import zoo

__all__ = [
    "AIS",
    "GRU",
    "LSTM",
    "Beliefs",
    "Bernoulli",
    "Beta",
    "Bound",
    "Comparison",
    "Conditional",
    "ContinuousBernoulli",
    "Deterministic",
    "Diagnosis",
    "Evidence",
    "Exact",
    "FamilyCheck",
    "Forecast",
    "Gap",
    "Laplace",
    "Mixture",
    "Model",
    "MultivariateNormal",
    "NegativeBinomial",
    "Network",
    "Normal",
    "OneHot",
    "Particles",
    "Poisson",
    "Posterior",
    "PredictiveCheck",
    "Run",
    "Schema",
    "Sequences",
    "Settings",
    "StudentT",
    "TableModel",
    "__version__",
    "alternate",
    "attention",
    "bidirectional",
    "check_family",
    "compare",
    "compare_estimators",
    "conv",
    "deconv",
    "diagnose",
    "em",
    "fit",
    "from_declaration",
    "joint",
    "linear",
    "load",
    "load_run",
    "load_table",
    "mle",
    "mlp",
    "predictive_check",
    "register",
    "register_kl",
    "residual",
    "sequences",
    "switching",
    "table",
    "to_arviz",
    "wrap",
    "zoo",
]
