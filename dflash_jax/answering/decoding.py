"""Answers by decoding with the target itself, in batches on a mesh.

Conversations are taken in blocks, in their order. In a block all first answers are decoded, then all second ones,
and so on; the prompts of such a round are sorted by length and cut into batches, so that little is padding.
Batches are a function of the prompts alone: a run that was interrupted makes the same ones, leaves out those whose
answers it has, and computes the others in the shapes that an uninterrupted run would have used.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.answering.dialogue import Message, open_turn, with_answers
from dflash_jax.answering.generation import Generation
from dflash_jax.answering.journal import Answer, Journal
from dflash_jax.chat.chat import Chat
from dflash_jax.decode.generate import generate
from dflash_jax.decode.sampling import answer_keys
from dflash_jax.errors import UserError
from dflash_jax.models.target import Target
from dflash_jax.sharding import replicated, row_shards, rows
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.unused import UnusedRow

BLOCK = 128  # batches whose prompts are sorted together


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A prompt of a round. tokens: [n] int32; known: whether its answer is there already."""

    index: int
    tokens: np.ndarray
    known: bool


class BatchDecoder:
    """The compiled decoding of batches of `size` rows."""

    def __init__(
        self,
        target: Target,
        mesh: Mesh,
        *,
        batch_size: int,
        stop: tuple[int, ...],
        generation: Generation,
    ):
        """batch_size: rows, rounded up to what the mesh splits evenly."""
        shards = row_shards(mesh)
        self.size = -(-batch_size // shards) * shards
        self._target, self._place = target, rows(mesh)

        def run(target, prompts, lengths, indices, turns):
            found = generate(
                target,
                prompts,
                lengths,
                stop=stop,
                max_new_tokens=generation.max_new_tokens,
                sampling=generation.sampling,
                keys=answer_keys(generation.seed, indices, turns) if generation.temperature else None,
            )
            return found.tokens, found.lengths

        self._run = jax.jit(run, out_shardings=replicated(mesh))

    def __call__(self, batch: Sequence[Question], turn: int) -> list[np.ndarray]:
        """The tokens that follow each prompt, none where the answer is known. batch: at most `size` of a round."""
        room = padded_length(max(len(question.tokens) for question in batch))
        prompts = np.zeros((self.size, room), np.int32)
        lengths, indices = (np.zeros(self.size, np.int32) for _ in range(2))
        turns = np.full(self.size, turn, np.int32)
        for row, question in enumerate(batch):
            indices[row] = question.index
            if not question.known:
                lengths[row] = len(question.tokens)
                prompts[row, : lengths[row]] = question.tokens
        arguments = jax.device_put((prompts, lengths, indices, turns), self._place)
        try:
            tokens, ends = jax.device_get(self._run(self._target, *arguments))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"batch_size: {self.size} prompts of up to {room} tokens do not fit the device's memory; lower "
                "batch_size or max_new_tokens, or choose a mesh with more devices. What is answered is kept"
            ) from error
        return [tokens[row, lengths[row] : ends[row]] for row in range(len(batch))]


def padded_length(longest: int) -> int:
    """The static length for prompts of at most `longest` tokens: 128, 256, 512, 768, 1024, 1536, 2048, ..

    Each length is compiled, which may take minutes, and padding costs little beside decoding: so there are few.
    """
    power = 1 << max(longest - 1, 127).bit_length()
    return power * 3 // 4 if power > 512 and longest <= power * 3 // 4 else power


def decode_all(
    conversations: Sequence[Conversation],
    journal: Journal,
    *,
    decoder: BatchDecoder,
    chat: Chat,
    as_message: Callable[[np.ndarray], Message],
    stopping: Callable[[], object],
    on_answers: Callable[[Sequence[Answer]], object],
) -> dict[int, str]:
    """Put all answers into the journal that it lacks, until `stopping`; why some conversations got none, by index.

    as_message: what tokens [n] say; on_answers: told of answers once they are in the journal.
    """
    failed: dict[int, str] = {}
    size = BLOCK * decoder.size
    for first in range(0, len(conversations), size):
        block = range(first, min(first + size, len(conversations)))
        for turn in itertools.count():
            asked = list(_asked(conversations, journal, block, turn))
            if not asked:
                break
            if all(known for *_, known in asked):
                continue
            for batch in _batches(_prompts(asked, conversations, chat, failed=failed), decoder.size):
                if stopping():
                    return failed
                if all(question.known for question in batch):
                    continue
                answers = [
                    Answer(question.index, turn, as_message(tokens), len(tokens))
                    for question, tokens in zip(batch, decoder(batch, turn), strict=True)
                    if not question.known
                ]
                journal.add(answers)
                on_answers(answers)
    return failed


def _asked(
    conversations: Sequence[Conversation], journal: Journal, block: Sequence[int], turn: int
) -> Iterator[tuple[int, list[Message], bool]]:
    """(index, messages up to the one that wants answer number `turn`, whether it is known) of the block."""
    for index in block:
        answers = journal.messages(index)
        messages = with_answers(conversations[index].messages, answers[:turn])
        at = open_turn(messages)
        if len(answers) >= turn and at is not None:
            yield index, messages[: at + 1], len(answers) > turn


def _prompts(
    asked: Sequence[tuple[int, list[Message], bool]],
    conversations: Sequence[Conversation],
    chat: Chat,
    *,
    failed: dict[int, str],
) -> Iterator[Question]:
    """The prompts as tokens; why one cannot be made is added to `failed`."""
    for index, messages, known in asked:
        try:
            tokens = chat.prompt(messages, conversations[index].tools)
        except UnusedRow as fault:
            failed[index] = f"{fault.reason}: {fault.detail}"
            continue
        yield Question(index, tokens, known)


def _batches(questions: Iterable[Question], size: int) -> Sequence[list[Question]]:
    """Longest prompts first, so that what does not fit the memory is found at once."""
    ordered = sorted(questions, key=lambda question: (-len(question.tokens), question.index))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
