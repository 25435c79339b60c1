"""Tensors that all ranks ask the main one for: `tests/e2e/scenes.py` sends them."""

import torch

from finetune.training.ranks import Ranks
from finetune.training.world.from_main import FromMain


class _Asked(dict[str, torch.Tensor]):
    """Tensors that remember which of them were asked for."""

    def __init__(self, names: str) -> None:
        super().__init__({name: torch.tensor(float(i)) for i, name in enumerate(names)})
        self.names: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.append(name)
        return super().__getitem__(name)


class _OtherOfTwo(Ranks):
    num, index, nodes = 2, 1, (0, 0)

    def from_main(self, make):
        return torch.tensor(7.0)


def test_a_tensor_is_read_when_it_is_asked_for() -> None:
    stored = _Asked("abc")
    tensors = FromMain(stored, ranks=Ranks())
    assert stored.names == []
    assert [float(tensors[name]) for name in "bc"] == [1.0, 2.0]
    assert stored.names == ["b", "c"]


def test_another_rank_gets_what_the_main_one_sends() -> None:
    tensors = FromMain(None, ranks=_OtherOfTwo())
    assert float(tensors["b"]) == 7.0
