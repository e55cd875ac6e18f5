"""Random models small enough for tests: a Llama written by transformers, drafters, and published weights."""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_targets
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from dflash_jax.batch import Batch
from dflash_jax.mesh import WEIGHT_AXES
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import FULL, SLIDING, Drafter, DrafterConfig
from dflash_jax.objective.objective import Frozen
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.stored import Stored
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import fill, names
from dflash_jax.sharding import shardings

GOLDEN = pathlib.Path(__file__).parent / "golden"
# Compiles sooner; for tests that compile much and run little.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
NO_RULES = dict.fromkeys(WEIGHT_AXES)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("data",))


@dataclasses.dataclass(frozen=True)
class HubLlama:
    """A model folder and the torch model that it was saved from."""

    path: pathlib.Path
    torch_model: Any


def save_llama(path: pathlib.Path, *, seed: int, max_shard_size: str = "1GB", **changes: Any) -> HubLlama:
    """Save a random float32 transformers Llama whose every parameter, norms included, is away from its start."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**(tiny_targets.SHARED | changes))).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name or parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return HubLlama(path, model)


def load_target(path: pathlib.Path, mesh: Mesh | None = None, rules=NO_RULES) -> Decoder:
    files = TargetFiles.open(path)
    graph, abstract = files.abstract(jnp.dtype("float32"))
    return nnx.merge(graph, files.load(abstract, shardings(abstract, mesh or one_device(), rules)))


def frozen_of(target: Decoder) -> Frozen:
    return Frozen(target.embedding[...], target.head[...], None)


def drafter_sizes(**changes: Any) -> DrafterConfig:
    """Sizes of a drafter for `save_llama`'s default target with two taps."""
    sizes: dict[str, Any] = {
        "width": 36,
        "target_width": 36,
        "mlp_width": 40,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 8,
        "feature_width": 72,
        "block_size": 5,
        "mask_token": 6,
        "rope_theta": 500.0,
        "norm_eps": 1e-5,
        "layer_types": (SLIDING, FULL),
        "window": 10,
        "is_causal": None,
    }
    return DrafterConfig(**(sizes | changes))


def random_drafter(seed: int, **changes: Any) -> Drafter:
    """A drafter of `drafter_sizes`; norms and weights are away from where training starts them."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Drafter(drafter_sizes(**changes), nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    def away(leaf):
        noise = random.standard_normal(leaf.shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * noise if leaf.ndim == 1 else 1.2 * noise / leaf.shape[1] ** 0.5)

    return nnx.merge(graph, jax.tree.map(away, state))


def published_tables() -> Frozen:
    """The embedding and head of the published drafters' target, [211, 64] each."""
    tables = np.load(GOLDEN / "target_tables.npz")
    return Frozen(jnp.asarray(tables["embedding"]), jnp.asarray(tables["head"]), None)


def seeded_tensor(name: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """One tensor of the published drafters, whose weights are random streams named by seed and tensor name."""
    stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = stream.standard_normal(shape).astype(np.float32)
    return 1 + np.float32(0.2) * noise if len(shape) == 1 else noise * np.float32(1.2 / np.sqrt(shape[1]))


def stored(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Stored]]:
    """Arrays in memory, as a stream of what a file holds."""
    return ((name, Stored.of(array)) for name, array in arrays.items())


def published_drafter(kind: str) -> Drafter:
    """z-lab's drafter with layers "full" (from its safetensors file) or "sliding" (window 10 in two of three)."""
    layer_types = (FULL, FULL, FULL) if kind == "full" else (SLIDING, FULL, SLIDING)
    config = DrafterConfig(
        width=64,
        target_width=64,
        mlp_width=128,
        heads=4,
        kv_heads=2,
        head_width=16,
        feature_width=320,
        block_size=8,
        mask_token=210,
        rope_theta=1e6,
        norm_eps=1e-6,
        layer_types=layer_types,
        window=None if kind == "full" else 10,
    )
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Drafter(config, nnx.Rngs(0))))
    tensors = load_file(GOLDEN / "zlab_drafter.safetensors")
    if kind == "sliding":
        tensors = {name: seeded_tensor(name, array.shape, seed=12) for name, array in tensors.items()}
    places = shardings(abstract, one_device(), NO_RULES)
    return nnx.merge(graph, fill(abstract, stored(tensors), shardings=places, source=kind))


def published_folder(path: pathlib.Path, kind: str, *, spelling: str = "config.json") -> pathlib.Path:
    """Write z-lab's drafter "full" or "sliding"; spelling: config.json, or transformers 5's config.v5.json."""
    tensors = load_file(GOLDEN / "zlab_drafter.safetensors")
    if kind == "sliding":
        tensors = {name: seeded_tensor(name, array.shape, seed=12) for name, array in tensors.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    name = "zlab_drafter" if kind == "full" else "zlab_drafter_swa"
    (path / "config.json").write_text((GOLDEN / f"{name}.{spelling}").read_text())
    return path


def save_drafter(path: pathlib.Path, drafter: Drafter, *, taps: tuple[int, ...], **changes: Any) -> pathlib.Path:
    """Write a drafter as z-lab publishes one; changes: top-level keys of its config.json."""
    c = drafter.config
    scaling = c.yarn and {
        "rope_type": "yarn",
        "factor": c.yarn.factor,
        "original_max_position_embeddings": c.yarn.original_length,
        "attention_factor": c.yarn.attention_factor,
        "beta_fast": c.yarn.beta_fast,
        "beta_slow": c.yarn.beta_slow,
        "truncate": c.yarn.truncate,
    }
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": len(c.layer_types),
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": 4096,
        "layer_types": list(c.layer_types),
        "sliding_window": c.window,
        "use_sliding_window": c.window is not None,
        "num_target_layers": 6,
        "vocab_size": 264,
        "block_size": c.block_size,
        "dflash_config": {"mask_token_id": c.mask_token, "target_layer_ids": list(taps)},
    }
    if c.is_causal is not None:
        fields["is_causal"] = c.is_causal
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields | changes))
    tensors = {name: np.asarray(value[...]) for name, value in names(nnx.state(drafter)).items()}
    save_file(tensors, path / "model.safetensors")
    return path


def load_drafter(path: pathlib.Path) -> Drafter:
    """The drafter of a folder, through the package's own reader."""
    folder = DrafterFolder.open(path)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Drafter(folder.config, nnx.Rngs(0))))
    places = shardings(abstract, one_device(), NO_RULES)
    return nnx.merge(graph, fill(abstract, folder.tensors(), shardings=places, source=str(path)))


def specforge_batch(golden: Any, loss_mask: Any) -> Batch:
    """The two rows of the golden specforge_loss, the second one padded from token 29 on."""
    segments = np.ones((2, 40), np.int32)
    segments[1, 29:] = 0
    return Batch(
        tokens=jnp.asarray(golden["input_ids"], jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(40), (2, 40)),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(loss_mask),
        record_ids=jnp.arange(2)[:, None],
        epochs=jnp.zeros(2, jnp.int32),
    )
