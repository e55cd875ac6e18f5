"""What is wrong with a run, from its log; with a second log also how two runs compare at equal tokens.

    python tools/diagnose.py RUN|LOG [LOG2] [--html FILE]

RUN is a run directory, LOG a file of JSON lines with "step", "loss" and what else is logged, plain or gzipped.
Exit status 0: no findings. 1: findings. 2: an argument or a file is wrong.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import NoReturn

from dflash_jax.arguments import run_entry_point
from dflash_jax.diagnosis.comparison import compare
from dflash_jax.diagnosis.diagnose import diagnose
from dflash_jax.diagnosis.page import write_page
from dflash_jax.diagnosis.reading import read_log
from dflash_jax.diagnosis.report import comparison_text, text
from dflash_jax.errors import UserError


class Arguments(argparse.ArgumentParser):
    """Says what is wrong with arguments as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: diagnose.py RUN|LOG [LOG2] [--html FILE]")


def main(arguments: Sequence[str]) -> int:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=pathlib.Path, metavar="RUN|LOG", help="run directory or log")
    parser.add_argument("second", type=pathlib.Path, metavar="LOG2", nargs="?", help="to compare with")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="also write a page with charts")
    given = parser.parse_args(arguments)
    runs = [(log, diagnose(log)) for log in map(read_log, filter(None, (given.log, given.second)))]
    for log, diagnosis in runs:
        print(text(log, diagnosis), end="\n\n" if len(runs) > 1 else "\n")
    compared = None
    if len(runs) == 2:
        (first, _), (second, _) = runs
        compared = comparison_text(first, second, compare(first, second))
        print(compared)
    if given.html is not None:
        write_page(runs, given.html, comparison=compared)
        print(f"written: {given.html}")
    return 1 if any(diagnosis.findings for _, diagnosis in runs) else 0


if __name__ == "__main__":
    run_entry_point(main)
