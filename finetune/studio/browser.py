"""The door of the static page: a question as JSON in, its answer as JSON out, in the browser."""

from pathlib import Path

from finetune.studio.answer import Planner

_FOLDER = Path("/tmp/configs")  # of the browser's own file system, in memory
_planner = Planner(here=None, folder=_FOLDER)


def answered(kind: str, text: str) -> str:
    """Answer a question."""
    return _planner.answered(kind, text)
