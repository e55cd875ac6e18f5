"""Teacher-forced numbers of drafters on the text that plain decoding wrote, one target pass for each batch.

On greedy text the walk along an answer is what real decoding takes, so that both must agree.
"""

import collections
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.batch import Batch
from dflash_jax.decode.simulate import Simulated, simulate
from dflash_jax.decode.ways import PLAIN, Speculator, Way
from dflash_jax.evaluation.measure import Measured, batches, padded
from dflash_jax.models.target import Target
from dflash_jax.sharding import replicated, rows

HEAD_CHUNK = 64  # blocks whose logits are alive at a time


def replay(
    target: Target,
    speculators: Mapping[str, Speculator],
    mesh: Mesh,
    measured: Sequence[Measured],
    ways: Sequence[Way],
    *,
    size: int,
    max_new_tokens: int,
) -> dict[str, dict[str, Simulated]]:
    """The sums of each drafter that a way uses, by prompt set and by the drafter's name.

    measured: every prompt, with plain among its ways; size: prompts of a batch, which the mesh splits evenly.
    """
    by_index = sorted(measured, key=lambda item: item.index)
    prompts = [item.prompt for item in by_index]
    answers = [item.answers[Way(PLAIN)].tokens for item in by_index]
    split, whole = rows(mesh), replicated(mesh)
    programs = {}
    for name in dict.fromkeys(way.drafter for way in ways if way.drafter):
        own = [way for way in ways if way.drafter == name]
        budgets = tuple(way.budget for way in own if way.budget is not None)
        program = functools.partial(
            _replay, anchors=max(max_new_tokens - 1, 1), budgets=budgets, width=own[0].slots
        )
        programs[name] = jax.jit(program, out_shardings=whole)
    totals: dict[str, dict[str, Simulated]] = collections.defaultdict(dict)
    for indices, room in batches(prompts, size):
        batch = padded(prompts, indices, rows=size, room=room + max_new_tokens)
        ends = batch.lengths.copy()
        for row, index in enumerate(indices):
            ends[row] += len(answers[index])
            batch.tokens[row, batch.lengths[row] : ends[row]] = answers[index]
        arrays = jax.device_put((batch.tokens, batch.lengths, ends), split)
        of_set = totals[prompts[indices[0]].set]
        for name, program in programs.items():
            found = jax.device_get(program(target, speculators[name], *arrays))
            of_set[name] = of_set[name] + found if name in of_set else found
    return dict(totals)


def _replay(
    target: Target,
    speculator: Speculator,
    tokens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    anchors: int,
    budgets: tuple[int, ...],
    width: int,
) -> Simulated:
    """The sums over answers tokens[starts : ends] of rows [B, S], of all positions where a block may start."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    inside = positions < ends[:, None]
    segments = inside.astype(jnp.int32)
    nobody = jnp.zeros(rows, jnp.int32)
    batch = Batch(tokens, positions, segments, inside & (positions >= starts[:, None]), nobody[:, None], nobody)
    features, _ = target.hidden(tokens, positions, segment_ids=segments, taps=speculator.taps)
    numbers = jnp.arange(anchors, dtype=jnp.int32)
    kept = numbers < (ends - starts - 1)[:, None]
    return simulate(
        speculator.drafter,
        batch,
        features,
        speculator.frozen,
        anchors=jnp.where(kept, starts[:, None] + numbers, 0),
        kept=kept,
        budgets=budgets,
        head_chunk=HEAD_CHUNK,
        width=width,
    )
