"""Rows with images against TRL's own trainers: loss and gradient norm of one step.

    python -m tests.bench.bench_images        (pip install trl==1.16.0)

TRL's `SFTTrainer` and `DPOTrainer` run as they are, on the CPU, with a tiny model in float32, its
processor, and LoRA whose factors are all random; Sluice runs a recipe that begins with the same
adapter. The third column is plain: transformers, the processor and autograd, each row by itself and
from pixels, with a loss on the tokens that the case names. Sluice takes a step in three
micro-batches, which are packed where the model can; TRL in as many as the case says.
"""

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForImageTextToText, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from offload.probe.machine import probe
from tests.bench.bench_preference_training import Norms, trl_options
from tests.command import run
from tests.e2e.runs import rows_of
from tests.e2e.seeing import draw, seeing_recipe, small_family
from tests.image_processors import plain_processor

NUM_ROWS, MICRO_BATCH, BETA = 12, 4, 0.5  # of DPO a row is a pair
EQUAL = 2e-5  # relative
LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
TEMPLATE = (
    "{% macro said(parts) %}{% if parts is string %}{{ parts }}{% else %}{% for part in parts %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endmacro %}{% for turn in messages %}{{ turn.role }}: {% if turn.role == 'assistant' %}"
    "{% generation %}{{ said(turn.content) }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{{ said(turn.content) }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWERS, TEXT, ALL = "answers", "text of turns", "text and tokens of images"
BY_BATCH = "answers, the mean of micro-batches' means"
Found = tuple[float, float]  # loss and gradient norm
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows, and what both sides are told."""

    name: str
    images: Sequence[Sequence[int]]  # of each row: which pictures it has
    form: str = "prompt"  # or `messages`
    learned: tuple[str, ...] = (ANSWERS,)  # what plain has a loss on
    trl: dict[str, Any] = field(default_factory=dict)  # settings of its trainer
    data: dict[str, Any] = field(default_factory=dict)  # settings of the recipe
    num_micro_batches: int = 1  # of TRL

    @property
    def is_paired(self) -> bool:
        """Whether it is DPO."""
        return self.form == "pairs"


ONE = [(number % 4,) for number in range(NUM_ROWS)]  # pictures have four sizes
MIXED: list[tuple[int, ...]] = [
    ((number, number + 1), (), (number,))[number % 3] for number in range(NUM_ROWS)
]
ASSISTANT, EVERY = {"assistant_only_loss": True}, {"loss_on": "all"}
CASES = (
    Case(name="prompt and completion", images=ONE),
    Case(name="messages, loss of the assistant", images=ONE, form="messages", trl=ASSISTANT),
    Case(
        name="messages, TRL's default mask",
        images=ONE,
        form="messages",
        learned=(TEXT, ALL),
        data=EVERY,
    ),
    Case(name="two images, one, none", images=MIXED),
    Case(name="the same, loss of the assistant", images=MIXED, form="messages", trl=ASSISTANT),
    Case(
        name="the same in three micro-batches, one without images",
        images=[*[()] * MICRO_BATCH, *MIXED[MICRO_BATCH:]],
        num_micro_batches=3,
        learned=(ANSWERS, BY_BATCH),
    ),
    Case(name="DPO", images=ONE, form="pairs"),
    Case(name="DPO, two images, one, none", images=MIXED, form="pairs"),
)


# ------------------------------------------------------------------------------- rows


def turns(number: int, images: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the question and the answer of a row, as turns; the last image is after the text."""
    parts = [*images[:1], {"type": "text", "text": f"what is it {number}"}, *images[1:]]
    told = [{"type": "text", "text": "noise " * (1 + number % 3)}]
    return [{"role": "user", "content": parts}], [{"role": "assistant", "content": told}]


def row(case: Case, number: int, images: Sequence[Any]) -> dict[str, Any]:
    """Return a row in the case's form."""
    asked, told = turns(number, images)
    if case.form == "messages":
        return {"messages": asked + told}
    if case.is_paired:
        other = [{"role": "assistant", "content": [{"type": "text", "text": "no"}]}]
        return {"prompt": asked, "chosen": told, "rejected": other}
    return {"prompt": asked, "completion": told}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on disk, its processor, an adapter, and pictures."""

    folder: Path
    recipe: Path
    processor: ProcessorMixin
    pictures: list[Path]

    @classmethod
    def of(cls, folder: Path, model_type: str) -> "Subject":
        """Write one into a folder."""
        recipe = seeing_recipe(folder, model_type)
        family = small_family(model_type)
        image = family.around.format(family.tokens[1 if model_type == "gemma3" else 0])
        template = TEMPLATE.replace("IMAGE", image)
        (folder / "model/chat_template.jinja").write_text(template)
        processor = plain_processor(family, folder / "model")
        processor.chat_template = template
        model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
        names = [
            name
            for name, _ in model.named_modules()
            if "language_model" in name and name.endswith(LAYERS)
        ]
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(str(folder / "adapter"))
        return cls(
            folder=folder,
            recipe=recipe,
            processor=processor,
            pictures=draw(folder / "drawn", num=NUM_ROWS + 1),
        )

    def adapter(self, case: Case) -> Path:
        """Return the adapter: of pairs that of our run, which a step by 1e-9 left as it was."""
        return self.folder / ("run/adapter" if case.is_paired else "adapter")

    def model(self, case: Case) -> PeftModel:
        """Load the model with the adapter."""
        base = AutoModelForImageTextToText.from_pretrained(
            self.folder / "model", dtype=torch.float32
        )
        return PeftModel.from_pretrained(base, self.adapter(case), is_trainable=True)

    def opened(self, images: Sequence[int]) -> list[Image.Image]:
        """Return a row's pictures."""
        return [Image.open(self.pictures[number]).convert("RGB") for number in images]


# ------------------------------------------------------------------------------- three sides


def theirs(case: Case, subject: Subject) -> Found:
    """Return what TRL's trainer logs."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = [
        {
            **row(case, number, [{"type": "image", "text": None} for _ in images]),
            "images": subject.opened(images),
        }
        for number, images in enumerate(case.images)
    ]
    options = trl_options(str(subject.folder / "trl"), num_steps=1) | {
        "learning_rate": 1e-9,
        "per_device_train_batch_size": NUM_ROWS // case.num_micro_batches,
        "gradient_accumulation_steps": case.num_micro_batches,
        "max_length": None,
        **({"beta": BETA} if case.is_paired else {}),
        **case.trl,
    }
    trainer_class, config_class = (
        (DPOTrainer, DPOConfig) if case.is_paired else (SFTTrainer, SFTConfig)
    )
    norms = Norms()
    trainer = trainer_class(
        model=subject.model(case),
        args=config_class(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=copy.deepcopy(subject.processor),
        callbacks=[norms],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    (loss,) = (log["loss"] for log in trainer.state.log_history if "loss" in log)
    return loss, norms.found[0]


def ours(case: Case, subject: Subject, machine: Path) -> Found:
    """Return what a run of the recipe writes."""
    lines = []
    for number, images in enumerate(case.images):
        urls = [str(subject.pictures[image]) for image in images]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        lines.append(json.dumps(row(case, number, parts)) + "\n")
    (subject.folder / "rows.jsonl").write_text("".join(lines))
    begin = [f"adapter.init_from={subject.adapter(case)}"]
    if case.is_paired:  # the reference of DPO is the model without an adapter
        begin = ["objective.method=dpo", f"objective.beta={BETA}"]
    words = [
        *begin,
        "adapter.alpha=8",
        "train.lr=1e-9",
        "train.steps=1",
        f"train.micro_batch_size={MICRO_BATCH * (2 if case.is_paired else 1)}",
        f"train.grad_accum_steps={NUM_ROWS // MICRO_BATCH}",
        *(f"data.{name}={value}" for name, value in case.data.items()),
    ]
    told = "--machine", machine, "--overwrite"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = run("finetune", subject.recipe, *words, *told)
    assert code == 0, shown.getvalue()
    (step,) = rows_of(subject.folder / "run")
    return step["loss"], step["grad_norm"]


def encoded(
    processor: Any, asked: list[Any], told: list[Any], images: Sequence[Image.Image], learned: str
) -> Inputs:
    """Return what the processor makes of a row, and labels."""
    whole = processor.apply_chat_template(asked + told, tokenize=False)
    prompt = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt)
    given = {"images": [list(images)]} if images else {}
    options = {"add_special_tokens": False, "return_mm_token_type_ids": True}
    inputs = dict(processor(text=[whole], **given, return_tensors="pt", **options))
    labels = inputs["input_ids"].clone()
    if learned in (ANSWERS, BY_BATCH):
        answer = processor.tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
        labels[:, : -len(answer)] = -100
    elif learned == TEXT:
        tokenizer, at = processor.tokenizer, 0
        added = tokenizer.added_tokens_decoder.keys() - {tokenizer.eos_token_id}
        labels[torch.isin(labels, torch.tensor([*added]))] = -100
        for number, piece in enumerate(whole.split(processor.image_token)):
            if number:  # the processor may write ends of lines around an image
                alone = {"images": [[images[number - 1]]], "text": [processor.image_token]}
                num = len(processor(**alone, add_special_tokens=False)["input_ids"][0])
                labels[:, at : at + num] = -100
                at += num
            at += len(tokenizer(piece, add_special_tokens=False)["input_ids"])
    return {**inputs, "labels": labels}


def losses(model: nn.Module, inputs: Inputs) -> tuple[torch.Tensor, int]:
    """Return the sum of a row's losses, and of how many tokens."""
    labels = inputs["labels"][0, 1:]
    given = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), int((labels >= 0).sum())


