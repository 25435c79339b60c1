"""A rank that talks with the others without a model: `main([SCENE, FILE])`, for each rank.

It creates the file once it has joined them.
"""

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.env import launch
from finetune.training import process_group
from finetune.training.process_group import ProcessGroup

JOIN_S = 6.0


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def talk(joined: Path) -> None:
    """Exchange values for about two seconds."""
    with ProcessGroup(launch()) as ranks:
        joined.touch()
        own = torch.full((3,), 1.0 + ranks.index)
        for number in range(40):
            assert ranks.exchange((number, ranks.index)) == ((number, 0), (number, 1))
            assert torch.equal(ranks.add_up(own), torch.full((3,), 3.0))
            assert torch.equal(ranks.from_main(lambda: own), torch.ones(3))
            time.sleep(0.05)


def send_code(joined: Path) -> None:
    """As rank 1, which knows the secret, send what runs code where it is unpickled."""
    with ProcessGroup(launch()) as ranks:
        if ranks.index == 1:
            content = pickle.dumps((Touch(joined.with_name("ran")), None))
            vars(process_group)["sealed"] = lambda _: torch.tensor(list(content), dtype=torch.uint8)
        ranks.exchange(None)


def main(argv: Sequence[str]) -> None:
    """Play a scene."""
    vars(process_group)["JOIN_S"] = JOIN_S
    globals()[argv[0]](Path(argv[1]))
