"""The ways to decode that are compared, each compiled once for every shape of prompts."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.decode.sampling import GREEDY, Sampling, answer_keys
from dflash_jax.decode.tree_decoding import generate_tree
from dflash_jax.errors import UserError
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen
from dflash_jax.sharding import replicated, row_shards, rows

KINDS = PLAIN, CHAIN, TREE = "plain", "chain", "tree"


@dataclasses.dataclass(frozen=True)
class Way:
    """kind: PLAIN, CHAIN or TREE; drafter: its name, None for PLAIN; budget: of a TREE; slots: of a block;
    min_accept: accepted drafts to expect, below which none are verified."""

    kind: str
    drafter: str | None = None
    budget: int | None = None
    slots: int = 1
    min_accept: float = 0.0

    @property
    def decoding(self) -> str:
        """plain, chain, or tree with its budget."""
        return self.kind if self.budget is None else f"{self.kind} {self.budget}"

    def keeps_text(self, sampling: Sampling) -> bool:
        """Whether each answer must be that of plain decoding. Rejection sampling keeps its distribution only."""
        return self.kind == TREE or (self.kind == CHAIN and sampling.temperature == 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Speculator:
    """A drafter with what it needs to draft for a target; taps: the target's layers that feed it."""

    drafter: Drafter
    frozen: Frozen
    taps: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Limits:
    """How answers are decoded. stop: tokens that end one; seed: of the sampling; batch_size: prompts at a time."""

    stop: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    batch_size: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class PromptBatch:
    """tokens: [B, P] int32, right-padded; lengths: [B], 0 for a row without a prompt; indices: [B], prompts'."""

    tokens: np.ndarray
    lengths: np.ndarray
    indices: np.ndarray

    @property
    def count(self) -> int:
        """Prompts of the batch, which its first rows hold."""
        return int((self.lengths > 0).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """What a batch was answered, on the host. answers: each row's tokens; accepted, emitted: each row's verify
    rounds (empty for plain decoding); seconds: of the whole batch, prefill included."""

    answers: list[np.ndarray]
    accepted: list[np.ndarray]
    emitted: list[np.ndarray]
    seconds: float


class Decoding:
    """Decodes batches of prompts in any of the ways, on the target's part of a mesh."""

    def __init__(self, target: Target, speculators: Mapping[str, Speculator], mesh: Mesh, *, limits: Limits):
        """speculators: by the name of their drafter. limits.batch_size is rounded up to what the mesh splits."""
        shards = row_shards(mesh)
        self.size = -(-limits.batch_size // shards) * shards
        self._target, self._speculators, self._limits = target, speculators, limits
        self._in, self._out = rows(mesh), replicated(mesh)
        self._compiled: dict[tuple[Way, int], Callable] = {}

    @property
    def sampling(self) -> Sampling:
        """How every way chooses tokens."""
        return self._limits.sampling

    def __call__(self, way: Way, batch: PromptBatch) -> Rounds:
        """The answers; a new shape is compiled and run once before the clock starts."""
        arrays = jax.device_put((batch.tokens, batch.lengths, batch.indices), self._in)
        speculator = self._speculators[way.drafter] if way.drafter else None
        try:
            run = self._program(way, speculator, arrays)
            start = time.perf_counter()
            found = jax.block_until_ready(run(self._target, speculator, *arrays))
            seconds = time.perf_counter() - start
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"batch_size: {self.size} prompts of up to {batch.tokens.shape[1]} tokens do not fit the device's "
                f"memory ({way.decoding}); lower batch_size, max_new_tokens or budget, or choose a mesh with more "
                "devices"
            ) from error
        tokens, ends, *played = jax.device_get(found)
        count = batch.count
        answers = [tokens[row, batch.lengths[row] : ends[row]] for row in range(count)]
        if not played:
            nothing = [np.zeros(0, np.int32)] * count
            return Rounds(answers, nothing, nothing, seconds)
        accepted, emitted = ([table[row, played[1][row] > 0] for row in range(count)] for table in played)
        return Rounds(answers, accepted, emitted, seconds)

    def _program(self, way: Way, speculator: Speculator | None, arrays: tuple[jax.Array, ...]) -> Callable:
        key = (way, arrays[0].shape[1])
        if key not in self._compiled:
            whole = jax.jit(functools.partial(_decode, way=way, limits=self._limits), out_shardings=self._out)
            run = self._compiled[key] = whole.lower(self._target, speculator, *arrays).compile()
            # A first run is slow even when it is compiled, in each of its branches.
            jax.block_until_ready(run(self._target, speculator, *arrays))
        return self._compiled[key]


def _decode(
    target: Target,
    speculator: Speculator | None,
    prompts: jax.Array,
    lengths: jax.Array,
    indices: jax.Array,
    *,
    way: Way,
    limits: Limits,
) -> tuple[jax.Array, ...]:
    """Tokens [B, T] and lengths [B] of finished rows; unless plain also accepted and emitted [B, R] of rounds."""
    turns = jnp.zeros_like(indices)
    options = {
        "stop": limits.stop,
        "max_new_tokens": limits.max_new_tokens,
        "sampling": limits.sampling,
        "keys": answer_keys(limits.seed, indices, turns) if limits.sampling.temperature else None,
    }
    if speculator is None:
        found = generate(target, prompts, lengths, **options)
        return found.tokens, found.lengths
    options |= {"taps": speculator.taps, "width": way.slots, "min_accept": way.min_accept}
    models = (target, speculator.drafter, speculator.frozen)
    if way.budget is None:
        decoded = generate_chain(*models, prompts, lengths, **options)
    else:
        decoded = generate_tree(*models, prompts, lengths, budget=way.budget, **options)
    return decoded.rows.tokens, decoded.rows.lengths, decoded.accepted, decoded.emitted
