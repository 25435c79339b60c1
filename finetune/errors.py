"""Errors of a fine-tuning run.

FinetuneError            see offload.errors.SluiceError for the three parts
  ConfigError            a recipe, or the command line over it
  DataError              a row, a file or a data set
  ModelError             weights, a config or a tokenizer
  CheckpointError        a run directory that cannot be continued
  MergeError             an adapter that cannot be merged, or a model that cannot be exported
  RankError              another process of the run has failed
  RunFailedError         one of several runs, which all its ranks know
    DivergedError        its loss or its gradients are no numbers
  StudioError            what the page cannot do: start or stop a run; its second process died
ApartError               runs that are to train in waves, by their plan
RowError                 what is wrong with one row, which becomes a part of a DataError
TrialDoesNotFitError     the longest batch ran out of memory when it was tried
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from offload.errors import DoesNotFitError, SluiceError

_SHOWN = 200


class FinetuneError(SluiceError):
    """The base of what `finetune` raises."""


class ConfigError(FinetuneError):
    """A recipe, or the command line over it, is wrong."""


class DataError(FinetuneError):
    """A row, a file or a data set is wrong."""


class ModelError(FinetuneError):
    """Weights, a config or a tokenizer cannot be used."""


class CheckpointError(FinetuneError):
    """A run directory cannot be continued."""


class MergeError(FinetuneError):
    """An adapter cannot be merged, or a model cannot be exported."""


class RowError(Exception):
    """What is wrong with one row; collected, never seen by a caller.

    Attributes:
        lost: Keys that mean something and would not be read.
    """

    def __init__(self, problem: str, lost: Sequence[str] = ()) -> None:
        super().__init__(problem, lost)
        self.problem, self.lost = problem, tuple(lost)

    def __str__(self) -> str:
        return self.problem


def unmatched(source: str, problem: str, names: Collection[str]) -> ModelError:
    """Return the error that weights and config do not match, with a name for an example."""
    return ModelError(
        f"model.path: {source} {problem} {len(names)} tensors, such as {min(map(str, names))}",
        limit="weights and config must match",
        hint="download the model again, or give the config.json that belongs to it",
    )


class RankError(FinetuneError):
    """Another process of the run has failed, has ended or does not answer.

    Attributes:
        is_shown: Whether this process shows it, and no other one of its machine.
    """

    def __init__(self, what: str, *, limit: str, hint: str, is_shown: bool) -> None:
        super().__init__(what, limit=limit, hint=hint)
        self.is_shown = is_shown


class RunFailedError(FinetuneError):
    """A run cannot go on. All its ranks raise it at the same point, so other runs can go on."""


class DivergedError(RunFailedError):
    """The loss or the gradients of a run are not finite."""


class StudioError(FinetuneError):
    """A process of the local page has died."""


class ApartError(FinetuneError):
    """Runs that do not share their steps: not all fit, or waves of them take less time.

    Attributes:
        waves: The runs of each, by their numbers.
        sizes: The sizes of the waves, in words.
    """

    def __init__(self, waves: Sequence[tuple[int, ...]]) -> None:
        self.sizes = " and ".join(str(len(wave)) for wave in waves)
        super().__init__(
            f"{sum(map(len, waves))} runs in one step",
            limit="by the plan they do not fit, or take longer than in waves",
            hint=f"`sluice sweep` trains them in waves of {self.sizes}",
        )
        self.waves = waves


class TrialDoesNotFitError(DoesNotFitError):
    """The longest batch ran out of device memory when it was tried; on which ranks is not known."""


def file_error(error: OSError, where: str) -> FinetuneError:
    """Return what a user is shown of a file that cannot be read or written.

    Args:
        error: From the system.
        where: What is named if the error names no file.
    """
    return FinetuneError(
        f"{error.filename or where}: {error.strerror or error}",
        limit="a file is read or written there, which needs permission and room",
        hint="give another path, fix the permissions (`ls -ld`) or free space (`df -h`)",
    )


@contextmanager
def read_by_library(
    what: str, *, error: type[FinetuneError], limit: str, hint: str
) -> Iterator[None]:
    """Turn whatever a library raises about a file into an error that names the file.

    Libraries do not validate files, and fail on damaged ones with any exception: tokenizers with a
    bare `Exception`, transformers with whatever its current line raises. Only library calls belong
    inside; our own errors pass through.

    Args:
        what: What is wrong, including the file or folder.
        error: The type to raise.
        limit: What the file should be.
        hint: How to get one that is right.
    """
    try:
        yield
    except SluiceError:
        raise
    except Exception as found:
        words = " ".join(str(found).split())
        why = words if len(words) <= _SHOWN else words[: _SHOWN - 3] + "..."
        raise error(
            f"{what} ({type(found).__name__}{': ' if why else ''}{why})", limit=limit, hint=hint
        ) from found


def reading_config(source: str) -> AbstractContextManager[None]:
    """Return a context that turns failures of building a model from its config into one error."""
    return read_by_library(
        f"transformers builds no model from the config.json of {source}",
        error=ModelError,
        limit="it must be of a language model that transformers can build",
        hint="correct config.json, install what is missing, or `pip install -U transformers`",
    )
