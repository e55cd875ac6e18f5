"""The two device meshes of a run, from a layout file: where the target runs and where the drafter is trained."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dflash_jax.config import MeshLayout, MeshPart
from dflash_jax.errors import UserError
from dflash_jax.sharding import Rules

# Every name that a weight gives to one of its dimensions (models/).
WEIGHT_AXES = (
    *("embed", "mlp", "heads", "kv_heads", "head", "vocab", "features"),
    *("experts", "expert_mlp", "router", "delta_channels", "delta_values", "delta_heads", "single", "kernel"),
)


@dataclasses.dataclass(frozen=True)
class Meshes:
    """target and drafter: meshes with Auto axes, `data` among them; rules: weight axis -> mesh axis of each."""

    target: Mesh
    drafter: Mesh
    target_rules: Rules
    drafter_rules: Rules


def prepare_devices(layout: MeshLayout) -> None:
    """Switch on what the layout needs; must come before anything asks jax for its devices."""
    if layout.platform == "cpu":
        wanted = {"jax_platforms": "cpu", "jax_num_cpu_devices": layout.device_count}
        for name, value in wanted.items():
            if getattr(jax.config, name) != value:  # jax refuses even an equal value once it has started
                jax.config.update(name, value)


def make_meshes(layout: MeshLayout, name: str) -> Meshes:
    """The meshes of a layout. Raises UserError, naming the layout's keys, if they do not fit the devices."""
    devices = jax.devices()
    if len(devices) < layout.device_count:
        raise UserError(
            f"mesh {name}: device_count is {layout.device_count} but jax finds {len(devices)} "
            f"{devices[0].platform} devices; choose another mesh= or make one for this machine"
        )
    target = _mesh(layout.target, devices[: layout.device_count], f"mesh {name}: target")
    drafter = _mesh(layout.drafter, devices[: layout.device_count], f"mesh {name}: drafter")
    return Meshes(
        target,
        drafter,
        _rules(layout.target, f"mesh {name}: target"),
        _rules(layout.drafter, f"mesh {name}: drafter"),
    )


def _mesh(part: MeshPart, devices: list, where: str) -> Mesh:
    if outside := [index for index in part.devices if not 0 <= index < len(devices)]:
        raise UserError(f"{where}.devices names device {outside[0]}, allowed: 0 to {len(devices) - 1}")
    if len(set(part.devices)) != len(part.devices):
        raise UserError(f"{where}.devices names a device twice: {part.devices}")
    if "data" not in part.axes:
        raise UserError(f"{where}.axes needs an axis `data` (size 1 if rows are not split), found {part.axes}")
    sizes = tuple(part.axes.values())
    if min(sizes) < 1 or np.prod(sizes) != len(part.devices):
        raise UserError(f"{where}.axes {part.axes} do not multiply to its {len(part.devices)} devices")
    grid = np.array([devices[index] for index in part.devices]).reshape(sizes)
    return Mesh(grid, tuple(part.axes), axis_types=(AxisType.Auto,) * len(sizes))


def _rules(part: MeshPart, where: str) -> Rules:
    for axis, place in part.rules.items():
        if axis not in WEIGHT_AXES:
            raise UserError(f"{where}.rules: unknown weight axis {axis!r}; known: {', '.join(WEIGHT_AXES)}")
        if place not in part.axes:
            raise UserError(f"{where}.rules.{axis}: no mesh axis {place!r}; the mesh has {', '.join(part.axes)}")
    return {axis: part.rules.get(axis) for axis in WEIGHT_AXES}
