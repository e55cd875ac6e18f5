"""From named axes of weights to places on a mesh; the only code that knows both.

A weight names its dimensions (``axes=("mlp", "embed")``), a mesh file maps those names to mesh axes, and
`shardings` joins the two for a whole tree. Leaves without names (counters, optimizer scalars) are replicated.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.errors import UserError

ROW_AXES = ("data", "fsdp")
Rules = Mapping[str, str | None]


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device of the mesh."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The first axis of an array (rows of a batch) split over the mesh's axes `data` and `fsdp`."""
    return NamedSharding(mesh, P(_row_axes(mesh)))


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in _row_axes(mesh))


def _row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    # Devices along `fsdp` hold parts of the weights, and gather them for rows of their own.
    return tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """A tree like `tree` with one NamedSharding per leaf.

    Raises UserError, with the parameter's path, for a name without a rule, a mesh axis used twice and a
    dimension that its mesh axis does not divide.
    """

    def one(path, leaf):
        if isinstance(leaf, nnx.Variable):
            axes = leaf.get_metadata().get("axes", ())
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            return leaf.replace(_sharding(where, leaf.shape, axes, mesh, rules))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _sharding(where: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh, rules: Rules) -> NamedSharding:
    if unknown := [axis for axis in axes if axis not in rules]:
        raise UserError(
            f"mesh rules: no rule for axis {unknown[0]!r} of {where}; rules name {', '.join(sorted(rules))}"
        )
    spec = P(*(rules[axis] for axis in axes))
    used = [name for name in spec if name]
    if len(used) != len(set(used)):
        raise UserError(f"mesh rules: axes {axes} of {where} use a mesh axis twice: {spec}")
    for size, name in zip(shape, spec, strict=False):
        if name and size % mesh.shape[name]:
            raise UserError(
                f"mesh rules: {where} of shape {shape} does not divide over {mesh.shape[name]} devices "
                f"of mesh axis {name!r}"
            )
    return NamedSharding(mesh, spec)


def materialise(make: Callable[[], Any], mesh: Mesh, rules: Rules) -> Any:
    """Run `make` under jit with every leaf of its result born in its shards."""
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), mesh, rules))()
