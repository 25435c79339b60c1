"""How much clients may ask for, and how long they may be silent."""

from dataclasses import dataclass

from finetune.errors import ConfigError, FinetuneError
from finetune.serve.planned import NUM_SNAPSHOTS


class GoneError(FinetuneError):
    """Something was here, or never was: a session, a model, a sampler, a promised answer."""


class BusyError(FinetuneError):
    """Too much is asked for at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What clients may ask for at a time, and how long they may be silent."""

    num_clients: int  # models in training
    num_samplers: int  # samplers in slots
    max_rank: int  # of an adapter
    row_tokens: int  # of a row, and of a prompt with its answer
    pass_tokens: int  # of a client's rows in a pass
    chunk_rows: int = 1024  # rows of a request to train
    num_pending: int = 2048  # prompts of a client whose answers it has not fetched
    waiting_bytes: int = 2**30  # of all requests that wait
    num_sessions: int = 256
    num_answers: int = 256  # answers of a request
    num_snapshots: int = NUM_SNAPSHOTS  # samplers of a model without a name, the newest
    kept_bytes: int = 2**28  # answers that were sent, in case they were lost on the way
    hold_s: float = 30.0  # how long a client waits for an answer until it asks again
    gives_way_s: float = 35.0  # silence of a client that gives way to another; it beats every 10 s
    frees_s: float = 600.0  # silence of a client that is freed

    def require_planned(self, what: str, rank: int) -> None:
        """Check the rank of an adapter.

        Args:
            what: Name of what has the chunk.
            rank: The rank.

        Raises:
            ConfigError: No such adapter was planned.
        """
        if not 1 <= rank <= self.max_rank:
            raise ConfigError(
                f"{what} has rank {rank}",
                limit=f"adapters of ranks 1 to {self.max_rank} were planned",
                hint=f"`sluice serve --rank {max(1, rank)}`, or another rank",
            )
