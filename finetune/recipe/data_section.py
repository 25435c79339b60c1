"""The section `data` of a recipe: which rows, from where, and what of them is learned."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from finetune.recipe.section import Names, Section

DataFormat = Literal[
    "auto",
    "messages",
    "alpaca",
    "sharegpt",
    "prompt_completion",
    "text",
    "preference",
    "ranking",
    "labelled",
    "sampled",
    "distilled",
    "rated",
    "classified",
    "tagged",
]
EmptyThink = Literal["prompt", "learn"]
FORMAT_COLUMNS = {
    "messages": (("messages",), ("tools", "system")),
    "sharegpt": (("conversations",), ("tools", "system")),
    "alpaca": (("instruction", "output"), ("input", "system")),
    "prompt_completion": (("prompt", "completion"), ("tools", "system")),
    "text": (("text",), ()),
    "preference": (
        ("chosen", "rejected"),
        ("prompt", "tools", "system", "ref_chosen_logps", "ref_rejected_logps"),
    ),
    "ranking": (("prompt", "completions"), ("scores", "ranks", "tools", "system", "ref_logps")),
    "labelled": (("prompt", "completion", "label"), ("tools", "system", "ref_logps")),
    "sampled": (
        ("prompt", "completions", "rewards"),
        ("tools", "system", "ref_logps", "logprobs"),
    ),
    "distilled": (("prompt", "completion", "top_ids", "top_logprobs"), ("tools", "system")),
    "rated": (("chosen", "rejected"), ("prompt", "tools", "system", "margin")),
    "classified": (("text", "label"), ()),
    "tagged": (("tokens", "labels"), ()),
}
"""Format -> the columns that its rows have, and those that they may have."""
ColumnName = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "text",
    "tools",
    "system",
    "chosen",
    "rejected",
    "label",
    "labels",
    "tokens",
    "completions",
    "scores",
    "ranks",
    "rewards",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "ref_logps",
    "logprobs",
    "top_ids",
    "top_logprobs",
    "margin",
]
ColumnNames = dict[ColumnName, Annotated[str, Field(min_length=1)]]


class MixSource(Section):
    """One source of `data.mix`; what it leaves out is as in `data`."""

    path: str = Field(min_length=1, description="As `data.path`.", examples=["data/chats.jsonl"])
    weight: float = Field(
        default=1.0, gt=0, description="Its share of the rows is this over the sum of weights."
    )
    format: DataFormat | None = Field(
        default=None, description="Form of its rows.", examples=["messages"]
    )
    columns: ColumnNames | None = Field(
        default=None,
        description="Its columns under other names.",
        examples=[{"prompt": "question", "completion": "answer"}],
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt put before its conversations that have none.",
        examples=["Answer briefly."],
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Its first rows, at most.", examples=[1000]
    )


class DataSection(Section):
    """The rows to train on, and those held out."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="File (jsonl, json, csv, parquet, txt), directory of files, saved data set, or"
        " hub id (id#config:split). Either this or `data.mix`.",
        examples=["data/train.jsonl"],
    )
    mix: Annotated[tuple[MixSource, ...], Field(strict=False)] = Field(
        default=(),
        description="Several sources, each with `path`, `weight` (its share of the rows), and"
        " `format`, `columns`, `system`, `max_rows` of its own.",
        examples=[[{"path": "data/chats.jsonl", "weight": 3}, {"path": "data/code.jsonl"}]],
    )
    format: DataFormat = Field(
        default="auto",
        description="Form of a row; `auto` finds it by the column names. `text`: documents;"
        " `preference`, `ranking`, `labelled`, `sampled`: answers to compare; `distilled`: with a"
        " teacher's likeliest tokens; `rated`: pairs for `objective.method: reward`; `classified`:"
        " texts with the number of their class, for `classify`; `tagged`: words with one each, for"
        " `classify_tokens`.",
    )
    columns: ColumnNames = Field(
        default={},
        description="Columns under other names: the format's name, and the file's.",
        examples=[{"instruction": "question", "output": "answer"}],
    )
    ignored_columns: Names = Field(
        default=(),
        description="Columns, and keys of turns, whose meaning is left out on purpose.",
        examples=[["tools"]],
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt put before conversations that have none.",
        examples=["Answer briefly."],
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="The first rows of `data.path`, or rows of an epoch of `data.mix`, at most.",
        examples=[1000],
    )
    drop_duplicates: bool = Field(
        default=False,
        description="Drop rows that were in the same source before; they are counted.",
    )
    skip_bad: int = Field(
        default=0,
        ge=0,
        description="Empty or malformed rows that may be skipped and named; one more is an error.",
    )
    too_long: Literal["drop", "truncate", "split", "error"] = Field(
        default="truncate",
        description="Rows of more than `train.seq_len` tokens: cut off there, `drop`ped, `split`"
        " into several, or an `error`.",
    )
    eval_path: str | None = Field(
        default=None,
        min_length=1,
        description="Held-out rows, in the same form as `data.path`.",
        examples=["data/eval.jsonl"],
    )
    eval_frac: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Part of the rows that is held out, in place of `data.eval_path`.",
        examples=[0.05],
    )
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Tokens that the loss is taken on: of every answer, of the last one, or all."
        " `train: false` in a turn leaves its answer out.",
    )
    empty_think: EmptyThink = Field(
        default="prompt",
        description="The empty think block that a chat template writes before answers without"
        " reasoning: part of the `prompt`, which a server sends only if it is set to, or `learn`ed"
        " with the answer, after the prompt that servers send by default.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether short rows share a sequence, none seeing another. A step then has"
        " `train.tokens_per_step` real tokens. `auto` is `on`, except with `train.compile`.",
    )
    num_workers: int = Field(
        default=1,
        ge=0,
        le=256,
        description="Processes that prepare batches ahead of the step; 0 prepares in the step, and"
        " tokenises in the main process in place of one process per core.",
    )

    @field_validator("packing", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """Take `on` and `off` as YAML reads them, which are booleans there."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @property
    def set_for_turns(self) -> tuple[str, ...]:
        """The settings that are not at their defaults and say nothing of documents."""
        changed = {
            "loss_on": self.loss_on != "assistant",
            "system": self.system is not None,
            "too_long": self.too_long != "truncate",
            "empty_think": self.empty_think != "prompt",
        }
        return tuple(name for name, is_changed in changed.items() if is_changed)

    @property
    def sources(self) -> tuple[MixSource, ...]:
        """What is trained on: the sources of the mix, or `path` as the only one."""
        return self.mix or (MixSource(path=self.path or ""),)

    @property
    def has_eval(self) -> bool:
        """Whether any rows are held out."""
        return self.eval_path is not None or self.eval_frac is not None
