"""`sluice chat` by typed lines, against plain transformers and peft."""

import pytest

from tests.e2e.talking import Plain, talk


@pytest.mark.thorough
def test_turns_are_remembered_and_the_base_answers_the_same(
    finished, model_dir, monkeypatch, capsys
) -> None:
    said = ["what follows 3", "", "and then", "/reset", "what follows 3"]
    capsys.readouterr()
    assert talk(said, monkeypatch, finished, "--compare") == 0
    shown = capsys.readouterr().out
    adapter, base = Plain(model_dir, finished / "adapter"), Plain(model_dir, None)
    first = [{"role": "user", "content": said[0]}]
    answer = adapter.answer(first)
    second = [*first, {"role": "assistant", "content": answer}]
    second.append({"role": "user", "content": said[2]})
    wanted = [base.answer(first), answer, base.answer(second), adapter.answer(second)]
    assert wanted[0] != wanted[1]
    spoken = [f"{name}: {text}" for name, text in zip(("base", "adapter") * 2, wanted, strict=True)]
    assert shown == "".join(f"{text}\n" for text in (*spoken, *spoken[:2]))


@pytest.mark.thorough
def test_what_cannot_be_talked_with_is_refused(finished, tmp_path, monkeypatch, capsys) -> None:
    assert talk(["hello"], monkeypatch, tmp_path / "nowhere") == 1
    assert talk(["hello"], monkeypatch, finished, "--top-k", "3") == 1
    assert "top" in capsys.readouterr().err


@pytest.mark.slow
def test_an_answer_without_room_is_not_remembered(finished, monkeypatch, capsys) -> None:
    import finetune.commands.trained_model as trained_model
    from offload.errors import DoesNotFitError

    lengths = list[int]()

    def room(*_: object, prompt_tokens: int, **_others: object) -> None:
        lengths.append(prompt_tokens)
        if len(lengths) == 2:
            raise DoesNotFitError("too long", limit="there is no room", hint="shorter")

    monkeypatch.setattr(trained_model, "require_room", room)
    assert talk(["what follows 3", "more", "more"], monkeypatch, finished) == 0
    shown = capsys.readouterr()
    assert "too long: there is no room. /reset forgets what was said before." in shown.err
    assert lengths[1] == lengths[2] > lengths[0]
    assert len(shown.out.splitlines()) == 2
