"""The `checkpoints/` folder of a run: which steps are whole, which one is meant, what becomes of damaged ones.

    checkpoints/400/state/           arrays, as Orbax writes them
    checkpoints/400/run.json         data position, fingerprint, held-out accept length
    checkpoints/400/checksums.json   size and SHA-256 of every other file

A step is written as 400.writing, and gets its name by one rename once its checksums are on disk: a folder with a
number for a name was whole. Whether it still is, the checksums tell.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.errors import UserError

STATE, RUN, CHECKSUMS = "state", "run.json", "checksums.json"
WRITING, REMOVING = ".writing", ".removing"

Fingerprint = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Position:
    """What belongs to the arrays of a step. cursor: batches of the plan consumed; fingerprint: what must not
    differ in the run that goes on; accept_len: held-out, tokens per verify step, None where it was not evaluated.
    """

    cursor: int
    fingerprint: Fingerprint
    accept_len: float | None


def saved(directory: pathlib.Path) -> list[int]:
    """The steps saved in a folder, ascending; none if it does not exist. Unfinished saves do not count."""
    if not directory.is_dir():
        return []
    return sorted(int(folder.name) for folder in directory.iterdir() if folder.name.isdecimal())


def position(directory: pathlib.Path, step: int) -> Position:
    """What belongs to a saved step. Raises UserError if it cannot be read."""
    file = directory / str(step) / RUN
    try:
        return Position(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as fault:
        raise UserError(f"{file} cannot be read ({fault}); choose another step") from None


def accept_lengths(directory: pathlib.Path) -> dict[int, float]:
    """The held-out accept length of every saved step that was evaluated, by ascending step."""
    found = {step: position(directory, step).accept_len for step in saved(directory)}
    return {step: length for step, length in found.items() if length is not None}


def seal(folder: pathlib.Path, belongs: Position, *, final: pathlib.Path) -> None:
    """Complete a folder whose arrays are on disk with its other files, and give it its final name."""
    _write(folder / RUN, dataclasses.asdict(belongs))
    found = {name: [size, digest] for name, size, digest in _digests(folder)}
    _write(folder / CHECKSUMS, found)
    _sync(folder)
    folder.rename(final)
    _sync(final.parent)


def damage(folder: pathlib.Path) -> str:
    """What is wrong with a saved step, "" if its files are, to the last bit, those that were written."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
        for name, (size, digest) in expected.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _digest(file) != digest:
                return f"{name} has other content than was written"
    except (OSError, ValueError, TypeError, AttributeError) as fault:
        return f"{CHECKSUMS} cannot be read ({fault})"
    return ""


def newest_whole(directory: pathlib.Path, warn: Callable[[str], object]) -> int:
    """The newest saved step whose files are as written, 0 if none was ever saved.

    Damaged ones after it are reported and set aside in a sibling folder. Raises UserError if all are damaged.
    """
    faults: dict[int, str] = {}
    for step in reversed(saved(directory)):
        fault = damage(directory / str(step))
        if not fault:
            for number, found in faults.items():
                place = _moved(directory, number, f"{directory.name}.damaged")
                warn(f"checkpoint {number} is damaged ({found}); set aside as {place}, going on from step {step}")
            return step
        faults[step] = fault
    if faults:
        listed = "; ".join(f"step {step}: {fault}" for step, fault in faults.items())
        raise UserError(
            f"resume: every checkpoint in {directory} is damaged ({listed}); choose another out=, or move that "
            "folder away to start from the beginning"
        )
    return 0


def chosen_step(directory: pathlib.Path, wanted: str, *, key: str) -> int:
    """The step saved in a `checkpoints/` folder that `latest`, `best` (held-out accept length) or a number means.

    Raises UserError, naming `key` and the saved steps, if there is no such step or its files are damaged.
    """
    steps = saved(directory)
    listed = ", ".join(map(str, steps)) or "there is none"
    latest = "auto, never" if key == "resume" else "latest"
    if wanted == "best" and steps:
        found = accept_lengths(directory)
        if not found:
            raise UserError(
                f"{key}: found 'best', but no step in {directory} was evaluated; name a saved step ({listed}), or "
                "train with data.heldout and eval.every"
            )
        step = max(found, key=lambda step: (found[step], step))
    elif wanted == latest and steps:
        step = steps[-1]
    elif wanted.isdecimal() and int(wanted) in steps:
        step = int(wanted)
    else:
        raise UserError(f"{key}: found {wanted!r}, allowed: {latest}, best, or a saved step ({listed})")
    if fault := damage(directory / str(step)):
        others = ", ".join(str(other) for other in steps if other != step) or "there is none"
        raise UserError(f"{key}: checkpoint {step} is damaged ({fault}); name another saved step ({others})")
    return step


def check_fingerprint(
    directory: pathlib.Path, step: int, fingerprint: Fingerprint, *, allowed: tuple[str, ...]
) -> None:
    """Raise UserError, naming both values, if the weights of a saved step have another meaning than `fingerprint`.

    allowed: keys that may differ.
    """
    before = position(directory, step).fingerprint
    for key, value in fingerprint.items():
        if before.get(key) != value and key not in allowed:
            raise UserError(
                f"resume: {key} is {value} now, but {directory} was trained with {before.get(key)}; restore the "
                f"old value, choose another out=, or say resume_allow=[{key}]"
            )


def set_aside(directory: pathlib.Path, *, after: int) -> None:
    """Move the steps past `after` to a sibling folder, so that training can branch off there."""
    for step in saved(directory):
        if step > after:
            _moved(directory, step, f"{directory.name}.after-step-{after}")


def prune(directory: pathlib.Path, *, keep: int, keep_every: int | None) -> None:
    """Remove all steps but the latest `keep`, the best of the evaluated ones, and multiples of `keep_every`."""
    steps, found = saved(directory), accept_lengths(directory)
    kept = {*steps[-keep:], *(step for step in steps if keep_every and step % keep_every == 0)}
    if found:
        kept.add(max(found, key=lambda step: (found[step], step)))
    for step in steps:
        if step not in kept:
            # A removal that is cut off must not leave what looks like a step.
            (directory / str(step)).rename(directory / f"{step}{REMOVING}")
    clean(directory)


def clean(directory: pathlib.Path) -> None:
    """Remove what saves and removals that were cut off have left. Not to be called while a save is in flight."""
    if directory.is_dir():
        for folder in directory.iterdir():
            if folder.suffix in (WRITING, REMOVING):
                shutil.rmtree(folder, ignore_errors=True)


def _moved(directory: pathlib.Path, step: int, sibling: str) -> pathlib.Path:
    place = directory.with_name(sibling) / str(step)
    place.parent.mkdir(exist_ok=True)
    while place.exists():
        place = place.with_name(f"{place.name}-again")
    (directory / str(step)).rename(place)
    return place


def _digests(folder: pathlib.Path) -> list[tuple[str, int, str]]:
    """(name, bytes, SHA-256) of every file in a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [(str(file.relative_to(folder)), file.stat().st_size, _digest(file)) for file in files]


def _digest(file: pathlib.Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    with file.open("w") as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: pathlib.Path) -> None:
    """Have a folder's own entries on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
