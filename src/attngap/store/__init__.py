"""Run records: SQLite, one row a run."""

from attngap.store.runs import Progress, Record, Runs, spec_key

__all__ = ["Progress", "Record", "Runs", "spec_key"]
