"""Let the target answer prompts: ``python -m dflash_jax.regenerate target=PATH prompts=FILES output=FILE``.

A drafter must learn what its target says, so training data carries the target's own answers: decoded here, in
batches on a mesh, or asked of a server that runs the target (server=URL). Each user's turn without an answer gets
one, one after another, so that a later answer sees the earlier ones. An answer that was cut by max_new_tokens is
marked, so that its end is not learned as an end, and its conversation ends there.

Answers are collected in OUTPUT.partial. After a stop or a kill the same command continues: what is answered is not
asked again. At the end OUTPUT has the conversations in the order of the prompts, OUTPUT.settings.json says what
they were made with, and OUTPUT.failed.jsonl holds those that could not be answered, and why.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.answering.asking import ask_all
from dflash_jax.answering.decoding import BatchDecoder, decode_all
from dflash_jax.answering.dialogue import ends, open_turn, open_turns, with_answers
from dflash_jax.answering.finish import beside, write_output
from dflash_jax.answering.generation import Generation
from dflash_jax.answering.journal import Answer, Journal
from dflash_jax.answering.server import Server
from dflash_jax.answering.spelling import as_message
from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.chat.chat import Chat
from dflash_jax.config import MeshLayout, RegenerateConfig
from dflash_jax.errors import UserError, named
from dflash_jax.mesh import make_meshes, prepare_devices
from dflash_jax.monitor.progress import Answering, Loading
from dflash_jax.published.end_tokens import end_tokens, stop_tokens
from dflash_jax.published.targets import TargetFiles
from dflash_jax.sharding import shardings
from dflash_jax.sources.conversations import Conversation, read_conversations
from dflash_jax.sources.files import content_digest, find_files
from dflash_jax.sources.unused import UnusedRow
from dflash_jax.target_path import target_path
from dflash_jax.training.interrupt import StopRequest

TRIED = 20  # conversations of which the chat template must take one before weights are loaded

USAGE = """\
usage: python -m dflash_jax.regenerate target=PATH prompts=FILES output=FILE [debug=true] [key=value ...]
       python -m dflash_jax.regenerate server=URL prompts=FILES output=FILE [target=PATH] [key=value ...]

keys, with type, default and meaning:"""


class Fill(Protocol):
    """Puts the answers into a journal that it lacks; why some conversations got none, by index."""

    def __call__(
        self, journal: Journal, *, stopping: Callable[[], object], on_answers: Callable[[Sequence[Answer]], object]
    ) -> dict[int, str]: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """Who answers. ready: loads what that takes; model: what the answers are made with, as a run that goes on must
    find it again; place: what has no part in what they say."""

    ready: Callable[[], Fill]
    model: dict[str, Any]
    place: dict[str, Any]


def main(arguments: list[str]) -> int:
    config = build(RegenerateConfig, [("command line", parse_assignments(arguments))])
    check_arguments(config)
    with named("prompts"):
        files = find_files(config.prompts)
    conversations = read_prompts(files)
    answerer = by_target if config.server is None else by_server
    source = answerer(config, conversations)
    settings = {"prompts_digest": digest(files), **dataclasses.asdict(generation_of(config)), **source.model}
    output = pathlib.Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with Journal(beside(output, "partial"), settings=settings) as journal:
        stopped_by, failed = collect(conversations, journal, source)
        if stopped_by:
            print(f"stopped by {stopped_by} with {len(journal)} answers; the same command continues from there")
            return 1
        names = {"prompt_files": [str(file) for file in files]}
        version = {"dflash_jax": importlib.metadata.version("dflash-jax")}
        settings |= source.place | names | version
        counts = write_output(output, conversations, journal, failed=failed, settings=settings)
        journal.remove()
    print_end(output, counts)
    return 0


def check_arguments(config: RegenerateConfig) -> None:
    """Raise UserError for what does not go together."""
    if config.server is None and config.target is None:
        raise UserError("target: a value is required without server=, and none was given")
    if config.server is None and config.model is not None:
        raise UserError(f"model: found {config.model!r}, but it names a model of a server; give server= as well")
    if config.temperature == 0 and (config.top_p < 1 or config.top_k):
        name, value = ("top_p", config.top_p) if config.top_p < 1 else ("top_k", config.top_k)
        raise UserError(f"{name}: found {value}, but temperature=0 takes the likeliest token; set temperature=1")
    output = pathlib.Path(config.output)
    if output.suffix != ".jsonl":
        raise UserError(f"output: found {output}, allowed: a name that ends in .jsonl")
    if output.exists():
        raise UserError(f"output: {output} exists; delete it or name another file")


def read_prompts(files: Sequence[pathlib.Path]) -> list[Conversation]:
    """The conversations of all files. Raises UserError for one without a turn to answer."""
    conversations = []
    for file in files:
        for number, conversation in enumerate(read_conversations(file), start=1):
            if open_turn(conversation.messages) is None:
                raise UserError(f"prompts: conversation {number} of {file} is answered already")
            conversations.append(conversation)
    return conversations


def digest(files: Sequence[pathlib.Path]) -> str:
    """The sha256, in hex, of the files' contents; their names have no part in it."""
    return hashlib.sha256(" ".join(content_digest(file) for file in files).encode()).hexdigest()


