"""An engine's answers beside our own: where texts part, how many drafts were accepted, one table, one verdict."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from dflash_jax.evaluation.difference import Difference
from dflash_jax.evaluation.table import aligned

# The decodings; the first is what the others' text is compared with.
ENGINE, ENGINE_DRAFTED, OURS, OURS_DRAFTED = "vLLM plain", "vLLM drafted", "ours plain", "ours drafted"
TOLERANCE = 0.05  # of accept lengths


@dataclasses.dataclass(frozen=True)
class Served:
    """What a prompt was answered. tokens: with the stop token, where one ended it; seconds: with the prefill.

    drafts: drafts that were verified; accepted: [W - 1], in how many of them the token at each position was
    accepted, empty for plain decoding. difference: from vLLM's plain answer.
    """

    tokens: tuple[int, ...]
    seconds: float
    drafts: int = 0
    accepted: tuple[int, ...] = ()
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """What vllm_decode.py wrote. versions: of what served; repaired: whether the engine had to be, as it says."""

    answers: list[Served]
    versions: dict[str, str]
    repaired: bool

    @classmethod
    def read(cls, file: pathlib.Path) -> Self:
        result = json.loads(file.read_text())
        answers = [
            Served(tuple(one["tokens"]), one["seconds"], one["drafts"], tuple(one["accepted"]))
            for one in result["answers"]
        ]
        return cls(answers, result["versions"], result["repaired"])


def accepted_by_position(accepted: np.ndarray, *, positions: int) -> tuple[int, ...]:
    """From the drafts accepted in each round [R] to how many rounds accepted the 1st, 2nd, ... one.

    vLLM counts a draft as soon as it is verified, before a stop token or the limit cuts what came of it; so does
    `Decoded.accepted`. The last round of an answer therefore counts tokens that nobody gets.
    """
    return tuple(int((accepted > position).sum()) for position in range(positions))


def accept_length(answers: Sequence[Served]) -> float:
    """Tokens per verify round with the target's own, pooled over all rounds; 1 if there were none."""
    drafts = sum(answer.drafts for answer in answers)
    return 1 + sum(sum(answer.accepted) for answer in answers) / max(drafts, 1)


def same_rounds(decodings: Mapping[str, Sequence[Served]]) -> int:
    """Prompts for which vLLM and this package verified as many drafts, and accepted as many at each position."""
    pairs = zip(decodings[ENGINE_DRAFTED], decodings[OURS_DRAFTED], strict=True)
    return sum((theirs.drafts, theirs.accepted) == (ours.drafts, ours.accepted) for theirs, ours in pairs)


def faults(decodings: Mapping[str, Sequence[Served]]) -> list[str]:
    """What says that the exported drafter is not served as it should be; empty if nothing does."""
    found = []
    for name, answers in decodings.items():
        if count := sum(answer.difference is not None and not answer.difference.tie for answer in answers):
            found.append(
                f"{name}: {count} of {len(answers)} answers differ from vLLM's plain ones by more than a tie"
            )
    theirs, ours = accept_length(decodings[ENGINE_DRAFTED]), accept_length(decodings[OURS_DRAFTED])
    if abs(theirs - ours) > TOLERANCE:
        found.append(f"accept length: {theirs:.3f} in vLLM, {ours:.3f} here; at most {TOLERANCE} apart is allowed")
    return found


def totals(decodings: Mapping[str, Sequence[Served]]) -> dict[str, dict[str, Any]]:
    """The numbers of each decoding over all prompts, as JSON values."""
    found = {}
    for name, answers in decodings.items():
        tokens = sum(len(answer.tokens) for answer in answers)
        found[name] = {
            "identical": sum(answer.difference is None for answer in answers),
            "ties": sum(answer.difference is not None and answer.difference.tie for answer in answers),
            "tokens": tokens,
            "tokens_s": tokens / sum(answer.seconds for answer in answers),
            "drafts": sum(answer.drafts for answer in answers),
            "accept_len": accept_length(answers),
            "accepted_by_position": np.sum([answer.accepted for answer in answers], axis=0, dtype=int).tolist(),
        }
    return found


def answers_content(decodings: Mapping[str, Sequence[Served]]) -> dict[str, list[dict[str, Any]]]:
    """Every answer as JSON values; JSON knows no infinite gap, which is null."""

    def gap_or_null(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in items}

    return {
        name: [dataclasses.asdict(answer, dict_factory=gap_or_null) for answer in answers]
        for name, answers in decodings.items()
    }


def table(decodings: Mapping[str, Sequence[Served]]) -> str:
    """A column for each decoding, then a line for each answer that differs."""
    columns, count = totals(decodings), len(decodings[ENGINE])

    def row(title: str, key: str, form: str) -> list[str]:
        return [title, *(f"{found[key]:{form}}" if found["drafts"] else "-" for found in columns.values())]

    lines = [
        ["text equal to vLLM plain", *(f"{found['identical']}/{count}" for found in columns.values())],
        ["tokens", *(str(found["tokens"]) for found in columns.values())],
        ["tokens/s", *(f"{found['tokens_s']:.1f}" for found in columns.values())],
        row("verify rounds", "drafts", "d"),
        row("accept length", "accept_len", ".3f"),
    ]
    positions = max(len(found["accepted_by_position"]) for found in columns.values())
    for position in range(positions):
        counts = (found["accepted_by_position"] for found in columns.values())
        lines.append([f"accepted, draft {position + 1}", *(str(of[position]) if of else "-" for of in counts)])
    said = [aligned(["", *columns], lines, left=("",))]
    said.append(f"rounds and accepted tokens are the same for {same_rounds(decodings)}/{count} prompts")
    for name, answers in decodings.items():
        for number, answer in enumerate(answers):
            if (difference := answer.difference) is not None:
                said.append(
                    f"{'tie' if difference.tie else 'DIFFERENT'}: {name}, prompt {number} parts at token "
                    f"{difference.position}, logit gap {difference.logit_gap:.2g}"
                )
    return "\n".join(said)
