"""JSON files that may be damaged: each is read whole and validated before it is used.

Each kind of file has one `JsonFile`: its schema, and the error for a file that does not match it.
A value that passes has every key and type that its readers rely on.
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
        error: Raised if the content is wrong.
        limit: What it should be.
        hint: How to get one that is right.
    """

    holds: type[BaseModel]
    error: type[FinetuneError]
    limit: str
    hint: str

    def read(self, file: Path) -> Any:
        """Return the content of a file.

        Raises:
            FinetuneError: Of this kind: it cannot be read, is not JSON, or holds something else.
        """
        return self.parsed(self.content(file), source=str(file))

    def content(self, file: Path, *, start: int = 0) -> bytes:
        """Return a file's bytes, if it is a plain file of any size that such a file can have.

        Args:
            file: To be read.
            start: Its first bytes that are left out.
        """
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise self.refusal(str(file), "it is no file")
            if status.st_size > MAX_BYTES:
                raise self.refusal(str(file), f"it has {status.st_size:,} bytes")
            with file.open("rb") as opened:
                opened.seek(start)
                return opened.read()
        except OSError as error:
            raise self.refusal(str(file), error.strerror or str(error)) from error

    def parsed(self, content: bytes, *, source: str) -> Any:
        """Return the content of JSON text.

        Args:
            content: The text.
            source: Its name in errors.

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
    """Describe the first error: where it is, what is there, and what should be."""
    detail = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where} is missing"
    seen = json.dumps(detail["input"], default=str)
    seen = seen if len(seen) <= 40 else seen[:37] + "..."
    problem = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if detail["type"] in ("model_type", "dict_type"):
        problem = "should be an object"
    return f"{where} is {seen}, and {problem}" if where else f"it holds {seen}, and {problem}"
