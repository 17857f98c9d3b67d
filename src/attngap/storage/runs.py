"""Run records in one SQLite file: one row per run, keyed by a hash of everything that decides its numbers.

A row is written whole in one transaction, so a kill at any moment leaves either no row or the row. Write-ahead logging
lets any number of readers watch while one driver writes; a second driver waits its turn.
"""

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError

APPLICATION = 0x61676170  # "agap": tells our files from other SQLite files
SCHEMA = 1
BUSY_SECONDS = 60.0  # how long a writer waits for another one

TABLES = """
CREATE TABLE runs (
    key TEXT PRIMARY KEY,
    task TEXT NOT NULL,
    mechanism TEXT NOT NULL,
    seed INTEGER NOT NULL,
    learning_rate REAL NOT NULL,
    score REAL,
    seconds REAL NOT NULL,
    finished TEXT NOT NULL,
    spec TEXT NOT NULL,
    result TEXT NOT NULL,
    provenance TEXT NOT NULL
) STRICT;
CREATE TABLE failures (
    key TEXT PRIMARY KEY,
    error TEXT NOT NULL,
    failed TEXT NOT NULL
) STRICT;
CREATE TABLE plan (
    sweep TEXT NOT NULL,
    key TEXT NOT NULL,
    PRIMARY KEY (sweep, key)
) STRICT;
"""


