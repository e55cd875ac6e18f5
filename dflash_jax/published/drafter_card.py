"""The README.md of an exported drafter: what it is, how to serve it, what a server sees, how it came about."""

import dataclasses
import json
import math

from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.published.drafter_fields import DrafterFields
from dflash_jax.published.finished_drafter import FinishedDrafter

ZLAB, SPECULATORS = "zlab", "speculators"


@dataclasses.dataclass(frozen=True)
class History:
    """How a drafter came about.

    target: its target's name; origin: lines of text; check: the command that compares it with a real engine, if
    there is one; measured: rows of prompt set, way of decoding and accept length; recipe: YAML.
    """

    target: str
    origin: tuple[str, ...]
    check: str | None = None
    measured: tuple[tuple[str, str, str], ...] = ()
    recipe: str | None = None


def card(trained: FinishedDrafter, history: History, *, format: str, dtype: str, place: str) -> str:
    """The text; trained: before its format takes anything from it; place: the folder as the user names it."""
    drafter = trained.covering_all() if format == ZLAB else trained
    fields, facts = drafter.fields(), drafter.ends.facts
    config, target = fields.config, facts.place or "TARGET"
    count = sum(math.prod(stored.shape) for stored in drafter.tensors(dtype).values())
    kinds = ", ".join(
        f"{config.layer_types.count(kind)} {kind.split('_')[0]}" for kind in sorted({*config.layer_types})
    )
    parts = [
        f"# DFlash drafter for {history.target}",
        "A small transformer that proposes a block of tokens at a time, for speculative decoding with "
        f"{history.target}. The target checks every proposal, so that its output stays its own.",
        _table(
            ("target", f"{history.target}: {facts.layers} layers, {facts.vocab} embedding rows"),
            ("taps", f"outputs of the target's layers {list(fields.taps)}, counted from 0"),
            ("block", f"{config.block_size} slots: the last token and {config.block_size - 1} proposals"),
            ("MASK", f"token {config.mask_token}"),
            ("layers", f"{len(config.layer_types)} ({kinds}), width {config.width}, {config.heads} heads"),
            ("weights", f"{count / 1e6:.1f} M in {dtype}, {_format_name(format)} format"),
        ),
        "## Serve it",
        *(
            []
            if facts.place
            else ["TARGET stands for the target as a model folder; training read it from a single file."]
        ),
        *_serving(fields, target=target, place=place, format=format),
        "## What a server sees",
        "\n".join(f"- {line}" for line in _remarks(drafter, trained, format=format)),
    ]
    if history.check:
        parts += [
            "## Check it",
            "In a real engine, vLLM on CPU, beside our own decoding: the same text, and both accept lengths.",
            _code(history.check),
        ]
    if history.measured:
        parts += [
            "## Measured",
            "Tokens that a pass of the target yields (accept length, the target's own token included):",
            _table(("prompts", "decoding", "accept length"), *history.measured),
        ]
    parts += ["## How it came about", "\n".join(f"- {line}" for line in history.origin)]
    if history.recipe:
        parts += ["The recipe, for `python -m dflash_jax.train`:", _code(history.recipe.rstrip(), "yaml")]
    return "\n\n".join(parts) + "\n"


def _serving(fields: DrafterFields, *, target: str, place: str, format: str) -> list[str]:
    config = fields.config
    proposals = config.block_size - 1
    speculation = json.dumps({"method": "dflash", "model": place, "num_speculative_tokens": proposals})
    mixed = "VLLM_USE_V2_MODEL_RUNNER=1 " if {FULL, SLIDING} <= {*config.layer_types} else ""
    vllm = f"{mixed}vllm serve {target} --speculative-config '{speculation}'"
    parts = ["vLLM:", _code(vllm)]
    if format == SPECULATORS:
        return [
            *parts,
            "The speculators package:",
            _code(
                "from speculators.models.dflash import DFlashDraftModel\n\n"
                f"drafter = DFlashDraftModel.from_pretrained({place!r})",
                "python",
            ),
            "SGLang, tpu-inference and z-lab's code read the other format: export again with `format=zlab`.",
        ]
    parts += [
        "SGLang:",
        _code(
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\\n"
            f"    --speculative-draft-model-path {place} --speculative-num-draft-tokens {config.block_size}"
        ),
    ]
    if fields.has_own_ends:
        return [
            *parts,
            "z-lab's code and tpu-inference cannot run it: they know only drafters of the target's width.",
        ]
    parts += [
        'z-lab\'s code (`pip install "dflash[local]"`):',
        _code(
            "from dflash import DFlashDraftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"target = AutoModelForCausalLM.from_pretrained({target!r}, dtype='auto')\n"
            f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
            f"drafter = DFlashDraftModel.from_pretrained({place!r}, dtype='auto')\n"
            "ids = tokenizer.apply_chat_template(\n"
            "    [{'role': 'user', 'content': 'Hello'}], add_generation_prompt=True, return_tensors='pt'\n"
            ")['input_ids']\n"
            "stop = [tokenizer.eos_token_id]\n"
            "found = drafter.spec_generate(target, ids, max_new_tokens=64, stop_token_ids=stop)\n"
            "print(tokenizer.decode(found[0]))",
            "python",
        ),
    ]
    if SLIDING in config.layer_types or config.is_causal:
        return [*parts, "tpu-inference cannot run it: it knows only full attention, both ways inside a block."]
    return [*parts, "tpu-inference, with its package installed beside vLLM on a TPU:", _code(vllm)]


def _remarks(drafter: FinishedDrafter, trained: FinishedDrafter, *, format: str) -> list[str]:
    """What may surprise whoever serves it; drafter: as this format has it."""
    fields = drafter.fields()
    config, vocab = fields.config, drafter.ends.facts.vocab
    found = []
    if fields.has_own_ends:
        found.append(
            f"The drafter's width, {config.width}, is not the target's, {fields.tap_width}. Its projections are "
            "multiplied into an embedding and a head of its own, `embed_tokens.weight` and `lm_head.weight`, "
            "which vLLM uses in place of the target's. The `speculators` package and z-lab's code cannot run it."
        )
    else:
        found.append("It has no embedding and borrows the target's.")
    if drafter.draft_tokens is not None:
        found.append(
            f"Its head covers {len(drafter.draft_tokens)} of {vocab} tokens, the most frequent ones (`d2t`, "
            "`t2d`); others are never proposed. The target's checks cover all."
        )
    elif trained.draft_tokens is not None:
        found.append(
            f"It was trained with a draft vocabulary of {len(trained.draft_tokens)} tokens, which this format "
            f"cannot say: proposals are made over all {vocab}. They cost more than in our own decoding; accept "
            "lengths can differ a little; `format=speculators` keeps the vocabulary."
        )
    if not fields.has_own_ends and drafter.draft_tokens is None:
        found.append("It has no head and borrows the whole head of the target.")
    if format == SPECULATORS and {FULL, SLIDING} <= {*config.layer_types}:
        found.append(
            "vLLM 0.32 takes one causality for all layers from this format, and so computes the full layers of "
            "this drafter wrongly (proposals get worse, the text does not). Serve `format=zlab` there."
        )
    if format == SPECULATORS and SLIDING in config.layer_types:
        found.append(
            f"The `speculators` package shows every slot the {config.window} tokens before the anchor; engines "
            "move the window with the slot, as this drafter was trained."
        )
    return found


def _format_name(format: str) -> str:
    return {ZLAB: "z-lab's", SPECULATORS: "speculators'"}[format]


def _code(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def _table(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    lines = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
