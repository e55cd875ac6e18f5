"""Checks of a drafter's folder that was just written, before anyone gets to see it.

Its configuration says what it should, to us and to transformers; its tensors are those that the configuration asks
for; and the logits of a block, as an independent reader computes them from the folder (reference_drafter.py), are
those of our own drafter.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import Drafter, DrafterConfig
from dflash_jax.published.drafter_folder import EMBEDDING, HEAD, DrafterFolder
from dflash_jax.published.finished_drafter import FinishedDrafter, rounded
from dflash_jax.published.reference_drafter import ReferenceDrafter
from dflash_jax.published.stored import Stored
from dflash_jax.published.tensor_file import pieces
from dflash_jax.published.weights import fill

CONTEXT = 24  # tokens before the block
# Of the largest logit: what float32 sums in another order make, and what rounding a product, or a target's float32
# head, to bfloat16 does.
SAME_WEIGHTS, ROUNDED_HEAD = 1e-3, 5e-2


def check_folder(folder: pathlib.Path, drafter: FinishedDrafter, *, dtype: str) -> None:
    """Raise UserError, naming what differs, unless the folder is the drafter with its weights in `dtype`."""
    faults = config_faults(folder, drafter)
    try:
        reference = ReferenceDrafter(folder)
        faults += transformers_faults(folder, reference) + tensor_faults(reference)
        faults = faults or logit_faults(reference, drafter, dtype=dtype)
    except KeyError as key:
        faults.append(f"config.json lacks {key}")
    if faults:
        raise UserError(f"what was written is not the drafter, and was not kept: {'; '.join(faults)}")


def config_faults(folder: pathlib.Path, drafter: FinishedDrafter) -> list[str]:
    """What our own reader finds in the folder that is not the drafter's."""
    opened = DrafterFolder.open(folder)
    opened.tensors()  # raises UserError where the file of weights cannot be read
    found, wanted = (
        {**vars(fields), "config": None, **_semantics(fields.config)}
        for fields in (opened.fields, drafter.fields())
    )
    faults = [f"{key} is {found[key]}, not {value}" for key, value in wanted.items() if found[key] != value]
    tokens = [None if of is None else of.tolist() for of in (opened.draft_tokens(), drafter.draft_tokens)]
    if tokens[0] != tokens[1]:
        faults.append("d2t and t2d name other tokens than the draft vocabulary")
    return faults + opened.misfits(drafter.ends.config)


def _semantics(config: DrafterConfig) -> dict[str, object]:
    """The configuration, with what is_causal and window mean for each layer in their place."""
    layers = range(len(config.layer_types))
    means = {"is_causal": [config.causal(layer) for layer in layers], "window": [*map(config.reach, layers)]}
    return vars(config) | means


def transformers_faults(folder: pathlib.Path, reference: ReferenceDrafter) -> list[str]:
    """What transformers makes of the layers' configuration that is not what the file says, in either spelling."""
    from transformers import AutoConfig

    layers = reference.layers
    read = AutoConfig.for_model(**layers) if reference.is_speculators else AutoConfig.from_pretrained(folder)
    keys = ("head_dim", "hidden_size", "layer_types", "num_key_value_heads", "rms_norm_eps", "sliding_window")
    faults = [
        f"transformers reads {key} {getattr(read, key)}" for key in keys if getattr(read, key) != layers[key]
    ]
    older = {"rope_theta": layers["rope_theta"], **(layers["rope_scaling"] or {"rope_type": "default"})}
    for place, rope in (("transformers reads", read.rope_parameters), ("rope_theta and rope_scaling say", older)):
        if rope != layers["rope_parameters"]:
            faults.append(f"{place} RoPE {rope}, rope_parameters {layers['rope_parameters']}")
    return faults


