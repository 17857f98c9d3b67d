"""Read a result from its JSON file: right, or refused in one line."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from attngap.errors import AttngapError

Record = TypeVar("Record", bound=BaseModel)


def read_record(path: Path, kind: type[Record], *, what: str, schema: str, hint: str) -> Record:
    """The file as a `kind`; `what` it is and the `hint` what to do are for the error."""
    content = read_json(path, what=what, hint=hint)
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise AttngapError(f"'{path}' is not a {what} this version reads: schema {found!r}, expected {schema!r}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise AttngapError(f"The {what} '{path}' is wrong at {place!r}: {first['msg']}. {hint}") from error


def read_json(path: Path, *, what: str, hint: str) -> Any:
    """What the file says; a missing one, a pipe, another encoding or a broken text are refused."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise AttngapError(f"Cannot read the {what} '{path}': it is not a file. {hint}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise AttngapError(f"Cannot read the {what} '{path}': {why}. {hint}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AttngapError(f"The {what} '{path}' is not JSON: {error}. {hint}") from error
