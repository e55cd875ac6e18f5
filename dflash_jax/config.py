"""What a run can be told: one frozen dataclass per group of keys, each key with its meaning and its limits.

This file says which keys exist; arguments.py reads them from a recipe and the command line. Nothing here
imports jax, so that a wrong key is reported before any device is touched.
"""

import dataclasses
from typing import Any

MISSING = "???"  # OmegaConf's mark for a key without a default
DTYPES = ("float32", "bfloat16")
MAX_SEED = 2**32 - 1  # what a random key of jax tells apart
LAYER_TYPES = ("full_attention", "sliding_attention")
LOSS_TERMS = ("ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_hybrid")  # what they are: objective/terms.py


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its one-line meaning and the values it allows (limits inclusive).

    For a mapping, choices are its keys and the limits those of its values; for a list, both are of its items.
    """
    metadata = {"meaning": meaning, "low": low, "high": high, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def template_arguments() -> Any:
    """The field `template` of everything that renders conversations."""
    meaning = "arguments of the target's chat template, such as template.enable_thinking=false"
    return dataclasses.field(default_factory=dict, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True)
class TargetSection:
    """The frozen model whose decoding is to be sped up."""

    path: str = option(MISSING, "model folder, .gguf file, or package:NAME/FILE inside a Python package")
    dtype: str = option("bfloat16", "dtype of the target's weights and activations", choices=DTYPES)


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """The model that is trained. What is left null is the target's own, or that of the folder in `init`."""

    init: str = option(
        "random", "weights of a fresh run: random, target (copies of its last layers), or a drafter's folder"
    )
    layers: int = option(5, "transformer layers", low=1, high=256)
    block_size: int = option(16, "slots of a block: the anchor and block_size - 1 proposals", low=2, high=256)
    tap_count: int = option(5, "target layers that feed the drafter, placed by the published rule", low=1)
    taps: list[int] | None = option(None, "target layers by index, instead of tap_count; the last is refused")
    mask_token: int | None = option(None, "token id of MASK; null: first embedding row past the tokenizer", low=0)
    width: int | None = option(
        None, "channels; other than the target's adds trained projections to its embedding and head", low=1
    )
    mlp_width: int | None = option(None, "width of the MLP", low=1)
    heads: int | None = option(None, "query heads", low=1)
    kv_heads: int | None = option(None, "key/value heads", low=1)
    head_width: int | None = option(None, "channels of a head", low=2)
    rope_theta: float | None = option(None, "RoPE base", low=1.0)
    rope_factor: float | None = option(None, "YaRN: how much longer the context gets; null: no YaRN", low=1.0)
    rope_original_length: int | None = option(None, "YaRN: tokens of the context before", low=1)
    layer_types: list[str] | None = option(None, "attention of each layer; null: all full", choices=LAYER_TYPES)
    sliding_window: int | None = option(None, "keys that a sliding query sees, itself included", low=1)
    is_causal: bool | None = option(None, "causal inside the block; null: sliding layers only")
    vocab: int | None = option(None, "draft vocabulary: most frequent tokens the head covers; null: all", low=1)
    dtype: str = option("bfloat16", "dtype of the drafter's activations; parameters are float32", choices=DTYPES)


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """What the drafter learns from a batch."""

    anchors: int = option(512, "blocks per row and step", low=1)
    head_chunk: int = option(64, "blocks whose logits are alive at a time", low=1)
    head_sample: int | None = option(
        None, "tokens in the softmax of a step: all labels of the data and random others; null: all", low=2
    )
    terms: dict[str, float] | None = option(
        None, "factors of the losses by name; null: {ce: 1}", choices=LOSS_TERMS, low=1e-6
    )
    slot_weights: str = option("decay", "how slots are weighted", choices=("decay", "dpace", "uniform"))
    gamma: float | None = option(
        None, "constant of `decay`; null: by block size (16: 7, 10: 5, 8: 4); 10 suits tree decoding", low=1e-3
    )
    dpace_alpha: float = option(0.5, "smoothing of `dpace`", low=1e-3, high=1.0)
    noise_peak: float = option(0.0, "standard deviation of Gaussian noise on the features, after warm-up", low=0.0)
    noise_end: float = option(0.0, "standard deviation of the noise at the last step", low=0.0)
    noise_warmup: float = option(0.04, "share of the steps with rising noise", low=0.0, high=1.0)
    noise_schedule: str = option("linear", "noise after warm-up", choices=("linear", "cosine"))


