"""Rows with images, in each form that they are written in."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from finetune.data.pictures.download import downloaded
from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.rows import Compared, Conversation, Row, RowForm
from finetune.data.sources import open_source
from finetune.data.turns import Message
from finetune.errors import RowError
from finetune.recipe.extensions import FORMATS

TEXT_PART = {"type": "text", "text": "What is it?"}
ANSWERED = {"role": "assistant", "content": "A cat and a dog."}


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of images, next to those of the rows."""
    (tmp_path / "img").mkdir()
    files = tmp_path / "img" / "a.png", tmp_path / "img" / "b b.png"
    for number, file in enumerate(files):
        values = np.random.RandomState(number).randint(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(values).save(file)
    return files


def read_rows(path: Path | str, data_format: str = "auto", **settings: Any) -> list[Row]:
    form = RowForm(
        path=str(path),
        data_format=data_format,
        columns=settings.pop("columns", {}),
        system=settings.pop("system", None),
        ignored=settings.pop("ignored", ()),
        loss_on="assistant",
        formats=tuple(FORMATS)
        if data_format != "auto"
        else ("messages", "sharegpt", "alpaca", "prompt_completion"),
        **settings,
    )
    source = open_source(str(path))
    named = [(source.name(place), raw) for place, raw in source.rows()]
    form = form.detected(named)
    return [form.read(name, raw) for name, raw in named]


def read_row(folder: Path, row: object, data_format: str = "auto", **settings: Any) -> Row:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = read_rows(file, data_format, **settings)
    return found


def seen(row: Row) -> tuple[object, ...]:
    """Return what each conversation of a row says and shows."""
    conversations = row.conversations if isinstance(row, Compared) else (row,)
    return tuple(
        tuple(
            (one.role, one.content, tuple(image.opened().key for image in one.images))
            for one in conversation.messages
        )
        for conversation in conversations
        if isinstance(conversation, Conversation)
    )


def url(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def asked(*parts: object) -> list[object]:
    """Return what a user says: parts of which texts are as they are."""
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]


HOLE = {"type": "image"}


def forms(a: Path, b: Path) -> dict[str, object]:
    """The same row in each form: two images with words around them, and an answer."""

    def chat(*parts: object, **columns: object) -> dict[str, object]:
        turns = [{"role": "user", "content": asked(*parts)}, ANSWERED]
        return {"messages": turns, **columns}

    def said(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
        return chat("See ", one, " and ", other, " now")

    text = "See <image> and <image> now"
    short = [f"img/{file.name}" for file in (a, b)]
    contents = [base64.b64encode(file.read_bytes()).decode() for file in (a, b)]
    answer = ANSWERED["content"]
    return {
        "OpenAI, data URLs": said(
            {"type": "image_url", "image_url": {"url": url(a)}},
            {"type": "image_url", "image_url": {"url": url(b), "detail": "auto"}},
        ),
        "OpenAI, texts": said(
            {"type": "image_url", "image_url": url(a)}, {"type": "image_url", "image_url": short[1]}
        ),
        "parts with paths": said(
            {"type": "image", "path": short[0]}, {"type": "image", "path": str(b)}
        ),
        "parts with images": said(
            {"type": "image", "image": short[0]}, {"type": "image", "image": f"./img/../{short[1]}"}
        ),
        "parts with URLs of files": said(
            {"type": "image", "url": a.as_uri()}, {"type": "image", "url": b.as_uri()}
        ),
        "parts in base64": said(
            {"type": "image", "base64": contents[0]}, {"type": "image", "base64": url(b)}
        ),
        "parts with objects": said(
            {"type": "image", "image": {"path": short[0], "bytes": None}},
            {"type": "image", "image": {"url": short[1]}},
        ),
        "TRL, placeholders": chat("See ", HOLE, " and ", HOLE, " now", images=short),
        "TRL, numbered": chat(
            {"type": "text", "text": "See ", "index": None},
            {"type": "image", "text": None, "index": 0},
            " and ",
            {"type": "image", "text": None, "index": 1},
            " now",
            images=short,
        ),
        "TRL, as a table": chat(
            {"type": "text", "text": "See ", "image": None},
            {"type": "image", "text": None, "image": None},
            " and ",
            {"type": "image", "text": "", "image": None},
            " now",
            images=[{"bytes": None, "path": short[0]}, {"bytes": None, "path": short[1]}],
        ),
        "TRL, prompt and completion": {
            "prompt": [{"role": "user", "content": asked("See ", HOLE, " and ", HOLE, " now")}],
            "completion": [ANSWERED],
            "images": short,
        },
        "LLaVA": {
            "id": "1",
            "conversations": [
                {"from": "human", "value": text},
                {"from": "gpt", "value": answer},
            ],
            "image": short,
        },
        "LLaMA-Factory, messages": {
            "messages": [{"role": "user", "content": text}, ANSWERED],
            "images": short,
        },
        "LLaMA-Factory, alpaca": {
            "instruction": text,
            "input": "",
            "output": answer,
            "images": short,
        },
        "texts": {"prompt": text, "completion": answer, "images": short},
        "a list as a text": {"prompt": text, "completion": answer, "images": json.dumps(short)},
        "turns as a text": {
            "messages": json.dumps([{"role": "user", "content": text}, ANSWERED]),
            "images": short,
        },
    }


def test_all_forms_of_a_row_are_one_conversation(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    keys = [Picture(name="x", path=str(file)).opened().key for file in pictures]
    wanted = (
        (
            ("user", f"See {PLACE} and {PLACE} now", (keys[0], keys[1])),
            ("assistant", "A cat and a dog.", ()),
        ),
    )
    assert keys[0] != keys[1]
    found = {name: seen(read_row(tmp_path, row)) for name, row in forms(*pictures).items()}
    assert found == dict.fromkeys(found, wanted)


def test_all_forms_give_a_template_the_same_turns(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    for row in forms(*pictures).values():
        found = read_row(tmp_path, row)
        assert isinstance(found, Conversation)
        assert [message.to_json() for message in found.messages] == [
            {"role": "user", "content": asked("See ", HOLE, " and ", HOLE, " now")},
            {"role": "assistant", "content": "A cat and a dog."},
        ]


def table_row(files: tuple[Path, Path]) -> dict[str, object]:
    parts = [
        {"type": "text", "text": "See "},
        {"type": "image", "text": None},
        {"type": "text", "text": " and "},
        {"type": "image", "text": None},
        {"type": "text", "text": " now"},
    ]
    answer = [{"type": "text", "text": ANSWERED["content"]}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return {
        "messages": turns,
        "images": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
    }


@pytest.mark.parametrize("kind", ["parquet", "saved", "split"])
def test_a_data_set_with_images_gives_the_bytes_of_their_files(
    tmp_path: Path, pictures: tuple[Path, Path], kind: str
) -> None:
    rows = datasets.Dataset.from_list([table_row(pictures)] * 2)
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    assert isinstance(rows[0]["images"][0], Image.Image), "by default they are decoded"
    path = tmp_path / "rows.parquet" if kind == "parquet" else tmp_path / "saved"
    if kind == "parquet":
        rows.to_parquet(path)
    elif kind == "saved":
        rows.save_to_disk(path)
    else:
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(path)
    before = sorted(path.rglob("*"))
    found = read_rows(f"{path}:test" if kind == "split" else path)
    wanted = seen(read_row(tmp_path, forms(*pictures)["TRL, placeholders"]))
    assert [seen(row) for row in found] == [wanted, wanted]
    assert [image.content for image in found[0].images] == [f.read_bytes() for f in pictures]
    assert sorted(path.rglob("*")) == before, "nothing is written next to the rows"
    assert open_source(str(path)).digest() == open_source(str(path)).digest()


def test_a_folder_of_images_with_their_texts_is_read(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    folder = pictures[0].parent
    lines = [{"file_name": file.name, "prompt": "?", "completion": "!"} for file in pictures]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_rows(folder)
    keys = [Picture(name="x", path=str(file)).opened().key for file in pictures]
    assert [seen(row) for row in found] == [
        ((("user", f"{PLACE}?", (key,)), ("assistant", "!", ())),) for key in keys
    ]


# --------------------------------------------------------------------------------------------------
# Where images are


def test_images_without_places_come_before_the_first_question(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    turns = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "What?"},
        ANSWERED,
        {"role": "user", "content": "Really?"},
        ANSWERED,
    ]
    row = read_row(tmp_path, {"messages": turns, "images": ["img/a.png", "img/b b.png"]})
    assert isinstance(row, Conversation)
    said = [(one.content, len(one.images)) for one in row.messages]
    assert said[:2] == [("Look.", 0), (f"{PLACE}{PLACE}What?", 2)]
    assert [num for _, num in said[2:]] == [0, 0, 0]


def test_images_are_in_any_turn_that_is_no_answer(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    turns = [
        {"role": "system", "content": "Know <image>."},
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "draw", "arguments": {}}]},
        {"role": "tool", "content": "<image>", "name": "draw"},
        ANSWERED,
    ]
    row = read_row(tmp_path, {"messages": turns, "images": ["img/a.png", "img/b b.png"]})
    assert isinstance(row, Conversation)
    assert [[image.name for image in one.images] for one in row.messages] == [
        ["img/a.png"],
        [],
        [],
        ["img/b b.png"],
        [],
    ]
    assert row.messages[3] == Message(
        role="tool", content=PLACE, images=row.messages[3].images, name="draw"
    )


def test_an_image_alone_is_a_question(tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    turns = [{"role": "user", "content": [{"type": "image", "path": "img/a.png"}]}, ANSWERED]
    (message, _) = read_row(tmp_path, {"messages": turns}).messages  # type: ignore[attr-defined]
    assert message.to_json() == {"role": "user", "content": [HOLE]}


def test_a_row_without_images_keeps_its_text(tmp_path: Path) -> None:
    text = f"What does <image> mean, and {PLACE}?"
    empty: list[dict[str, object]] = [{}, {"images": []}, {"images": None}, {"image": ""}]
    for more in empty:
        row = read_row(tmp_path, {"prompt": text, "completion": "<image>", **more})
        assert isinstance(row, Conversation)
        assert [message.to_json()["content"] for message in row.messages] == [text, "<image>"]


def test_a_tag_beside_placeholders_is_text(tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    content = asked("Write <image>", HOLE)
    row = read_row(
        tmp_path,
        {"messages": [{"role": "user", "content": content}, ANSWERED], "images": ["img/a.png"]},
    )
    assert isinstance(row, Conversation)
    assert row.messages[0].content == f"Write <image>{PLACE}"


def test_columns_have_other_names_and_a_prompt_is_put_before_them(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    row = read_row(
        tmp_path,
        {"q": "<image>?", "a": "!", "photo": "img/a.png"},
        "prompt_completion",
        columns={"prompt": "q", "completion": "a", "image": "photo"},
        system="Look.",
    )
    assert isinstance(row, Conversation)
    assert [one.content for one in row.messages] == ["Look.", f"{PLACE}?", "!"]


def test_a_path_starts_at_the_folder_of_its_file(
    tmp_path: Path, pictures: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    for file in (tmp_path / "rows" / "a:1.jsonl", tmp_path / "rows" / "deep" / "b[1].json"):
        up = "../" * len(file.relative_to(tmp_path).parents[:-1])
        rows = [{"prompt": "?", "completion": "!", "image": f"{up}img/a.png"}]
        lines = json.dumps(rows[0]) if file.suffix == ".jsonl" else json.dumps(rows)
        file.write_text(lines)
        (row,) = read_rows(file)
        assert row.images[0].opened().image.size == (8, 6)
    monkeypatch.chdir(tmp_path)
    (row,) = read_rows("rows/a:1.jsonl")
    monkeypatch.chdir("/")
    assert row.images[0].opened().image.size == (8, 6), "the path is absolute"


def test_a_csv_file_names_images(tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        'prompt,completion,images\n<image>?,!,img/a.png\n?,!,\n?,!,"[""img/b b.png""]"\n'
    )
    rows = read_rows(file)
    assert [len(row.images) for row in rows] == [1, 0, 1]


# --------------------------------------------------------------------------------------------------
# Answers that are compared


def pair(*prompt: object, **more: object) -> dict[str, object]:
    turns = [{"role": "user", "content": asked(*prompt)}]
    good, bad = ({"role": "assistant", "content": one} for one in ("A cat.", "A dog."))
    return {"prompt": turns, "chosen": [good], "rejected": [bad], **more}


def test_the_images_of_a_prompt_are_shared_by_its_answers(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    image = {"type": "image", "path": "img/a.png"}
    sides = [
        [{"role": "user", "content": asked(HOLE, "?")}, {"role": "assistant", "content": one}]
        for one in ("A cat.", "A dog.")
    ]
    rows: list[object] = [
        pair(image, "?"),
        pair(HOLE, "?", images=["img/a.png"]),
        pair("?", image="img/a.png"),
        {"prompt": "<image>?", "chosen": "A cat.", "rejected": "A dog.", "images": ["img/a.png"]},
        {"chosen": sides[0], "rejected": sides[1], "images": ["img/a.png"]},
        {
            "conversations": [{"from": "human", "value": "<image>?"}],
            "chosen": {"from": "gpt", "value": "A cat."},
            "rejected": {"from": "gpt", "value": "A dog."},
            "images": ["img/a.png"],
        },
    ]
    key = Picture(name="x", path=str(pictures[0])).opened().key
    wanted = tuple(
        (("user", f"{PLACE}?", (key,)), ("assistant", answer, ()))
        for answer in ("A cat.", "A dog.")
    )
    for row in rows:
        found = read_row(tmp_path, row, "preference")
        assert seen(found) == wanted
        assert len(found.images) == 1


def test_labelled_answers_have_images(tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    rows: list[object] = [
        {"prompt": "<image>?", "completion": "A cat.", "label": True, "image": "img/a.png"},
        {
            "messages": [
                {"role": "user", "content": "<image>?"},
                {"role": "assistant", "content": "A cat."},
            ],
            "kto_tag": True,
            "images": ["img/a.png"],
        },
    ]
    one, other = (seen(read_row(tmp_path, row, "labelled")) for row in rows)
    assert one == other
    assert one[0][0][1] == f"{PLACE}?"  # type: ignore[index]


IMAGE_PART = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]
NO_IMAGES: list[tuple[str, dict[str, object]]] = [
    ("ranking", {"prompt": IMAGE_PART, "completions": ["a", "b"], "scores": [1, 0]}),
    ("sampled", {"prompt": IMAGE_PART, "completions": ["a", "b"], "rewards": [1, 0]}),
    ("rated", {"prompt": IMAGE_PART, "chosen": "a", "rejected": "b"}),
    (
        "distilled",
        {"prompt": IMAGE_PART, "completion": "a", "top_ids": [[1]], "top_logprobs": [[-1.0]]},
    ),
    ("prompt", {"prompt": IMAGE_PART}),
]


@pytest.mark.parametrize(("data_format", "row"), NO_IMAGES)
def test_other_formats_refuse_images_by_name(
    tmp_path: Path, data_format: str, row: dict[str, object]
) -> None:
    with pytest.raises(RowError, match=f"it is of the format {data_format} and has images"):
        read_row(tmp_path, row, data_format)


@pytest.mark.parametrize(
    ("data_format", "row"),
    [
        ("text", {"text": "a"}),
        ("classified", {"text": "a", "label": 1}),
        ("tagged", {"words": ["a"], "labels": [1]}),
        ("rated", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("prompt", {"prompt": "a", "label": 7}),
    ],
)
@pytest.mark.parametrize("column", ["image", "images", "video", "audios"])
def test_columns_of_media_are_never_dropped(
    tmp_path: Path, data_format: str, row: dict[str, object], column: str
) -> None:
    with pytest.raises(RowError, match=f"'{column}' would be dropped"):
        read_row(tmp_path, {**row, column: "a.png"}, data_format)


# --------------------------------------------------------------------------------------------------
# What is refused


def row_of(content: object, **columns: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}, ANSWERED], **columns}


A = {"type": "image", "path": "a.png"}
REFUSED: list[tuple[dict[str, object], str]] = [
    (row_of(asked(HOLE, "?")), r"1 places for images in its turns, and 0 images in a column"),
    (row_of(asked(HOLE, "?"), images=["a", "b"]), "1 places for images in its turns, and 2 images"),
    (row_of(asked(HOLE, HOLE), images=["a"]), "2 places for images in its turns, and 1 images"),
    (row_of([{"type": "image", "index": 1}], images=["a"]), "place 0 has the index 1"),
    (row_of([{"type": "image", "index": 0, "url": "a"}]), "an image with 'index'"),
    (row_of("<image>", images=["a", "b"]), "1 places for images in its turns, and 2 images"),
    (row_of("<image><image>", image="a"), "2 places for images in its turns, and 1 images"),
    (row_of(asked(A, "?"), images=["a.png"]), "both in its turns and in a column"),
    (row_of(asked(A, HOLE)), "1 places for images in its turns, and 0 images"),
    (row_of(asked(A, HOLE), images=["a.png"]), "both in its turns and in a column"),
    (row_of("?", image="a", images=["b"]), "images in 'images' and in 'image'"),
    (row_of(f"{PLACE}?", images=["a"]), r"turn 1 has the character U\+FFFC"),
    (row_of(asked(A, PLACE)), r"turn 1 has the character U\+FFFC"),
    (
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [A]}]},
        "turn 2 is an answer with an image",
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "Draw."},
                {"from": "gpt", "value": "<image>"},
            ],
            "image": "a.png",
        },
        "turn 2 is an answer with an image",
    ),
    (row_of("?", images=7), "'images': an image is given as int"),
    (row_of("?", images=[None]), "'images': an image is given as NoneType"),
    (row_of("?", images=[["a.png"]]), "'images': an image is given as list"),
    (row_of("?", images=[""]), "'images': an image has an empty path"),
    (row_of("?", images="[a.png"), "'images': broken JSON"),
    (row_of("?", images={"a": 1}), "'images': an image is an object without"),
    (row_of("?", images={"bytes": "iVBO"}), "`bytes` of an image is given as str"),
    (row_of("?", images={"path": 7}), "`path` of an image is given as int"),
    (row_of("?", images={"path": "a", "size": 7}), "an image has `size`, which would not be read"),
    (row_of([{"type": "image", "path": "a", "url": "b"}]), "an image with 'path', 'url'"),
    (row_of([{"type": "image", "path": "a", "min_pixels": 9}]), "an image with 'min_pixels'"),
    (row_of([{"type": "image", "text": "a"}]), "an image with 'text'"),
    (row_of([{"type": "image_url"}]), "part 1 of 'content': an image is given as NoneType"),
    (row_of([{"type": "image_url", "url": "a"}]), "an image with 'url'"),
    (
        row_of([{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}]),
        "a `detail`, .*`image.max_tokens`",
    ),
    (row_of([{"type": "image", "base64": 7}]), "`base64` of an image must be text"),
    (row_of([{"type": "image", "base64": "aaaa?"}]), "broken base64"),
    (row_of([{"type": "image", "base64": "aaaaa"}]), "broken base64"),
    (row_of("?", image="data:image/png;base64,aa_-aa"), "broken base64"),
    (row_of("?", image="data:image/png,abc"), "a data URL that is not"),
    (row_of("?", image="data:;base64"), "a data URL that is not"),
    (row_of("?", image="data:,"), "a data URL that is not"),
    (row_of("?", image="data:;base64,aaaa"), "a data URL of the type"),
    (row_of("?", image="data:text/html;base64,aaaa"), "a data URL of the type 'text/html'"),
    (row_of("?", image="data:image/svg+xml;base64,aaaa"), r"the type 'image/svg\+xml'"),
    (row_of("?", image="data:image/png;base64," + "A" * 2**27), r"has 96\.0 MiB|MiB are read"),
    (row_of("?", image="s3://b/a.png"), "not in a file: download it"),
    (row_of("?", image="ftp://b/a.png"), "not in a file: download it"),
    (row_of("?", image="file://host/a.png"), "on another host"),
    (row_of("?", image="file://["), "on another host"),
    (row_of("?", image="https://b/a.png"), r"on a server: set `data\.allow_downloads: true`"),
    (row_of("?", image="HTTP://b/a.png"), r"on a server: set `data\.allow_downloads: true`"),
    (row_of([{"type": "video", "video": "a.mp4"}]), "type 'video': only texts and images"),
    (row_of([{"type": "input_audio", "input_audio": {}}]), "type 'input_audio': only texts and"),
    (row_of(["a"]), "part 1 of 'content' is of type 'str'"),
    (row_of("?", videos=["a.mp4"]), "'videos' would be dropped"),
    (row_of("?", audio="a.wav"), "'audio' would be dropped"),
    (
        {"messages": [{"role": "user", "content": "?", "images": ["a.png"]}, ANSWERED]},
        "'images' of turn 1 would be dropped: images are",
    ),
]


@pytest.mark.parametrize(("row", "problem"), REFUSED)
def test_a_row_is_refused_with_what_is_wrong(
    tmp_path: Path, row: dict[str, object], problem: str
) -> None:
    if len(json.dumps(row)) > 2**26:  # more than a line of a file may have
        with pytest.raises(RowError, match=problem):
            read_row_itself(row)
        return
    with pytest.raises(RowError, match=problem):
        read_row(tmp_path, row)


def read_row_itself(row: object) -> Row:
    form = RowForm(
        path="rows", data_format="messages", columns={}, system=None, ignored=(), loss_on="last"
    )
    return form.read("rows:1", row)


def test_a_missing_image_is_found_when_it_is_opened(tmp_path: Path) -> None:
    row = read_row(tmp_path, row_of("?", image="img/none.png"))
    with pytest.raises(RowError, match=rf"image img/none.png is missing: there is no {tmp_path}"):
        row.images[0].opened()


@pytest.mark.parametrize("name", ["a\nb.png", "\x1b[2Jb.png", "\udc80.png"])
def test_a_name_is_shown_as_one_line_that_can_be_written(tmp_path: Path, name: str) -> None:
    row = read_row_itself(row_of("?", image=name))
    with pytest.raises(RowError) as caught:
        row.images[0].opened()
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()


def test_what_is_ignored_on_purpose_is_no_image(tmp_path: Path) -> None:
    row = read_row(tmp_path, row_of("<image>?", images=["a.png"]), ignored=("images",))
    assert isinstance(row, Conversation)
    assert (row.messages[0].content, row.images) == ("<image>?", ())


def test_duplicates_have_the_same_images(tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    def said(name: object) -> object:
        return read_row(tmp_path, row_of("?", image=name)).content("assistant")

    a, b = (f"img/{file.name}" for file in pictures)
    assert said(a) == said(a)
    assert said(a) != said(b)
    assert said(url(pictures[0])) == said({"url": url(pictures[0])})
    assert said(url(pictures[0])) != said(url(pictures[1]))
    assert json.dumps(said(url(pictures[0])))


# --------------------------------------------------------------------------------------------------
# Images of servers


class Handler(BaseHTTPRequestHandler):
    """Serves one image, and troubles."""

    image = b""

    def do_GET(self) -> None:
        if self.path == "/a.png":
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.image)))
            self.end_headers()
            self.wfile.write(self.image)
        elif self.path == "/short.png":
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.image) + 9))
            self.end_headers()
            self.wfile.write(self.image)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            block = bytes(2**20)
            try:
                while True:
                    self.wfile.write(block)
            except OSError:
                pass  # hung up on
        elif self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(pictures: tuple[Path, Path]) -> Iterator[str]:
    Handler.image = pictures[0].read_bytes()
    downloaded.cache_clear()
    with HTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["/a.png", "/to?/a.png"])