def tensor_faults(reference: ReferenceDrafter) -> list[str]:
    """Tensors that are missing, unexpected or misshapen."""
    wanted, found = reference.expected_shapes(), reference.found_shapes()
    return [
        f"{name} has shape {found.get(name)}, expected {wanted.get(name)}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]


@dataclasses.dataclass(frozen=True)
class Block:
    """features: [S, T * E] of tokens at positions [S]; tokens: [W] of the block behind them, anchor and MASK."""

    features: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray

    @property
    def anchor(self) -> int:
        """The anchor's position."""
        return int(self.positions[-1]) + 1


def logit_faults(reference: ReferenceDrafter, drafter: FinishedDrafter, *, dtype: str) -> list[str]:
    """How much the logits of a block behind random features differ, if they do."""
    config = drafter.config
    # Part of the context is out of a sliding layer's sight.
    stride = 1 if config.window is None else max(1, 3 * config.window // (2 * CONTEXT))
    positions = stride * np.arange(CONTEXT)
    features = np.random.default_rng(0).standard_normal((CONTEXT, config.feature_width)).astype(np.float32)
    width, mask = reference.block_input()
    block = Block(features, positions, tokens=np.array([mask // 2] + [mask] * (width - 1)))
    theirs, ours = reference_logits(reference, drafter, block), our_logits(drafter, block, dtype=dtype)
    error = float(np.max(np.abs(theirs - ours)) / np.max(np.abs(ours)))
    limit = ROUNDED_HEAD if dtype == "bfloat16" and HEAD in reference.found_shapes() else SAME_WEIGHTS
    # NaN is no number below the limit.
    return (
        [] if error <= limit else [f"logits of a block differ by {error:.2g} of the largest, allowed: {limit:g}"]
    )


def reference_logits(reference: ReferenceDrafter, drafter: FinishedDrafter, block: Block) -> np.ndarray:
    """[W, V'] as the independent reader computes them, with what the folder borrows of the target."""
    ends, own = drafter.ends, reference.found_shapes()
    if EMBEDDING in own:
        embedded = reference.rows(EMBEDDING, block.tokens)
    else:
        embedded = some_rows(ends.embedding, block.tokens) * np.float32(ends.config.embedding_scale or 1)
    states = reference.states(block.features, block.positions, embedded, anchor=block.anchor)
    return reference.times(states, HEAD) if HEAD in own else times_head(states, ends.head)


def our_logits(drafter: FinishedDrafter, block: Block, *, dtype: str) -> np.ndarray:
    """[W, V'] of our drafter with its weights rounded to `dtype`, computed in float32."""
    ends = drafter.ends
    if drafter.own_embedding is not None:
        embedded = some_rows(rounded(drafter.own_embedding, dtype), block.tokens)
    else:
        embedded = some_rows(ends.embedding, block.tokens) * np.float32(ends.config.embedding_scale or 1)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Drafter(drafter.config, nnx.Rngs(0))))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), shapes)
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    places = jax.tree.map(lambda _: host, abstract)
    params = fill(abstract, drafter.params.items(), shardings=places, source="the drafter's parameters")
    positions = jnp.asarray(block.positions)[None]
    slots = block.anchor + jnp.arange(len(block.tokens))[None, None]

    @jax.jit
    def states(params: nnx.State, embedded: jax.Array, features: jax.Array) -> jax.Array:
        module = nnx.merge(graph, params)
        context = module.context(features, positions)
        visible = jnp.ones((1, 1, CONTEXT), bool)
        return module(embedded, slots, context, visible=visible, context_positions=positions)[0, 0]

    found = np.asarray(states(params, embedded[None, None], block.features[None]))
    if drafter.own_head is not None:
        return times_head(found, rounded(drafter.own_head, dtype))
    logits = times_head(found, ends.head)
    return logits if drafter.draft_tokens is None else logits[:, drafter.draft_tokens]


def some_rows(stored: Stored, indices: np.ndarray) -> np.ndarray:
    """Rows of a tensor as float32."""
    return np.stack([stored.read((int(index),)) for index in indices]).astype(np.float32)


def times_head(states: np.ndarray, head: Stored) -> np.ndarray:
    """[W, V]: the states [W, D] by a head [V, D], of which little is in memory at a time."""
    return np.concatenate([states @ piece.T for piece in pieces(rounded(head, "float32"))], axis=-1)
