"""Errors of a fine-tuning run.

FinetuneError            see offload.errors.SluiceError for the three parts
  ConfigError            a recipe, or the command line over it
  DataError              a row, a file or a data set
  ModelError             weights, a config or a tokenizer
  CheckpointError        a run directory that cannot be continued
  MergeError             an adapter that cannot be merged, or a model that cannot be exported
  RankError              another process of the run has failed
    ToldRankError        and has said so itself
"""

from collections.abc import Collection

from offload.errors import SluiceError


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


def unmatched(source: str, problem: str, names: Collection[str]) -> ModelError:
    """Return the error that weights and config do not match, with a name for an example."""
    return ModelError(
        f"model.path: {source} {problem} {len(names)} tensors, such as {min(map(str, names))}",
        limit="weights and config must match",
        hint="download the model again, or give the config.json that belongs to it",
    )


class RankError(FinetuneError):
    """Another process of the run has ended, does not answer, or trains on something else."""


class ToldRankError(RankError):
    """Another process of the run has failed and shows why; this one ends with it, silently."""

    def __init__(self, rank: int, failure: str) -> None:
        super().__init__(
            f"rank {rank} has failed: {failure}",
            limit="the ranks of a run end together",
            hint=f"see what rank {rank} shows",
        )
        self.rank = rank
