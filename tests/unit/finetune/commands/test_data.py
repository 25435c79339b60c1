import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from finetune import app
from finetune.data.dataset import load_rows
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.load import load_recipe

SETTINGS = (
    *("data.eval_path=null", "data.format=alpaca", "data.system=null", "data.skip_bad=1"),
    *("data.too_long=drop", "output.eval_every=null", "report.samples=0"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"instruction": "What is <b>1+1</b>?", "output": "It is <i>2</i> & no more."},
        {"instruction": "Clear \x1b[2J?", "output": "No."},
        {"instruction": "Long?", "output": "word " * 300},
        {"instruction": "Empty?", "output": ""},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        app.main(["data", "quickstart", f"data.path={file}", *SETTINGS, *words])
    assert not exit_info.value.code, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.thorough
def test_data_shows_rows_with_their_loss_lengths_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rows_file(tmp_path)
    for width in ("80", "100"):
        monkeypatch.setenv("COLUMNS", width)
        out = run(capsys, file)
        assert all(len(line) <= int(width) for line in out.splitlines())
        assert "tokens with a loss between \u00ab and \u00bb" in out
        assert "\u00abIt is <i>2</i> & no more.<|im_end|>\u00bb" in out
        assert "What is <b>1+1</b>?<|im_end|>" in out
        assert "\x1b" not in out
        assert "Clear \\x1b[2J?" in out
        flat = "".join(out.split())
        assert "1of3rowsweredropped:theyhavemorethan" in flat
        assert f"{file}:4:emptyanswer" in flat


def test_the_figures_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows_file(tmp_path)
    shown: dict[str, Any] = json.loads(run(capsys, file, "--json", "--rows", "1"))
    recipe = load_recipe("quickstart", [f"data.path={file}", "data.skip_bad=1"])
    data = recipe.data.model_copy(
        update={"eval_path": None, "format": "alpaca", "system": None, "too_long": "drop"}
    )
    rows = load_rows(
        data,
        load_tokenizer(recipe.model.tokenizer_source),
        seq_len=recipe.train.seq_len,
        seed=recipe.train.seed,
        cache_dir=tmp_path / "other",
    )
    assert shown["data_hash"] == rows.data_hash
    assert (shown["epoch_rows"], shown["epoch_tokens"]) == (2, sum(rows.train.lengths))
    assert shown["epoch_loss_tokens"] == sum(row.num_loss_tokens for row in rows.train)
    assert shown["fill"] == sum(rows.train.lengths) / 2 / recipe.train.seq_len
    # the 48 rows of a step are 24 of each, which two sequences of 16 times 64 tokens hold
    assert shown["packed_fill"] == 24 * sum(rows.train.lengths) / (2 * 16 * 64)
    shown = json.loads(run(capsys, file, "--json", "--rows", "1", "data.packing=off"))
    assert shown["packed_fill"] is None
    assert sum(one["num_rows"] for one in shown["lengths"]) == 2
    (source,) = shown["sources"]
    assert (source["num_rows"], source["num_used"]) == (3, 2)
    (row,) = source["rows"]
    first = rows.train[0]
    assert sum(piece["num_tokens"] for piece in row["pieces"]) == len(first.input_ids)
    learned = [piece for piece in row["pieces"] if piece["has_loss"]]
    assert [piece["text"] for piece in learned] == ["It is <i>2</i> & no more.<|im_end|>"]


class Page(HTMLParser):
    """The tags of a page, and the texts that are marked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.marked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "mark":
            self.marked.append(data)


@pytest.mark.thorough
def test_the_page_is_one_file_with_every_text_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data.html"
    run(capsys, rows_file(tmp_path), "--html", str(out))
    text = out.read_text()
    page = Page(text)
    assert not {"b", "i", "script", "link", "img"} & {*page.tags}
    assert page.links == []
    assert "It is <i>2</i> & no more.<|im_end|>" in page.marked
    assert "\x1b" not in text
    assert "prefers-color-scheme: dark" in text
