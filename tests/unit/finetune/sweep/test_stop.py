import pytest

from finetune.sweep.variants import StopRule, Verdicts


def verdicts(
    rule: StopRule | None, before: dict[str, dict[int, float]]
) -> tuple[Verdicts, list[str]]:
    notes: list[str] = []
    judge = Verdicts(rule=rule, names=["a", "b"], before=lambda: before, note=notes.append)
    return judge, notes


RULE = StopRule(worse_than_best_by=0.5, after_steps=4)


def test_a_run_stops_where_it_is_worse_than_the_best_by_more_than_the_margin() -> None:
    judge, notes = verdicts(RULE, {})
    early = {0: 1.0, 1: 9.0}
    assert judge(2, early) == {}  # no run stops before step 4
    at = {0: 1.25, 1: 1.5}
    assert judge(4, at) == {}  # exactly the margin above the lowest, of step 2
    late = {0: 1.25, 1: 1.75}
    assert list(judge(6, late)) == [1]
    assert notes == [
        "b: stopped after step 6: loss on held-out rows 1.7500, more than 0.5 above 1.0000 of a"
    ]


def test_runs_of_earlier_waves_count_with_their_losses_up_to_the_same_step() -> None:
    judge, _ = verdicts(RULE, {"earlier": {4: 3.0, 8: 1.0}})
    assert judge(4, {0: 3.25}) == {}
    assert list(judge(8, {0: 3.25})) == [0]


def test_without_a_rule_no_run_stops() -> None:
    judge, notes = verdicts(None, {"earlier": {4: 0.0}})
    assert judge(4, {0: 9.0}) == {}
    assert not notes


@pytest.mark.parametrize("loss", [0.5, 0.25])
def test_the_best_run_never_stops(loss: float) -> None:
    judge, _ = verdicts(StopRule(worse_than_best_by=0.0, after_steps=1), {})
    assert 0 not in judge(4, {0: loss, 1: 0.5})
