"""The sparse MLP against transformers' two, and its independence of company and of devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.errors import UserError
from dflash_jax.models.experts import LANES, ExpertsConfig, SparseMLP, block_length, route
from dflash_jax.published.weights import names
from dflash_jax.sharding import shardings

WIDTH, MLP_WIDTH, SHARED_WIDTH, TOKENS = 20, 6, 14, 37
AXES = ("embed", "mlp", "experts", "expert_mlp", "router")
FAMILIES = ("qwen3_moe", "qwen3_moe_normalised", "qwen3_5_moe")


def random_mlp(seed, **changes):
    """(graph, state) of a sparse MLP whose every parameter is random."""
    sizes = {"width": WIDTH, "mlp_width": MLP_WIDTH, "normalised": True, "shared_mlp_width": None}
    config = ExpertsConfig(**(sizes | changes))
    graph, abstract = nnx.split(nnx.eval_shape(lambda: SparseMLP(config, nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    def away(leaf):
        return jnp.asarray(1.5 * random.standard_normal(leaf.shape) / leaf.shape[-1] ** 0.5, jnp.float32)

    return graph, jax.tree.map(away, abstract)


def random_tokens(seed, *shape, crowded=False):
    """float32 [*shape]; a part that all tokens share, if crowded, sends most of them to the same experts."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) + 2 * random.standard_normal(shape[-1]) * crowded
    return x.astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def apply(graph, state, x):
    return nnx.merge(graph, state)(x)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


def torch_block(family, sizes):
    """transformers' block of a family, every parameter away from its start."""
    experts, chosen = sizes
    fields = {
        "hidden_size": WIDTH,
        "moe_intermediate_size": MLP_WIDTH,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "experts_implementation": "eager",
    }
    if family == "qwen3_5_moe":
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

        config = Qwen3_5MoeTextConfig(shared_expert_intermediate_size=SHARED_WIDTH, **fields)
        block = Qwen3_5MoeSparseMoeBlock(config)
    else:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=family.endswith("normalised"), **fields))
    draw = torch.Generator().manual_seed(experts)
    with torch.no_grad():
        for parameter in block.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return block


def same_weights(family, sizes):
    """transformers' block and (graph, state) of ours with the same weights under the same names."""
    block = torch_block(family, sizes)
    graph, state = random_mlp(
        0,
        experts=sizes[0],
        chosen=sizes[1],
        normalised=family != "qwen3_moe",
        shared_mlp_width=SHARED_WIDTH if family == "qwen3_5_moe" else None,
    )
    weights = {name: value.detach().numpy() for name, value in block.named_parameters()}
    ours = names(state)
    assert {name: value.shape for name, value in weights.items()} == {name: ours[name].shape for name in ours}
    flat = [(path, leaf.replace(jnp.asarray(weights[".".join(path)]))) for path, leaf in nnx.to_flat_state(state)]
    return block, graph, nnx.from_flat_state(flat)


def margins(block, x):
    """[B, S]: by how much the last chosen expert's logit is above the next one's, and the block's result."""
    with torch.no_grad():
        logits = torch.nn.functional.linear(torch.tensor(x), block.gate.weight).numpy()
        y = block(torch.tensor(x)).numpy()
    best = -np.sort(-logits, axis=-1)
    return best[..., block.gate.top_k - 1] - best[..., block.gate.top_k], y


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("sizes", [(5, 2), (8, 3)], ids=["5-2", "8-3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_transformers(family, sizes, crowded):
    block, graph, state = same_weights(family, sizes)
    x = random_tokens(11, 2, TOKENS, WIDTH, crowded=crowded)
    margin, expected = margins(block, x)
    # Of equally good experts the two libraries may choose different ones; no token here has such.
    assert margin.min() > 1e-4
    close(apply(graph, state, x), expected)


def test_crowded_tokens_need_several_blocks():
    block = torch_block("qwen3_moe", (8, 3))
    with torch.no_grad():
        _, _, chosen = block.gate(torch.tensor(random_tokens(11, 2, TOKENS, WIDTH, crowded=True)))
    fullest = np.bincount(chosen[:TOKENS].numpy().ravel()).max()
    assert fullest > 2 * block_length(TOKENS, 3, 8)


def test_bf16_follows_float32():
    block, graph, state = same_weights("qwen3_5_moe", (8, 3))
    x = jnp.asarray(random_tokens(12, 1, 200, WIDTH), jnp.bfloat16)
    margin, expected = margins(block, np.asarray(x, np.float32))
    clear = margin > 0.05
    assert clear.sum() > 100
    found = apply(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state), x)
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found, np.float32) - expected)[clear]
    assert error.max() < 0.03 * np.abs(expected).max()


