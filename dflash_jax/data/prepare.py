"""A JSON-lines file of conversations -> a folder of tokenised records, made once and recognised afterwards."""

import pathlib
from typing import Any

from dflash_jax.data.chat import encode_conversation
from dflash_jax.data.conversations import content_digest, read_conversations
from dflash_jax.data.records import Records, write_records
from dflash_jax.errors import UserError


def prepare_records(tokenizer: Any, source: pathlib.Path, directory: pathlib.Path) -> Records:
    """The records of `source` under `directory`, written there first if the folder does not exist.

    Raises UserError if the folder holds records of another source or chat template.
    """
    # What the rows depend on; a folder made from anything else must not be trained on by accident.
    origin = {"source_digest": content_digest(source), "chat_template": tokenizer.chat_template}
    if not directory.exists():
        rows = (encode_conversation(tokenizer, item.messages) for item in read_conversations(source))
        write_records(directory, rows, manifest={"source": source.name, **origin})
    records = Records.open(directory)
    for key, value in origin.items():
        if records.manifest.get(key) != value:
            raise UserError(
                f"{directory} was made from another {key.replace('_', ' ')} than {source} has now; "
                "choose a new out= directory, or delete that folder to train on the new data"
            )
    return records


def refuse_mask_token(records: Records, mask_token: int) -> None:
    """Raise UserError if the MASK token occurs in the data: its embedding would then mean two things."""
    every, _ = records.token_counts()
    if mask_token < len(every) and every[mask_token]:
        raise UserError(
            f"drafter.mask_token: token {mask_token} occurs {every[mask_token]} times in {records.directory}; "
            "name a token that never occurs"
        )
