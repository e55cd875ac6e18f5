"""A folder that appears whole or not at all, and never in the place of something else.

It is written under a hidden name beside its place, `.NAME.unfinished`, and renamed when all is well. The file
export.json in it says of which drafter it is an export; only such a folder is ever replaced.
"""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

from dflash_jax.errors import UserError

CONFIG, WEIGHTS, CARD, MARK = "config.json", "model.safetensors", "README.md", "export.json"
EXPORTER = "dflash_jax.export"


@contextlib.contextmanager
def whole_folder(to: pathlib.Path, *, drafter: str) -> Iterator[pathlib.Path]:
    """A folder to write into, which is at `to` once the block ends well, and gone if it does not.

    drafter: what tells one drafter from another. Raises UserError where `to` is taken, and where the disk does not
    take what is written.
    """
    refuse_taken(to, drafter=drafter)
    unfinished, previous = (to.with_name(f".{to.name}.{kind}") for kind in ("unfinished", "previous"))
    try:
        # Of a process that was killed.
        shutil.rmtree(unfinished, ignore_errors=True)
        if previous.exists() and not to.exists():
            previous.rename(to)
        shutil.rmtree(previous, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        mark = {"exporter": EXPORTER, "drafter": drafter}
        (unfinished / MARK).write_text(json.dumps(mark, indent=2) + "\n")
        if to.exists():
            to.rename(previous)
        unfinished.rename(to)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"to: {error.filename or to} cannot be written ({error.strerror}); nothing was kept"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_taken(to: pathlib.Path, *, drafter: str) -> None:
    """Raise UserError, saying what is there, unless `to` is free or an earlier export of the same drafter."""
    if not to.exists() and not to.is_symlink():
        return
    remedy = "choose another place, or remove it"
    if to.is_symlink() or not to.is_dir():
        raise UserError(f"to: {to} is a {'link' if to.is_symlink() else 'file'}; {remedy}")
    names = {item.name for item in to.iterdir()}
    if not names:
        return
    try:
        mark = json.loads((to / MARK).read_text())
        exported = mark["exporter"] == EXPORTER
    except (OSError, ValueError, KeyError, TypeError):
        mark, exported = {}, False
    if not exported:
        raise UserError(f"to: {to} was not exported here, and holds {_some(names)}; {remedy}")
    if more := names - {CONFIG, WEIGHTS, CARD, MARK}:
        raise UserError(f"to: {to} holds more than an export: {_some(more)}; {remedy}")
    if mark.get("drafter") != drafter:
        raise UserError(f"to: {to} is an export of another drafter ({mark.get('drafter')}); {remedy}")


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
