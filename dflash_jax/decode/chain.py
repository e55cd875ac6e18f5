"""Chain speculative decoding with a DFlash drafter: the most probable token of each slot, or a sample of it.

    draft   [x_a, MASK ..] -> q_1 .. q_{W-1} -> d_1 .. d_{W-1}
    verify  [x_a, d_1 .. d_{W-1}] at a .. a + W - 1 -> p_0 .. p_{W-1};  p_k is the target's for position a + k + 1

Greedy, a draft is accepted if it is the target's own choice, and the text is that of plain decoding. At a
temperature drafts are drawn and accepted by rejection sampling (rejection.py), and the text is distributed as
plain samples are.

Drafts that will hardly survive need not be verified (early_end.py). The chance that k drafts are accepted is
estimated by  max q_1 * .. * max q_k.  That looks at the distributions, never at what was drawn from them, so that
samples stay exact.
"""

import jax
import jax.numpy as jnp

from dflash_jax.decode.drafting import draft_logits, remember
from dflash_jax.decode.early_end import draft_unless, verify_promising
from dflash_jax.decode.rejection import accept
from dflash_jax.decode.sampling import GREEDY, Sampling, filtered
from dflash_jax.decode.speculate import Anchors, Decoded, Outcome, speculate
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen


def generate_chain(
    target: Target,
    drafter: Drafter,
    frozen: Frozen,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    taps: tuple[int, ...],
    stop: tuple[int, ...],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    width: int | None = None,
    min_accept: float = 0.0,
) -> Decoded:
    """Continuations of prompts [B, P] of `lengths` [B], drafted by `drafter` in blocks of `width` slots.

    keys: [B] random keys, needed unless the sampling is greedy; width: None is the drafter's block size;
    min_accept: drafts to expect, of the most promising row, below which none are verified; 0 verifies all.
    """
    slots = width or drafter.config.block_size

    def play(at: Anchors) -> Outcome:
        def draft() -> tuple[jax.Array, jax.Array, jax.Array]:
            """Drafts [B, W - 1], their distributions [B, W - 1, V'], and the chance [B, W - 1] to come so far."""
            logits = draft_logits(drafter, frozen, at.token, at.cache.lengths, at.context, width=slots)
            if sampling.temperature == 0:
                q, drafts = jax.nn.softmax(logits, axis=-1), frozen.tokens_of(jnp.argmax(logits, axis=-1))
            else:
                # In the order of the vocabulary, also where the drafter knows a part of it.
                left = frozen.over_vocabulary(filtered(logits, sampling))
                q, drafts = jax.nn.softmax(left, axis=-1), jax.vmap(jax.random.categorical)(random(at, 0), left)
            return drafts.astype(jnp.int32), q, jnp.cumprod(q.max(axis=-1), axis=1)

        drafts, q, survival = draft_unless(at.resting, draft, min_accept=min_accept)

        def verify(at: Anchors, *, length: int) -> Outcome:
            return verdict(at, drafts[:, : length - 1], q[:, : length - 1])

        return verify_promising(verify, at, survival, min_accept=min_accept)

    def verdict(at: Anchors, drafts: jax.Array, q: jax.Array) -> Outcome:
        """What the target says of drafts [B, D] from the distributions q [B, D, V'], padded to all slots."""
        block = jnp.concatenate([at.token[:, None], drafts], axis=1)
        features, last, step = target.step(block, at.cache, taps=taps)
        found = target.logits(last)
        length = block.shape[1]
        if sampling.temperature == 0:
            tokens = jnp.argmax(found, axis=-1).astype(jnp.int32)
            accepted = jnp.cumprod(drafts == tokens[:, :-1], axis=1).sum(axis=1).astype(jnp.int32)
        else:
            uniforms = jax.vmap(lambda key: jax.random.uniform(key, (slots - 1,)))(random(at, 1))
            p = jax.nn.softmax(filtered(found, sampling), axis=-1)
            accepted, rest = accept(drafts, q, p, uniforms[:, : length - 1])
            after = jax.vmap(jax.random.categorical)(random(at, 2), jnp.log(rest)).astype(jnp.int32)[:, None]
            tokens = jnp.where(jnp.arange(length) == accepted[:, None], after, jnp.pad(drafts, ((0, 0), (0, 1))))
        return Outcome(
            tokens=jnp.pad(tokens, ((0, 0), (0, slots - length))),
            accepted=accepted,
            cache=step.keep(jnp.where(at.active, accepted + 1, 0)),
            context=remember(drafter, at.context, features, at.cache.lengths),
        )

    def random(at: Anchors, use: int) -> jax.Array:
        """[B] keys of this round, for one of its three uses: drafts, verdicts, and the token after them."""
        assert keys is not None
        return jax.vmap(lambda key, place: jax.random.split(jax.random.fold_in(key, place), 3)[use])(
            keys, at.places
        )

    return speculate(
        target,
        drafter,
        frozen,
        prompts,
        lengths,
        play=play,
        room=slots,
        taps=taps,
        stop=stop,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        keys=keys,
    )