def plain(case: Case, subject: Subject, learned: str) -> Found:
    """Return loss and gradient norm of all rows, each by itself."""
    model = subject.model(case).eval()
    sums, counts = list[torch.Tensor](), list[int]()
    for number, images in enumerate(case.images):
        asked, told = turns(number, [{"type": "image"} for _ in images])
        opened = subject.opened(images)
        loss, count = losses(model, encoded(subject.processor, asked, told, opened, learned))
        if case.is_paired:
            other = row(case, number, [])["rejected"]
            worse, _ = losses(model, encoded(subject.processor, asked, other, opened, learned))
            margin = worse - loss
            loss = -nn.functional.logsigmoid(BETA * (margin - margin.detach()))
            count = 1
        sums.append(loss)
        counts.append(count)
    size = MICRO_BATCH if learned == BY_BATCH else NUM_ROWS
    starts = range(0, NUM_ROWS, size)
    by_batch = [(sums[at : at + size], counts[at : at + size]) for at in starts]
    means = [torch.stack(some).sum() / sum(nums) for some, nums in by_batch]
    mean = torch.stack(means).mean()
    mean.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return mean.item(), float(torch.stack(norms).norm())


# ------------------------------------------------------------------------------- the table


def equal(one: Found, other: Found) -> bool:
    """Return whether both numbers are."""
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= EQUAL * max(abs(a), abs(b)) for a, b in pairs)


