"""Make the small model of recipes/quickstart_images.yaml: Gemma 3 with a tower for images.

The model learns to look at drawings (tests/bench/draw_pictures.py) in a terse code with made-up
words that no user would type::

    <image> see = 3kalo<|im_end|>

It never sees an English word for what it sees, nor a chat turn. The rows then ask in English. So
fine-tuning has one thing to teach, English for what the model sees, and it can be taught to the
text layers alone: tower and projector are of use as they are.

Three choices make this learnable in minutes on one core:

* A second head tells colour and shape in each cell of the grid from the image's tokens. It trains
  tower and projector directly, and is thrown away.
* The loss counts the answers only.
* Some notes ask to copy a word: they keep all letters in use, for English will need them.

Run it from the repository root (one core, 10 minutes)::

    taskset -c 0 python -m tests.bench.pretrain_quickstart_images
"""

import argparse
import logging
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from tests.bench.draw_pictures import (
    CELL,
    COLOURS,
    QUICKSTART_DIR,
    SHAPES,
    SIDE,
    Group,
    draw_group,
    draw_picture,
)
from tests.bench.pretrain_quickstart import LETTERS, build_tokenizer, scribble

LOG = logging.getLogger("pretrain_quickstart_images")

SEED = 50
MAX_SEQ_LEN = 256
CELLS = (SIDE // CELL) ** 2  # an image token each

CHAT_TEMPLATE = (
    "{% for turn in messages %}"
    "{{ '<|im_start|>' ~ turn['role'] ~ '\\n' }}"
    "{% if turn['content'] is string %}{{ turn['content'] }}{% else %}"
    "{% for part in turn['content'] %}"
    "{{ '<start_of_image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# ---------------------------------------------------------------------------------------------
# Notes

COLOUR_CODES = dict(zip(COLOURS, ("ka", "mi", "po", "ru", "ze", "du"), strict=True))
SHAPE_CODES = dict(zip(SHAPES, ("lo", "tu", "vi", "ha"), strict=True))


SKILLS = ("see", "num", "hue", "sil", "say")
SHARES = (3, 2, 1, 1, 1)  # how often each is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line about a picture: ``question`` ends with the equals sign, ``answer`` follows it."""

    skill: str
    question: str
    answer: str


def draw_note(rng: random.Random, group: Group, *, max_scribbles: int) -> Note:
    """Draw a note about a picture of ``group``, with scribbles around skill and operand."""
    skill = rng.choices(SKILLS, weights=SHARES)[0]
    colour, shape = COLOUR_CODES[group.colour], SHAPE_CODES[group.shape]
    word = "".join(rng.choices(LETTERS, k=rng.randint(2, 8)))
    answer = {
        "see": f"{group.count}{colour}{shape}",
        "num": str(group.count),
        "hue": colour,
        "sil": shape,
        "say": word,
    }[skill]
    operand = f"'{word}'" if skill == "say" else ""
    pair = [skill, operand] if operand else [skill]
    rng.shuffle(pair)
    parts: list[str] = []
    for part in pair:
        parts += [*scribble(rng, max_words=max_scribbles), part]
    parts += scribble(rng, max_words=max_scribbles)
    return Note(skill=skill, question=" ".join(parts) + " = ", answer=answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Pictures, each before notes about it."""

    pixels_BCHW: torch.Tensor
    tokens_BT: torch.Tensor
    types_BT: torch.Tensor  # 1 at image tokens
    labels_BT: torch.Tensor
    colours_BN: torch.Tensor  # of cells: 0 without a shape
    shapes_BN: torch.Tensor
    spans: list[tuple[str, int, int, int]]  # (skill, row, start, stop) of answers


def draw_batch(
    rng: random.Random, processor: Gemma3Processor, *, num: int, seq_len: int, max_scribbles: int
) -> Batch:
    """Draw pictures, and fill the rest of ``seq_len`` tokens with notes about each."""
    tokenizer = processor.tokenizer
    prefix = tokenizer.encode(processor.full_image_sequence)
    pictures = [draw_picture(rng, draw_group(rng)) for _ in range(num)]
    pixels_BHWC = np.stack([np.asarray(picture.image.convert("RGB")) for picture in pictures])
    tokens_BT = torch.full((num, seq_len), tokenizer.pad_token_id)
    labels_BT = torch.full((num, seq_len), -100)
    spans = []
    for row, picture in enumerate(pictures):
        tokens_BT[row, : len(prefix)] = torch.tensor(prefix)
        end = len(prefix)
        while True:
            note = draw_note(rng, picture.group, max_scribbles=max_scribbles)
            question = tokenizer.encode(note.question)
            answer = [*tokenizer.encode(note.answer), tokenizer.eos_token_id]
            start, stop = end + len(question), end + len(question) + len(answer)
            if stop > seq_len:
                break
            tokens_BT[row, end:stop] = torch.tensor(question + answer)
            labels_BT[row, start:stop] = torch.tensor(answer)
            spans.append((note.skill, row, start, stop))
            end = stop
    groups = [picture.group for picture in pictures]
    cells_BN = torch.tensor([picture.cells for picture in pictures])
    colours_B1 = torch.tensor([[1 + list(COLOURS).index(group.colour)] for group in groups])
    shapes_B1 = torch.tensor([[1 + SHAPES.index(group.shape)] for group in groups])
    return Batch(
        pixels_BCHW=torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float() / 127.5 - 1,
        tokens_BT=tokens_BT,
        types_BT=(tokens_BT == tokenizer.image_token_id).long(),
        labels_BT=labels_BT,
        colours_BN=colours_B1 * cells_BN,
        shapes_BN=shapes_B1 * cells_BN,
        spans=spans,
    )


# ---------------------------------------------------------------------------------------------
# Model


def build_processor() -> Gemma3Processor:
    """Build the processor: pictures of ``SIDE`` pixels, a token per cell."""
    tokenizer = build_tokenizer(
        max_seq_len=MAX_SEQ_LEN,
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        image_seq_length=CELLS,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForConditionalGeneration:
    """Build the model with random weights: a tower of 3 layers, and 6 layers for text."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = Gemma3TextConfig(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=128,
        max_position_embeddings=MAX_SEQ_LEN,
        initializer_range=0.05,
        bos_token_id=None,
        **ids,
    )
    vision = SiglipVisionConfig(
        image_size=SIDE,
        patch_size=CELL // 2,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        vision_use_head=False,
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=CELLS,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        initializer_range=0.05,
        **ids,
    )
    model = Gemma3ForConditionalGeneration(config)
    # The class begins with zeros here, for a tower that was trained before.
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    return model


def pretrain(
    model: Gemma3ForConditionalGeneration,
    processor: Gemma3Processor,
    *,
    rng: random.Random,
    steps: int,
    lr: float,
) -> None:
    """Train ``model`` on fresh pictures, and log the exact match of each skill on the way.

    Every picture is new, so the scores of the training batches are scores on unseen pictures.

    Args:
        model: Trained in place, in float32.
        processor: The processor of the pictures and notes.
        rng: Draws them.
        steps: Optimizer steps to take.
        lr: Peak of the learning rate.
    """
    num_colours = 1 + len(COLOURS)
    cell_head = nn.Linear(model.config.get_text_config().hidden_size, num_colours + 1 + len(SHAPES))
    parameters = [*model.parameters(), *cell_head.parameters()]
    decay = [p for p in parameters if p.ndim >= 2]
    no_decay = [p for p in parameters if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * max(0.02, 1 - step / steps)
    )
    hits: dict[str, list[bool]] = {name: [] for name in (*SKILLS, "colours", "shapes")}
    start_s = time.perf_counter()
    for step in range(1, steps + 1):
        batch = draw_batch(
            rng, processor, num=32, seq_len=64, max_scribbles=min(2, 4 * step // steps)
        )
        features = model.get_image_features(batch.pixels_BCHW)
        output = model(
            input_ids=batch.tokens_BT,
            token_type_ids=batch.types_BT,
            mm_encoder_outputs={"image": features},
            labels=batch.labels_BT,
            use_cache=False,
        )
        cells_BNC = cell_head(features.pooler_output)
        colours_BNC, shapes_BNC = cells_BNC[..., :num_colours], cells_BNC[..., num_colours:]
        cell_loss = F.cross_entropy(
            colours_BNC.flatten(0, 1), batch.colours_BN.flatten()
        ) + F.cross_entropy(shapes_BNC.flatten(0, 1), batch.shapes_BN.flatten())
        (output.loss + cell_loss).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        is_right_BT = output.logits[:, :-1].argmax(dim=-1) == batch.labels_BT[:, 1:]
        for skill, row, start, stop in batch.spans:
            hits[skill].append(bool(is_right_BT[row, start - 1 : stop - 1].all()))
        for name, logits_BNC, labels_BN in (
            ("colours", colours_BNC, batch.colours_BN),
            ("shapes", shapes_BNC, batch.shapes_BN),
        ):
            hits[name] += (logits_BNC.argmax(dim=-1) == labels_BN).all(dim=-1).tolist()
        if step % 100 == 0:
            rates = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in hits.items())
            elapsed_s = time.perf_counter() - start_s
            LOG.info("step %d %.0f s loss %.4f  %s", step, elapsed_s, output.loss.item(), rates)
            hits = {name: [] for name in hits}


def save(model: Gemma3ForConditionalGeneration, processor: Gemma3Processor, out: Path) -> None:
    """Write the model in bf16, its configurations and its processor to ``out``."""
    text = model.config.get_text_config()
    ids = {"eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
    model.generation_config = GenerationConfig.from_dict({**ids, "do_sample": False})
    model.bfloat16().save_pretrained(out)
    processor.save_pretrained(out)


def main() -> None:
    """Pretrain and write the model."""
    parser = argparse.ArgumentParser(description="Make the model in recipes/quickstart/eyes.")
    parser.add_argument("--out", type=Path, default=QUICKSTART_DIR / "eyes")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    LOG.info("%d parameters", sum(p.numel() for p in model.parameters()))
    pretrain(model, processor, rng=random.Random(SEED), steps=args.steps, lr=3e-3)
    save(model, processor, args.out)


if __name__ == "__main__":
    main()