@dataclasses.dataclass(frozen=True)
class Record:
    """One finished run: what was asked (`spec`), what came out (`result`), where it ran (`provenance`)."""

    key: str
    spec: dict[str, Any]
    result: dict[str, Any]
    provenance: dict[str, Any]
    finished: str


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a sweep has come."""

    sweep: str
    total: int
    done: int
    failed: int
    last: str | None  # when its latest run finished

    @property
    def left(self) -> int:
        return self.total - self.done - self.failed


def spec_key(spec: Mapping[str, Any]) -> str:
    """Hash of a JSON-ready spec; the order of its keys does not matter.

    >>> spec_key({"a": 1, "b": 2.0}) == spec_key({"b": 2.0, "a": 1})
    True
    """
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Runs:
    """The database. Opens an existing file or makes a new one; `readonly` refuses to make one."""

    def __init__(self, path: str | Path, *, readonly: bool = False):
        self.path = Path(path)
        if readonly and not self.path.exists():
            raise AttngapError(f"No run database at {self.path}. Make one: attngap probe run mqar --db {self.path}")
        if not self.path.parent.is_dir():
            raise AttngapError(f"The folder of the run database, {self.path.parent}, does not exist. Create it first")
        # One handle for one thread; autocommit, so that every transaction below is spelled out.
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        try:
            self._db = sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
            self._prepare(readonly)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise AttngapError(
                f"{self.path} cannot be used as a run database: {' '.join(str(error).split())}. Give another --db"
            ) from error

    def _prepare(self, readonly: bool) -> None:
        if not readonly:
            self._create()
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        schema = self._db.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise AttngapError(f"{self.path} is an SQLite file, but not one of attngap's runs. Give another --db")
        if schema != SCHEMA:
            raise AttngapError(
                f"{self.path} has schema version {schema}, this attngap reads version {SCHEMA}. "
                "Give another --db, or use the attngap that wrote it"
            )
        if not readonly:  # only now: somebody else's file must stay as it is
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")

    def _create(self) -> None:
        """Tables and version in one transaction: two drivers that start together do not trip over each other."""
        with Write(self._db):
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={APPLICATION}")
                self._db.execute(f"PRAGMA user_version={SCHEMA}")

    def add(self, spec: Mapping[str, Any], result: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
        """Store a finished run; False when it was there already (the first one stays).

        `spec` needs task, mechanism, seed and learning_rate; `result` needs score and seconds.
        """
        key = spec_key(spec)
        row = (
            key,
            *(spec[name] for name in ("task", "mechanism", "seed", "learning_rate")),
            *(result[name] for name in ("score", "seconds")),
            datetime.now(UTC).isoformat(timespec="milliseconds"),
            *(json.dumps(part, sort_keys=True, allow_nan=False) for part in (spec, result, provenance)),
        )
        with self._telling(), Write(self._db):
            added = self._db.execute(f"INSERT OR IGNORE INTO runs VALUES ({', '.join('?' * 11)})", row).rowcount
            self._db.execute("DELETE FROM failures WHERE key = ?", (key,))
        return bool(added)

    def fail(self, spec: Mapping[str, Any], error: str) -> None:
        """Note why a run could not finish; it stays missing, so the next call tries it again."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._telling(), Write(self._db):
            self._db.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", (spec_key(spec), error, now))

    def missing(self, specs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The specs without a finished run, in order and without repeats."""
        seen = {key for (key,) in self._rows("SELECT key FROM runs")}
        left = []
        for spec in specs:
            if (key := spec_key(spec)) not in seen:
                seen.add(key)
                left.append(spec)
        return left

    def announce(self, sweep: str, specs: Iterable[Mapping[str, Any]]) -> None:
        """Announce what a sweep will hold, so that `progress` can tell how far it is; forgets its old failures."""
        keys = {spec_key(spec) for spec in specs}
        with self._telling(), Write(self._db):
            self._db.execute("DELETE FROM plan WHERE sweep = ?", (sweep,))
            self._db.executemany("INSERT INTO plan VALUES (?, ?)", ((sweep, key) for key in sorted(keys)))
            self._db.executemany("DELETE FROM failures WHERE key = ?", ((key,) for key in keys))

    def progress(self) -> list[Progress]:
        """One entry per sweep."""
        rows = self._rows(
            """SELECT plan.sweep, count(*), count(runs.key),
                      sum(runs.key IS NULL AND failures.key IS NOT NULL), max(runs.finished)
               FROM plan LEFT JOIN runs USING (key) LEFT JOIN failures USING (key) GROUP BY plan.sweep"""
        )
        return [Progress(*row) for row in rows]

    def failures(self) -> dict[str, str]:
        """Key to error, for runs that could not finish."""
        return dict(self._rows("SELECT key, error FROM failures ORDER BY failed"))

    def records(
        self, *, task: str | None = None, mechanism: str | None = None, sweep: str | None = None
    ) -> list[Record]:
        """Finished runs in the order they finished, filtered."""
        query = "SELECT key, spec, result, provenance, finished FROM runs"
        wanted = {"task": task, "mechanism": mechanism}
        clauses = [f"{column} = :{column}" for column, value in wanted.items() if value is not None]
        if sweep is not None:
            clauses.append("key IN (SELECT key FROM plan WHERE sweep = :sweep)")
        if clauses:
            query += " WHERE " + " AND ".join(clauses)
        rows = self._rows(query + " ORDER BY finished, key", {**wanted, "sweep": sweep})
        try:
            found = [Record(key, *map(json.loads, parts), finished=finished) for key, *parts, finished in rows]
        except (ValueError, TypeError, RecursionError) as error:
            raise AttngapError(f"{self.path} is damaged: {' '.join(str(error).split())}. Give another --db") from error
        if any(not isinstance(part, dict) for each in found for part in (each.spec, each.result, each.provenance)):
            raise AttngapError(f"{self.path} is damaged: a run is no table of values. Give another --db")
        return found

    def _rows(self, query: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        with self._telling():
            return self._db.execute(query, values or {}).fetchall()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What SQLite finds wrong with the file, in a line: damage may lie in a page that opening it does not read."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # it quotes damaged names, which may be no text
            why = " ".join(str(error).split())
            state = "cannot be used" if isinstance(error, sqlite3.OperationalError) else "is damaged"  # full, locked
            raise AttngapError(f"{self.path} {state}: {why}. Give another --db") from error

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Write:
    """One write transaction; takes the lock at once, so that reads inside it cannot go stale."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
