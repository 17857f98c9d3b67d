"""Running many jobs: joblib on one machine, Ray on a cluster, through one call."""

from attngap.engine.outcome import Outcome
from attngap.engine.run import run

__all__ = ["Outcome", "run"]
