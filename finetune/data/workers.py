"""How many processes prepare data, and the error if one of them dies."""

import os

from finetune.errors import DataError


def num_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def worker_died(doing: str, error: Exception) -> DataError:
    """Return the error for a worker that was killed."""
    return DataError(
        f"a data worker died while {doing}: {error}",
        limit="each worker needs memory for the tokens of the data set",
        hint="`data.num_workers: 0` prepares the data in the main process",
    )
