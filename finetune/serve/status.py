"""What a server says of its clients while it runs: a file in its folder, for the runs room."""

from typing import Annotated

from pydantic import BaseModel, Field

from finetune.errors import CheckpointError
from finetune.files.atomic import JsonFile
from finetune.run.run_files import Count, Seconds, Step

STATUS_FILE = "clients.json"
Name = Annotated[str, Field(max_length=1000)]


class ClientStatus(BaseModel):
    """A model in training."""

    id: Name
    rank: Step
    num_steps: Count
    num_tokens: Count
    last_loss: float | None
    num_sampled: Count
    num_pending: Count
    silent_s: Seconds


class ServerStatus(BaseModel):
    """A server; passes and loads are by their kind."""

    base: Name
    clients: list[ClientStatus]
    num_waiting: Count
    num_passes: dict[Name, Count]
    num_loads: dict[Name, Count]


STATUS = JsonFile(
    holds=ServerStatus,
    error=CheckpointError,
    limit="it is written whole, every two seconds",
    hint="remove it: a server that runs writes it again",
)
