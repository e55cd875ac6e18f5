"""What a recipe names, opened: the target's files, its tokenizer, and everything that follows from them."""

import dataclasses
import pathlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import resolve
from dflash_jax.config import Recipe
from dflash_jax.data.records import Records
from dflash_jax.data.tokenizer import load_tokenizer
from dflash_jax.errors import UserError
from dflash_jax.models.drafter import Drafter, DrafterConfig
from dflash_jax.models.target import Target
from dflash_jax.models.targets import TargetFiles
from dflash_jax.objective.head_sample import HeadSample
from dflash_jax.objective.objective import Frozen
from dflash_jax.sharding import Rules, replicated, shardings


@dataclasses.dataclass(frozen=True)
class Experiment:
    """taps: tapped target layers; drafter: the drafter's sizes; tokenizer: a transformers tokenizer."""

    recipe: Recipe
    files: TargetFiles
    tokenizer: Any
    taps: tuple[int, ...]
    drafter: DrafterConfig

    @classmethod
    def open(cls, recipe: Recipe) -> Self:
        """Read configuration and tokenizer, no weights. Raises UserError for whatever does not fit together."""
        path = resolve.target_path(recipe.target.path)
        files = TargetFiles.open(path)
        config = files.config
        taps = resolve.tap_layers(recipe.drafter, config)
        tokenizer = load_tokenizer(path)
        mask = resolve.mask_token(recipe.drafter, tokenizer, config)
        return cls(
            recipe,
            files,
            tokenizer,
            taps,
            resolve.drafter_config(recipe.drafter, config, taps=taps, mask_token=mask),
        )

    @property
    def name(self) -> str:
        """The target's name, from its file or folder."""
        path = pathlib.Path(self.files.path)
        return path.stem if path.is_file() else path.name

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
        """Tokens that end an answer: the tokenizer's, and those of the target's configuration."""
        named = self.files.fields.get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        return tuple(sorted({self.tokenizer.eos_token_id, *listed} - {None}))

    def load_target(self, mesh: Mesh, rules: Rules) -> Target:
        """The target with its weights, in target.dtype, in their shards on the mesh."""
        graph, abstract = self.files.abstract(jnp.dtype(self.recipe.target.dtype))
        return nnx.merge(graph, self.files.load(abstract, shardings(abstract, mesh, rules)))

    def initial_drafter(self) -> Drafter:
        """A drafter with random weights from train.seed."""
        return Drafter(self.drafter, nnx.Rngs(self.recipe.train.seed))

    def draft_tokens(self, records: Records) -> np.ndarray | None:
        """The draft vocabulary [V'], from the training records; None where the head covers all tokens."""
        _, supervised = records.token_counts()
        return resolve.draft_vocabulary(self.recipe.drafter.vocab, supervised, vocab=self.files.config.vocab)

    def head_sample(self, records: Records) -> HeadSample | None:
        """What the softmax of a training step is drawn from, or None where it covers the whole head."""
        size = self.recipe.objective.head_sample
        if size is None:
            return None
        if self.recipe.drafter.vocab is not None:
            raise UserError("objective.head_sample: not together with drafter.vocab; set one of them to null")
        sample = HeadSample.split(records.token_counts()[1], vocab=self.files.config.vocab)
        if size <= len(sample.labels):
            raise UserError(
                f"objective.head_sample: found {size}, but the data has {len(sample.labels)} tokens as labels; "
                "the sample must hold all of them and some others"
            )
        return sample

    def frozen(self, target: Target, mesh: Mesh, draft_tokens: np.ndarray | None) -> Frozen:
        """The target's embedding and head for the drafter's use, on the drafter's mesh, in drafter.dtype."""
        dtype, place = jnp.dtype(self.recipe.drafter.dtype), replicated(mesh)
        embedding = jax.device_put(target.embedding.get_value(), place).astype(dtype)
        tied = target.head is target.embedding
        head = embedding if tied else jax.device_put(target.head.get_value(), place).astype(dtype)
        if draft_tokens is None:
            return Frozen(embedding, head, None)
        return Frozen(embedding, head[draft_tokens], jax.device_put(draft_tokens, place))