def shown(found: Found | str) -> str:
    return found if isinstance(found, str) else f"{found[0]:.6f} {found[1]:.6f}"


def rows_of_table(case: Case, subject: Subject, machine: Path) -> list[list[str]]:
    """Return the lines of a case: one for each set of tokens that have a loss."""
    trl: Found | str
    own = ours(case, subject, machine)
    try:
        trl = theirs(case, subject)
    except Exception as error:  # noqa: BLE001 - that it fails is what is found
        trl = f"{type(error).__name__}: {str(error)[:60]}"
    lines = []
    for learned in case.learned:
        true = plain(case, subject, learned)
        sides = {"TRL": trl, "ours": own}
        right = [n for n, one in sides.items() if not isinstance(one, str) and equal(one, true)]
        name = f"{case.name}: {learned}"
        lines.append([name, shown(trl), shown(own), shown(true), ", ".join(right) or "none"])
    return lines


def main() -> None:
    """Print the table."""
    disable_progress_bar()
    table = Table("family", "case: loss on", "TRL", "ours", "plain", "equal to plain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = folder / "machine.json"
        machine.write_text(probe(device="cpu", seconds=0.2, dtype="float32").to_json())
        for model_type in ("gemma3", "qwen3_vl"):
            subject = Subject.of(folder / model_type, model_type)
            for case in CASES:
                for line in rows_of_table(case, subject, machine):
                    table.add_row(model_type, *line)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
