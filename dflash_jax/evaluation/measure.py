"""Decode every prompt in every way, and say for each what it took and whether it changed a token.

A batch holds prompts of one set and of like length, and is decoded in one way after another, so that a machine
whose speed drifts hurts all alike. Prompts are padded to few lengths, and compiling is not timed.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dflash_jax.decode.ways import PLAIN, Decoding, PromptBatch, Way
from dflash_jax.evaluation.difference import Difference, Judge
from dflash_jax.prompts.prompt import Prompt

MULTIPLE = 32  # prompts are padded to the longest of all, rounded up to this, or to a half or a quarter of that
SHAPES = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """tokens: [n]; accepted, emitted: [R] of each verify round, none for plain decoding: drafts that it accepted,
    and tokens that it gave, which a stop token or the limit may have cut; seconds: this prompt's share of its
    batch's time, prefill included; difference: from plain decoding, None where there is none or where text is not
    compared."""

    tokens: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    seconds: float
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """A prompt with its answer in every way; index: of the prompt."""

    index: int
    prompt: Prompt
    answers: dict[Way, Answer]


def measure(
    decoding: Decoding, prompts: Sequence[Prompt], ways: Sequence[Way], judge: Judge | None
) -> Iterator[Measured]:
    """Each prompt once, in batches of like length.

    judge: compares with plain decoding, which must be one of the ways then; None: nothing is compared.
    """
    for indices, room in batches(prompts, decoding.size):
        batch = padded(prompts, indices, rows=decoding.size, room=room)
        found = {way: decoding(way, batch) for way in ways}
        for row, index in enumerate(indices):
            prompt, answers = prompts[index], {}
            for way, said in found.items():
                tokens, difference = said.answers[row], None
                if judge is not None and way.keeps_text(decoding.sampling):
                    plain = found[Way(PLAIN)].answers[row]
                    difference = judge.difference(prompt.tokens, plain, tokens, index)
                share = said.seconds / len(indices)
                answers[way] = Answer(tokens, said.accepted[row], said.emitted[row], share, difference)
            yield Measured(index, prompt, answers)


def shapes(longest: int) -> list[int]:
    """The lengths that prompts are padded to, ascending."""
    top = -(-longest // MULTIPLE) * MULTIPLE
    return sorted({-(-top // (MULTIPLE * 2**part)) * MULTIPLE for part in range(SHAPES)})


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[list[int], int]]:
    """(indices of at most `size` prompts of one set, the length that they are padded to)."""
    lengths = shapes(max(len(prompt.tokens) for prompt in prompts))
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        of_set = [index for index, prompt in enumerate(prompts) if prompt.set == name]
        of_set.sort(key=lambda index: -len(prompts[index].tokens))  # what does not fit the memory is found at once
        for first in range(0, len(of_set), size):
            indices = of_set[first : first + size]
            longest = len(prompts[indices[0]].tokens)
            yield indices, next(length for length in lengths if length >= longest)


def padded(prompts: Sequence[Prompt], indices: Sequence[int], *, rows: int, room: int) -> PromptBatch:
    """The prompts in the first of `rows` rows of `room` tokens; the others hold none."""
    tokens, lengths = np.zeros((rows, room), np.int32), np.zeros(rows, np.int32)
    numbers = np.zeros(rows, np.int32)
    for row, index in enumerate(indices):
        known = prompts[index].tokens
        tokens[row, : len(known)], lengths[row], numbers[row] = known, len(known), index
    return PromptBatch(tokens, lengths, numbers)
