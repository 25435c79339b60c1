"""A command of the program, run in this process."""

import pytest

from finetune import app


def run(*argv: object) -> int:
    """Run `sluice` with these words, and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        app.main([str(word) for word in argv])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code
