"""Whole trainings small enough for tests: a chat target on disk, conversations, a recipe."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import tiny_models
import tiny_targets

VOCAB = 264
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["alpha", "beta", "gamma", "delta", "one two", "three", "four five six", "seven"]


def save_chat_llama(path: pathlib.Path, *, seed: int = 5, **changes: Any) -> pathlib.Path:
    """A random Llama with six layers, a byte tokenizer with a chat template, and free rows past its tokens."""
    end = save_tokenizer(path)
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 6, "max_position_embeddings": 256, "eos_token_id": end}
    tiny_models.save_llama(path, seed=seed, **(sizes | changes))
    return path


def save_chat_target(path: pathlib.Path, family: str, **changes: Any) -> pathlib.Path:
    """A random target of a family, with the same tokenizer."""
    end = save_tokenizer(path)
    tiny_targets.save_target(path, family, **({"vocab_size": VOCAB, "eos_token_id": end} | changes))
    return path


def save_tokenizer(path: pathlib.Path) -> int:
    """Write a byte tokenizer with a chat template; the token that ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(path)
    return tokenizer.eos_token_id


def write_conversations(file: pathlib.Path, count: int, *, seed: int) -> pathlib.Path:
    """Conversations of one question and one answer, of many lengths, in two sets."""
    rng = np.random.default_rng(seed)
    with file.open("w") as out:
        for number in range(count):
            asked = " ".join(rng.choice(WORDS, 2))
            said = " ".join(rng.choice(WORDS, int(rng.integers(2, 16))))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            out.write(json.dumps({"set": f"set-{number % 2}", "messages": turns}) + "\n")
    return file


@dataclasses.dataclass(frozen=True)
class TinyRecipe:
    """A recipe file and the directory for its runs."""

    file: pathlib.Path
    root: pathlib.Path

    def arguments(self, out: str, *more: str) -> list[str]:
        return [f"recipe={self.file}", f"out={self.root / out}", *more]


def save_recipe(root: pathlib.Path, target: pathlib.Path) -> TinyRecipe:
    """Thirty conversations in two buckets: passes of several batches, some of them with empty rows."""
    write_conversations(root / "train.jsonl", 30, seed=1)
    write_conversations(root / "heldout.jsonl", 7, seed=2)
    recipe = {
        "mesh": "cpu8",
        "out": "unused",
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"layers": 2, "block_size": 4, "tap_count": 3, "dtype": "float32"},
        "objective": {"anchors": 6},
        "optim": {"lr": 3e-3, "warmup": 0.1},
        "data": {
            "train": str(root / "train.jsonl"),
            "heldout": str(root / "heldout.jsonl"),
            "buckets": [128, 192],
            "tokens_per_batch": 1152,
        },
        "train": {"steps": 20},
        "pipeline": {"feature_cache_gib": 1.0},
        "checkpoint": {"every": 5},
        "eval": {"every": 10, "anchors": 8},
    }
    file = root / "tiny.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return TinyRecipe(file, root)


def save_run(recipe: TinyRecipe, out: str, *changes: str, steps: tuple[int, ...] = (3,)) -> pathlib.Path:
    """A run directory with a checkpoint for each step: an untrained drafter, its weights times the step."""
    import jax
    from omegaconf import OmegaConf

    from dflash_jax import train
    from dflash_jax.experiment import Experiment
    from dflash_jax.training.checkpoint import Checkpoints
    from dflash_jax.training.optim import learning_rate, make_optimizer
    from dflash_jax.training.state import initial_state

    whole, _ = train.read_arguments(recipe.arguments(out, *changes))
    experiment, run = Experiment.open(whole), pathlib.Path(whole.out)
    run.mkdir()
    (run / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(whole)))
    state = initial_state(experiment.initial_drafter, make_optimizer(whole.optim, learning_rate(whole.optim, 10)))
    with Checkpoints(run / "checkpoints", keep=len(steps), warn=print) as checkpoints:
        for step in steps:
            params = jax.tree.map(lambda leaf, step=step: leaf * step, state.params)
            checkpoints.save(step, dataclasses.replace(state, params=params), cursor=0, fingerprint={})
    return run