def generation_of(config: RegenerateConfig) -> Generation:
    """What the configuration says about generating."""
    return Generation(
        config.temperature, config.top_p, config.top_k, config.seed, config.max_new_tokens, config.template
    )


def by_target(config: RegenerateConfig, conversations: Sequence[Conversation]) -> Source:
    """Answers by decoding with the target, whose weights are loaded when they are needed."""
    assert config.target is not None
    path = target_path(config.target)
    files = TargetFiles.open(path)
    chat = Chat.open(path, stop_tokens=end_tokens(path), arguments=config.template)
    stop = stop_tokens(path, chat.tokenizer)
    refuse_template(chat, conversations)
    mesh_file = find_named("meshes", config.mesh, key="mesh")
    layout = build(MeshLayout, [(str(mesh_file), read_yaml(mesh_file))])
    prepare_devices(layout)
    meshes = make_meshes(layout, config.mesh)
    graph, abstract = files.abstract(jnp.dtype(config.dtype))
    places = shardings(abstract, meshes.target, meshes.target_rules)

    def ready() -> Fill:
        with Loading(files.name, files.weight_bytes) as loading:
            state = files.load(abstract, places, on_bytes=loading.add)
        decoder = BatchDecoder(
            nnx.merge(graph, state),
            meshes.target,
            batch_size=min(config.batch_size, len(conversations)),
            stop=stop,
            generation=generation_of(config),
        )
        spelled = functools.partial(as_message, chat.tokenizer, stop=stop)
        return functools.partial(decode_all, conversations, decoder=decoder, chat=chat, as_message=spelled)

    model = {
        "target": files.name,
        "target_digest": files.digest,
        "dtype": config.dtype,
        "stop_tokens": list(stop),
        "template_digest": chat.template_digest,
        "tokenizer_digest": chat.tokenizer_digest,
    }
    return Source(ready, model, {"mesh": config.mesh, "batch_size": config.batch_size, "jax": jax.__version__})


def refuse_template(chat: Chat, conversations: Sequence[Conversation]) -> None:
    """Raise UserError if the chat template takes none of the first conversations."""
    for conversation in conversations[:TRIED]:
        turn = open_turn(conversation.messages)
        assert turn is not None
        try:
            chat.prompt(conversation.messages[: turn + 1], conversation.tools)
            return
        except UnusedRow as fault:
            found = fault
    raise UserError(f"prompts: none of the first conversations can be asked; {found.reason}: {found.detail}")


def by_server(config: RegenerateConfig, conversations: Sequence[Conversation]) -> Source:
    """Answers of a server; where target= names the model's files, the lengths of its prompts are compared."""
    assert config.server is not None
    chat = None
    if config.target is not None:
        path = target_path(config.target)
        chat = Chat.open(path, stop_tokens=end_tokens(path), arguments=config.template)
        refuse_template(chat, conversations)
    key = os.environ.get("OPENAI_API_KEY")
    server = Server(config.server, key=key, timeout_s=config.timeout_s, retries=config.retries)
    model = server.model(config.model)

    fill = functools.partial(
        ask_all,
        conversations,
        server=server,
        model=model,
        generation=generation_of(config),
        chat=chat,
        concurrency=config.concurrency,
    )
    place = {"server": server.url, "target": config.target, "left_to_server": server.unknown}  # what it is by then
    return Source(lambda: fill, {"model": model}, place)


def collect(conversations: Sequence[Conversation], journal: Journal, source: Source) -> tuple[str, dict[int, str]]:
    """Fill the journal; the signal that stopped it, "" for none, and why some conversations got no answer."""
    wanted = [open_turns(conversation.messages) for conversation in conversations]
    left = [
        open_turns(with_answers(conversation.messages, journal.messages(index)))
        for index, conversation in enumerate(conversations)
    ]
    if not any(left):
        return "", {}
    if len(journal):
        print(f"continuing with {len(journal)} answers that are there already", flush=True)
    fill, settled = source.ready(), sum(wanted) - sum(left)
    progress = Answering(len(left), sum(wanted), done=left.count(0), settled=settled)
    with StopRequest() as stop, progress as shown:

        def on_answers(answers: Sequence[Answer]) -> None:
            rest = [wanted[answer.index] - answer.turn for answer in answers]  # turns without one, before this one
            turns = [count if ends(answer.message) else 1 for answer, count in zip(answers, rest, strict=True)]
            whole = sum(count == turn for count, turn in zip(rest, turns, strict=True))
            tokens = sum(answer.tokens or 0 for answer in answers)
            shown.add(conversations=whole, answers=sum(turns), tokens=tokens)

        failed = fill(journal, stopping=lambda: stop.received, on_answers=on_answers)
    return stop.received, failed


def print_end(output: pathlib.Path, counts: Mapping[str, int]) -> None:
    """What was written, and what a person should know before training on it."""
    print(
        f"written: {output}, {counts['conversations']} conversations, {counts['answers']} answers, "
        f"{counts['truncated']} cut"
    )
    if counts["failed"]:
        print(f"{counts['failed']} could not be answered: {beside(output, 'failed.jsonl')} says why")
    if counts["other_prompts"]:
        print(
            f"{counts['other_prompts']} prompts have another length on the server than with the target's own "
            "template: it renders with another one, or with other arguments (template.KEY=VALUE)"
        )


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=RegenerateConfig)
