"""The reference's log-probabilities of a run's rows, kept in its directory.

They are taken once, by the model as the run begins, and read again when it is resumed. The file is
of one run, whose recipe names the base and the adapter and cannot change; it names the rows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.files.atomic import write_atomically
from finetune.files.manifest import is_sealed_json, sealed_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

REFERENCES = "reference.json"
SEAL = '"sha256"'
References = Mapping[str, "NDArray[np.float64]"]
"""`train` and `held_out` -> of each example, the sum over its label tokens, in nats."""


def write_references(run_dir: Path, references: References, *, rows: str) -> None:
    """Write them whole.

    Args:
        run_dir: Of the run.
        references: To keep.
        rows: Digest of the examples.
    """
    sums = {name: sums.tolist() for name, sums in references.items()}
    text = json.dumps({"rows": rows, "sums": sums}, indent=1)
    write_atomically(run_dir / REFERENCES, sealed_json(text))


def read_references(run_dir: Path, *, rows: str) -> References | None:
    """Return what was kept for these rows; None if there is nothing, or not what was written."""
    file = run_dir / REFERENCES
    if not file.is_file():
        return None
    text = file.read_text(errors="replace")
    if SEAL not in text or not is_sealed_json(text):
        return None
    found = json.loads(text)
    if found["rows"] != rows:
        return None
    return {name: np.array(sums) for name, sums in found["sums"].items()}
