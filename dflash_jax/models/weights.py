"""Fill a tree of abstract parameters from named tensors, strictly, and name a tree's parameters back."""

from collections.abc import Iterable

import jax
import numpy as np
from flax import nnx

from dflash_jax.errors import UserError


def names(state: nnx.State) -> dict[str, nnx.Variable]:
    """Parameters by their checkpoint name, which is their path in the tree."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def fill(
    abstract: nnx.State,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    shardings: nnx.State,
    source: str,
    repeated: tuple[str, ...] = (),
) -> nnx.State:
    """A state like `abstract` with every value read from `tensors`, each put straight into its shards.

    Floating tensors are converted to the abstract dtype. Raises UserError that lists every missing,
    unexpected and wrongly shaped tensor at once; names in `repeated` are skipped.
    """
    wanted, places = names(abstract), names(shardings)
    found: dict[str, jax.Array] = {}
    faults: list[str] = []
    for name, array in tensors:
        if name in repeated and name not in wanted:
            continue
        if name not in wanted:
            faults.append(f"unexpected {name} {list(array.shape)}")
        elif array.shape != wanted[name].shape:
            faults.append(f"{name} has shape {list(array.shape)}, expected {list(wanted[name].shape)}")
            found.setdefault(name, jax.numpy.zeros(()))
        else:
            value = np.ascontiguousarray(array, dtype=wanted[name].dtype)
            found[name] = jax.device_put(value, places[name].get_value())
    faults += [f"missing {name}" for name in sorted(wanted.keys() - found.keys())]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise UserError(f"{source}: {len(faults)} tensors do not fit the model: {shown}")
    flat = [(path, var.replace(found[".".join(map(str, path))])) for path, var in nnx.to_flat_state(abstract)]
    return nnx.from_flat_state(flat)