@dataclasses.dataclass(frozen=True)
class OptimSection:
    """AdamW with warm-up and clipping."""

    lr: float = option(6e-4, "peak learning rate", low=0.0)
    b1: float = option(0.9, "AdamW decay of the first moment", low=0.0, high=0.9999)
    b2: float = option(0.95, "AdamW decay of the second moment", low=0.0, high=0.99999)
    eps: float = option(1e-8, "AdamW epsilon", low=1e-20)
    weight_decay: float = option(0.0, "AdamW weight decay", low=0.0)
    warmup: float = option(0.04, "share of the steps with a rising learning rate", low=0.0, high=1.0)
    schedule: str = option("cosine", "learning rate after warm-up", choices=("cosine", "wsd", "constant"))
    clip_norm: float = option(1.0, "global norm that gradients are clipped to", low=1e-6)


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Conversations, answered by the target itself, and the batches that are made of them."""

    train: str = option(MISSING, "what to train on: a file of conversations, or a folder that `prepare` wrote")
    heldout: str | None = option(None, "what is never trained on: a file or a folder, like `train`")
    template: dict[str, Any] = template_arguments()
    last_turn_only: bool = option(False, "train on the last answer of each conversation only")
    max_length: int = option(8192, "tokens of a record; longer conversations are cut where an answer ends", low=2)
    buckets: Any = option(
        "auto:6",
        "row lengths in tokens, such as [512,1024,2048], or auto:N for the N best; longer records stay out",
    )
    pad_multiple: int = option(1, "row lengths are rounded up to a multiple of this", low=1)
    tokens_per_batch: int = option(49152, "tokens of a batch, padding included, before rounding to rows", low=1)
    batching: str = option(
        "bucketed",
        "how records become batches: bucketed; packed (several records a row); random, sorted (to compare with)",
        choices=("bucketed", "packed", "random", "sorted"),
    )
    features: str = option(
        "online",
        "target features: online (computed), hybrid (on disk while there is room), cached (all on disk first)",
        choices=("online", "cached", "hybrid"),
    )
    features_dir: str | None = option(None, "folder of features on disk, shared by runs; null: features/ in `out`")
    features_gib: float = option(64.0, "most that features of one data set may take on disk", low=0.0)


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """How long, and from which seed."""

    epochs: int = option(6, "passes over the data", low=1)
    steps: int | None = option(None, "optimizer steps; shortens or lengthens the run to just so many", low=1)
    accumulate: int = option(1, "batches that make one optimizer step", low=1)
    seed: int = option(0, "seed of initial weights, batch order and anchors", low=0, high=MAX_SEED)


@dataclasses.dataclass(frozen=True)
class PipelineSection:
    """How the two meshes are kept busy."""

    look_ahead: int = option(2, "batches whose features are requested before the drafter needs them", low=0)
    feature_cache_gib: float = option(
        0.0, "host memory to keep features of past passes in; held-out data may take as much", low=0.0
    )
    read_threads: int = option(2, "threads that read records", low=1)
    prefetch_mib: float = option(256.0, "host memory for batches that are read ahead", low=0.0)
    stuck_s: float = option(
        600.0, "seconds without a batch after which the run is saved and ends with an error", low=0.001
    )


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """What is kept on disk."""

    every: int = option(500, "optimizer steps between checkpoints", low=1)
    keep: int = option(2, "latest checkpoints that are kept, besides the best", low=1)
    keep_every: int | None = option(None, "checkpoints at multiples of so many steps are kept for good", low=1)
    max_failures: int = option(5, "saves in a row that may fail before the run ends with an error", low=1)


@dataclasses.dataclass(frozen=True)
class GuardSection:
    """When a step is not taken. One whose loss or gradient is not finite never is."""

    max_grad_norm_ratio: float | None = option(
        None, "most that a gradient's norm may be, as a multiple of the median of recent steps; null: any", low=1.0
    )
    max_bad_steps: int = option(10, "skipped steps in a row after which the run ends with an error", low=1)


@dataclasses.dataclass(frozen=True)
class ProfileSection:
    """A trace for JAX's profiler."""

    steps: str | None = option(None, "first:last optimizer step of a trace, written to profile/ in `out`")


