"""The runs room in a browser: a run is started, stopped, resumed and finished from the page."""

import json
import multiprocessing
from pathlib import Path

import pytest

from finetune.errors import StudioError
from finetune.studio.launcher import started
from finetune.studio.talk import MOST_TOKENS
from tests.e2e.runs import losses, run, same_adapter
from tests.e2e.talking import talk
from tests.studios import axe_script, browser, serious_findings, served


@pytest.mark.browser
@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed_to_the_bit_and_outlives_the_server(
    tmp_path: Path, write_recipe, machine_file: Path
) -> None:
    recipe = write_recipe(
        train={"steps": 60, "schedule": "constant"}, output={"checkpoint_every": 1000}
    )
    words = ("--machine", machine_file, f"output.dir={tmp_path / 'whole'}")
    assert run("finetune", recipe, *words) == 0
    folder = tmp_path / "runs"
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        with served(folder, tmp_path / "configs", tmp_path, machine_file) as made:
            page.goto(f"{made.studio.address}runs")
            page.select_option("#start [name=recipe]", recipe.name)
            page.fill("#start [name=name]", "one")
            page.click("#start button")
            page.wait_for_selector("#said.good:text('start: one')")
            page.click("#start button")  # a second one
            page.wait_for_selector("#said.bad:text('one is at work')")
            page.wait_for_selector("#runs td:text-is('training')", timeout=120_000)
            page.click("[aria-label='stop one']")
            page.wait_for_selector("#said.good:text('stop: one')")
            page.wait_for_selector("[aria-label='resume one']", timeout=60_000)
            done = len(losses(folder / "one"))
            assert 0 < done < 60
            saved = [path.name for path in (folder / "one" / "checkpoints").iterdir()]
            assert saved == [f"step-{done:07d}"]
            assert "Stopped after step" in page.text_content("#log")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert (scheme, serious_findings(page, axe_script())) == (scheme, [])
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.click("[aria-label='resume one']")
            page.wait_for_selector("#said.good:text('resume: one')")
        assert started(folder) is not None  # the server has ended
        with served(folder, tmp_path / "configs", tmp_path, machine_file) as made:
            page.goto(f"{made.studio.address}runs")
            page.wait_for_selector("#runs td:text-is('finished')", timeout=120_000)
        assert not problems
    assert losses(folder / "one") == losses(tmp_path / "whole")
    assert same_adapter(folder / "one", tmp_path / "whole")
    assert json.loads((folder / "one" / "report.json").read_text())


@pytest.mark.browser
@pytest.mark.slow
def test_a_finished_run_answers_what_sluice_chat_answers(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    assert talk(["what follows 7"], monkeypatch, finished, num_new=MOST_TOKENS) == 0
    expected = capfd.readouterr().out.strip()
    with (
        browser() as chromium,
        served(finished.parent, tmp_path / "configs") as made,
    ):
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"{made.studio.address}runs#run={finished.name}")
        page.fill("#chat [name=said]", "what follows 7")
        page.click("#chat button")
        page.wait_for_selector("#chat button:disabled")
        page.wait_for_selector("#chat button:not(:disabled)", timeout=120_000)
        paragraphs = page.locator("#talk p").all_text_contents()
        assert [one.strip() for one in paragraphs] == ["what follows 7", expected]
        page.fill("#chat [name=said]", "/image /etc/passwd")
        page.click("#chat button")
        page.wait_for_selector("#talk .bad:text('shows no image')")
        assert serious_findings(page, axe_script()) == []
        page.click(f"[aria-label='rows of {finished.name}']")
        page.wait_for_selector("text=what follows")
        assert serious_findings(page, axe_script()) == []
        held = made.studio.talk
        left = held.answer(finished.name, "what follows 8")
        next(left)
        (busy,) = held.answer(finished.name, "what follows 7")
        assert busy == ("problem", "run is answering: one conversation is held at a time")
        with pytest.raises(StudioError, match="run is answering"):
            held.end()
        left.close()  # as a page that is closed: nothing of its answer is in the next one
        parts = list(held.answer(finished.name, "what follows 7"))
        assert "".join(text for kind, text in parts if kind == "say").strip() == expected
        held.end()
        assert not multiprocessing.active_children()[1:]  # but the one that plans
