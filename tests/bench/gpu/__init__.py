"""What holds on a GPU, measured by one command.

    python -m tests.bench.gpu --window A         what decides most, in 570 s, all starts included
    python -m tests.bench.gpu --window B         the next loan of a card
    python -m tests.bench.gpu --cases exact,moe30b --out DIR
    python -m tests.bench.gpu --window A --rehearse --out DIR      all of it on a CPU, tiny
    python -m tests.bench.gpu.wheels             what a machine without a network lacks, as a file
    python -m tests.bench.gpu.record DIR         keep the rows, from a clean tree

DIR, runs/gpu if none is given, holds rows.jsonl (a line per measurement), table.md, log.txt and
what cases need again; both are whole up to the moment at which a command is cut off. The same
command goes on where it stopped: cases that are complete are skipped, of others the parts that have
rows. Rows that are kept for this card and this code count too, and for `is_of_card` cases those of
any code. Every case is a child process that is ended at its limit; what it had measured stays.
Models and caches are in DIR-scratch.

Nothing is downloaded: models have the shapes in recipes/shapes and random weights. `--vram 24`
makes a large card stand in for one of 24 GiB.

Interface of a case, for whoever adds one:

1. A module with `run(settings: Settings, journal: Journal) -> None`, run in a process of its own
   by `python -m tests.bench.gpu.child NAME JSON`, its output in DIR/log.txt.
2. A line in `CASES` (cases.py): its name, its module, its limits on a card and in a rehearsal; a
   turn in a window, if it decides something, with what.
3. `run` calls `journal.expect(names)` with the names of its parts, then for each part that
   `journal.has` not yet and that `settings.left_s` has room for: `journal.add(part, **fields)`, or
   `journal.fail(part, error)` for what does not fit or cannot be had: that is a result too, and is
   not tried again. Parts without a row are listed as not run, and come first next time. What it
   starts must die with it: start no new sessions, for a case is ended with its process group.
4. Fields: JSON values, units in names, quantiles from `tests.bench.record.quantiles`. A part whose
   fields have these names is shown in the table and held against the goals: tokens_per_s, step_s
   (p20, p50, p80), n, r3_share, resident_share, exposed_frac, calibrated_error, memory_error,
   lane_share, once_flops_per_s, as {p20, p50, p80} or numbers; of_m_star: micro-batches as a
   multiple of M*; note: in words; path: the code path, which README and docs tell apart. Of a peer,
   of_ours is its tokens per second divided by this engine's at equal work.
   The code's version, machine, libraries, cap and rates stand in every row without being given.
5. In a rehearsal (`settings.is_rehearsal`) everything is tiny, on `settings.device` cpu.

What helps: `settings.machine(dtype)`, this run's measured rates; `models.fields(shape, ...)` and
`models.fill(name, tensor)`, random weights that depend on a parameter's name alone, so that other
libraries can be given the same ones; `card.Card`, which makes the card smaller.
"""
