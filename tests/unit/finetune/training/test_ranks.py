from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.env import SECRET, Launch, launch, rank_label
from finetune.errors import ConfigError, RankError
from finetune.recipe.sections import OffloadSection
from finetune.training import preflight
from finetune.training.ranks import (
    FromMain,
    Ranks,
    micro_batches_by_shares,
    own_micro_batches,
)
from finetune.training.rendezvous import join


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    num=st.integers(1, 8),
)
def test_each_micro_batch_has_one_rank_and_ranks_differ_by_one_at_most(
    sizes: list[int], num: int
) -> None:
    sizes = sorted(sizes, reverse=True)
    shares = [own_micro_batches(len(sizes), index=index, num=num) for index in range(num)]
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == max(counts)
    tokens = [sum(sizes[i] for i in share) for share in shares]
    assert max(tokens) - min(tokens) <= sizes[0]


def test_a_share_of_one_rank_is_the_whole_step_in_its_order() -> None:
    assert own_micro_batches(5, index=0, num=1) == (0, 1, 2, 3, 4)


def test_micro_batches_are_dealt_back_and_forth() -> None:
    assert [own_micro_batches(4, index=i, num=2) for i in range(2)] == [(1, 2), (0, 3)]
    assert [own_micro_batches(3, index=i, num=2) for i in range(2)] == [(1, 2), (0,)]


