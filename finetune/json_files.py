"""JSON files that anything may have happened to, each read whole and checked before it is used.

A kind of file has one `JsonFile`: what it holds, and what to say of one that holds something else.
A value that passes has every key and type that its readers take for granted.
"""

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune.errors import FinetuneError

MAX_BYTES = 2**30
_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFile:
    """A kind of JSON file.

    Attributes:
        holds: Checks the content.
        error: What is raised where it is wrong.
        limit: What it should be.
        hint: How to get one that is right.
    """

    holds: type[BaseModel]
    error: type[FinetuneError]
    limit: str
    hint: str

    def read(self, file: Path) -> Any:
        """Return what a file holds.

        Raises:
            FinetuneError: Of this kind: it cannot be read, is not JSON, or holds something else.
        """
        return self.parsed(self.content(file), source=str(file))

    def content(self, file: Path) -> bytes:
        """Return a file's bytes, if it is a plain file of any size that such a file can have."""
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise self.refusal(str(file), "it is no file")
            if status.st_size > MAX_BYTES:
                raise self.refusal(str(file), f"it has {status.st_size:,} bytes")
            return file.read_bytes()
        except OSError as error:
            raise self.refusal(str(file), error.strerror or str(error)) from error

    def parsed(self, content: bytes, *, source: str) -> Any:
        """Return what JSON text says.

        Args:
            content: The text.
            source: What errors name.

        Raises:
            FinetuneError: Of this kind: it is not JSON, or says something else.
        """
        try:
            value = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # also: not UTF-8, a number too long
            raise self.refusal(source, f"it is not JSON: {error}") from error
        try:
            self.holds.model_validate(value, strict=True)
        except ValidationError as error:
            raise self.refusal(source, _first(error)) from error
        return value

    def refusal(self, source: str, why: str) -> FinetuneError:
        """Return the error for a file with something wrong in it."""
        return self.error(
            f"{source} cannot be read: {why[:_SHOWN]}", limit=self.limit, hint=self.hint
        )


def _first(error: ValidationError) -> str:
    """Say where the first thing is that is wrong, what it is, and what it should be."""
    detail = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where} is missing"
    seen = json.dumps(detail["input"], default=str)
    seen = seen if len(seen) <= 40 else seen[:37] + "..."
    told = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if detail["type"] in ("model_type", "dict_type"):
        told = "should be an object"
    return f"{where} is {seen}, and {told}" if where else f"it holds {seen}, and {told}"
