"""Source files -> a folder of tokenised records, made once by worker processes and recognised afterwards.

    files -> parts -> [workers: rows -> conversations -> tokens -> bytes] -> shards, in the order of the parts

The bytes of the folder do not depend on the number of workers, nor on whether the run was killed and continued.
"""

import collections
import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from dflash_jax.data.origin import Preparation, differences, origin
from dflash_jax.data.packed_parts import PackedPart, Tally, pack_part
from dflash_jax.data.records import Records, ShardWriter
from dflash_jax.data.unfinished import CONTINUES, Unfinished, clear_leftover, writing
from dflash_jax.errors import UserError
from dflash_jax.sources import files as source_files
from dflash_jax.sources.files import Part, read_parts

SHARD_PARTS = 32  # parts of the source files in a shard; what a killed run loses at most
WAITING_PARTS = 2  # for each worker: one that it works on, and one for when it is done

# (bytes of the source files, tokens): how much more is done since the last call.
Progress = Callable[[int, int], object]


def prepare_records(
    files: Sequence[pathlib.Path],
    directory: pathlib.Path,
    *,
    preparation: Preparation,
    workers: int = 1,
    on_progress: Progress | None = None,
) -> Records:
    """The records of `files` under `directory`, written there first if the folder does not exist.

    They grow in DIRECTORY.partial, where the next run continues if this one is killed. With one worker all is done
    in this process. Raises UserError if either folder holds records of other files, options, tokenizer or
    template, if no row can be used, if the disk refuses, or if a worker dies.
    """
    stamps = _stamps(files)
    wanted = origin(files, preparation)
    if directory.exists() and any(directory.iterdir()):
        records = _recognised(directory, wanted)
        clear_leftover(directory)
        return records
    cut = {"rows": source_files.PART_ROWS, "bytes": source_files.PART_BYTES, "parts": SHARD_PARTS}
    with Unfinished.open(directory, wanted, cut=cut) as unfinished:
        complete = unfinished.complete_shards()
        with contextlib.closing(
            _packed(files, preparation=preparation, workers=workers, skip=complete * SHARD_PARTS)
        ) as packed:
            _write_shards(packed, unfinished, on_progress=on_progress)
        if _stamps(files) != stamps:
            shutil.rmtree(unfinished.place)
            raise UserError("A source file was changed while it was read; prepare again, once it stays as it is.")
        with writing(unfinished.place):
            unfinished.finish(wanted)
    return Records.open(directory)


def refuse_mask_token(records: Records, mask_token: int) -> None:
    """Raise UserError if the MASK token occurs in the data: its embedding would then mean two things."""
    every, _ = records.token_counts()
    if mask_token < len(every) and every[mask_token]:
        raise UserError(
            f"drafter.mask_token: token {mask_token} occurs {every[mask_token]} times in {records.directory}; "
            "name a token that never occurs"
        )


def _recognised(directory: pathlib.Path, wanted: dict[str, Any]) -> Records:
    records = Records.open(directory)
    if said := differences(records.manifest, wanted):
        raise UserError(
            f"{directory} holds other records: {'; '.join(said)} changed. Name another output, or delete that "
            "folder to make it anew."
        )
    return records


def _stamps(files: Sequence[pathlib.Path]) -> list[tuple[int, int]]:
    stats = [file.stat() for file in files]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _write_shards(
    packed: Iterator[tuple[PackedPart, int]], unfinished: Unfinished, *, on_progress: Progress | None
) -> None:
    """packed: (part, bytes of the source files that were read for it)."""
    for shard, parts in itertools.groupby(packed, key=lambda pair: pair[0].index // SHARD_PARTS):
        writer, tally = ShardWriter(unfinished.shard(shard)), Tally()
        for part, read in parts:
            with writing(unfinished.place):
                writer.write(part.content, lengths=part.tally.lengths.tolist())
            tally += part.tally
            if on_progress is not None:
                on_progress(read, int(part.tally.lengths.sum()))
        with writing(unfinished.place):
            unfinished.save(shard, tally, digest=writer.close())


def _packed(
    files: Sequence[pathlib.Path], *, preparation: Preparation, workers: int, skip: int
) -> Generator[tuple[PackedPart, int], None, None]:
    """(packed part, bytes read for it) of all parts but the first `skip`, in order."""
    taken: list[int] = []
    parts = read_parts(files, skip=skip, on_bytes=taken.append)
    if workers == 1:
        pack = _packing(preparation)
        for part in parts:
            yield pack(part), _emptied(taken)
        return
    waiting = collections.deque()
    with _pool(workers, preparation=preparation) as pool:
        for part in parts:
            waiting.append((pool.submit(_work, part), _emptied(taken)))
            if len(waiting) > workers * WAITING_PARTS:
                future, read = waiting.popleft()
                yield future.result(), read
        for future, read in waiting:
            yield future.result(), read


def _emptied(counts: list[int]) -> int:
    total = sum(counts)
    counts.clear()
    return total


@contextlib.contextmanager
def _pool(workers: int, *, preparation: Preparation) -> Iterator[ProcessPoolExecutor]:
    """Processes that have a chat ready, stopped at the end whatever happens.

    They get the tokenizer pickled: to build it from a GGUF file again takes seconds. They are spawned, not forked,
    for a fork of a process with threads may hang.
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(preparation,),
    )
    try:
        yield pool
    except BrokenProcessPool as fault:
        raise UserError(
            "A worker process died, most likely because memory ran out. With fewer workers= less is needed; "
            f"{CONTINUES}."
        ) from fault
    finally:
        pool.shutdown(cancel_futures=True)


def _packing(preparation: Preparation) -> Callable[[Part], PackedPart]:
    return functools.partial(pack_part, chat=preparation.chat(), preparation=preparation)


_pack: Callable[[Part], PackedPart]  # of a worker process


def _start_worker(preparation: Preparation) -> None:
    global _pack
    _pack = _packing(preparation)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as there are cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent stops the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A killed parent closes no queue, and its workers would wait for parts for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(part: Part) -> PackedPart:
    return _pack(part)