def test_an_image_is_downloaded_where_it_may_be(
    tmp_path: Path, pictures: tuple[Path, Path], server: str, path: str
) -> None:
    row = read_row(tmp_path, row_of("?", image=server + path), allow_downloads=True)
    assert row.images[0].content == pictures[0].read_bytes()
    assert seen(row) == seen(read_row(tmp_path, row_of("?", image="img/a.png")))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/none.png", "404"),
        ("/short.png", "9 bytes are missing"),
        ("/endless", "at most 64 MiB"),
        ("/to?/none.png", "404"),
        ("/to?file:///etc/passwd", "cannot be downloaded"),
        ("/to?ftp://127.0.0.1/a.png", "cannot be downloaded"),
        ("/to?/to?/to?", "cannot be downloaded"),
        ("/a b\n.png", "cannot be downloaded"),
    ],
)
def test_a_download_that_fails_is_an_error_of_the_row(
    tmp_path: Path, server: str, path: str, problem: str
) -> None:
    with pytest.raises(RowError, match=f"(?s)the image .*{problem}"):
        read_row(tmp_path, row_of("?", image=server + path), allow_downloads=True)


@pytest.mark.parametrize("where", ["http://127.0.0.1:1/a.png", "http://[/a.png", "http:///a.png"])
def test_no_url_is_more_than_an_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(RowError, match="cannot be downloaded"):
        read_row(tmp_path, row_of("?", image=where), allow_downloads=True)


def test_images_of_a_row_are_those_of_all_its_answers(
    tmp_path: Path, pictures: tuple[Path, Path]
) -> None:
    first, second = ({"type": "image", "path": str(one)} for one in pictures)

    def answer(*shown: object) -> list[object]:
        return [ANSWERED, {"role": "user", "content": [*shown, TEXT_PART]}, ANSWERED]

    asked = {"role": "user", "content": [first, first, TEXT_PART]}
    row = {"prompt": [asked], "chosen": answer(), "rejected": answer(second, first)}
    found = read_row(tmp_path, row, "preference")
    a, b = (image.opened().key for image in (found.images[0], found.images[-1]))
    assert [image.opened().key for image in found.images] == [a, a, b]
    assert a != b
