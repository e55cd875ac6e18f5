"""Filling a tree from stored tensors: values on a mesh, parts of parameters, and every fault."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh
from tiny_models import NO_RULES, one_device, stored

from dflash_jax.errors import UserError
from dflash_jax.published.stored import Stored
from dflash_jax.published.targets import Family, TargetFiles
from dflash_jax.published.weights import Place, fill, names
from dflash_jax.sharding import shardings

SPLIT = NO_RULES | {"mlp": "model"}
EXPERTS = {"experts": ("mlp", "vocab", "embed")}  # [expert, gate rows then up rows, input]


def eight_devices() -> Mesh:
    """Two copies, each over four devices."""
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def tree(dtype: str = "float32", axes: dict[str, tuple[str, ...]] | None = None, **shapes: tuple[int, ...]):
    """An abstract state with parameters of these names and shapes; the first axis is `mlp`, the others `embed`."""
    axes = axes or {}
    return nnx.from_flat_state(
        [
            (
                (name, "weight"),
                nnx.Param(
                    jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
                    axes=axes.get(name, ("mlp", *["embed"] * (len(shape) - 1))[: len(shape)]),
                ),
            )
            for name, shape in shapes.items()
        ]
    )


def filled(abstract, tensors, *, mesh: Mesh | None = None, rules=NO_RULES, **more) -> dict[str, jax.Array]:
    where = shardings(abstract, mesh or one_device(), rules)
    state = fill(abstract, tensors, shardings=where, source="folder", **more)
    return {name.removesuffix(".weight"): variable.get_value() for name, variable in names(state).items()}


def never(index):
    raise AssertionError("a tensor was read")


def unread(dtype: str = "F32", **shapes: tuple[int, ...]) -> list[tuple[str, Stored]]:
    return [(f"{name}.weight", Stored(shape, dtype, never)) for name, shape in shapes.items()]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kept", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_shard_holds_its_part_in_the_parameters_dtype(kept):
    arrays = {"a.weight": normal(8, 6).astype(kept), "b.weight": normal(12).astype(kept)}
    found = filled(tree("bfloat16", a=(8, 6), b=(12,)), stored(arrays), mesh=eight_devices(), rules=SPLIT)
    for name, value in found.items():
        exact = torch.from_numpy(arrays[f"{name}.weight"].astype(np.float64))
        expected = exact.to(torch.float32).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(np.asarray(value, np.float32), expected)
        assert value.dtype == jnp.bfloat16
        assert value.sharding.spec[0] == "model"
        assert len(value.addressable_shards) == 8
        for shard in value.addressable_shards:
            assert shard.data.shape[0] == len(expected) // 4
            np.testing.assert_array_equal(np.asarray(shard.data, np.float32), expected[shard.index])


def test_a_parameter_without_dimensions_is_filled():
    assert filled(tree(a=()), stored({"a.weight": np.array(3.5, np.float32)}))["a"] == 3.5


def test_copies_of_a_part_are_read_once_and_no_part_is_read_whole():
    array, read = normal(8, 6), []

    def reading(index):
        read.append(index)
        return array[index]

    a = tree(a=(8, 6))
    found = filled(a, [("a.weight", Stored((8, 6), "F32", reading))], mesh=eight_devices(), rules=SPLIT)
    np.testing.assert_array_equal(found["a"], array)
    assert sorted(rows.start for rows, _ in read) == [0, 2, 4, 6]
    read.clear()
    filled(a, [("a.weight", Stored((8, 6), "F32", reading))], mesh=eight_devices())
    assert len(read) == 1


def test_bytes_are_told_as_they_are_stored():
    arrays = {"a.weight": np.ones((4, 3), ml_dtypes.bfloat16), "b.weight": np.ones(5), "c.weight": np.ones(7)}
    told: list[int] = []
    filled(
        tree(a=(4, 3), b=(5,)),
        stored(arrays),
        place=lambda name: None if name[0] == "c" else Place(name),
        on_bytes=told.append,
    )
    assert told == [4 * 3 * 2, 5 * 8]


# Parts.


def expert_place(name: str) -> Place:
    """``7.up`` -> the upper rows of expert 7."""
    expert, _, projection = name.partition(".")
    return Place("experts.weight", (int(expert), slice(0, 2) if projection == "gate" else slice(2, 4)))


def expert_arrays(count: int = 4) -> dict[str, np.ndarray]:
    pairs = itertools.product(range(count), ("gate", "up"))
    return {f"{expert}.{projection}": normal(2, 3, seed=n) for n, (expert, projection) in enumerate(pairs)}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rules", [SPLIT, NO_RULES], ids=["sharded", "replicated"])
def test_a_parameter_is_put_together_from_its_parts(order, rules):
    arrays = expert_arrays()
    expected = np.stack([np.concatenate([arrays[f"{e}.gate"], arrays[f"{e}.up"]]) for e in range(4)])
    found = filled(
        tree("bfloat16", EXPERTS, experts=(4, 4, 3)),
        list(stored(arrays))[::order],
        mesh=eight_devices(),
        rules=rules,
        place=expert_place,
    )["experts"]
    expected = torch.from_numpy(expected).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data, np.float32), expected[shard.index])


def test_a_single_expert_is_a_part_too():
    arrays = {name: array for name, array in expert_arrays().items() if name[0] == "0"}
    found = filled(tree(axes=EXPERTS, experts=(1, 4, 3)), stored(arrays), place=expert_place)["experts"]
    np.testing.assert_array_equal(found[0], np.concatenate([arrays["0.gate"], arrays["0.up"]]))


# Faults, none of which may come after something was read.


def refused(abstract, tensors, **more) -> str:
    with pytest.raises(UserError) as raised:
        filled(abstract, tensors, **more)
    return str(raised.value)


def test_every_fault_is_named_at_once_and_nothing_is_read():
    tensors = unread(a=(2, 3), e=(4, 4), f=(2,)) + unread("F8_E4M3", c=(4,)) + unread("I32", q=(7,))
    message = refused(tree(a=(3, 2), b=(1,), c=(4,), e=(4, 4)), [*tensors, *unread(e=(4, 4))])
    assert message.startswith("folder: 6 tensors do not fit the model: ")
    assert set(message.split(": ", 2)[2].split("; ")) == {
        "a.weight has shape [2, 3], expected [3, 2]",
        "unexpected f.weight [2]",
        "c.weight is stored as F8_E4M3: dequantise the model first",
        "unexpected q.weight [7] stored as I32: dequantise the model first",
        "missing b.weight",
        "e.weight is given more than once",
    }


def test_a_long_list_of_faults_is_cut_and_counted():
    message = refused(tree(a=(1,)), unread(**{f"x{n}": (1,) for n in range(20)}))
    assert "21 tensors" in message
    assert message.count("unexpected") == 8
    assert message.endswith("; and 13 more")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"2.up": None}, "missing experts.weight[2:3, 2:4, 0:3]"),
        ({"2.up": (2, 4)}, "2.up has shape [2, 4], expected [2, 3]"),
        ({"4.up": (2, 3)}, "unexpected 4.up [2, 3]"),
        ({"02.up": (2, 3)}, "experts.weight[2:3, 2:4, 0:3] is given more than once"),
        ({"whole": (4, 4, 3)}, "experts.weight[0:1, 0:2, 0:3] is given more than once"),
    ],
)
def test_every_part_belongs_once(change, fault):
    shapes = {name: array.shape for name, array in expert_arrays().items()} | change
    tensors = [(name, Stored(shape, "F32", never)) for name, shape in shapes.items() if shape]

    def place(name: str) -> Place:
        return Place("experts.weight") if name == "whole" else expert_place(name)

    message = refused(tree(axes=EXPERTS, experts=(4, 4, 3)), tensors, place=place)
    assert fault in message
    assert ("1 tensors" in message) == ("whole" not in change)


def test_what_has_no_place_is_left_out_whatever_it_is():
    tensors = [*stored({"a.weight": normal(2)}), *unread("U8", vision=(3,))]
    found = filled(tree(a=(2,)), tensors, place=lambda name: None if "vision" in name else Place(name))
    assert found.keys() == {"a"}


# A target.


class Gated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rate = nnx.Param(jnp.zeros(3), axes=("heads",), keep_dtype=True)
        self.weight = nnx.Param(jnp.zeros((3, 2)), axes=("heads", "embed"))


def test_a_parameter_may_keep_its_dtype(monkeypatch, tmp_path):
    family = Family(lambda fields: None, lambda config, rngs: Gated(rngs))  # type: ignore[arg-type]
    monkeypatch.setattr(TargetFiles, "family", family)
    _, abstract = TargetFiles(tmp_path, {}, lambda: iter(())).abstract(jnp.dtype("bfloat16"))
    found = names(abstract)
    assert {name: str(variable.dtype) for name, variable in found.items()} == {
        "rate": "float32",
        "weight": "bfloat16",
    }
    assert found["rate"].get_metadata()["axes"] == ("heads",)


def test_a_tied_targets_bytes_add_up_without_the_repeated_head(tied_llama):
    files = TargetFiles.open(tied_llama.path)
    size = sum(parameter.numel() * 4 for parameter in tied_llama.torch_model.parameters())
    assert files.weight_bytes == size
    _, abstract = files.abstract(jnp.dtype("float32"))
    told: list[int] = []
    files.load(abstract, shardings(abstract, one_device(), NO_RULES), on_bytes=told.append)
    assert sum(told) == size
    again = TargetFiles(files.path, files.fields, lambda: iter([*files.tensors(), *unread(lm_head=(9,))]))
    assert again.weight_bytes == size
