"""Which target families exist, and how one is read from a folder or a GGUF file onto its devices."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.errors import UserError
from dflash_jax.models import gguf, hub_folder
from dflash_jax.models.llama import Llama, LlamaConfig
from dflash_jax.models.target import TargetConfig
from dflash_jax.models.weights import fill

# model_type in config.json -> (configuration, module). A new family is one file and one line here.
FAMILIES: dict[str, tuple[Any, Callable[[Any, nnx.Rngs], Any]]] = {"llama": (LlamaConfig, Llama)}


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """A target on disk: its published configuration and a stream of its tensors."""

    path: pathlib.Path
    fields: dict[str, Any]
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]

    @classmethod
    def open(cls, path: pathlib.Path) -> "TargetFiles":
        """A hub-style folder or a .gguf file. Raises UserError where it is neither or unsupported."""
        if path.is_dir():
            reader = hub_folder
        elif path.is_file() and path.suffix == ".gguf":
            reader = gguf
        else:
            raise UserError(
                f"target.path: {path} is neither a model folder nor a .gguf file; "
                "download the model first (for example with `hf download NAME --local-dir DIR`)"
            )
        fields = reader.read_config(path)
        if fields["model_type"] not in FAMILIES:
            raise UserError(
                f"target.path: model_type {fields['model_type']!r} in {path} is not supported; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )
        return cls(path, fields, lambda: reader.tensors(path))

    @property
    def config(self) -> TargetConfig:
        """The family's configuration. Raises UserError naming a field that the file lacks."""
        try:
            return FAMILIES[self.fields["model_type"]][0].from_checkpoint(self.fields)
        except KeyError as error:
            raise UserError(f"{self.path}: the model's configuration lacks {error}") from None

    @property
    def digest(self) -> str:
        """A sha256 over the configuration and each weight file's name, size, first and last MiB.

        Tells one model from another without reading hundreds of gigabytes.
        """
        digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode())
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in (0, max(0, size - 2**20)):
                    opened.seek(start)
                    digest.update(opened.read(2**20))
        return digest.hexdigest()

    def abstract(self, dtype: jnp.dtype) -> tuple[nnx.GraphDef[Any], nnx.State]:
        """The module's structure and the shapes of its parameters in `dtype`, without any memory."""
        config, family = self.config, FAMILIES[self.fields["model_type"]][1]
        graph, state = nnx.split(nnx.eval_shape(lambda: family(config, nnx.Rngs(0))))
        return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)

    def load(self, abstract: nnx.State, shardings: nnx.State) -> nnx.State:
        """Stream every tensor from disk to its shards; strict in both directions."""
        # A tied checkpoint may repeat the embedding under the head's name.
        repeated = ("lm_head.weight",) if self.config.tied else ()
        return fill(abstract, self.tensors(), shardings=shardings, source=str(self.path), repeated=repeated)
