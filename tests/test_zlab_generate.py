"""A drafter that we trained, decoded by z-lab's own PyTorch loop: the same tokens from the same verify steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import frozen_of, load_target, random_drafter, save_drafter
from zlab_decoding import accepted_by_zlab

from dflash_jax.batch import Batch
from dflash_jax.config import OptimSection
from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.objective.head import Rule
from dflash_jax.objective.objective import TargetStates, block_loss
from dflash_jax.objective.slot_weights import Decay
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.state import first_state
from dflash_jax.training.step import apply_gradients, gradient_sums

TAPS, NEW, STEPS = (0, 1), 32, 150
NEVER = (10**6,)  # a stop token that no vocabulary has
PROMPTS = np.random.default_rng(11).integers(0, 66, (6, 7)).astype(np.int32)


def trained(target, drafter, frozen):
    """`drafter` after STEPS of our training step on the target's greedy answers to PROMPTS."""
    rows = jax.jit(functools.partial(generate, stop=NEVER, max_new_tokens=NEW))(
        target, PROMPTS, jnp.full(len(PROMPTS), PROMPTS.shape[1])
    )
    count, length = rows.tokens.shape
    batch = Batch(
        tokens=rows.tokens,
        positions=jnp.broadcast_to(jnp.arange(length), rows.tokens.shape),
        segment_ids=jnp.ones_like(rows.tokens),
        loss_mask=jnp.broadcast_to(jnp.arange(length) >= PROMPTS.shape[1], rows.tokens.shape),
        record_ids=jnp.arange(count)[:, None],
        epochs=jnp.zeros(count, jnp.int32),
    )
    features, _ = target.hidden(batch.tokens, batch.positions, segment_ids=batch.segment_ids, taps=TAPS)
    section = OptimSection(lr=3e-3)
    optimizer = make_optimizer(section, learning_rate(section, STEPS))
    structure, params = nnx.split(drafter)
    rule = Rule((("ce", 1.0),), Decay(4.0))

    def objective(drafter, batch, states, frozen, step):
        return block_loss(
            drafter,
            dataclasses.replace(batch, epochs=jnp.full(count, step)),  # new anchors every step
            states,
            frozen,
            rule=rule,
            anchor_count=12,
            seed=0,
            head_chunk=64,
            head_draw=None,
        )

    @jax.jit
    def step(state):
        found = gradient_sums(
            state.params,
            batch,
            TargetStates(features),
            frozen,
            state.step,
            structure=structure,
            objective=objective,
        )
        return apply_gradients(state, found, optimizer=optimizer)

    state = first_state(params, optimizer)
    for _ in range(STEPS):
        state, _ = step(state)
    return nnx.merge(structure, state.params)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    [{"layer_types": (FULL, FULL), "window": None}, {"layer_types": (SLIDING, FULL), "window": 9}],
    ids=["full", "sliding"],
)
def test_their_loop_accepts_what_ours_accepts(plain_llama, tmp_path, kind):
    import torch
    from dflash import DFlashDraftModel

    target = load_target(plain_llama.path)
    frozen = frozen_of(target)
    drafter = trained(target, random_drafter(3, **kind), frozen)
    ours = jax.jit(functools.partial(generate_chain, taps=TAPS, stop=NEVER, max_new_tokens=NEW))(
        target, drafter, frozen, PROMPTS, jnp.full(len(PROMPTS), PROMPTS.shape[1])
    )

    path = save_drafter(tmp_path / "drafter", drafter, taps=TAPS)
    theirs = DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    lengths = accepted_by_zlab(theirs, plain_llama.torch_model, ours, PROMPTS, new=NEW)
    assert np.mean(lengths) > 2.0, "the drafter learned too little for the comparison to mean anything"
