"""Every recipe and mesh file of the repository parses, and the layouts of meshes add up."""

import math
import pathlib

from dflash_jax.arguments import build, read_yaml
from dflash_jax.config import MeshLayout, Recipe

ROOT = pathlib.Path(__file__).parents[1]


def layout_faults(layout: MeshLayout) -> list[str]:
    faults = []
    for name, part in (("target", layout.target), ("drafter", layout.drafter)):
        if math.prod(part.axes.values()) != len(set(part.devices)):
            faults.append(f"{name}.axes {part.axes} do not multiply to devices {part.devices}")
        if outside := [index for index in part.devices if not 0 <= index < layout.device_count]:
            faults.append(f"{name}.devices {outside} lie outside device_count {layout.device_count}")
    return faults


def test_every_recipe_parses_and_names_a_mesh_that_exists():
    files = sorted((ROOT / "recipes").glob("*.yaml"))
    assert files
    for file in files:
        recipe = build(Recipe, [("a user", {"data": {"train": "x"}}), (str(file), read_yaml(file))])
        assert (ROOT / "meshes" / f"{recipe.mesh}.yaml").is_file(), f"{file}: mesh {recipe.mesh}"


def test_every_mesh_file_parses_and_adds_up():
    files = sorted((ROOT / "meshes").glob("*.yaml"))
    assert files
    for file in files:
        assert layout_faults(build(MeshLayout, [(str(file), read_yaml(file))])) == [], file


def test_a_layout_that_does_not_add_up_is_named():
    part = {"devices": [0, 1], "axes": {"data": 2}}
    wrong = {"devices": [1, 2], "axes": {"data": 3}}
    layout = build(MeshLayout, [("test", {"device_count": 2, "target": part, "drafter": wrong})])
    assert [fault.split()[0] for fault in layout_faults(layout)] == ["drafter.axes", "drafter.devices"]
