"""Records for tests, from rows in memory."""

import pathlib
from collections.abc import Iterable

import numpy as np

from dflash_jax.chat.chat import Encoded
from dflash_jax.data.records import UNUSED, Records, ShardWriter, pack, shard_name, write_index


def write(directory: pathlib.Path, rows: Iterable[Encoded], **manifest: object) -> Records:
    """Write rows as a folder of one shard and open it."""
    rows = list(rows)
    directory.mkdir(parents=True)
    lengths = [len(row.tokens) for row in rows]
    writer = ShardWriter(directory / shard_name(0))
    writer.write(b"".join(map(pack, rows)), lengths=lengths)
    tokens = np.concatenate([row.tokens for row in rows])
    mask = np.concatenate([row.loss_mask for row in rows])
    size = int(tokens.max()) + 1
    write_index(
        directory,
        lengths=np.array(lengths, np.int32),
        counts=np.stack([np.bincount(chosen, minlength=size) for chosen in (tokens, tokens[mask])]),
        shards=[{"file": shard_name(0), "records": len(rows), "digest": writer.close()}],
        manifest=manifest,
    )
    (directory / UNUSED).touch()
    return Records.open(directory)
