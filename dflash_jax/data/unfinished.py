"""The folder beside the records to be, where they grow shard by shard, so that a killed run can be continued.

DIR.partial/origin.json            what the records follow from, and how many parts make a shard
DIR.partial/records/               what becomes DIR: shards, and at the end their index
DIR.partial/shard-00000.npz, ...   of a complete shard: lengths, token counts, and the rest of its tally as JSON;
                                   a shard is complete when this file is there
"""

import collections
import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from dflash_jax.data.origin import differences
from dflash_jax.data.packed_parts import Tally
from dflash_jax.data.records import FORMAT, UNUSED, shard_name, write_index
from dflash_jax.errors import UserError

ORIGIN = "origin.json"
CONTINUES = "the same command continues behind the last complete shard"


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """place: the folder DIR.partial; directory: DIR."""

    place: pathlib.Path
    directory: pathlib.Path

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: pathlib.Path, wanted: Mapping[str, Any], *, cut: Mapping[str, int]) -> Iterator[Self]:
        """The folder of an earlier run, or a fresh one; no other process may have it open.

        cut: how source files are cut into parts and shards. Raises UserError if the folder is of another origin
        than `wanted` or cut otherwise, or if another process writes there.
        """
        place = _beside(directory)
        with writing(place):
            (place / "records").mkdir(parents=True, exist_ok=True)
            lock = os.open(place, os.O_RDONLY)
        try:
            _lock(lock, place)
            _agree(place, dict(wanted), cut=dict(cut) | {"format": FORMAT})
            yield cls(place, directory)
        finally:
            os.close(lock)

    def shard(self, index: int) -> pathlib.Path:
        """The ArrayRecord file of a shard."""
        return self.place / "records" / shard_name(index)

    def complete_shards(self) -> int:
        """How many shards from the first on are complete."""
        count = 0
        while self._side(count).exists():
            count += 1
        return count

    def save(self, index: int, tally: Tally, *, digest: str) -> None:
        """Note that the shard, whose file is closed, is complete."""
        if self.shard(index).exists():
            _sync(self.shard(index))
        rest = {
            "digest": digest,
            "rows": list(tally.rows.items()),
            "notes": tally.notes,
            "unused": tally.unused,
            "split": tally.split,
            "cut": tally.cut,
        }
        side = io.BytesIO()
        as_bytes = np.frombuffer(json.dumps(rest).encode(), np.uint8)
        np.savez(side, lengths=tally.lengths, counts=tally.counts, rest=as_bytes)
        _write_whole(self._side(index), side.getvalue())

    def load(self, index: int) -> tuple[Tally, str]:
        """The tally of a complete shard, and its digest."""
        with np.load(self._side(index)) as side:
            rest = json.loads(side["rest"].tobytes())
            tally = Tally(
                side["lengths"],
                side["counts"],
                collections.Counter({file: rows for file, rows in rest["rows"]}),
                collections.Counter(rest["notes"]),
                [(file, row, reason, detail) for file, row, reason, detail in rest["unused"]],
                rest["split"],
                rest["cut"],
            )
        return tally, rest["digest"]

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the index of the complete shards, and give the folder its name.

        manifest: the origin and whatever else is to be kept. Raises UserError if there is no record in any shard.
        """
        total, reasons, shards, first = Tally(), collections.Counter[str](), [], None
        names = [source["name"] for source in manifest["sources"]]
        inside = self.place / "records"
        with (inside / UNUSED).open("w", encoding="utf-8", errors="backslashreplace") as out:
            for index in range(self.complete_shards()):
                tally, digest = self.load(index)
                for file, row, reason, detail in tally.unused:
                    line = {"file": names[file], "row": row, "reason": reason, "detail": detail}
                    first = first or line
                    reasons[reason] += 1
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                if len(tally.lengths):
                    name = shard_name(index)
                    shards.append({"file": name, "records": len(tally.lengths), "digest": digest})
                total += dataclasses.replace(tally, unused=[])
        if not shards:
            shutil.rmtree(self.place)
            raise _nothing(names, reasons, first)
        sources = [source | {"rows": total.rows[file]} for file, source in enumerate(manifest["sources"])]
        made = {
            "rows": total.rows.total(),
            "split": total.split,
            "cut": total.cut,
            "notes": dict(sorted(total.notes.items())),
            "unused": dict(sorted(reasons.items())),
        }
        write_index(
            inside,
            lengths=total.lengths,
            counts=total.counts,
            shards=shards,
            manifest=made | dict(manifest) | {"sources": sources},
        )
        for file in inside.iterdir():
            _sync(file)
        inside.rename(self.directory)
        shutil.rmtree(self.place)

    def _side(self, index: int) -> pathlib.Path:
        return self.place / f"shard-{index:05d}.npz"


def clear_leftover(directory: pathlib.Path) -> None:
    """Remove what remains of DIR.partial if a run was killed right after it had given DIR its name."""
    place = _beside(directory)
    if (place / ORIGIN).exists() and not (place / "records").exists():
        shutil.rmtree(place)


@contextlib.contextmanager
def writing(place: pathlib.Path) -> Iterator[None]:
    """Let what is done inside fail with a UserError if the disk refuses."""
    try:
        yield
    # ArrayRecord reports the disk's refusal as a RuntimeError.
    except (OSError, RuntimeError) as fault:
        raise UserError(f"Cannot write to {place}: {fault}. Once it can be written, {CONTINUES}.") from fault


def _beside(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f"{directory.name}.partial")


def _lock(lock: int, place: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"Another process writes to {place}; wait for it, or name another output.") from None


def _agree(place: pathlib.Path, wanted: dict[str, Any], *, cut: dict[str, int]) -> None:
    """Note the origin in a fresh folder; in one that is there already it must be the same."""
    file = place / ORIGIN
    if not file.exists():
        with writing(place):
            _write_whole(file, json.dumps(wanted | {"cut": cut}, indent=2).encode())
        return
    found = json.loads(file.read_text("utf-8"))
    if found["cut"] != cut:
        said = [f"how files are cut (then {found['cut']}, now {cut})"]
    else:
        said = differences(found, wanted)
    if said:
        raise UserError(
            f"{place} is the beginning of other records: {'; '.join(said)} changed. Delete it to begin anew, or "
            "name another output."
        )


def _write_whole(file: pathlib.Path, content: bytes) -> None:
    """The file has all of its content or does not exist."""
    scratch = file.with_suffix(".tmp")
    with scratch.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    scratch.replace(file)


def _sync(file: pathlib.Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _nothing(names: list[str], reasons: collections.Counter[str], first: dict[str, Any] | None) -> UserError:
    if first is None:
        return UserError(f"There are no rows in {', '.join(names)}.")
    counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return UserError(
        f"No row of {', '.join(names)} can be used: {counted}. The first: {first['file']}:{first['row']}, "
        f"{first['reason']}: {first['detail']}"
    )
