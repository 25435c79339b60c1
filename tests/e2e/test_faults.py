"""Each kind of fault ends all processes in time, named by each of them, and the run goes on."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.conftest import recipe_writer
from tests.e2e.faults import (
    FAULTS,
    FSDP2,
    LIMIT_S,
    NUM_BEFORE,
    SECTIONS,
    STREAM,
    WAYS,
    Fault,
    NoDiskError,
    Scene,
    resumed_by,
    suffer,
)
from tests.e2e.forked import Forked
from tests.e2e.runs import LOSS_TOLERANCE, WEIGHT_TOLERANCE

SceneOf = Callable[..., Scene]


@pytest.fixture(scope="module")
def scene_of(
    tmp_path_factory: pytest.TempPathFactory,
    model_dir: Path,
    rows_file: Path,
    machine_file: Path,
    fork_server: Forked,
) -> Iterator[SceneOf]:
    """Return what sets a scene in a way, with more words of the command."""

    @cache
    def scene(way: str, *more: str) -> Scene:
        folder = tmp_path_factory.mktemp(way)
        recipe = recipe_writer(folder, model_dir, rows_file)(**SECTIONS)
        words = ("finetune", recipe, "--machine", machine_file, *more)
        return Scene(folder=folder, model=model_dir, words=words, way=way, forked=fork_server)

    yield scene
    fork_server.end_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        pytest.param(way, fault, id=f"{way}-{fault.name.replace(' ', '_')}")
        for fault in FAULTS
        for way in WAYS
        if way in fault.ways
    ],
)
def test_a_fault_ends_all_in_time_each_names_it_and_the_run_goes_on_to_the_bit(
    way: str, fault: Fault, scene_of: SceneOf
) -> None:
    try:
        outcome = suffer(scene_of(way, *fault.more), fault)
    except NoDiskError:
        pytest.skip("mounting a small disk needs root")
    assert outcome.codes == fault.codes, outcome.shown
    assert all(ended_s < LIMIT_S for ended_s in outcome.ended_s), outcome.ended_s
    for cause, shown in zip(fault.causes, outcome.shown, strict=True):
        assert cause in " ".join(shown.split())
    assert outcome.checkpoint >= NUM_BEFORE
    assert outcome.is_resumed, outcome.resume_shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "sizes"), [(STREAM, (1,)), (STREAM, (2, 1)), (FSDP2, (1,)), (FSDP2, (2, 1))]
)
def test_other_ranks_and_machines_resume_a_run_within_rounding(
    way: str, sizes: tuple[int, ...], scene_of: SceneOf
) -> None:
    resumed = resumed_by(scene_of(way), *sizes)
    assert set(resumed.codes) == {0}, resumed.shown
    assert resumed.loss_error <= LOSS_TOLERANCE
    assert resumed.weight_error <= WEIGHT_TOLERANCE
