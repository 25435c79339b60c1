"""The program, with no room in a run's directory after two steps: `main([NAME, WORDS...])`."""

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from finetune import app
from finetune.run.run_dir import RunDir

FULL_AFTER = 2  # steps


def main(argv: Sequence[str]) -> None:
    """Run the program; the directory that is full has this name."""
    append = RunDir.append_metrics

    def full(self: RunDir, row: Mapping[str, Any]) -> None:
        if self.path.name == argv[0] and row["step"] > FULL_AFTER:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path / "metrics.jsonl"))
        append(self, row)

    RunDir.append_metrics = full  # type: ignore[method-assign]
    app.main(argv[1:])
