"""Model FLOPs against torch's FlopCounterMode over transformers and z-lab's drafter, and our own program's."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxprs_in_params
from tiny_models import drafter_sizes, random_drafter, save_drafter
from tiny_targets import FAMILIES, VOCAB, save_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dflash_jax.batch import Batch
from dflash_jax.models.attention import AttentionConfig
from dflash_jax.models.decoder import FULL, SLIDING, DecoderConfig
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.flops import drafter_flops, peak_flops, target_flops
from dflash_jax.models.rope import Rope
from dflash_jax.objective.head import Rule
from dflash_jax.objective.objective import Frozen, TargetStates, anchored_loss
from dflash_jax.objective.slot_weights import Decay
from dflash_jax.published.targets import TargetFiles

ROWS, LENGTH = 2, 19


def counted(run):
    """torch's count by module and operation: {module: {operation: FLOPs}}."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return {
        module: {str(operation).removeprefix("aten."): count for operation, count in counts.items()}
        for module, counts in counter.get_flop_counts().items()
    }


@functools.cache
def of_recurrence(heads, key_width, value_width):
    """What torch counts of one token of the delta rule, written as its products."""
    k = q = torch.zeros(heads, 1, key_width)
    state, v = torch.zeros(heads, key_width, value_width), torch.zeros(heads, 1, value_width)

    def token():
        after = state + k.mT @ (v - k @ state)
        return q @ after

    return counted(token)["Global"]["bmm"]


def layer_by_torch(config, index, counts):
    """FLOPs of a layer of transformers' model as ours are defined, from its configuration and torch's count."""
    matrices = counts.get("mm", 0) + counts.get("addmm", 0)
    kind = config.layer_types[index] if hasattr(config, "layer_types") else FULL
    if kind == "linear_attention":
        # torch counts the convolution where it runs past the end of the row, and the rule in chunks of 64 tokens.
        width, heads = config.linear_conv_kernel_dim, config.linear_num_value_heads
        conv = counts["convolution"] * LENGTH // (LENGTH + width - 1)
        rule = of_recurrence(heads, config.linear_key_head_dim, config.linear_value_head_dim)
        return matrices + conv + ROWS * LENGTH * rule
    # torch counts all pairs of tokens, seen or not.
    window = config.sliding_window if kind == SLIDING else LENGTH
    seen = sum(0 <= i - j < window for i, j in itertools.product(range(LENGTH), repeat=2))
    return matrices + counts["bmm"] * seen // LENGTH**2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_target_is_transformers_by_torchs_count(tmp_path, family):
    hub = save_target(tmp_path / family, family)
    model = hub.torch_model.model
    # The other implementations hide their products from the counter.
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    with torch.no_grad():
        counts = counted(lambda: model(torch.zeros(ROWS, LENGTH, dtype=torch.long), use_cache=False))
    config = TargetFiles.open(hub.path).config
    before = 0.0
    for index in range(config.layers):
        found = target_flops(config, rows=ROWS, length=LENGTH, last_tap=index)
        assert found - before == layer_by_torch(
            model.config, index, counts[f"{type(model).__name__}.layers.{index}"]
        )
        before = found
    assert target_flops(config, rows=ROWS, length=LENGTH, last_tap=None) == before


def test_a_target_by_hand():
    # SmolLM2-135M, a layer: q and o 576 x 576, k and v 192 x 576, three of 1536 x 576.
    config = DecoderConfig(
        vocab=49152,
        attention=AttentionConfig(width=576, heads=9, kv_heads=3, head_width=64, norm_eps=1e-5),
        layer_types=(FULL,) * 30,
        rope=Rope(1e5, 64),
        tied=True,
        mlp_width=1536,
    )
    weights = 2 * 331_776 + 2 * 110_592 + 3 * 884_736
    assert weights == 3_538_944
    pairs = 256 * 257 // 2
    layer = 2 * weights * 256 + 4 * 576 * pairs
    assert target_flops(config, rows=6, length=256, last_tap=26) == 6 * 27 * layer
    assert target_flops(config, rows=6, length=256, last_tap=None) == 6 * 30 * layer


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL, SLIDING)])
def test_one_block_is_the_published_drafters_training_by_torchs_count(tmp_path, layer_types):
    from dflash import DFlashDraftModel

    drafter = random_drafter(17, layer_types=layer_types)
    path = save_drafter(tmp_path / "drafter", drafter, taps=(1, 3))
    theirs = DFlashDraftModel.from_pretrained(path, dtype=torch.float32).train()
    block, head = drafter.config.block_size, torch.zeros(VOCAB, 36)

    def train():
        hidden = theirs(
            position_ids=torch.arange(LENGTH + block).expand(ROWS, -1),
            noise_embedding=torch.zeros(ROWS, block, 36),
            target_hidden=torch.zeros(ROWS, LENGTH, 72),
        )
        (hidden[:, 1:] @ head.T).sum().backward()

    with sdpa_kernel(SDPBackend.MATH):
        counts = counted(train)
    found = drafter_flops(drafter.config, rows=ROWS, length=LENGTH, anchors=1, head_rows=VOCAB)
    assert found == sum(counts["Global"].values())
    assert theirs.fc.weight.grad is not None


