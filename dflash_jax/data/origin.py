"""What the records of a folder follow from: source files, tokenizer, chat template and options.

It stands in the folder's manifest, and in that of an unfinished one. Records are used again, or continued, only if
all of it is as it would be now.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.chat.chat import Chat
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError
from dflash_jax.sources.files import content_digest


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What turns conversations into records. It can be pickled, and each process opens its own Chat.

    tokenizer: a transformers tokenizer with a chat template; arguments: of that template; stop_tokens: the tokens
    that end an answer. max_length (tokens of a record, or None), too_long ("cut" or "drop") and last_turn_only are
    those of Chat.encode.
    """

    tokenizer: Any
    stop_tokens: tuple[int, ...]
    arguments: Mapping[str, Any]
    max_length: int | None = None
    too_long: str = "cut"
    last_turn_only: bool = False

    def chat(self) -> Chat:
        """Raises UserError if the tokenizer has no chat template."""
        return Chat(self.tokenizer, stop_tokens=self.stop_tokens, arguments=self.arguments)

    @property
    def options(self) -> dict[str, Any]:
        """What Chat.encode is told besides the conversation."""
        return {name: getattr(self, name) for name in ("max_length", "too_long", "last_turn_only")}


def origin(files: Sequence[pathlib.Path], preparation: Preparation) -> dict[str, Any]:
    """JSON entries that together decide the records of `files`. Reads the files once, for their sha256."""
    sources = [{"name": str(file), "bytes": file.stat().st_size, "sha256": content_digest(file)} for file in files]
    return {"sources": sources, **_way(preparation)}


def _way(preparation: Preparation) -> dict[str, Any]:
    chat = preparation.chat()
    entries = {
        "tokenizer_digest": chat.tokenizer_digest,
        "vocab": chat.vocab,
        "template_digest": chat.template_digest,
        "template_arguments": dict(preparation.arguments),
        "stop_tokens": sorted(preparation.stop_tokens),
        "options": preparation.options,
        "chat_template": preparation.tokenizer.chat_template,
    }
    return json.loads(json.dumps(entries))  # what is read from a manifest is compared with this


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What is not the same in two origins, each in words; empty if they give the same records."""
    said = [f"source file {name}" for name in _other_sources(found["sources"], wanted["sources"])]
    if found["tokenizer_digest"] != wanted["tokenizer_digest"]:
        said.append("the tokenizer")
    if found["template_arguments"] != wanted["template_arguments"]:
        said.append(
            f"the chat template's arguments (then {found['template_arguments']}, "
            f"now {wanted['template_arguments']})"
        )
    elif found["template_digest"] != wanted["template_digest"]:
        said.append("the chat template")
    if found["stop_tokens"] != wanted["stop_tokens"]:
        said.append(f"the stop tokens (then {found['stop_tokens']}, now {wanted['stop_tokens']})")
    for name, value in wanted["options"].items():
        if (before := found["options"].get(name)) != value:
            said.append(f"{name} (then {before}, now {value})")
    return said


def check_origin(records: Records, preparation: Preparation) -> None:
    """Raise UserError if the records were made with another tokenizer or chat template than `preparation` has.

    Its options may be others: a folder that was prepared before is taken as it is.
    """
    found, wanted = records.manifest, _way(preparation)
    for key, name in (("tokenizer_digest", "tokenizer"), ("template_digest", "chat template")):
        if found[key] != wanted[key]:
            then, now = (_identity(name, entries) for entries in (found, wanted))
            raise UserError(
                f"{records.directory} was prepared with another {name} ({then}) than the target's ({now}); "
                "prepare the data again with this target and these template arguments"
            )


def _identity(name: str, entries: Mapping[str, Any]) -> str:
    if name == "tokenizer":
        return f"{entries['tokenizer_digest'][:12]}, {entries['vocab']} tokens"
    return f"{entries['template_digest'][:12]}, arguments {entries['template_arguments']}"


def _other_sources(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first place where the lists of source files part, in words."""
    for number, (then, now) in enumerate(zip(found, wanted, strict=False), start=1):
        if then["sha256"] != now["sha256"]:
            if then["name"] == now["name"]:
                return [f"{now['name']} (other content)"]
            return [f"{number} (then {then['name']}, now {now['name']})"]
    if len(found) != len(wanted):
        extra, when = (found, "then") if len(found) > len(wanted) else (wanted, "now")
        return [f"{extra[min(len(found), len(wanted))]['name']} (only {when})"]
    return []
