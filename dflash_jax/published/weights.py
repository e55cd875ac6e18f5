"""Fill a tree of abstract parameters from stored tensors, strictly and shard by shard; name a tree's parameters.

Every name, shape and dtype is checked first. Then one parameter after another is read, cast and put into its
shards, so that host memory holds no more than the largest of them.
"""

import dataclasses
import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from dflash_jax.errors import UserError
from dflash_jax.published.stored import FLOATS, Index, Stored

Bounds = tuple[tuple[int, int], ...]  # (start, stop) in every dimension
SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Place:
    """The parameter that a stored tensor belongs to, and the part of it that the tensor is; (): the whole."""

    name: str
    index: Index = ()


def same_name(name: str) -> Place:
    """The place of a tensor that is stored under its parameter's name."""
    return Place(name)


def names(state: nnx.State) -> dict[str, nnx.Variable]:
    """Parameters by their checkpoint name, which is their path in the tree."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def fill(
    abstract: nnx.State,
    tensors: Iterable[tuple[str, Stored]],
    *,
    shardings: nnx.State,
    source: str,
    place: Callable[[str], Place | None] = same_name,
    on_bytes: Callable[[int], object] | None = None,
) -> nnx.State:
    """A state like `abstract` with every value read from `tensors`, converted to the abstract dtype.

    place: where a stored name belongs, None for a tensor to leave out; on_bytes: told the stored size of each
    parameter once it is on its devices. Raises UserError before anything is read, listing at once every parameter
    or part that is missing or given more than once and every tensor that is unexpected, misshapen or not float.
    """
    wanted, where = names(abstract), names(shardings)
    found: dict[str, jax.Array] = {}
    for name, parts in _fitted(wanted, tensors, source=source, place=place).items():
        found[name] = _put(parts, wanted[name], where[name].get_value())
        if on_bytes is not None:
            on_bytes(sum(stored.size_bytes for _, stored in parts))
    flat = [(path, var.replace(found[".".join(map(str, path))])) for path, var in nnx.to_flat_state(abstract)]
    return nnx.from_flat_state(flat)


def _put(parts: list[tuple[Index, Stored]], variable: nnx.Variable, sharding: Sharding) -> jax.Array:
    """The variable's array; each device gets its piece, and devices with the same piece share one reading."""
    buffer = _pages(variable.shape, variable.dtype)
    _, first = parts[0]
    stored_whole = first.shape == buffer.shape
    if not stored_whole:
        for index, stored in parts:
            buffer[index] = stored.read(())
    read: set[Bounds] = set()

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = _bounds(index or (), buffer.shape)
        index = tuple(itertools.starmap(slice, bounds))
        if stored_whole and bounds not in read:
            buffer[index] = first.read(index)
            read.add(bounds)
        return buffer[index]

    # Copies to devices are asynchronous: without waiting, those of many parameters would be in memory at once.
    return jax.block_until_ready(jax.make_array_from_callback(buffer.shape, sharding, piece))


def _pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in memory pages of its own.

    They go back to the system at once, while buffers in the heap leave holes between the arrays of CPU devices.
    CPU devices use what begins at a page as it is, all copies of a parameter in the same memory.
    """
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray(shape, dtype, buffer=pages)


def _fitted(
    wanted: Mapping[str, nnx.Variable],
    tensors: Iterable[tuple[str, Stored]],
    *,
    source: str,
    place: Callable[[str], Place | None],
) -> dict[str, list[tuple[Index, Stored]]]:
    """The parts of every parameter, in the order of their first ones; UserError unless they are what is wanted."""
    fitted: dict[str, list[tuple[Index, Stored]]] = {}
    faults: list[str] = []
    for name, stored in tensors:
        target = place(name)
        if target is None:
            continue
        shape, expected = list(stored.shape), None
        if target.name in wanted:
            expected = _shape(target.index, wanted[target.name].shape)
        quantised = "" if stored.dtype in FLOATS else f" stored as {stored.dtype}: dequantise the model first"
        if expected is None:
            faults.append(f"unexpected {name} {shape}{quantised}")
            continue
        if quantised:
            faults.append(f"{name} is{quantised}")
        elif shape != expected:
            faults.append(f"{name} has shape {shape}, expected {expected}")
        fitted.setdefault(target.name, []).append((target.index, stored))
    for name, variable in sorted(wanted.items()):
        faults += _uncovered(name, variable.shape, [index for index, _ in fitted.get(name, [])])
    if faults:
        shown = "; ".join(faults[:SHOWN]) + (f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else "")
        raise UserError(f"{source}: {len(faults)} tensors do not fit the model: {shown}")
    return fitted


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    whole = (slice(None),) * (len(shape) - len(index))
    return tuple(
        (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
        for part, size in zip(index + whole, shape, strict=True)
    )


def _shape(index: Index, shape: tuple[int, ...]) -> list[int] | None:
    """The shape of a part, None where a parameter of this shape has no such part."""
    try:
        return list(np.broadcast_to(np.int8(0), shape)[index].shape)
    except IndexError:
        return None


def _uncovered(name: str, shape: tuple[int, ...], given: list[Index]) -> list[str]:
    """A fault for each piece of a parameter that is not given exactly once."""
    parts = [_bounds(index, shape) for index in given]
    # The edges of all parts cut the parameter into cells; a cell is in a part as a whole or not at all.
    cuts = [sorted({0, size, *itertools.chain(*sides)}) for size, *sides in zip(shape, *parts, strict=True)]
    counts = np.zeros([len(cut) - 1 for cut in cuts], int)
    for part in parts:
        cells = (slice(cut.index(start), cut.index(stop)) for cut, (start, stop) in zip(cuts, part, strict=True))
        counts[tuple(cells)] += 1
    faults = []
    for cell in np.argwhere(counts != 1):
        sides = [(cut[at], cut[at + 1]) for cut, at in zip(cuts, cell, strict=True)]
        where = ", ".join(f"{start}:{stop}" for start, stop in sides)
        piece = name if counts.size == 1 else f"{name}[{where}]"
        faults.append(f"{piece} is given more than once" if counts[tuple(cell)] else f"missing {piece}")
    return faults