def products(jaxpr):
    """FLOPs of the matrix products of a traced program, those in loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        inside = sum(map(products, jaxprs_in_params(equation.params)))
        assert not (inside and equation.primitive.name == "while"), "a loop of unknown length"
        total += inside * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


@pytest.mark.parametrize("width", [36, 24])
@pytest.mark.parametrize("teacher", [False, True])
def test_many_blocks_are_the_products_of_our_own_gradient(width, teacher):
    anchors, config = 6, drafter_sizes(width=width)
    structure, params = nnx.split(nnx.eval_shape(lambda: Drafter(config, nnx.Rngs(0))))
    frozen = Frozen(jnp.zeros((VOCAB, 36)), jnp.zeros((VOCAB, 36)), None)
    whole = jnp.zeros((ROWS, LENGTH), jnp.int32)
    batch = Batch(whole, whole, whole + 1, whole > 0, whole[:, :1], whole[:, 0])
    states = TargetStates(jnp.zeros((ROWS, LENGTH, 72)), jnp.zeros((ROWS, LENGTH, 36)) if teacher else None)

    def loss(params):
        return anchored_loss(
            nnx.merge(structure, params),
            batch,
            states,
            frozen,
            rule=Rule(((("tv" if teacher else "ce"), 1.0),), Decay(4.0)),
            anchors=jnp.zeros((ROWS, anchors), jnp.int32),
            kept=jnp.ones((ROWS, anchors), bool),
            head_chunk=4,
            head_draw=None,
        ).loss

    traced = jax.make_jaxpr(jax.grad(loss))(params)
    found = drafter_flops(config, rows=ROWS, length=LENGTH, anchors=anchors, head_rows=VOCAB, teacher=teacher)
    assert found == products(traced.jaxpr)


def test_a_drafter_by_hand():
    config = drafter_sizes(
        width=2, target_width=3, feature_width=6, mlp_width=5, heads=2, kv_heads=1, head_width=4, block_size=4
    )
    # 2 rows of 10 tokens and 3 blocks of 4: 20 tokens, 24 slots, 18 of them before the head; 2 layers.
    context = 2 * 20 * (2 * 6) * 2  # fc, whose input is frozen
    keys_values = 2 * (20 + 24) * (2 * 4 * 2) * 2 * 3
    rest = 2 * 24 * (2 * 8 * 2 + 3 * 5 * 2) * 2 * 3  # q and o, and the MLP
    ends = 2 * 24 * (2 * 3) * (2 + 3)  # into the drafter's width, from a frozen input, and back
    attention = 4 * (2 * 4) * 24 * (10 + 4) * 2 * 3
    head = 2 * 18 * (7 * 3)
    found = functools.partial(drafter_flops, config, rows=2, length=10, anchors=3, head_rows=7)
    assert found() == context + keys_values + rest + ends + attention + 2 * head
    assert found(teacher=True) - found() == head


@pytest.mark.parametrize(
    ("device_kind", "system", "devices"),
    [
        # bf16 FLOP/s of whole systems, from other pages than those of the single devices.
        ("TPU v4", 1.1e18, 4096),
        ("TPU v5 lite", 50.63e15, 256),
        ("TPU v6 lite", 234.9e15, 256),
        ("NVIDIA A100-SXM4-80GB", 5e15 / 2, 8),  # DGX A100, stated with sparsity
        ("NVIDIA H100 80GB HBM3", 16e15 / 2, 8),  # HGX H100
        ("NVIDIA H200", 16e15 / 2, 8),
        ("NVIDIA B200", 36e15 / 2, 8),
        ("NVIDIA GB200", 360e15 / 2, 72),
    ],
)
def test_peaks_add_up_to_those_of_whole_systems(device_kind, system, devices):
    assert peak_flops(device_kind) * devices == pytest.approx(system, rel=0.03)


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v5 lite 2"])
def test_what_is_not_known_has_no_peak(device_kind):
    assert peak_flops(device_kind) is None