@dataclasses.dataclass(frozen=True)
class EvalSection:
    """Evaluation on data.heldout while training: teacher-forced, and by decoding."""

    every: int = option(0, "optimizer steps between evaluations, step 0 included; 0: never", low=0)
    anchors: int = option(64, "blocks per held-out row, the same ones each time", low=1)
    budgets: list[int] = option(
        [], "tree budgets whose accept length is measured too, such as [16,64]", low=1, high=1024
    )
    decode_every: int = option(0, "optimizer steps between real decodings of held-out prompts; 0: never", low=0)
    decode_prompts: int = option(8, "prompts of such a decoding", low=1)
    decode_tokens: int = option(64, "tokens decoded for each of them", low=1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole experiment."""

    target: TargetSection = dataclasses.field(default_factory=TargetSection)
    drafter: DrafterSection = dataclasses.field(default_factory=DrafterSection)
    objective: ObjectiveSection = dataclasses.field(default_factory=ObjectiveSection)
    optim: OptimSection = dataclasses.field(default_factory=OptimSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    pipeline: PipelineSection = dataclasses.field(default_factory=PipelineSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    guard: GuardSection = dataclasses.field(default_factory=GuardSection)
    profile: ProfileSection = dataclasses.field(default_factory=ProfileSection)
    eval: EvalSection = dataclasses.field(default_factory=EvalSection)
    mesh: str = option(MISSING, "device layout: a name in meshes/ or a YAML file")
    out: str = option(MISSING, "run directory, made if it does not exist")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What `evaluate` is told."""

    run: str | None = option(None, "run directory of a training: its target, its drafter, its held-out data")
    target: str | None = option(None, "without `run`: model folder, .gguf file or package:NAME/FILE")
    drafter: str | None = option(
        None, "more drafters, separated by commas: run directories, and folders in z-lab's or speculators' format"
    )
    step: str = option("latest", "checkpoint of run directories: latest, best (held-out accept length), or a step")
    prompts: str | None = option(
        None, "files of conversations, humaneval, mt-bench, separated by commas; null: data.heldout of `run`"
    )
    limit: int | None = option(None, "prompts of each set; null: all", low=1)
    decode: str = option("plain,chain", "ways to decode, separated by commas: plain, chain, tree")
    budget: str = option("15,32,64", "nodes of a tree besides its root, one number or several")
    block_size: int | None = option(None, "slots drafted at a time; null: the drafter's own", low=2)
    min_accept: float = option(
        0.0,
        "drafts are not verified where fewer are expected to be accepted, and few are made where none is; 0: all",
        low=0.0,
    )
    draft_vocab: int | None = option(
        None, "draft only so many tokens, those most frequent in the training data of `run`; null: all", low=2
    )
    temperature: float = option(0.0, "0: greedy", low=0.0)
    top_p: float = option(1.0, "sample from the smallest set of tokens with this probability", low=1e-6, high=1.0)
    top_k: int = option(0, "sample from so many tokens; 0: from all", low=0)
    seed: int = option(0, "seed of the sampling", low=0, high=MAX_SEED)
    max_new_tokens: int = option(128, "tokens decoded for each prompt", low=1)
    batch_size: int = option(1, "prompts decoded at a time", low=1)
    simulate: bool = option(True, "also measure teacher-forced, on the text that plain decoding wrote")
    template: dict[str, Any] = template_arguments()
    dtype: str | None = option(
        None, "dtype of weights and activations; null: the run's own, without `run` bfloat16", choices=DTYPES
    )
    mesh: str = option(
        "one", "device layout, of which the target's part is used: a name in meshes/ or a YAML file"
    )
    report: str | None = option(None, "folder for evaluation.json and pictures; null: report/ in `run`")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """What `export` is told."""

    run: str | None = option(None, "run directory of a training")
    step: str = option("latest", "checkpoint: latest, best (held-out accept length), or a saved step")
    drafter: str | None = option(None, "instead of `run`: a folder in either format, to be converted")
    target: str | None = option(None, "with `drafter`: its target, a folder, .gguf file or package:NAME/FILE")
    to: str = option(MISSING, "folder to write; must not exist, or hold an earlier export of the same drafter")
    format: str = option(
        "zlab",
        "zlab: read by vLLM, SGLang, TPU inference and z-lab's code; speculators: by vLLM and speculators",
        choices=("zlab", "speculators"),
    )
    dtype: str = option("bfloat16", "dtype of the weights", choices=DTYPES)


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What `prepare` is told."""

    target: str = option(MISSING, "model folder, .gguf file, or package:NAME/FILE inside a Python package")
    input: str = option(MISSING, "files of conversations: paths, patterns or folders, separated by commas")
    output: str | None = option(None, "folder to write; may only be left out with `inspect`")
    template: dict[str, Any] = template_arguments()
    last_turn_only: bool = option(False, "train on the last answer of each conversation only")
    max_length: int = option(8192, "tokens of a record", low=2)
    too_long: str = option(
        "cut", "longer conversations: cut where an answer ends, or drop", choices=("cut", "drop")
    )
    workers: int | None = option(None, "processes; null: one for each core", low=1)
    inspect: int = option(
        0, "print so many conversations with the trained tokens marked, and write nothing", low=0
    )


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What `plan` is told."""

    data: str = option(MISSING, "a folder that `prepare` wrote, or a .npy file of record lengths")
    buckets: Any = option("auto:6", "row lengths in tokens, or auto:N for the N best")
    pad_multiple: int = option(1, "row lengths are rounded up to a multiple of this", low=1)
    tokens_per_batch: int = option(49152, "tokens of a batch, padding included, before rounding to rows", low=1)
    row_multiple: int = option(
        1, "rows of a batch are rounded down to a multiple of this: the mesh's row shards", low=1
    )
    seed: int = option(0, "seed of the order", low=0)


@dataclasses.dataclass(frozen=True)
class RegenerateConfig:
    """What `regenerate` is told."""

    target: str | None = option(None, "model folder, .gguf file or package:NAME/FILE; not needed with `server`")
    prompts: str = option(MISSING, "file of conversations; each user turn without an answer gets one")
    output: str = option(MISSING, "JSONL file to write, with the answers added")
    template: dict[str, Any] = template_arguments()
    temperature: float = option(0.0, "0: greedy", low=0.0)
    top_p: float = option(1.0, "sample from the smallest set of tokens with this probability", low=1e-6, high=1.0)
    top_k: int = option(0, "sample from so many tokens; 0: from all", low=0)
    seed: int = option(0, "seed of the sampling", low=0, high=MAX_SEED)
    max_new_tokens: int = option(192, "an answer is cut there and marked as truncated", low=1)
    dtype: str = option("float32", "dtype of the target's weights and activations", choices=DTYPES)
    mesh: str = option(
        "one", "device layout, of which the target's part is used: a name in meshes/ or a YAML file"
    )
    batch_size: int = option(32, "prompts decoded at a time", low=1)
    server: str | None = option(None, "OpenAI-compatible server that answers instead, such as http://host:8000/v1")
    model: str | None = option(None, "the model's name on the server; null: the only one that it has")
    concurrency: int = option(32, "requests to the server at a time", low=1)
    retries: int = option(5, "times that a request is repeated when the server fails", low=0)
    timeout_s: float = option(600.0, "seconds that an answer of the server may take", low=0.001)


@dataclasses.dataclass(frozen=True)
class MeshPart:
    """One of the two meshes: which devices, and the sizes of its axes (their product is the device count)."""

    devices: list[int] = option(MISSING, "device indices, in mesh order")
    axes: dict[str, int] = option(
        MISSING, "sizes of the mesh axes by name; `data` and `fsdp` split the rows of a batch"
    )
    rules: dict[str, str] = dataclasses.field(
        default_factory=dict,
        metadata={"meaning": "weight axis -> mesh axis; axes that are not named are replicated"},
    )


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Which devices run the target and which train the drafter."""

    target: MeshPart = dataclasses.field(default_factory=MeshPart)
    drafter: MeshPart = dataclasses.field(default_factory=MeshPart)
    platform: str | None = option(None, "`cpu` makes virtual devices; null: whatever jax finds", choices=("cpu",))
    device_count: int = option(MISSING, "devices that the layout needs, idle ones included", low=1)
