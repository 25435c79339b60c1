"""A rank that talks with the others without a model: `main([SCENE, FILE])`, for each rank.

It creates the file once it has joined them.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from finetune.env import launch
from finetune.training import process_group
from finetune.training.process_group import ProcessGroup

JOIN_S = 6.0


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
    """As rank 1, which knows the secret, name a function where a type is named."""
    with ProcessGroup(launch()) as ranks:
        if ranks.index == 1:
            words = ["os.system", f"touch {joined.with_name('ran')}"]
            vars(process_group)["written"] = lambda _value, _tensors: words
        ranks.exchange(None)


def main(argv: Sequence[str]) -> None:
    """Play a scene."""
    process_group.JOIN_S = JOIN_S
    globals()[argv[0]](Path(argv[1]))
