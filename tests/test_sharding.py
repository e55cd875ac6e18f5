"""Names of weight axes to places on a mesh, and a split target against a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import NO_RULES, drafter_sizes, load_target

from dflash_jax.config import MeshLayout, MeshPart
from dflash_jax.errors import UserError
from dflash_jax.mesh import make_meshes
from dflash_jax.models.drafter import Drafter
from dflash_jax.published.weights import names
from dflash_jax.sharding import materialise, replicated, rows, shardings

MESH = AbstractMesh((3, 2), ("data", "model"))
RULES = NO_RULES | {"mlp": "model", "heads": "model", "kv_heads": "model", "vocab": "model"}


def abstract_drafter(**changes):
    return nnx.state(nnx.eval_shape(lambda: Drafter(drafter_sizes(**changes), nnx.Rngs(0))))


def test_shardings_of_a_drafter():
    found = {
        name: variable.get_value().spec
        for name, variable in names(shardings(abstract_drafter(), MESH, RULES)).items()
    }
    layer = {
        "input_layernorm.weight": P(None),
        "mlp.down_proj.weight": P(None, "model"),
        "mlp.gate_proj.weight": P("model", None),
        "mlp.up_proj.weight": P("model", None),
        "post_attention_layernorm.weight": P(None),
        "self_attn.k_norm.weight": P(None),
        "self_attn.k_proj.weight": P("model", None),
        "self_attn.o_proj.weight": P(None, "model"),
        "self_attn.q_norm.weight": P(None),
        "self_attn.q_proj.weight": P("model", None),
        "self_attn.v_proj.weight": P("model", None),
    }
    assert found == {
        "fc.weight": P(None, None),
        "hidden_norm.weight": P(None),
        "norm.weight": P(None),
        **{f"layers.{index}.{name}": spec for index in range(2) for name, spec in layer.items()},
    }


def test_leaves_without_names_are_replicated():
    tree = {"count": jax.ShapeDtypeStruct((), jnp.int32), "table": jax.ShapeDtypeStruct((7, 5), jnp.float32)}
    places = shardings(tree, MESH, RULES)
    assert places == {"count": NamedSharding(MESH, P()), "table": NamedSharding(MESH, P())}


def test_an_axis_without_a_rule_is_named_with_its_parameter():
    rules = {name: place for name, place in RULES.items() if name != "features"}
    with pytest.raises(UserError, match=r"no rule for axis 'features' of fc\.weight; rules name delta.*, embed, "):
        shardings(abstract_drafter(), MESH, rules)


def test_a_mesh_axis_used_twice_is_refused():
    with pytest.raises(
        UserError, match=r"\('embed', 'mlp'\) of layers\.0\.mlp\.down_proj\.weight use a mesh axis twice"
    ):
        shardings(abstract_drafter(), MESH, NO_RULES | {"mlp": "model", "embed": "model"})


def test_a_dimension_that_does_not_divide_is_refused():
    with pytest.raises(
        UserError, match=r"layers\.0\.mlp\.down_proj\.weight of shape \(36, 41\) does not divide over 2 .*'model'"
    ):
        shardings(abstract_drafter(mlp_width=41), MESH, RULES)


def layout(target, drafter=None, *, count=8):
    return MeshLayout(target=target, drafter=drafter or MeshPart([0], {"data": 1}, {}), device_count=count)


def test_meshes_of_a_layout():
    meshes = make_meshes(
        layout(
            MeshPart([5, 4, 3, 2, 1, 0], {"data": 3, "model": 2}, {"mlp": "model"}), MeshPart([6], {"data": 1}, {})
        ),
        "mine",
    )
    assert [[device.id for device in line] for line in meshes.target.devices] == [[5, 4], [3, 2], [1, 0]]
    assert meshes.target.axis_names == ("data", "model")
    assert [device.id for device in meshes.drafter.devices.flat] == [6]
    assert meshes.target_rules == NO_RULES | {"mlp": "model"}
    assert meshes.drafter_rules == NO_RULES


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (layout(MeshPart([0], {"data": 1}, {}), count=9), "device_count is 9 but jax finds 8 cpu devices"),
        (layout(MeshPart([0, 8], {"data": 2}, {})), r"target\.devices names device 8, allowed: 0 to 7"),
        (layout(MeshPart([-1], {"data": 1}, {})), r"target\.devices names device -1"),
        (layout(MeshPart([0, 3], {"data": 2}, {}), count=3), r"target\.devices names device 3, allowed: 0 to 2"),
        (layout(MeshPart([1, 1], {"data": 2}, {})), r"target\.devices names a device twice"),
        (layout(MeshPart([0, 1], {"model": 2}, {})), r"target\.axes needs an axis `data`"),
        (layout(MeshPart([0, 1], {"data": 3}, {})), r"target\.axes .* do not multiply to its 2 devices"),
        (layout(MeshPart([0], {"data": 1, "model": 0}, {})), r"target\.axes .* do not multiply to its 1 devices"),
        (layout(MeshPart([0], {"data": 1}, {"mpl": "data"})), r"target\.rules: unknown weight axis 'mpl'"),
        (layout(MeshPart([0], {"data": 1}, {"mlp": "model"})), r"target\.rules\.mlp: no mesh axis 'model'"),
        (
            layout(MeshPart([0], {"data": 1}, {}), MeshPart([0], {"rows": 1}, {})),
            r"drafter\.axes needs an axis `data`",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_its_key(found, named):
    with pytest.raises(UserError, match=rf"mesh mine: {named}"):
        make_meshes(found, "mine")


@pytest.fixture(scope="module")
def six_devices():
    return make_meshes(layout(MeshPart([0, 1, 2, 3, 4, 5], {"data": 3, "model": 2}, {})), "six").target


@pytest.mark.parametrize("family", ["plain_llama", "tied_llama"])
def test_a_target_split_over_six_devices_gives_the_features_of_one(request, six_devices, family):
    path = request.getfixturevalue(family).path
    whole, split = load_target(path), load_target(path, six_devices, RULES)
    weight = split.model.layers[0].mlp.gate_proj.weight[...]
    assert weight.sharding == NamedSharding(six_devices, P("model", None))
    assert {shard.data.shape for shard in weight.addressable_shards} == {(26, 36)}
    np.testing.assert_array_equal(weight, whole.model.layers[0].mlp.gate_proj.weight[...])

    random = np.random.default_rng(0)
    tokens = random.integers(0, 66, (6, 12)).astype(np.int32)
    segments = np.ones((6, 12), np.int32)
    segments[4, 7:] = 0
    positions = np.broadcast_to(np.arange(12), (6, 12))

    @jax.jit
    def run(target, tokens, positions, segments):
        features, last = target.hidden(tokens, positions, segment_ids=segments, taps=(0, 1))
        return features, target.logits(last)

    expected = run(whole, tokens, positions, segments)
    placed = jax.device_put((tokens, positions, segments), rows(six_devices))
    found = run(split, *placed)
    assert found[0].sharding.is_equivalent_to(rows(six_devices), 3)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4)


def test_leaves_are_made_in_their_shards(six_devices):
    rules = NO_RULES | {"vocab": "model"}

    def make():
        return {
            "table": nnx.Param(jnp.arange(12.0).reshape(4, 3), axes=("vocab", "embed")),
            "count": jnp.zeros(()),
        }

    made = materialise(make, six_devices, rules)
    assert made["table"].get_value().sharding == NamedSharding(six_devices, P("model", None))
    assert made["count"].sharding.is_equivalent_to(replicated(six_devices), 0)
    np.testing.assert_array_equal(made["table"][...], np.arange(12.0).reshape(4, 3))
