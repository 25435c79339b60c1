"""Sluice side by side with what else its users could install, at equal work: case `peers`.

Each peer runs in a process of its own, by its own Python where one is given
(`--peer-python unsloth=/path/to/bin/python`), on the same weights, rows, initial adapters,
precision, optimizer and memory. A row is a peer in a job. What fails, does not fit or is not
installed is a row with its error; one that did other work than Sluice, or came to another loss,
says so and is not compared.

    jobs.py       what all are given alike, and how it is written down
    equal.py      whether two of them did the same work
    watched.py    a program within a time, its host memory watched, on a card of some size
    case.py       the jobs, the peers, and their rows
    programs/     what is run: by the peer's Python, with nothing of ours but `told.py`
"""
