"""Which target families exist, and how one is read from a folder or a GGUF file onto its devices."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.errors import UserError
from dflash_jax.models.decoder import Decoder, DecoderConfig
from dflash_jax.published import gguf, hub_folder, tensor_names
from dflash_jax.published.config_json import Fields, text_fields
from dflash_jax.published.families import llama, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe
from dflash_jax.published.stored import Stored
from dflash_jax.published.weights import Place, fill, names


@dataclasses.dataclass(frozen=True)
class Family:
    """read: from a configuration to sizes and kinds; module: what they build."""

    read: Callable[[Fields], DecoderConfig]
    module: type[Decoder] = Decoder


# By model_type in config.json. A multimodal wrapper and its text model alone are one family.
FAMILIES = {
    "llama": Family(llama.read),
    "qwen2": Family(qwen2.read),
    "qwen3": Family(qwen3.read),
    "qwen3_moe": Family(qwen3_moe.read),
    "qwen3_5": Family(qwen3_5.read),
    "qwen3_5_text": Family(qwen3_5.read),
    "qwen3_5_moe": Family(qwen3_5_moe.read),
    "qwen3_5_moe_text": Family(qwen3_5_moe.read),
}


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """A target on disk: its published configuration and a stream of its tensors."""

    path: pathlib.Path
    fields: dict[str, Any]
    tensors: Callable[[], Iterator[tuple[str, Stored]]]

    @classmethod
    def open(cls, path: pathlib.Path) -> "TargetFiles":
        """A hub-style folder or a .gguf file. Raises UserError where it is neither or unsupported."""
        if path.is_dir():
            reader = hub_folder
        elif path.is_file() and path.suffix == ".gguf":
            reader = gguf
        else:
            raise UserError(
                f"target.path: {path} is neither a model folder nor a .gguf file; nothing is downloaded here. "
                f"If it is a name on the hub: hf download {path} --local-dir models/{path.name}, "
                f"then target.path=models/{path.name}"
            )
        fields = reader.read_config(path)
        known = sorted(FAMILIES)
        if "model_type" not in fields:
            raise UserError(
                f"target.path: the config.json of {path} lacks model_type; supported: {', '.join(known)}"
            )
        if fields["model_type"] not in known:
            raise UserError(
                f"target.path: model_type {fields['model_type']!r} in {path} is not supported; "
                f"supported: {', '.join(known)}"
            )
        return cls(path, fields, lambda: reader.tensors(path))

    @property
    def config(self) -> DecoderConfig:
        """The model's sizes and kinds. Raises UserError naming a field that is missing or not supported."""
        try:
            return self.family.read(text_fields(self.fields))
        except KeyError as error:
            raise UserError(f"{self.path}: the model's configuration lacks {error}") from None
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    @property
    def family(self) -> Family:
        """The family that the model belongs to."""
        return FAMILIES[self.fields["model_type"]]

    @property
    def name(self) -> str:
        """The model's name, from its file or folder."""
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def digest(self) -> str:
        """A sha256 over the configuration and each weight file's name, size, first and last MiB.

        Tells one model from another without reading hundreds of gigabytes.
        """
        digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode())
        for file in [self.path] if self.path.is_file() else hub_folder.weight_files(self.path):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in (0, max(0, size - 2**20)):
                    opened.seek(start)
                    digest.update(opened.read(2**20))
        return digest.hexdigest()

    def abstract(self, dtype: jnp.dtype) -> tuple[nnx.GraphDef[Any], nnx.State]:
        """The module's structure and the shapes of its parameters, without any memory.

        They are in `dtype`, except those that the module marks with keep_dtype.
        """
        config, module = self.config, self.family.module
        graph, state = nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))

        def one(variable: nnx.Variable) -> nnx.Variable:
            kept = variable.get_metadata().get("keep_dtype")
            return variable.replace(jax.ShapeDtypeStruct(variable.shape, variable.dtype if kept else dtype))

        return graph, jax.tree.map(one, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    @property
    def place(self) -> Callable[[str], Place | None]:
        """From the name of a stored tensor to where it belongs, None for one that is not read."""
        return functools.partial(tensor_names.place, config=self.config)

    @property
    def weight_bytes(self) -> int:
        """The stored size of all tensors that `load` reads."""
        place = self.place
        return sum(stored.size_bytes for name, stored in self.tensors() if place(name) is not None)

    def load(
        self, abstract: nnx.State, shardings: nnx.State, *, on_bytes: Callable[[int], object] | None = None
    ) -> nnx.State:
        """Stream every tensor from disk to its shards; strict in both directions.

        on_bytes: told, parameter by parameter, how many of `weight_bytes` are on the devices now.
        """
        return fill(
            abstract,
            self.tensors(),
            shardings=shardings,
            source=str(self.path),
            place=self.place,
            on_bytes=on_bytes,
        )

    def load_some(self, abstract: nnx.State, shardings: nnx.State) -> nnx.State:
        """`load` for the parameters in `abstract` alone, a part of the model; no other tensor is read."""
        wanted = names(abstract)

        def place(name: str) -> Place | None:
            found = self.place(name)
            return found if found is not None and found.name in wanted else None

        return fill(abstract, self.tensors(), shardings=shardings, source=str(self.path), place=place)