@given(num=st.integers(0, 40), shares=st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_each_micro_batch_has_one_rank_whatever_the_shares(num: int, shares: list[int]) -> None:
    ranks = range(len(shares))
    own = [micro_batches_by_shares(num, index=index, shares=shares) for index in ranks]
    assert sorted(i for one in own for i in one) == list(range(num))
    assert all(list(one) == sorted(one) for one in own)


def test_unequal_shares_are_spread_over_a_step_and_equal_ones_dealt_as_before() -> None:
    own = [micro_batches_by_shares(8, index=index, shares=(3, 1)) for index in range(2)]
    assert own == [(0, 1, 3, 4, 5, 7), (2, 6)]
    equal = [micro_batches_by_shares(5, index=index, shares=(2, 2)) for index in range(2)]
    assert equal == [own_micro_batches(5, index=index, num=2) for index in range(2)]


def test_one_process_is_told_its_own_words() -> None:
    with Ranks() as ranks:
        assert ranks.is_main
        assert ranks.exchange("x") == ("x",)
        assert ranks.from_main(lambda: 3) == 3
        with ranks.first_here_first():
            pass
        parameter = torch.nn.Parameter(torch.zeros(2))
        ranks.sum_gradients([parameter], dtype=torch.float32)
        assert ranks.sum_losses(0.5) == 0.5
        assert parameter.grad is None
        ranks.require_same("nothing", lambda: pytest.fail("this costs time for nothing"))


KEY, STORE = "k" * 32, ("127.0.0.1", 29517)


class _Asked(dict[str, torch.Tensor]):
    """Tensors that remember which of them were asked for."""

    def __init__(self, names: str) -> None:
        super().__init__({name: torch.tensor(float(i)) for i, name in enumerate(names)})
        self.names: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.append(name)
        return super().__getitem__(name)


def test_a_tensor_of_a_checkpoint_is_read_when_it_is_asked_for() -> None:
    stored = _Asked("abc")
    tensors = FromMain(stored, ranks=Ranks())
    assert stored.names == []
    assert [float(tensors[name]) for name in "bc"] == [1.0, 2.0]
    assert stored.names == ["b", "c"]


# ------------------------------------------------------------------------------------ the launcher


def set_launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", SECRET)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(STORE[1]))


def test_without_a_launcher_there_is_one_process(monkeypatch) -> None:
    set_launch(monkeypatch)
    assert launch() == Launch(num=1, index=0, num_local=1, local_index=0, node=0)
    assert rank_label() == ""
    assert join(launch()).num == 1


def test_a_launcher_says_which_process_this_is(monkeypatch) -> None:
    own = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    set_launch(monkeypatch, **own, **{SECRET: KEY})
    assert launch() == Launch(
        num=4, index=3, num_local=2, local_index=1, node=1, store=STORE, secret=KEY
    )
    assert KEY not in repr(launch())
    assert rank_label() == " (rank 3)"


def test_a_launcher_that_does_not_number_its_processes_is_named(monkeypatch) -> None:
    set_launch(monkeypatch, WORLD_SIZE="2")
    with pytest.raises(
        ConfigError,
        match=r"variable RANK is not set; .*\n\nhint: `accelerate launch --multi_gpu",
    ):
        launch()


def test_a_launcher_that_does_not_number_its_machines_fills_one_after_the_other(
    monkeypatch,
) -> None:
    own = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", SECRET: KEY}
    set_launch(monkeypatch, **own)
    assert launch().node == 1
    set_launch(monkeypatch, **own, GROUP_RANK="7")
    assert launch().node == 7


@pytest.mark.parametrize(
    ("secret", "seen"), [({}, "not set"), ({SECRET: "guess me"}, "8 characters long")]
)
def test_several_machines_without_a_secret_are_refused_with_the_command(
    secret, seen, monkeypatch
) -> None:
    own = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    set_launch(monkeypatch, **own, **secret)
    with pytest.raises(
        ConfigError, match=f"variable SLUICE_SECRET is {seen}; .*\n\nhint: `export SLUICE_SECRET="
    ):
        launch()


def test_one_machine_needs_no_secret(monkeypatch) -> None:
    set_launch(monkeypatch, WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    assert launch().secret is None
    assert launch().is_on_one_machine


class _FourthOfFive(Ranks):
    num, index, local_index, nodes = 5, 3, 1, (0, 0, 1, 1, 1)


def test_a_rank_knows_who_is_on_its_machine() -> None:
    ranks = _FourthOfFive()
    assert (ranks.num_machines, ranks.most_local, ranks.is_first_here) == (2, 3, False)
    ranks.index = 2
    assert ranks.is_first_here
    assert not ranks.is_main


# -------------------------------------------------------------------------------- before the start


class _SecondOfTwo(Ranks):
    num, index, local_index, nodes = 2, 1, 1, (0, 0)


def test_each_rank_has_the_card_of_its_number(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = preflight.torch_device(OffloadSection(), _SecondOfTwo())
    assert found == torch.device("cuda", 1)
    cpu = preflight.torch_device(OffloadSection(device="cpu"), _SecondOfTwo())
    assert cpu == torch.device("cpu")


def test_more_ranks_than_cards_are_refused_with_the_fix(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError,
        match=r"2 processes were launched for 1 CUDA devices; .*\n\nhint: `--num_processes 1`",
    ):
        preflight.torch_device(OffloadSection(), _SecondOfTwo())


def test_only_the_first_process_is_heard(monkeypatch, capsys) -> None:
    from finetune.cli.console import open_console

    for rank in ("0", "1"):
        set_launch(monkeypatch, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        open_console().print(f"heard {rank}")
    assert capsys.readouterr().out == "heard 0\n"


def test_a_rank_that_another_has_ended_shows_nothing(monkeypatch, capsys, tmp_path: Path) -> None:
    import typer

    from finetune.exits import EXIT_USER, explained

    with pytest.raises(typer.Exit) as ending, explained("recipe.yaml"):
        raise RankError("it broke", limit="", hint="", is_shown=False)
    assert ending.value.exit_code == EXIT_USER
    assert capsys.readouterr() == ("", "")
    set_launch(monkeypatch, WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    with pytest.raises(typer.Exit), explained("recipe.yaml"):
        raise ConfigError("it broke", limit="it must not", hint="mend it")
    assert capsys.readouterr().err.startswith("error (rank 1): it broke; it must not\n\nhint: ")
