import os
import signal

import pytest

from finetune import interrupts
from finetune.interrupts import Interrupted


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_a_signal_ends_a_command_and_the_handler_of_before_is_put_back(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(Interrupted) as raised, interrupts.raised():
            os.kill(os.getpid(), number)
        assert raised.value.number == number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_the_first_signal_is_collected_and_the_second_ends_at_once(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with interrupts.collected() as received:
            os.kill(os.getpid(), number)
            assert received == [number]
            with pytest.raises(Interrupted):
                os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_at_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.raised(), interrupts.collected() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "shown"),
    [
        ([0], 1, ""),
        ([1], 2, " by SIGTERM to rank 1"),
        ([0, 2], 3, " by SIGTERM to ranks 0, 2"),
        ([0, 1], 2, " by SIGTERM to all ranks"),
    ],
)
def test_a_signal_is_shown_with_the_ranks_that_got_it(
    ranks: list[int], num_ranks: int, shown: str
) -> None:
    assert interrupts.shown_signal(signal.SIGTERM, ranks, of=num_ranks) == shown
