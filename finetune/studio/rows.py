"""The rows of a run and what is learned of them, as `sluice data` writes them."""

import subprocess
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from finetune.errors import StudioError
from finetune.recipe.load import RUN_RECIPE
from finetune.studio.launcher import argv

_is_writing = threading.Lock()  # rows are tokenized once at a time


def rows_page(run: Path, *, root: Path) -> str:
    """Return the page of a run's rows.

    Args:
        run: Directory of the run.
        root: The folder that the studio was started in, where relative paths begin.

    Raises:
        StudioError: `sluice data` refuses the recipe or its rows; the message is its own.
    """
    with _is_writing, TemporaryDirectory(prefix="sluice-rows-") as folder:
        file = Path(folder) / "rows.html"
        words = ["data", str(run / RUN_RECIPE), "--html", str(file)]
        done = subprocess.run(
            argv(words), cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()
            raise StudioError(
                said, limit="rows are shown of the files of the recipe", hint="see above"
            )
        return file.read_text("utf-8")
