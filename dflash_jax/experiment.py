"""What a recipe names, opened: the target's files, its tokenizer, and everything that follows from them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import initial, resolve
from dflash_jax.batches.buckets import parse_buckets
from dflash_jax.chat.rendering import Template
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.config import Recipe
from dflash_jax.data.origin import Preparation
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError, named
from dflash_jax.models.drafter import Drafter, DrafterConfig
from dflash_jax.models.target import Target
from dflash_jax.objective.head_sample import HeadSample
from dflash_jax.objective.objective import Frozen
from dflash_jax.objective.terms import needs_teacher
from dflash_jax.published.copied_layers import copied_layers
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.end_tokens import stop_tokens
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import fill
from dflash_jax.sharding import Rules, replicated, shardings
from dflash_jax.target_path import target_path


@dataclasses.dataclass(frozen=True)
class Experiment:
    """taps: tapped target layers; drafter: the drafter's sizes; tokenizer: a transformers tokenizer.

    folder: the published drafter that a fresh run starts from, if it does.
    """

    recipe: Recipe
    files: TargetFiles
    tokenizer: Any
    taps: tuple[int, ...]
    drafter: DrafterConfig
    folder: DrafterFolder | None = None

    @classmethod
    def open(cls, recipe: Recipe) -> Self:
        """Read configuration and tokenizer, no weights. Raises UserError for whatever does not fit together."""
        with named("target.path"):
            path = target_path(recipe.target.path)
            files = TargetFiles.open(path)
            config = files.config
        section, folder = recipe.drafter, initial.open_folder(recipe.drafter, config)
        if folder is not None:
            section = initial.filled(section, folder)
        taps = resolve.tap_layers(section, config)
        with named("target.path"):
            tokenizer = load_tokenizer(path)
            stop_tokens(path, tokenizer)
            Template(tokenizer, {})  # that there is none is the target's fault, a wrong argument the recipe's
        with named("data.template"):
            Template(tokenizer, recipe.data.template)
        mask = resolve.mask_token(section, tokenizer, config)
        drafter = resolve.drafter_config(section, config, taps=taps, mask_token=mask)
        if folder is not None:
            drafter = initial.agreed(drafter, folder, taps=taps, section=recipe.drafter)
        if section.init == initial.TARGET:
            initial.check_copies(drafter, config, files.fields)
        # What does not go together is refused before any work.
        resolve.rule(recipe.objective, drafter.block_size)
        _check_head_sample(recipe, vocab=config.vocab)
        parse_buckets(recipe.data.buckets)
        return cls(recipe, files, tokenizer, taps, drafter, folder)

    @property
    def name(self) -> str:
        """The target's name, from its file or folder."""
        return self.files.name

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint's weights mean: another target or another value of these makes them useless."""
        drafter = dataclasses.asdict(self.drafter) | {"layer_types": list(self.drafter.layer_types)}
        return {
            "target": self.files.digest,
            "target.dtype": self.recipe.target.dtype,
            "drafter.taps": list(self.taps),
            "drafter.vocab": self.recipe.drafter.vocab,
            **{f"drafter.{key}": value for key, value in drafter.items()},
        }

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, and those that the target's files name."""
        return stop_tokens(self.files.path, self.tokenizer)

    @property
    def preparation(self) -> Preparation:
        """How conversations become this experiment's records."""
        section = self.recipe.data
        return Preparation(
            self.tokenizer,
            self.stop_tokens,
            section.template,
            max_length=section.max_length,
            last_turn_only=section.last_turn_only,
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether the objective compares with the target's distributions."""
        return needs_teacher(dict(resolve.rule(self.recipe.objective, self.drafter.block_size).terms))

    def load_target(self, mesh: Mesh, rules: Rules, *, on_bytes: Callable[[int], object] | None = None) -> Target:
        """The target with its weights, in target.dtype, in their shards on the mesh; on_bytes as in `load`."""
        graph, abstract = self.files.abstract(jnp.dtype(self.recipe.target.dtype))
        state = self.files.load(abstract, shardings(abstract, mesh, rules), on_bytes=on_bytes)
        return nnx.merge(graph, state)

    def load_ends(self, mesh: Mesh) -> Target:
        """The target with its embedding and head alone, in target.dtype, whole on each device of the mesh.

        That is all that `frozen` needs. No other tensor is read, and the target cannot be run.
        """
        graph, abstract = self.files.abstract(jnp.dtype(self.recipe.target.dtype))
        target: Target = nnx.merge(graph, abstract)
        parameters = nnx.to_flat_state(nnx.state(target))
        ends = nnx.from_flat_state(
            [(path, value) for path, value in parameters if value is target.embedding or value is target.head]
        )
        nnx.update(target, self.files.load_some(ends, jax.tree.map(lambda _: replicated(mesh), ends)))
        return target

    def initial_drafter(self) -> Drafter:
        """A drafter with random weights from train.seed."""
        return Drafter(self.drafter, nnx.Rngs(self.recipe.train.seed))

    def initial_params(self, abstract: nnx.State, places: nnx.State) -> nnx.State | None:
        """A fresh run's weights from drafter.init, streamed to their shards; None where they are random."""
        seed = self.recipe.train.seed
        if self.folder is not None:
            tensors, source = self.folder.tensors(), f"drafter.init: {self.folder.path}"
        elif self.recipe.drafter.init == initial.TARGET:
            layers = self.files.config.layers
            tensors = copied_layers(self.files.tensors(), self.drafter, target_layers=layers, seed=seed)
            source = f"drafter.init={initial.TARGET}: {self.files.path}"
        else:
            return None
        return fill(abstract, tensors, shardings=places, source=source)

    def draft_tokens(self, records: Records) -> np.ndarray | None:
        """The draft vocabulary [V'], from the training records; None where the head covers all tokens."""
        return self.frequent_tokens(records, self.recipe.drafter.vocab)

    def frequent_tokens(self, records: Records, count: int | None) -> np.ndarray | None:
        """The `count` tokens [V'] that the records teach most often, ascending; None for all tokens."""
        _, supervised = records.token_counts()
        return resolve.draft_vocabulary(count, supervised, vocab=self.files.config.vocab)

    def head_sample(self, records: Records) -> HeadSample | None:
        """What the softmax of a training step is drawn from, or None where it covers the whole head."""
        size = self.recipe.objective.head_sample
        if size is None:
            return None
        sample = HeadSample.split(records.token_counts()[1], vocab=self.files.config.vocab)
        if size <= len(sample.labels):
            raise UserError(
                f"objective.head_sample: found {size}, but the data has {len(sample.labels)} tokens as labels; "
                "the sample must hold all of them and some others"
            )
        return sample

    def frozen(self, target: Target, mesh: Mesh, draft_tokens: np.ndarray | None) -> Frozen:
        """The target's embedding and head for the drafter's use, on the drafter's mesh, in drafter.dtype."""
        frozen = frozen_ends(target, mesh, dtype=self.recipe.drafter.dtype)
        resolve.refuse_zero_row(frozen.embedding, self.drafter.mask_token)
        return frozen.covering(draft_tokens)


def _check_head_sample(recipe: Recipe, *, vocab: int) -> None:
    size = recipe.objective.head_sample
    if size is None:
        return
    if recipe.drafter.vocab is not None:
        raise UserError("objective.head_sample: not together with drafter.vocab; set one of them to null")
    if size >= vocab:
        raise UserError(f"objective.head_sample: found {size}, but the head has {vocab} tokens; set it to null")


def frozen_ends(target: Target, mesh: Mesh, *, dtype: str) -> Frozen:
    """The target's embedding and its whole head, on every device of a mesh, in the dtype of its drafter.

    How the target scales embedded tokens and bounds its logits goes with them.
    """
    place = replicated(mesh)
    embedding = jax.device_put(target.embedding.get_value(), place).astype(jnp.dtype(dtype))
    tied = target.head is target.embedding
    head = embedding if tied else jax.device_put(target.head.get_value(), place).astype(jnp.dtype(dtype))
    config = target.config

    def constant(value: float | None) -> jax.Array | None:
        return None if value is None else jax.device_put(jnp.float32(value), place)

    return Frozen(
        embedding,
        head,
        None,
        embedding_scale=constant(config.embedding_scale),
        softcap=constant(config.logit_softcap),
    )
