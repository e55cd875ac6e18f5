"""Answers by asking a server: so many requests at a time, and each conversation turn by turn.

Every answer is in the journal before the next one of its conversation is asked for. A conversation that the server
refuses is left where it is, and the others go on; where one after another is refused, the run stops.
"""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

from dflash_jax.answering.completions import Refused, Reply, request_body
from dflash_jax.answering.dialogue import Message, open_turn, with_answers
from dflash_jax.answering.generation import Generation
from dflash_jax.answering.journal import Answer, Journal
from dflash_jax.answering.server import Server, Unavailable
from dflash_jax.chat.chat import Chat
from dflash_jax.errors import UserError
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.unused import UnusedRow

POLL_S = 0.2
# Conversations that fail one after another before the run stops: so many, or as many as are asked at a time if
# that is more; before the first answer the lesser of the two, but enough to be no accident.
FAILURES, FIRST_FAILURES = 20, 3


def ask_all(
    conversations: Sequence[Conversation],
    journal: Journal,
    *,
    server: Server,
    model: str,
    generation: Generation,
    chat: Chat | None,
    concurrency: int,
    stopping: Callable[[], object],
    on_answers: Callable[[Sequence[Answer]], object],
) -> dict[int, str]:
    """Put all answers into the journal that it lacks, until `stopping`; why some conversations got none, by index.

    model: its name on the server; chat: the target's own, with whose prompts those of the server are compared;
    on_answers: told of answers once they are in the journal.
    Closes the server. Raises UserError where too many conversations fail one after another.
    """
    failed: dict[int, str] = {}
    answered = in_a_row = 0
    running: dict[concurrent.futures.Future[Reply], tuple[int, int, list[Message]]] = {}
    waiting = _unfinished(conversations, journal)
    pool = concurrent.futures.ThreadPoolExecutor(concurrency)
    most, first_most = max(FAILURES, concurrency), max(FIRST_FAILURES, min(FAILURES, concurrency))

    def submit(index: int, turn: int, messages: list[Message]) -> None:
        seed = generation.answer_seed(index, turn)
        body = request_body(messages, conversations[index].tools, model=model, generation=generation, seed=seed)
        running[pool.submit(server.ask, body)] = index, turn, messages

    try:
        while not stopping():
            while len(running) < concurrency and (question := next(waiting, None)):
                submit(*question)
            if not running:
                break
            finished, _ = concurrent.futures.wait(
                running, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in finished:
                index, turn, messages = running.pop(future)
                try:
                    reply = future.result()
                except (Refused, Unavailable) as error:
                    failed[index], in_a_row = str(error), in_a_row + 1
                    if in_a_row >= (most if answered else first_most):
                        raise UserError(
                            f"server: {server.url} failed for {in_a_row} conversations one after another, at last "
                            f"with {error}. What is answered is kept: the same command continues"
                        ) from None
                    continue
                answered, in_a_row = answered + 1, 0
                other = _is_other(reply.prompt_tokens, chat, messages, conversations[index])
                answer = Answer(index, turn, reply.message, reply.tokens, other_prompt=other)
                journal.add([answer])
                on_answers([answer])
                if question := _question(conversations, journal, index):
                    submit(*question)
    finally:
        server.close()
        pool.shutdown(cancel_futures=True)
    return failed


def _is_other(
    prompt_tokens: int | None, chat: Chat | None, messages: Sequence[Message], conversation: Conversation
) -> bool:
    """Whether the server's prompt is known to have another length than the target's own."""
    if chat is None or prompt_tokens is None:
        return False
    try:
        return prompt_tokens != len(chat.prompt(messages, conversation.tools))
    except UnusedRow:
        return True


def _unfinished(
    conversations: Sequence[Conversation], journal: Journal
) -> Iterator[tuple[int, int, list[Message]]]:
    for index in range(len(conversations)):
        if question := _question(conversations, journal, index):
            yield question


def _question(
    conversations: Sequence[Conversation], journal: Journal, index: int
) -> tuple[int, int, list[Message]] | None:
    """(index, answers that are known, messages up to the one that wants the next answer); None where none does."""
    answers = journal.messages(index)
    messages = with_answers(conversations[index].messages, answers)
    at = open_turn(messages)
    return None if at is None else (index, len(answers), messages[: at + 1])
