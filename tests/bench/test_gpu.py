"""The harness for a GPU: what holds without one, and its rehearsal."""

import importlib
import itertools
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.recipe.load import load_recipe
from offload.engine.streams import Event
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.schedule.op import Lane
from tests.bench.gpu import (
    ablate,
    dense,
    exact,
    existing,
    flagship,
    launches,
    models,
    precompile,
    suite,
    wheels,
)
from tests.bench.gpu.__main__ import GRACE_S, is_done, main, options_of, run_case
from tests.bench.gpu.card import Card
from tests.bench.gpu.cases import CASES, START_S, WINDOW_S, WINDOWS, Case, named
from tests.bench.gpu.ceiling import ceiling_of, once_flops
from tests.bench.gpu.goals import verdicts
from tests.bench.gpu.journal import ROWS, SAME, Journal, common, read
from tests.bench.gpu.kernels import top_of
from tests.bench.gpu.moe30b import ADAPTER, FORMS, FRACS, SEQ_LENS, SHAPE, parts_of
from tests.bench.gpu.parts import (
    MIN_LAYERS,
    Model,
    Part,
    capped,
    layers_within,
    planned,
    worth_running,
)
from tests.bench.gpu.peers import case as case_of_peers
from tests.bench.gpu.record import DEFAULT, NOTHING, RefusedError, brief, require_worth, section
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.table import REHEARSED, text_of
from tests.bench.gpu.training import TINY, Session
from tests.bench.record import ROOT, gpu, quantiles
from tests.builders import model_facts

pytestmark = pytest.mark.bench

CASE = Case(name="probe", module="rates", what="anything")
H200 = named_machine("h200")
MOE = Model(
    shape=SHAPE,
    config=models.fields(SHAPE),
    adapter=ADAPTER,
    dtype="bfloat16",
    optimizer="adamw_8bit",
)


def settings_in(folder: Path, *, limit_s: float = 60.0, vram_gib: float | None = None) -> Settings:
    return Settings(
        out=folder, is_rehearsal=True, vram_gib=vram_gib, num_layers=None, limit_s=limit_s
    )


def is_running(pid: str) -> bool:
    file = Path("/proc") / pid / "stat"
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


# ------------------------------------------------------------------------- cases and their rows


def test_every_case_is_there_under_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert callable(importlib.import_module(f"tests.bench.gpu.{case.module}").run)


def test_a_case_is_ended_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, limit_s=0.5)
    Journal(settings, CASE.name).expect(["one", "two"])
    Journal(settings, CASE.name).add("one", seconds=1.0)
    start_s = time.perf_counter()
    said = run_case(CASE, settings, shell(f"sleep 60 & echo $! > {tmp_path}/pid; wait"))
    assert time.perf_counter() - start_s < 10
    assert "stopped" in said
    assert not is_running((tmp_path / "pid").read_text().strip())
    assert not is_done(CASE, settings)
    journal = Journal(settings, CASE.name)
    assert journal.has("one")
    assert not journal.has("two")
    assert "- probe: two: its 0.5 s were over" in text_of(journal.rows, [CASE])


