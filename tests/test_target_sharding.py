"""Targets on meshes with data, fsdp and model axes: the shardings of a real 27 B model, and equal results."""

import collections
import dataclasses
import functools
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tiny_models import GOLDEN, NO_RULES, load_target, quick
from tiny_targets import FAMILIES, VOCAB, save_target

from dflash_jax.decode.generate import generate
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import names
from dflash_jax.sharding import replicated, row_shards, rows, shardings

SPLIT = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "vocab", "experts", "delta_heads", "delta_channels", "delta_values"), "model"
)
RULES = NO_RULES | SPLIT | {"embed": "fsdp"}


@pytest.fixture(scope="module")
def flagship(tmp_path_factory) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure, shapes and dtypes of Qwen3.6-27B's text model."""
    path = tmp_path_factory.mktemp("flagship")
    (path / "config.json").write_text((GOLDEN / "qwen3.6-27b.config.json").read_text())
    return TargetFiles.open(path).abstract(jnp.dtype("bfloat16"))


@pytest.mark.slow
def test_the_flagship_compiles_in_two_minutes(flagship):
    graph, state = flagship
    taps, text = (1, 16, 31, 46, 61), jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def whole(state, tokens, positions, segments):
        return nnx.merge(graph, state).hidden(tokens, positions, segment_ids=segments, taps=taps)

    def verified(state, tokens, cache):
        features, last, step = nnx.merge(graph, state).step(tokens, cache, taps=taps)
        return features, last, step.keep(jnp.ones(1, jnp.int32))

    cache = jax.eval_shape(lambda state: nnx.merge(graph, state).empty_cache(1, capacity=4096), state)
    block = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    for program, arguments in ((whole, (text, text, text)), (verified, (block, cache))):
        start = time.perf_counter()
        jax.jit(program).lower(state, *arguments).compile()
        seconds = time.perf_counter() - start
        print(f"{program.__name__}: traced and compiled in {seconds:.0f} s")
        assert seconds < 120


def test_the_flagship_has_the_tensors_of_its_checkpoint(flagship):
    _, abstract = flagship
    shapes = {name: variable.shape for name, variable in names(abstract).items()}
    assert len(shapes) == 851
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(26.9e9, rel=1e-3)
    assert shapes["model.layers.62.linear_attn.in_proj_qkv.weight"] == (2 * 16 * 128 + 48 * 128, 5120)
    assert shapes["model.layers.63.self_attn.q_proj.weight"] == (2 * 24 * 256, 5120)
    kept = {name.split(".")[-1] for name, leaf in names(abstract).items() if leaf.dtype == jnp.float32}
    assert kept == {"A_log"}


def test_the_flagships_shardings_are_the_golden_table(flagship):
    mesh = AbstractMesh((3, 2, 2), ("data", "fsdp", "model"))
    found = collections.defaultdict(collections.Counter)
    for name, variable in names(shardings(flagship[1], mesh, RULES)).items():
        found[re.sub(r"layers\.\d+\.", "layers.*.", name)][variable.get_value().spec] += 1
    table = json.loads((GOLDEN / "qwen3.6-27b.shardings.json").read_text())
    assert {name: {P(*spec): count} for name, (count, *spec) in table.items()} == dict(found)


def test_rows_are_split_over_data_and_fsdp():
    mesh = AbstractMesh((3, 2, 2), ("data", "fsdp", "model"))
    assert rows(mesh).spec == P(("data", "fsdp"))
    assert row_shards(mesh) == 6
    assert row_shards(AbstractMesh((3,), ("data",))) == 3


@dataclasses.dataclass(frozen=True)
class Placed:
    """A target on one device and the same on eight, and where rows go on those."""

    whole: object
    split: object
    mesh: Mesh


@pytest.fixture(scope="module", params=FAMILIES)
def placed(request, tmp_path_factory):
    sizes = {"num_experts": 4} if "moe" in request.param else {}
    path = save_target(tmp_path_factory.mktemp("split") / request.param, request.param, **sizes).path
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    return Placed(load_target(path), load_target(path, mesh, RULES), mesh)


def test_no_device_holds_a_split_weight_whole(placed):
    embedding = placed.split.embedding.get_value()
    assert embedding.sharding.spec == P("model", "fsdp")
    assert embedding.addressable_shards[0].data.shape == (VOCAB // 2, 36 // 2)


def test_whole_rows_on_eight_devices_equal_those_on_one(placed):
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (4, 23)).astype(np.int32)
    segments = np.sort(random.integers(1, 3, (4, 23)), axis=1).astype(np.int32)
    positions = np.broadcast_to(np.arange(23, dtype=np.int32), (4, 23))
    run = functools.partial(lambda taps, target, t, p, s: target.hidden(t, p, segment_ids=s, taps=taps), (0, 1))
    everywhere = rows(placed.mesh)
    split = quick(run, in_shardings=(None, everywhere, everywhere, everywhere), out_shardings=everywhere)
    found = split(placed.split, tokens, positions, segments)
    assert found[0].sharding.spec == P(("data", "fsdp"))
    for ours, one in zip(found, quick(run)(placed.whole, tokens, positions, segments), strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-5, atol=2e-5)


def test_greedy_tokens_on_eight_devices_equal_those_on_one(placed):
    lengths = np.array([9, 4, 6, 1], np.int32)
    prompts = np.random.default_rng(2).integers(0, VOCAB, (4, 9)).astype(np.int32)
    decode = functools.partial(generate, stop=(VOCAB,), max_new_tokens=8)
    place = replicated(placed.mesh)
    found = quick(decode)(placed.split, *jax.device_put((prompts, lengths), place))
    np.testing.assert_array_equal(found.tokens, quick(decode)(placed.whole, prompts, lengths).tokens)
