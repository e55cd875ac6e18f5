"""Tokenise conversations once: ``python -m dflash_jax.prepare target=PATH input=FILES output=DIR``.

Training reads the folder with data.train=DIR. With inspect=N nothing is written: it prints how the first
conversations look to the drafter.
"""

import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.chat.show import show
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.config import PrepareConfig
from dflash_jax.data.origin import Preparation
from dflash_jax.data.packed_parts import encode_rows
from dflash_jax.data.prepare import prepare_records
from dflash_jax.data.records import UNUSED, Records
from dflash_jax.errors import UserError, named
from dflash_jax.monitor.progress import Preparing
from dflash_jax.published.end_tokens import stop_tokens
from dflash_jax.sources.files import find_files, read_parts
from dflash_jax.sources.unused import REASONS, UnusedRow
from dflash_jax.target_path import target_path

INTERRUPTED = 130  # the exit status of a shell's command that Ctrl-C ended

USAGE = """\
usage: python -m dflash_jax.prepare target=PATH input=FILES output=DIR [debug=true] [key=value ...]
       python -m dflash_jax.prepare target=PATH input=FILES inspect=N

keys, with type, default and meaning:"""


def main(arguments: list[str]) -> int:
    config = build(PrepareConfig, [("command line", parse_assignments(arguments))])
    if config.output is None and not config.inspect:
        raise UserError("output: name the folder to write, or say inspect=N to look at N conversations first")
    with named("input"):
        files = find_files(config.input)
    preparation = _preparation(config)
    if config.inspect:
        for text in inspected(files, preparation, limit=config.inspect, colour=sys.stdout.isatty()):
            print(text)
        return 0
    assert config.output is not None
    directory, workers = pathlib.Path(config.output), config.workers or len(os.sched_getaffinity(0))
    if directory.exists() and not directory.is_dir():
        raise UserError(f"output: {directory} is a file; name a folder")
    total = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {total / 1e6:,.1f} MB, {workers} workers", flush=True)
    is_done = directory.exists() and any(directory.iterdir())
    try:
        with Preparing(total) as preparing:
            records = prepare_records(
                files, directory, preparation=preparation, workers=workers, on_progress=preparing.add
            )
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues in {directory}.partial", file=sys.stderr)
        return INTERRUPTED
    print(summary(records))
    print(f"{'there already, from the same data' if is_done else 'written'}: {directory}")
    print(f"next: python -m dflash_jax.train recipe=... data.train={directory}")
    return 0


def _preparation(config: PrepareConfig) -> Preparation:
    path = target_path(config.target)
    tokenizer: Any = load_tokenizer(path)
    return Preparation(
        tokenizer=tokenizer,
        stop_tokens=stop_tokens(path, tokenizer),
        arguments=config.template,
        max_length=config.max_length,
        too_long=config.too_long,
        last_turn_only=config.last_turn_only,
    )


def inspected(
    files: Sequence[pathlib.Path], preparation: Preparation, *, limit: int, colour: bool
) -> Iterator[str]:
    """The first `limit` conversations that give records as text, and what is wrong with those before them."""
    chat, left = preparation.chat(), limit
    for part in read_parts(files):
        for number, answers in encode_rows(part, chat=chat, preparation=preparation):
            place = f"{files[part.file]}:{number}"
            if isinstance(answers, UnusedRow):
                yield f"--- {place}  not used, {answers}\n"
                continue
            for index, record in enumerate(answers.records, start=1):
                which = f"record {index} of {len(answers.records)}, " if len(answers.records) > 1 else ""
                sizes = f"{len(record.tokens)} tokens, {int(record.loss_mask.sum())} trained"
                notes = "".join(f"; {note}" for note in answers.notes)
                yield f"--- {place}  {which}{sizes}{'; cut' if answers.cut else ''}{notes}"
                yield show(preparation.tokenizer, record, colour=colour) + "\n"
            left -= 1
            if not left:
                return


def summary(records: Records) -> str:
    """What became of the rows, a line each."""
    made = records.manifest
    share = 100 * made["supervised"] / made["tokens"]
    spread = ", ".join(f"{name} {length:,}" for name, length in made["lengths"].items())
    lines = [
        ("rows", f"{made['rows']:,}"),
        ("records", f"{made['records']:,}"),
        ("tokens", f"{made['tokens']:,}, of which {share:.1f} % are trained"),
        ("lengths", spread),
    ]
    if made["split"]:
        lines.append(
            ("split", f"{made['split']:,} conversations became several records: the template rewrites history")
        )
    if made["cut"]:
        lines.append(("cut", f"{made['cut']:,} conversations where an answer ends, for max_length"))
    lines += [("note", f"{count:,} conversations: {note}") for note, count in made["notes"].items()]
    examples = first_examples(records, set(made["unused"]))
    for reason, count in made["unused"].items():
        lines.append(("not used", f"{count:,} rows, {reason} ({REASONS[reason]})"))
        lines.append(("", f"such as {examples[reason]}"))
    if examples:
        lines.append(("", f"all of them in {records.directory / UNUSED}"))
    return "\n".join(f"{name:<10}{text}".rstrip() for name, text in lines)


def first_examples(records: Records, reasons: set[str]) -> dict[str, str]:
    """The first row that was not used for each reason: its file, number and what was found."""
    found: dict[str, str] = {}
    with (records.directory / UNUSED).open(encoding="utf-8") as lines:
        for line in itertools.takewhile(lambda _: len(found) < len(reasons), lines):
            row: dict[str, Any] = json.loads(line)
            found.setdefault(row["reason"], f"{row['file']}:{row['row']}: {' '.join(row['detail'].split())}")
    return found


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=PrepareConfig)