def test_a_case_that_fails_says_why_and_is_run_again(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    assert "no such card" in run_case(CASE, settings, shell("echo no such card >&2; exit 3"))
    assert not is_done(CASE, settings)


def test_a_case_whose_parts_all_have_rows_is_complete_for_that_run_alone(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    journal = Journal(settings, CASE.name)
    journal.expect(["one", "two"])
    journal.add("one", seconds=1.0)
    assert "stopped" in run_case(CASE, settings, shell("true"))
    Journal(settings, CASE.name).fail("two", MemoryError("too large"))  # a result, too
    assert "complete" in run_case(CASE, settings, shell("true"))
    assert is_done(CASE, settings)
    assert not is_done(CASE, settings_in(tmp_path, vram_gib=12.0))
    assert not is_done(replace(CASE, name="other"), settings)


def test_rows_say_where_they_come_from_and_survive_a_cut_line(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    Journal(settings, "probe").add("one", seconds=1.0)
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"case": "probe", "pa')
    Journal(settings, "probe").add("two", seconds=2.0)
    rows = read(tmp_path / ROWS)
    assert [row["part"] for row in rows] == ["one", "two"]
    for name in (*SAME, "git_sha", "dirty", "date", "driver", "versions", "host_bytes", "rates"):
        assert name in rows[0]
    assert rows[0]["versions"]["torch"] == torch.__version__
    other = [row | {"code_sha256": "of other code"} for row in rows]
    (tmp_path / ROWS).write_text("".join(json.dumps(row) + "\n" for row in other))
    assert not Journal(settings, "probe").has("one")


def test_programs_that_are_run_exist() -> None:
    settings = settings_in(Path())
    for case in (case.name for case in CASES if case.module == "existing"):
        for is_rehearsal in (True, False):
            commands = existing.commands(case, replace(settings, is_rehearsal=is_rehearsal))
            assert commands
            for command in commands.values():
                assert find_spec(f"tests.bench.{command[0]}")


def test_tests_for_a_card_are_found() -> None:
    files = suite.files()
    assert "tests/parity/test_cuda.py" in files
    assert "tests/unit/test_docs.py" not in files


def test_tests_that_failed_are_named_though_pytest_was_ended(tmp_path: Path) -> None:
    log = tmp_path / "tests.txt"
    log.write_text(
        "bringing up nodes...\n\n"
        "[gw0] [ 25%] PASSED tests/a.py::test_good[x, y] \n"
        "[gw1] [ 50%] FAILED tests/a.py::test_bad[x, y] \n"
        "[gw1] [ 75%] SKIPPED tests/b.py::test_other \n"
        "FAILED tests/a.py::test_bad[x, y] - assert 1 == 2\n"
    )
    found = suite.counted(log)
    assert (found["tests"], found["failures"], found["skipped"]) == (3, 1, 1)
    assert found["failed"] == ["tests/a.py::test_bad[x, y]"]


# ---------------------------------------------------------------------------------------- windows


def parts_of_case(name: str) -> set[str]:
    """Return the parts that a case has on a card, where that is known without one."""
    if name == "launches":
        work = itertools.product(launches.SHAPES, launches.LENS)
        return {launches.name_of(shape, num, is_compiled=False) for shape, num in work}
    if name == "tests":
        return set(suite.files())
    settings = replace(settings_in(Path()), is_rehearsal=False)
    if name == "peers":
        return {part for job in case_of_peers.jobs(settings) for part in case_of_peers.parts(job)}
    if name == "tiles":
        return {precompile.EXPERTS, precompile.POINTWISE, precompile.SWEEP}
    forms = [(SHAPE, *form) for form in FORMS] if name == "moe30b" else dense.FORMS
    lens = SEQ_LENS if name == "moe30b" else dense.SEQ_LENS
    return {
        f"{shape}-{part.name}"
        for shape, codec, budgets in forms
        for part in parts_of(codec, budgets, settings, lens)
    }


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_fits_its_loan_with_all_starts_and_names_what_exists(window: str) -> None:
    turns = WINDOWS[window]
    assert START_S + GRACE_S + sum(turn.limit_s for turn in turns) <= WINDOW_S <= 570
    for turn in turns:
        named(turn.case)
        assert turn.decides
        assert set(turn.parts or ()) <= (parts_of_case(turn.case) if turn.parts else set())


def test_a_case_is_complete_for_the_parts_that_were_wanted(tmp_path: Path) -> None:
    wanted = replace(settings_in(tmp_path), parts=("one",))
    journal = Journal(wanted, CASE.name)
    journal.expect(["one"])
    journal.add("one", seconds=1.0)
    assert "complete" in run_case(CASE, wanted, shell("true"))
    assert is_done(CASE, wanted)
    assert not is_done(CASE, replace(wanted, parts=("one", "two")))
    assert not is_done(CASE, replace(wanted, parts=None))


def test_what_is_kept_for_a_card_is_not_measured_again(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "run")
    own = common(settings)
    kept = tmp_path / "kept"
    kept.mkdir()
    other = {"code_sha256": "of other code"}
    rows = [
        {"case": "probe", "part": "a", **own, **other},
        {"case": "moe30b", "part": "a", **own},
        {"case": "moe30b", "part": "b", **own, **other},
        {"case": "probe", "part": "b", **own, "gpu": "another card"},
    ]
    (kept / "one.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert Journal(settings, "probe", kept).has("a")  # of the card, whatever the code
    assert Journal(settings, "moe30b", kept).has("a")
    assert not Journal(settings, "moe30b", kept).has("b")
    assert not Journal(settings, "probe", kept).has("b")


def test_a_command_that_is_cut_off_has_written_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(case: Case, settings: Settings) -> str:
        if ran:
            raise KeyboardInterrupt
        ran.append(case.name)
        Journal(settings, case.name).add("one", note="measured before the end")
        return f"{case.name}: complete"

    monkeypatch.setattr("tests.bench.gpu.__main__.run_case", run)
    options = ["gpu", "--rehearse", "--window", "A", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert "measured before the end" in (tmp_path / "table.md").read_text()
    assert "- lane: not begun" in (tmp_path / "table.md").read_text()


def test_a_window_takes_no_cases_and_a_run_has_a_folder_without_being_given_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--window", "B"])
    assert options_of().out == ROOT / "runs/gpu"
    for other in (["--cases", "lane"], ["--vram", "24"], ["--minutes", "9"]):
        monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--window", "B", *other])
        with pytest.raises(SystemExit):
            options_of()
    assert "a window has its own cases" in capsys.readouterr().err


def test_time_is_counted_from_when_a_program_was_asked_for(tmp_path: Path) -> None:
    asked = settings_in(tmp_path).within(100.0, ("one",))
    before = replace(asked, start_s=asked.start_s - 30)
    there = Settings.from_json(before.to_json())
    assert there == before
    assert there.left_s == pytest.approx(65, abs=5)
    assert there.wants("one")
    assert not there.wants("two")


# ----------------------------------------------------------------------------- what work is worth


def test_each_product_of_a_step_is_counted_once() -> None:
    facts = model_facts(models.fields("qwen3-8b"))
    adapter = dense.adapter_of("qwen3-8b")
    hidden, width, queries, keys, layers, vocabulary = 4096, 12288, 4096, 1024, 36, 151936
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    matrices += [(hidden, width), (hidden, width), (width, hidden)]
    frozen = 2 * 2 * sum(a * b for a, b in matrices)  # forward, and by the input
    branches = 2 * 3 * 16 * sum(a + b for a, b in matrices)
    seen = (8192 + 1) / 2  # tokens that one attends to, in the mean
    attention = (2 + 4) * 2 * queries * seen  # scores and values; four products backward
    expected = 16384 * (layers * (frozen + branches + attention) + 4 * hidden * vocabulary)
    found = once_flops(facts, adapter, num_tokens=16384, seq_len=8192)
    assert found == pytest.approx(expected, rel=1e-4)


def test_experts_count_as_often_as_tokens_pass_through_them() -> None:
    facts, tokens = MOE.facts, 1000
    plain = once_flops(facts, replace(ADAPTER, experts=False), num_tokens=tokens, seq_len=8)
    adapted = once_flops(facts, ADAPTER, num_tokens=tokens, seq_len=8)
    per_expert = 6 * ADAPTER.rank * ((2048 + 2 * 768) + (768 + 2048))
    assert adapted - plain == pytest.approx(48 * tokens * 8 * per_expert)


def test_a_ceiling_is_the_best_product_that_all_tokens_pass_through() -> None:
    tiny = tiny_model(SHAPE).facts
    found = ceiling_of(tiny, 8, device=torch.device("cpu"), dtype=torch.float32)
    widths = {(x.d_in, x.d_out) for x in tiny.layers[0].linears if x.group == "attention"}
    names = {f"{a} to {b}, {way}" for a, b in widths for way in ("forward", "input")}
    assert set(found.rates) == names
    assert found.flops_per_s == max(found.rates.values()) == found.rates[found.name]


def test_a_model_on_the_host_keeps_the_frequencies_of_its_rotation() -> None:
    fields = dict(tiny_model("qwen3-8b").config)
    made: Any = models.with_values(models.empty(fields, torch.float32))
    kind = AutoConfig.for_model(fields.pop("model_type"), **fields)
    plain: Any = AutoModelForCausalLM.from_config(kind)
    expected = dict(plain.named_buffers())
    assert expected
    for name, buffer in made.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    for name, parameter in plain.named_parameters():
        models.fill(name, parameter.data)
        assert torch.equal(made.get_parameter(name), parameter), name


def test_every_kernel_keeps_its_whole_name() -> None:
    class Event:
        self_cpu_time_total, count = 1.0, 1

        def __init__(self, key: str) -> None:
            self.key = key

    class Seen:
        def key_averages(self) -> list[Event]:
            return [Event(f"void kernel<{'x' * 300}{number}>") for number in range(60)]

    found = top_of(Seen(), is_cuda=False)
    assert len({one["name"] for one in found}) == 60


def test_the_flagship_is_its_recipe_with_what_it_would_fetch_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "flagship"
    fields = models.fields(flagship.REHEARSED_SHAPE)
    flagship.write_inputs(folder, fields, seq_len=64, num_rows=2)
    settings = replace(settings_in(tmp_path / "run"), is_rehearsal=False)
    given = flagship.overrides(folder, settings)
    ours, recipe = load_recipe(str(flagship.RECIPE), given), load_recipe(str(flagship.RECIPE), [])
    assert ours.train.seq_len == recipe.train.seq_len == 8192
    assert ours.train.tokens_per_step == recipe.train.tokens_per_step
    assert ours.train.optimizer == recipe.train.optimizer
    assert ours.adapter == recipe.adapter
    assert (ours.offload.codec, ours.offload.num_slots) == (recipe.offload.codec, "auto")
    assert ours.offload.vram_budget == pytest.approx(
        named_machine("rtx5090").vram_bytes / GIB, abs=0.01
    )
    assert (ours.model.init, ours.train.steps) == ("random", 3)
    assert flagship.found_in(tmp_path / "nothing", fields, seq_len=64) == {}


def test_a_wheel_is_unpacked_without_what_is_dropped(tmp_path: Path) -> None:
    wheel = tmp_path / "lib-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("lib/a.py", "lib/a_cuda12.bin", "lib/tests/deep/b.py", "lib/cuda13.bin"):
            archive.writestr(name, "x" * 10)
    site = tmp_path / "site"
    assert wheels.unpacked(wheel, ("lib/a_cuda12*", "lib/tests/*"), site) == 20
    assert sorted(p.name for p in site.rglob("*") if p.is_file()) == ["a.py", "cuda13.bin"]
    with pytest.raises(ValueError, match=r"lib-1-py3-none-any\.whl has nothing like lib/b\*"):
        wheels.unpacked(wheel, ("lib/b*",), tmp_path / "other")
    for name in ("one.tar.xz", "two.tar.xz"):
        wheels.pack(site, tmp_path / name)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()


# --------------------------------------------------------------------------- goals and the table


def row(case: str, part: str, *, rehearsal: bool = False, **fields: Any) -> dict[str, Any]:
    common = {
        "rehearsal": rehearsal,
        "gpu": "Card",
        "driver": "1",
        "vram_gib": None,
        "cpu": "cpu",
        "host_bytes": 1,
        "git_sha": "f" * 40,
        "dirty": False,
        "code_sha256": "a" * 64,
        "date": "2026-11-21T00:00:00+00:00",
        "versions": {"torch": "2"},
    }
    return {"case": case, "part": part} | common | fields


def test_goals_are_held_against_the_rows_that_they_are_about() -> None:
    rows = [
        row("exact", "a", is_equal=True),
        row("exact", "b", is_equal=False),
        row("moe30b", "2", of_m_star=2.0, resident_share=0.96, exposed_frac=quantiles([0.02])),
        row("moe30b", "1", of_m_star=1.0, resident_share=0.5, r3_share=quantiles([0.95])),
        row("ablate", "x", r3_share=quantiles([0.1]), memory_error=-0.031),
        row("dense", "y", calibrated_error=-0.05, lane_share=quantiles([0.74]), seq_len=8192),
        row("dense", "short", lane_share=quantiles([0.2]), seq_len=2048),
        row("moe30b", "z", lane_share=quantiles([0.55]), seq_len=8192),
        row("flagship", "f", blind_error=-0.11, calibrated_error=0.05),
        row("peers", "streams", of_ours=1.0),
        row("peers", "fits", of_ours=1.0, is_resident=True),
        row("dense", "z", error="out of memory"),
    ]
    found = {v.goal.text.split(",")[0]: (v.num_reached, v.num) for v in verdicts(rows)}
    assert found == {
        "streamed equals resident to the bit": (1, 2),
        "no test fails": (0, 0),
        "at 2 M* at least 97 % of the resident rate": (0, 1),
        "at least 95 % of R3": (1, 1),
        "exposed transfer under 3 % at 2 M*": (1, 1),
        "calibrated prediction within 5 %": (2, 2),
        "peak VRAM within 3 %": (0, 1),
        "the flagship's plan within 10 % before a step is timed": (0, 1),
        "a dense model's layers at 75 % of their best product": (0, 1),
        "a mixture's layers at 55 % of their best product": (1, 1),
        "faster than every peer at equal work that streams": (0, 1),
        "as fast as the fastest peer where all fits": (1, 1),
    }
    text = text_of(
        [replaced | {"unequal": {}, "num_tensors": 1} for replaced in (*rows[4:6], rows[-1])]
    )
    assert "- peak VRAM within 3 %: 0 of 1; ablate x -0.031" in text
    assert "- no test fails: not measured" in text
    assert "- dense, z: out of memory" in text
    assert "- exact: not begun" in text


def test_a_rehearsal_reaches_no_goal_and_misses_none() -> None:
    text = text_of([row("moe30b", "a", rehearsal=True, tokens_per_s=1.0, memory_error=0.5)])
    assert REHEARSED in text
    assert "Goals" not in text
    assert "| moe30b | a | 1 |" in text


@pytest.mark.parametrize(
    ("change", "changes", "why"),
    [
        ({}, " M offload/probe/machine.py", r"not clean: M offload/probe/machine\.py"),
        ({"rehearsal": True}, "", "of a rehearsal"),
        ({"code_sha256": "b" * 64}, "", "by other code"),
        ({"gpu": "Other"}, "", "several cards"),
        ({"case": "dense"}, "", "dense was interrupted"),
    ],
)
def test_what_could_not_be_repeated_is_not_kept(
    change: dict[str, Any], changes: str, why: str
) -> None:
    rows = [row("moe30b", "a"), row("moe30b", "case", state="complete")]
    require_worth(rows, digest="a" * 64, changes="")
    beside = [one | {"git_sha": "unknown", "dirty": True} for one in rows]
    require_worth(beside, digest="a" * 64, changes="")  # wheels lay beside the same code
    with pytest.raises(RefusedError, match=why):
        require_worth([*rows, rows[0] | change], digest="a" * 64, changes=changes)


def test_what_is_said_of_speed_comes_from_what_is_kept(tmp_path: Path) -> None:
    assert section(tmp_path) == NOTHING
    assert brief(tmp_path).startswith(NOTHING)
    assert NOTHING.startswith("Nothing has been measured on a GPU yet")
    kept = row("dense", "b", r3_share=quantiles([0.97]), tokens_per_s=quantiles([1234.0]))
    (tmp_path / "one.jsonl").write_text(json.dumps(kept) + "\n")
    text = section(tmp_path)
    assert "### Card\n" in text
    assert "2026-11-21" in text
    assert "| dense | b | 1,234 |" in text
    assert "- at least 95 % of R3: 1 of 1" in text
    assert "1,234" not in brief(tmp_path)  # it streams too few tokens for README
    more = kept | {"of_m_star": 2.0, "resident_share": 1.02, "calibrated_error": -0.019}
    more |= {"note": "2 slots", "resident_step_s": quantiles([1.0])}
    (tmp_path / "two.jsonl").write_text(json.dumps(more) + "\n")
    told = "Card, 2026-11-21, b (2 slots): 1,234 tokens/s, 97% of what is possible, 102% of the"
    assert told in brief(tmp_path)


def test_one_statement_says_which_code_path_a_card_has_run(tmp_path: Path) -> None:
    of_old = row("moe30b", "a", tokens_per_s=quantiles([1.0]), gpu="Old")
    exact_too = row("exact", "b", gpu="Old")
    (tmp_path / "one.jsonl").write_text(f"{json.dumps(of_old)}\n{json.dumps(exact_too)}\n")
    text = section(tmp_path)
    assert text.startswith("### What has run on a card\n")
    assert "branches in fp32 by peft" in text
    assert "speed on Old, 2026-11-21; exactness on Old, 2026-11-21" in text
    assert "experts by Triton: **nothing**, neither speed nor bits" in text
    assert "Today's default path has [run on no card]" in brief(tmp_path)
    plain = row("dense", "c", path="branches in the base's dtype, the model's own norms")
    (tmp_path / "two.jsonl").write_text(json.dumps(plain) + "\n")
    assert "**nothing**" in section(tmp_path)  # not what a run does by default
    now = row("dense", "d", path=f"{DEFAULT}, experts by triton", gpu="New")
    (tmp_path / "two.jsonl").write_text(json.dumps(now) + "\n")
    assert "**nothing**" not in section(tmp_path)
    assert f"- {DEFAULT}, experts by triton: speed on New, 2026-11-21" in section(tmp_path)
    assert "run on no card" not in brief(tmp_path)


def test_columns_that_no_row_fills_are_left_out() -> None:
    old = text_of([row("dense", "a", tokens_per_s=1.0, ceiling_share=0.4)])
    assert "of the probe's rate" in old
    assert "best product |" not in old
    new = text_of(
        [row("dense", "a", tokens_per_s=1.0, lane_share=0.8, once_flops_per_s=quantiles([4e14]))]
    )
    assert "| case | part | tokens/s | of the best product | once |" in new
    assert "| dense | a | 1 | 80.0% | 400 |" in new


# ------------------------------------------------------------------------------ plans and models


def test_micro_batches_are_the_multiple_of_what_streaming_takes_to_be_free() -> None:
    parts = [
        Part(codec=codec, vram_gib=budget, seq_len=seq_len, of_m_star=frac)
        for codec, budgets in FORMS
        for budget in budgets
        for seq_len in SEQ_LENS[:1]
        for frac in FRACS
    ]
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        machine = capped(H200, part)
        found = planned(MOE, machine, part, num_layers=8)
        assert found.run.peak_bytes <= machine.vram_bytes
        assert found.run.facts.num_layers == 8
        assert found.said["num_layers"] < found.said["of_layers"] == 48
        assert found.said["note"]
        assert found.said["of_m_star"] == found.of_m_star
        if found.whole.residency.num_slots < 48:
            assert 2 <= found.run.num_slots < 8
        if (
            found.whole.residency.num_slots < 24
        ):  # else one micro-batch more or less changes too much
            wanted = part.of_m_star * found.n_star_tokens / part.seq_len
            assert found.num_micro_batches == pytest.approx(wanted, rel=0.3, abs=1)


def test_a_card_stands_in_for_a_smaller_one_and_for_no_larger_one() -> None:
    part = Part(codec="native", vram_gib=24, seq_len=8192, of_m_star=1.0)
    assert capped(H200, part).vram_bytes == 24 * GIB
    nearly = replace(H200, vram_bytes=int(23.5 * GIB))
    assert capped(nearly, part) == nearly
    with pytest.raises(DoesNotFitError, match=r"has 14\.0 GiB; this part is for a card of 24 GiB"):
        capped(named_machine("rtx4080"), part)


def test_fewer_layers_are_run_where_time_or_memory_is_short() -> None:
    parts = [Part(codec="native", vram_gib=32, seq_len=8192, of_m_star=2.0)]

    def layers(limit_s: float, ram_gib: int) -> int:
        machine = replace(H200, ram_bytes=ram_gib * GIB)
        return layers_within(MOE, machine, parts, limit_s=limit_s, setup_s=60.0)

    assert layers(1e6, 1024) == 48
    found = [layers(limit_s, 1024) for limit_s in (600, 300, 150, 1, -1)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == MIN_LAYERS
    assert layers(1e6, 64) < 48


def tiny_model(shape: str) -> Model:
    config = {**models.fields(shape), **TINY}
    if "num_experts" in config:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    adapter = AdapterSpec(rank=2, targets=models.ATTENTION, experts="num_experts" in config)
    return Model(shape=shape, config=config, adapter=adapter, dtype="float32", optimizer="adamw")


def session_of(shape: str, codec: str) -> tuple[Session, Part]:
    machine = replace(H200, device="cpu", dtype="float32")
    way = replace(machine.experts_implementation, value="eager")
    machine = replace(machine, experts_implementation=way)
    part = Part(codec=codec, vram_gib=None, seq_len=8, of_m_star=1e-3, num_slots=3)
    session = Session(tiny_model(shape), machine, codec, num_layers=4, card=Card("cpu"))
    return session, part


def gradients_of(rig: Any, **ways: Any) -> dict[str, torch.Tensor]:
    batches = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(0, 512, (3, 1, 8), generator=torch.Generator().manual_seed(1))
    ]
    for _ in range(2):
        for parameter in rig._parameters:
            parameter.grad = None
        rig.engine.forward_backward(batches, dropout_seed=0, **ways)
        rig.engine.wait()
    return {str(i): p.grad.clone() for i, p in enumerate(rig._parameters)}


def test_move_models_in_a_slab_compute_what_the_same_weights_do_in_transformers() -> None:
    session, part = session_of(SHAPE, "native")
    _, rig, batches = session.ready(part)
    config = dict(tiny_model(SHAPE).with_layers(4).config)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32
    )
    plain.set_experts_implementation("eager")
    for name, parameter in plain.named_parameters():
        models.fill(name, parameter.data)
    with rig._model.disable_adapter(), torch.no_grad():
        ours = rig.engine.forward({"input_ids": batches[0]["input_ids"]}).logits
        theirs = plain(batches[0]["input_ids"]).logits
    session.close()
    assert ours is not None
    assert theirs.std() > 0.01
    assert torch.equal(ours, theirs)


def test_steps_that_are_the_same_are_run_once() -> None:
    form: tuple[tuple[str, int], ...] = (("native", 24), ("nf4", 32))
    parts = [
        Part(codec=codec, vram_gib=vram_gib, seq_len=8192, of_m_star=frac)
        for codec, vram_gib in form
        for frac in FRACS
    ]
    found = worth_running(MOE, named_machine("rtx4090"), [*parts, *parts])
    assert found == parts[:4]


def test_rows_name_the_card_where_the_drivers_tool_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert gpu()["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    assert gpu() == dict.fromkeys(gpu()) | {"gpu": "a card"}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ablate.REHEARSED_CODECS)
def test_an_engine_with_a_part_taken_out_computes_the_same(codec: str) -> None:
    """So it is the part's speed that is compared; the usual order rounds in another order."""
    session, part = session_of("qwen3-8b", codec)
    _, rig, _ = session.ready(part)
    rig.rebind(num_slots=3, stash="host")
    expected = gradients_of(rig)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    arms = {name: arm for name, arm in ablate.arms(codec).items() if name != ablate.COMPILED}
    for name, (ablation, order, has_two_slots) in arms.items():
        rig.rebind(num_slots=2 if has_two_slots else 3, stash="host")
        with ablation(rig.engine):
            found = gradients_of(rig, order=order)
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)
            assert torch.equal(found[key], gradient) or name == "usual order", name
    session.close()


@pytest.mark.slow
def test_a_device_that_does_not_wait_is_told_from_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(exact.LateCpu):
        def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
            return super().submit(lane, () if lane is Lane.H2D else waits, body)

    settings, size = settings_in(tmp_path), exact.TINY[1]
    monkeypatch.setattr(exact, "WAYS", exact.WAYS[:1])
    assert exact.compared(size, "qwen3-8b", settings)["is_equal"]
    monkeypatch.setattr(exact, "LateCpu", Hasty)
    found = exact.compared(size, "qwen3-8b", settings)
    assert not found["is_equal"]
    assert found["unequal"]


@pytest.mark.long
@pytest.mark.slow
def test_a_rehearsal_measures_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "probe,moe30b"
    options = ["--rehearse", "--cases", names, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.bench.gpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    log = (tmp_path / "log.txt").read_text()
    rows = read(tmp_path / ROWS)
    assert not [row for row in rows if "error" in row], log
    for name in names.split(","):
        assert f"{name}: complete" in done.stdout, log
    timed = [row for row in rows if row["case"] == "moe30b" and "step_s" in row]
    assert {row["codec"] for row in timed} == {"native", "nf4"}
    for found in timed:
        assert found["step_s"]["p20"] <= found["step_s"]["p50"] <= found["step_s"]["p80"]
        assert found["n"] >= 5
        assert found["num_loads"] == 2 * (found["num_layers"] - found["num_slots"])
        assert 0 < found["r3_share"]["p50"] < 1.2
        assert found["predicted_s"] > 0
        assert found["rates"]["float32"]["h2d_bytes_per_s"] > 0
    text = (tmp_path / "table.md").read_text()
    assert REHEARSED in text
    assert "| moe30b | qwen3-30b-a3b-nf4-16-2 |" in text
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    main()
    assert capsys.readouterr().out.count("complete before") == 2
    assert read(tmp_path / ROWS) == rows
