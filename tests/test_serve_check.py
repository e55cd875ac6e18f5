"""tools/serve_check.py: its counting and verdicts by hand, the written target in transformers, and vLLM itself."""

import functools
import json
import math
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_runs
import tool_files
from gguf import GGUFWriter
from safetensors.numpy import load_file

from dflash_jax import train
from dflash_jax.chat.chat import Chat
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.decode.generate import generate
from dflash_jax.errors import UserError
from dflash_jax.evaluation.difference import Difference
from dflash_jax.published.targets import TargetFiles

hub_target = tool_files.load("hub_target")
report = tool_files.load("serving_report")
serve_check = tool_files.load("serve_check")
Served = report.Served

JOB = {
    "target": "unused",
    "drafter": None,
    "proposals": 3,
    "prompts": [[1]],
    "stop": [],
    "max_new_tokens": 1,
    "dtype": "float32",
    "repair": True,
}


def save_gguf(path: pathlib.Path, architecture: str, *, tied: bool) -> pathlib.Path:
    """A random model of two layers with a byte tokenizer, under the names that converters give to its parts."""
    width, heads, kv_heads, head, mlp, layers, vocab = 24, 4, 2, 6, 40, 2, 259
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(mlp)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_context_length(77)
    writer.add_vocab_size(vocab)
    writer.add_rope_dimension_count(head)
    pieces = ["a", "b", "ab", *(f"piece {number}" for number in range(vocab - 5))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "smollm", "qwen2": "qwen2"}[architecture])
    writer.add_token_list([*pieces, "<end>", "<stop>"])
    writer.add_token_types([1] * len(pieces) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 2)
    writer.add_eot_token_id(vocab - 1)
    writer.add_chat_template("{{ messages[0].content }}<end>")
    random = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        scale = 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3
        writer.add_tensor(name, ((len(shape) == 1) + scale * random.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", vocab, width)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", vocab, width)
    for layer in range(layers):
        for name, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            add(f"blk.{layer}.attn_{name}.weight", rows, width)
            if architecture == "qwen2":
                add(f"blk.{layer}.attn_{name}.bias", rows)
        add(f"blk.{layer}.attn_output.weight", width, heads * head)
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_norm.weight", width)
        add(f"blk.{layer}.ffn_gate.weight", mlp, width)
        add(f"blk.{layer}.ffn_up.weight", mlp, width)
        add(f"blk.{layer}.ffn_down.weight", width, mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_in_transformers(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_a_gguf_target_is_written_as_a_folder_that_transformers_runs(tmp_path, architecture, tied):
    path = save_gguf(tmp_path / "tiny.gguf", architecture, tied=tied)
    folder = hub_target.hub_target(path, tmp_path / "folder", dtype="float32")
    assert folder == tmp_path / "folder"
    tokens = np.random.default_rng(2).integers(0, 259, (2, 9))
    target = tiny_models.load_target(path)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    _, last = target.hidden(jnp.asarray(tokens), positions, segment_ids=jnp.ones_like(tokens), taps=())
    ours = np.asarray(target.logits(last))
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, logits_in_transformers(folder, tokens), atol=2e-5)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [257, 258]}
    written, read = load_tokenizer(folder), load_tokenizer(path)
    assert written("aab<stop>b abab")["input_ids"] == read("aab<stop>b abab")["input_ids"] != []
    assert written.chat_template == read.chat_template == "{{ messages[0].content }}<end>"
    assert written.special_tokens_map == read.special_tokens_map


def test_weights_are_written_in_the_dtype_asked_for(tmp_path):
    path = save_gguf(tmp_path / "tiny.gguf", "llama", tied=True)
    folder = hub_target.hub_target(path, tmp_path / "folder", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for name, stored in TargetFiles.open(path).tensors():
        np.testing.assert_array_equal(weights.pop(name), stored.read(()).astype(jnp.bfloat16))
    assert not weights


def test_a_hub_style_target_is_served_as_it_is(plain_llama, tmp_path):
    assert hub_target.hub_target(plain_llama.path, tmp_path / "unused", dtype="float32") == plain_llama.path
    assert not (tmp_path / "unused").exists()


def decodings(**changes: Any) -> dict[str, list[Any]]:
    """Two prompts, decoded alike by both sides."""
    plain = [Served((5, 6, 7, 9), 1.0), Served((4, 9), 1.0)]
    drafted = [Served((5, 6, 7, 9), 0.5, 2, (1, 1, 0)), Served((4, 9), 0.5, 1, (1, 0, 0))]
    found = {
        report.ENGINE: plain,
        report.ENGINE_DRAFTED: drafted,
        report.OURS: plain,
        report.OURS_DRAFTED: drafted,
    }
    return found | changes


def test_rounds_are_counted_by_position():
    """Rounds that accepted 0, 3, 1 and 3 of 4 drafts."""
    assert report.accepted_by_position(np.array([0, 3, 1, 3]), positions=4) == (3, 2, 2, 0)
    assert report.accepted_by_position(np.zeros(0, int), positions=0) == ()


def test_accept_length_is_pooled_over_rounds():
    answers = [Served((1,), 1.0, 3, (3, 2)), Served((1,), 1.0, 1, (0, 0)), Served((1,), 1.0)]
    assert report.accept_length(answers) == 1 + 5 / 4
    assert report.accept_length([Served((1,), 1.0)]) == 1


def test_nothing_is_wrong_where_all_agree():
    found = decodings()
    assert report.faults(found) == []
    assert report.same_rounds(found) == 2
    assert report.totals(found)[report.ENGINE_DRAFTED] == {
        "identical": 2,
        "ties": 0,
        "tokens": 6,
        "tokens_s": 6.0,
        "drafts": 3,
        "accept_len": 2.0,
        "accepted_by_position": [2, 1, 0],
    }
    lines = report.table(found).splitlines()
    assert lines[0].split() == ["vLLM", "plain", "vLLM", "drafted", "ours", "plain", "ours", "drafted"]
    assert [line.split()[-4:] for line in lines[2:]] == [
        ["2/2", "2/2", "2/2", "2/2"],
        ["6", "6", "6", "6"],
        ["3.0", "6.0", "3.0", "6.0"],
        ["-", "3", "-", "3"],
        ["-", "2.000", "-", "2.000"],
        ["-", "2", "-", "2"],
        ["-", "1", "-", "1"],
        ["-", "0", "-", "0"],
        ["same", "for", "2/2", "prompts"],
    ]


def test_a_tie_is_told_and_forgiven():
    other = [Served((5, 6, 8, 9), 1.0, difference=Difference(2, 0.0004, tie=True)), Served((4, 9), 1.0)]
    found = decodings(**{report.OURS: other})
    assert report.faults(found) == []
    assert "tie: ours plain, prompt 0 parts at token 2, logit gap 0.0004" in report.table(found)
    assert report.totals(found)[report.OURS]["ties"] == 1


def test_another_text_is_a_fault():
    difference = Difference(1, math.inf, tie=False)
    other = [Served((5, 6, 7, 9), 1.0), Served((4,), 1.0, difference=difference)]
    found = decodings(**{report.ENGINE_DRAFTED: other, report.OURS_DRAFTED: other})
    assert len(report.faults(found)) == 2
    assert report.faults(found)[0].startswith("vLLM drafted: 1 of 2 answers differ")
    assert "DIFFERENT: vLLM drafted, prompt 1 parts at token 1, logit gap inf" in report.table(found)
    json.dumps(report.answers_content(found), allow_nan=False)


@pytest.mark.parametrize(("accepted", "faults"), [(104, 0), (106, 1), (94, 1)])
def test_accept_lengths_may_be_a_twentieth_apart(accepted, faults):
    ours, theirs = [Served((1,), 1.0, 100, (100,))], [Served((1,), 1.0, 100, (accepted,))]
    found = decodings(**{report.ENGINE_DRAFTED: theirs, report.OURS_DRAFTED: ours})
    assert len(report.faults(found)) == faults
    assert report.same_rounds(found) == 0


def test_results_of_the_engine_are_read(tmp_path):
    answer = {"tokens": [3, 4], "seconds": 0.5, "drafts": 1, "accepted": [1, 0]}
    result = {"versions": {"torch": "2"}, "repaired": True, "answers": [answer]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = report.EngineResult.read(tmp_path / "result.json")
    assert found == report.EngineResult([Served((3, 4), 0.5, 1, (1, 0))], {"torch": "2"}, True)


def test_an_engine_that_fails_is_quoted(tmp_path):
    with pytest.raises(UserError, match=r"vllm_decode\.py ended with status 1: (?s:.*)No module named 'vllm'"):
        serve_check.run_vllm(sys.executable, JOB, folder=tmp_path)


def test_an_engine_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"vllm: .*/python does not exist; tools/setup_vllm.sh DIR makes"):
        serve_check.main([f"run={tmp_path}", f"vllm={tmp_path / 'python'}"])


def save_answered_recipe(root: pathlib.Path) -> tiny_runs.TinyRecipe:
    """A recipe whose data is what its target says, token by token, so that drafts are accepted now and then.

    The target's sizes are ones that vLLM's kernels for the CPU take.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = tiny_runs.save_chat_llama(root / "llama", head_dim=32, **sizes)
    recipe = tiny_runs.save_recipe(root, path)
    chat = Chat.open(path, stop_tokens=())
    asked = [[{"role": "user", "content": f"{a} {b}"}] for a in tiny_runs.WORDS for b in tiny_runs.WORDS[:3]]
    prompts = [chat.prompt(messages) for messages in asked]
    room = max(map(len, prompts))
    padded = np.array([np.pad(prompt, (0, room - len(prompt))) for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    target = tiny_models.load_target(path)
    rows = jax.jit(functools.partial(generate, stop=(), max_new_tokens=48))(target, padded, lengths)
    with (root / "answers.jsonl").open("w") as out:
        for tokens, end, start in zip(np.asarray(rows.tokens), np.asarray(rows.lengths), lengths, strict=True):
            mask = [0] * int(start) + [1] * int(end - start)
            out.write(json.dumps({"input_ids": tokens[:end].tolist(), "loss_mask": mask}) + "\n")
    (root / "asked.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))
    return recipe


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> tiny_runs.TinyRecipe:
    return save_answered_recipe(tmp_path_factory.mktemp("served"))


@pytest.mark.slow
@pytest.mark.skipif("DFLASH_VLLM" not in os.environ, reason="DFLASH_VLLM names no python with vLLM")
@pytest.mark.parametrize(
    ("name", "training", "serving"),
    [
        ("plain", [], []),
        ("speculators", [], ["format=speculators"]),
        ("narrow", ["drafter.width=32"], []),
        ("few-tokens", ["drafter.vocab=100"], []),
        ("few-tokens-speculators", ["drafter.vocab=100"], ["format=speculators"]),
        ("sliding", ["drafter.layer_types=[sliding_attention,sliding_attention]", "drafter.sliding_window=8"], []),
    ],
)
def test_vllm_drafts_as_this_package_does(answered, name, training, serving):
    """Not only as long on the average: in every round as many drafts, and as many accepted."""
    data = [f"data.train={answered.root / 'answers.jsonl'}", "data.heldout=null", "eval.every=0"]
    steps = ["train.steps=300", "checkpoint.every=300", "objective.anchors=24"]
    assert train.main(answered.arguments(name, *data, *steps, *training)) == 0
    where = [f"run={answered.root / name}", f"vllm={os.environ['DFLASH_VLLM']}"]
    asked = [f"prompts={answered.root / 'asked.jsonl'}", "max_new_tokens=32", "weights=float32"]
    assert serve_check.main([*where, *asked, *serving]) == 0
    found = json.loads((answered.root / name / "report" / "serving.json").read_text())
    assert found["totals"][report.OURS_DRAFTED]["accept_len"] > 1.2
    assert found["same_rounds"] == 24