def test_shares_by_hand():
    logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 3.0], [2.0, 2.0, 4.0, 2.0]]))
    chosen, shares = route(logits, 2, normalised=False)
    np.testing.assert_array_equal(chosen, [[1, 3], [2, 0]])  # of three equals the first
    np.testing.assert_allclose(shares, [[0.4, 0.3], [0.4, 0.2]], rtol=1e-6)
    chosen, shares = route(logits, 2, normalised=True)
    np.testing.assert_array_equal(chosen, [[1, 3], [2, 0]])
    np.testing.assert_allclose(shares, [[4 / 7, 3 / 7], [2 / 3, 1 / 3]], rtol=1e-6)


def test_experts_of_no_probability_are_chosen_last_and_once():
    chosen, shares = route(jnp.array([[0.0, -1e4, -2e4]]), 3, normalised=True)
    assert sorted(chosen[0].tolist()) == [0, 1, 2]
    np.testing.assert_array_equal(shares, [[1, 0, 0]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_nothing(dtype):
    """To the bit: whoever else is in the row, wherever in it the token stands, and whatever other rows hold."""
    graph, state = random_mlp(1, experts=8, chosen=3, shared_mlp_width=SHARED_WIDTH)
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    token = random_tokens(2, WIDTH)
    found = []
    for seed, (row, place) in enumerate([(0, 0), (0, 36), (1, 17), (1, 3), (0, 20)]):
        x = random_tokens(seed, 2, TOKENS, WIDTH, crowded=seed % 2 == 1)
        x[row, place] = token
        found.append(np.asarray(apply(graph, state, jnp.asarray(x, dtype)), np.float32)[row, place])
    assert np.abs(found[0]).max() > 0.1
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_any_number_of_leading_axes():
    graph, state = random_mlp(3, experts=5, chosen=2, shared_mlp_width=SHARED_WIDTH)
    x = random_tokens(3, 2, 3, 4, WIDTH)
    whole = apply(graph, state, x)
    assert whole.shape == x.shape
    close(apply(graph, state, x[1]), whole[1])
    close(apply(graph, state, x[1, 2, 3]), whole[1, 2, 3])


def on_devices(data, model, rules, experts=16, length=48):
    """One result on one device, the same split over data x model devices, and the split program's text."""
    graph, state = random_mlp(4, experts=experts, chosen=4, shared_mlp_width=16)
    x = random_tokens(5, 8, length, WIDTH)
    whole = np.asarray(apply(graph, state, x))
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = shardings(state, mesh, dict.fromkeys(AXES) | rules), NamedSharding(mesh, P("data"))
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x), in_shardings=places, out_shardings=places[1])
    compiled = run.lower(state, x).compile()
    split = compiled(*jax.device_put((state, x), places))
    return whole, np.asarray(split), compiled.as_text()


def exchanges(text):
    """(what it does, its shapes) of every exchange between devices in a compiled program."""
    pattern = r"= (\(?\S.*?) (all-\w+|collective-\w+|reduce-scatter|ragged-all-to-all)(?:-start)?\("
    return {(kind, tuple(re.findall(r"\w+\[[\d,]*\]", shape))) for shape, kind in re.findall(pattern, text)}


@pytest.mark.parametrize(("data", "model"), [(2, 4), (1, 8)])
def test_split_experts_stay_where_they_are(data, model):
    whole, split, text = on_devices(data, model, {"experts": "model", "mlp": "model"})
    close(split, whole)
    # The rows' sums over experts (and the shared expert's) once, and how many steps the longest queues take.
    sums = f"f32[{8 // data},48,{WIDTH}]"
    columns = f"s32[{16 // LANES}]"
    allowed = {("all-reduce", shape) for shape in [(sums,), (sums, sums), (columns,)]}
    assert exchanges(text) <= allowed
    assert exchanges(text) & {("all-reduce", (sums,)), ("all-reduce", (sums, sums))}


def test_whole_experts_on_every_device_exchange_no_tokens():
    whole, split, text = on_devices(8, 1, {})
    close(split, whole)
    assert exchanges(text) == {("all-reduce", (f"s32[{16 // LANES}]",))}


@pytest.mark.parametrize(
    ("data", "model", "rules", "experts"),
    [(4, 2, {"expert_mlp": "model", "mlp": "model"}, 16), (2, 3, {"experts": "model"}, 12)],
    ids=["width of the experts", "no whole lanes"],
)
def test_other_splits_are_right_too(data, model, rules, experts):
    whole, split, _ = on_devices(data, model, rules, experts)
    close(split, whole)


def test_more_experts_per_token_than_there_are():
    with pytest.raises(UserError, match=r"9 experts per token, but there are 8; num_experts_per_tok"):
        ExpertsConfig(width=4, experts=8, chosen=9, mlp_width=3, normalised=True, shared_mlp_width=None)
