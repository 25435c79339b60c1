"""How fast rows become tokens, in how much memory, and how long the second start takes.

    python -m tests.bench.bench_tokenize [--rows 1000000] [--tokenizer DIR] [--no-template]
    python -m tests.bench.bench_tokenize --second [--rows 1000000] [--tokenizer DIR]

Rows are generated: short questions and answers of random words. Each stage is a process of its own,
so that its peak memory is its own; imports are not counted, but in CPU seconds, which tell more
than seconds where others use the machine. Printed as one JSON line.

`--second` measures the second start alone. The first is not waited for: the tokens of 10,000 rows
are written to the cache as often as it takes, under the name of the whole file's.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = "river stone light seven paper green music window garden letter small open".split()  # noqa: SIM905  # a list of words is longer


def write_rows(file: Path, num_rows: int, *, seed: int = 0) -> None:
    """Write random rows, about 30 words each."""
    random_ = random.Random(seed)
    with file.open("w") as out:
        for number in range(num_rows):
            question = " ".join(random_.choices(WORDS, k=random_.randint(4, 16)))
            answer = " ".join(random_.choices(WORDS, k=random_.randint(4, 36)))
            out.write(json.dumps({"instruction": f"{number}: {question}?", "output": answer}))
            out.write("\n")


def load(
    file: Path, cache_dir: Path, tokenizer_dir: str | None, *, has_template: bool
) -> dict[str, float]:
    """Load the rows of a file and their hash, and return seconds and peak memory."""
    import datasets  # noqa: F401  # imports are not counted
    import torch  # noqa: F401

    from finetune.data.dataset import load_rows
    from finetune.model.tokenizer import load_tokenizer
    from finetune.recipe.sections import DataSection
    from tests.doubles import tiny_tokenizer

    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir else tiny_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    rows = load_rows(
        DataSection(path=str(file)),
        tokenizer,
        seq_len=2048,
        seed=0,
        cache_dir=cache_dir,
    )
    opened_s = time.perf_counter() - start_s
    digest = rows.data_hash
    return {
        "opened_s": opened_s,
        "with_hash_s": time.perf_counter() - start_s,
        "own_cpu_s": time.process_time() - start_cpu_s,
        "rows": len(rows.train),
        "tokens": int(rows.train.offsets[-1]),
        "hash": int(digest[:8], 16),
        "peak_bytes_before": before * 1024,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cpu_s": sum(resource.getrusage(who).ru_utime for who in (0, -1)),
        "peak_bytes_of_a_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def write_cache(file: Path, cache_dir: Path, tokenizer_dir: str | None, num_rows: int) -> None:
    """Write the tokens of a file, as those of its first rows over and over."""
    from finetune.data.dataset import load_rows, source_rows
    from finetune.data.encode_source import Part, StoreReport, cache_key, new_store
    from finetune.data.tokenize import Encoder, Fate
    from finetune.model.tokenizer import load_tokenizer
    from finetune.recipe.sections import DataSection, MixSource
    from tests.doubles import tiny_tokenizer

    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir else tiny_tokenizer()
    data, num_first = DataSection(path=str(file)), min(num_rows, 10_000)
    few = DataSection(path=str(file), max_rows=num_first)
    found = load_rows(few, tokenizer, seq_len=2048, seed=0, cache_dir=cache_dir)
    store = found.train.parts[0].tokens.store
    encoder = Encoder(
        tokenizer=tokenizer,
        seq_len=2048,
        loss_on=data.loss_on,
        too_long=data.too_long,
        empty_think=data.empty_think,
    )
    rows = source_rows(data, MixSource(path=str(file)), max_rows=None)
    settings = {"max_rows": None, "drop_duplicates": False}
    key = cache_key(rows.source.digest(), rows.form, encoder, settings)
    with new_store(cache_dir / f"tokens-{key}") as writer:
        for start in range(0, num_rows, num_first):
            writer.add(
                Part(
                    input_ids=store.input_ids,
                    labels=store.labels,
                    lengths=(store.offsets[1:] - store.offsets[:-1]).tolist(),
                    end_ids=store.end_ids.tolist(),
                    num_ends=(store.end_offsets[1:] - store.end_offsets[:-1]).tolist(),
                    rows=store.rows.tolist(),
                    is_truncated=store.is_truncated.tolist(),
                    fates=[Fate(fate) for fate in store.fates.tolist()],
                    places=[(0, start + number) for number in range(len(store.fates))],
                )
            )
        writer.close(StoreReport())


def main() -> None:
    """Generate rows, tokenise them, and open the cache in another process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--no-template", action="store_true", help="prompt and answer joined")
    parser.add_argument("--second", action="store_true", help="the second start alone")
    parser.add_argument("--load", nargs=2, type=Path)
    args = parser.parse_args()
    if args.load:
        sys.stdout.write(
            json.dumps(
                load(args.load[0], args.load[1], args.tokenizer, has_template=not args.no_template)
            )
        )
        return
    from finetune.data.encode_source import num_cores

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        write_rows(file, args.rows)
        command = [sys.executable, "-m", "tests.bench.bench_tokenize"]
        command += ["--load", str(file), str(Path(folder, "cache"))]
        command += ["--tokenizer", args.tokenizer] if args.tokenizer else []
        command += ["--no-template"] if args.no_template else []
        if args.second:
            write_cache(file, Path(folder, "cache"), args.tokenizer, args.rows)
            for _ in range(3):
                sys.stdout.write(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    + "\n"
                )
            return
        first, second = (
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(2)
        )
        assert first["hash"] == second["hash"]
        cores = num_cores()
        figures = {
            "rows": args.rows,
            "tokens": first["tokens"],
            "file_bytes": file.stat().st_size,
            "cores": cores,
            "first_s": first["opened_s"],
            "cpu_s": first["cpu_s"],
            "rows_per_cpu_s": args.rows / first["cpu_s"],
            "rows_per_s_per_core": args.rows / first["opened_s"] / cores,
            "peak_bytes_first": first["peak_bytes"],
            "peak_bytes_of_a_worker": first["peak_bytes_of_a_worker"],
            "second_opened_s": second["opened_s"],
            "second_with_hash_s": second["with_hash_s"],
            "second_cpu_s": second["own_cpu_s"],
            "peak_bytes_before_second": second["peak_bytes_before"],
            "peak_bytes_second": second["peak_bytes"],
        }
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
