"""Masks through published chat templates, against texts written by hand after reading the templates.

In a text written by hand, [[...]] are the trained characters, and "..." at its beginning stands for what the
template says about tools.
"""

import pathlib
import re

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.chat.chat import Chat
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.messages import REASONING
from dflash_jax.sources.unused import UnusedRow

TEMPLATES = pathlib.Path(__file__).parent / "golden" / "templates"
QWEN = "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call>"
QWEN += " <tool_response> </tool_response>"
LLAMA = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
HARMONY = "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>"
# The template's file, its special tokens, and those that end an answer.
FAMILIES = {
    "qwen2.5": ("Qwen-Qwen2.5-7B-Instruct", QWEN, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": ("Qwen-Qwen3-0.6B", QWEN, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3.5": ("Qwen3.5-4B", QWEN, ["<|im_end|>", "<|endoftext|>"]),
    "llama3.1": ("meta-llama-Llama-3.1-8B-Instruct", LLAMA, ["<|eot_id|>", "<|eom_id|>"]),
    "gpt-oss": ("openai-gpt-oss-120b", HARMONY, ["<|return|>", "<|call|>"]),
}

SYSTEM = {"role": "system", "content": "Be brief."}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = ({"type": "function", "function": ADD},)
TOOL_JSON = (
    '{"type": "function", "function": {"name": "add", "description": "Adds.", '
    '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}'
)


def asked(content):
    return {"role": "user", "content": content}


def said(content, reasoning="", **more):
    thought = dict.fromkeys(REASONING, reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **thought, **more}


CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}
TURNS = (asked("hi"), said("yes"), asked("more"), said("no"))
THOUGHTS = (asked("hi"), said("yes", "r"), asked("more"), said("no", "q"))
CALLS = (asked("1+1?"), said("", "r", **CALL), RESULT, said("It is 2.", "q"))
PLAIN_CALLS = (asked("1+1?"), said("", **CALL), RESULT, said("It is 2."))
EMPTY = (asked("hi"), said(""), asked("more"), said("no"))
NO_THINKING = {"enable_thinking": False}


def chat_of(family, arguments=None):
    """Every byte and every special token is a token, and a blank line is one, as in real tokenizers."""
    file, special, stops = FAMILIES[family]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    core = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special.split())
    bos = special.split()[0]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=stops[0], bos_token=bos)
    template = (TEMPLATES / f"{file}.jinja").read_text()
    tokenizer.chat_template = template.replace('strftime_now("%Y-%m-%d")', '"2025-08-05"')
    return Chat(tokenizer, stop_tokens=tokenizer.convert_tokens_to_ids(stops), arguments=arguments)


def spelled(family, text):
    """Tokens (as the vocabulary writes them) and mask of a text written by hand."""
    special = map(re.escape, FAMILIES[family][1].split())
    tokens, mask, trained = [], [], False
    for piece in re.findall("|".join([r"\[\[", r"\]\]", *special, "\n\n", r"[\x00-\x7f]"]), text):
        if piece in ("[[", "]]"):
            trained = piece == "[["
        else:
            tokens.append(piece.replace("\n", "Ċ").replace(" ", "Ġ"))
            mask.append(trained)
    return tokens, mask


def check(family, messages, *texts, arguments=None, tools=None, notes=()):
    chat = chat_of(family, arguments)
    answers = chat.encode(Conversation(messages, tools=tools))
    assert len(answers.records) == len(texts)
    for record, text in zip(answers.records, texts, strict=True):
        found = chat.tokenizer.convert_ids_to_tokens(record.tokens.tolist())
        mask = record.loss_mask.tolist()
        tokens, trained = spelled(family, text.removeprefix("..."))
        begin = len(found) - len(tokens) if text.startswith("...") else 0
        assert "".join(found[begin:]) == "".join(tokens)
        assert found[begin:] == tokens
        assert mask == [False] * begin + trained
    assert answers.split == (len(texts) > 1)
    assert answers.notes == notes


def refused(chat, messages, *, match, tools=None):
    with pytest.raises(UnusedRow, match=match) as caught:
        chat.encode(Conversation(messages, tools=tools))
    assert caught.value.reason == "unverified"


# Qwen's format, of which the families differ in the system message and the reasoning.
HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
MORE = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
SUM = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GIVEN = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
NOTHING = "<think>\n\n</think>\n\n"


def test_qwen2_5():
    start = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    turns = start + HI + "[[yes<|im_end|>]]\n" + MORE + "[[no<|im_end|>]]\n"
    check("qwen2.5", TURNS, turns)
    check("qwen2.5", THOUGHTS, turns, notes=("reasoning left out",))
    check("qwen2.5", (SYSTEM, *TURNS[:2]), BRIEF + HI + "[[yes<|im_end|>]]\n")
    check("qwen2.5", EMPTY, start + HI + "[[<|im_end|>]]\n" + MORE + "[[no<|im_end|>]]\n")
    tools = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" + TOOL_JSON + "\n"
        "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
    )
    calls = SUM + "[[" + JSON_CALL + "<|im_end|>]]\n" + GIVEN + "[[It is 2.<|im_end|>]]\n"
    check("qwen2.5", PLAIN_CALLS, tools + calls, tools=TOOLS)


def test_qwen3_thinking():
    thought = HI + "[[<think>\nr\n</think>\n\nyes<|im_end|>]]\n"
    later = HI + "yes<|im_end|>\n" + MORE + "[[<think>\nq\n</think>\n\nno<|im_end|>]]\n"
    check("qwen3", THOUGHTS, thought, later)
    check("qwen3", (SYSTEM, *THOUGHTS), BRIEF + thought, BRIEF + later)
    inside = (asked("hi"), said("<think>\nr\n</think>\n\nyes"), asked("more"), said("<think>q</think>no"))
    check("qwen3", inside, thought, later)
    made_up = ("empty reasoning trained",)
    first = HI + "[[" + NOTHING + "yes<|im_end|>]]\n"
    check(
        "qwen3", TURNS, first, HI + "yes<|im_end|>\n" + MORE + "[[" + NOTHING + "no<|im_end|>]]\n", notes=made_up
    )


def test_qwen3_without_thinking():
    first = HI + NOTHING + "[[yes<|im_end|>]]\n"
    second = HI + "yes<|im_end|>\n" + MORE + NOTHING + "[[no<|im_end|>]]\n"
    check("qwen3", TURNS, first, second, arguments=NO_THINKING)
    check("qwen3", TURNS[:2], first, arguments=NO_THINKING)
    match = (
        r"messages\[1\]: its prompt goes on with '\\n</think>.*, where .* renders 'r\\n</think>.*enable_thinking"
    )
    refused(chat_of("qwen3", NO_THINKING), THOUGHTS, match=match)
    # The empty answer is one token, no place for a block to start from.
    chat = chat_of("qwen3", NO_THINKING)
    answers = chat.encode(Conversation(EMPTY))
    (record,) = answers.records
    text = HI + "<|im_end|>\n" + MORE + NOTHING + "[[no<|im_end|>]]\n"
    assert record.loss_mask.tolist() == spelled("qwen3", text)[1]
    assert answers.split


def test_qwen3_keeps_reasoning_between_calls_until_the_next_question():
    calls = "[[<think>\nr\n</think>\n\n" + JSON_CALL + "<|im_end|>]]\n" + GIVEN
    first = "..." + SUM + calls + "[[<think>\nq\n</think>\n\nIt is 2.<|im_end|>]]\n"
    check("qwen3", CALLS, first, tools=TOOLS)
    history = "..." + SUM + JSON_CALL + "<|im_end|>\n" + GIVEN + "It is 2.<|im_end|>\n"
    second = history + MORE + "[[<think>\nz\n</think>\n\nno<|im_end|>]]\n"
    check("qwen3", (*CALLS, asked("more"), said("no", "z")), first, second, tools=TOOLS)
    # Without reasoning in the data the call is trained with an empty block, which is gone when the answer follows.
    calls = "..." + SUM + "[[" + NOTHING + JSON_CALL + "<|im_end|>]]\n"
    answer = "..." + SUM + JSON_CALL + "<|im_end|>\n" + GIVEN + "[[" + NOTHING + "It is 2.<|im_end|>]]\n"
    check("qwen3", PLAIN_CALLS, calls, answer, tools=TOOLS, notes=("empty reasoning trained",))


def test_qwen3_5():
    first = HI + "<think>\n[[r\n</think>\n\nyes<|im_end|>]]\n"
    second = HI + "yes<|im_end|>\n" + MORE + "<think>\n[[q\n</think>\n\nno<|im_end|>]]\n"
    check("qwen3.5", THOUGHTS, first, second)
    check("qwen3.5", (SYSTEM, *THOUGHTS[:2]), BRIEF + first)
    calls = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    thought = "..." + SUM + "<think>\n[[r\n</think>\n\n" + calls + "<|im_end|>]]\n"
    check("qwen3.5", CALLS, thought + GIVEN + "<think>\n[[q\n</think>\n\nIt is 2.<|im_end|>]]\n", tools=TOOLS)
    plain = "..." + SUM + NOTHING + "[[" + calls + "<|im_end|>]]\n" + GIVEN + NOTHING + "[[It is 2.<|im_end|>]]\n"
    check("qwen3.5", PLAIN_CALLS, plain, arguments=NO_THINKING, tools=TOOLS)


def test_qwen3_5_without_thinking():
    first = HI + NOTHING + "[[yes<|im_end|>]]\n"
    check(
        "qwen3.5",
        TURNS,
        first,
        HI + "yes<|im_end|>\n" + MORE + NOTHING + "[[no<|im_end|>]]\n",
        arguments=NO_THINKING,
    )
    # A thinking model's prompt ends with one line end, which the empty block makes a blank line.
    match = r"end with '\\n' '<think>' '\\n'; .* '<think>' '\\n\\n' .*such as template\.enable_thinking=false"
    refused(chat_of("qwen3.5"), TURNS, match=match)


def test_llama3_1():
    def turn(role, text=""):
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    start = "<|begin_of_text|>" + turn(
        "system", "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    )
    hi, more = (turn("user", f"{text}<|eot_id|>") + turn("assistant") for text in ("hi", "more"))
    turns = start + "<|eot_id|>" + hi + "[[yes<|eot_id|>]]" + more + "[[no<|eot_id|>]]"
    check("llama3.1", TURNS, turns)
    check("llama3.1", THOUGHTS, turns, notes=("reasoning left out",))
    check("llama3.1", (SYSTEM, *TURNS[:2]), start + "Be brief.<|eot_id|>" + hi + "[[yes<|eot_id|>]]")
    check("llama3.1", EMPTY, start + "<|eot_id|>" + hi + "[[<|eot_id|>]]" + more + "[[no<|eot_id|>]]")
    calls = "...1+1?<|eot_id|>" + turn("assistant", '[[{"name": "add", "parameters": {"a": 1}}<|eot_id|>]]')
    given = turn("ipython", '"2"<|eot_id|>') + turn("assistant")
    check("llama3.1", PLAIN_CALLS, calls + given + "[[It is 2.<|eot_id|>]]", tools=TOOLS)
    text_and_call = (asked("1+1?"), said("I add.", **CALL))
    refused(chat_of("llama3.1"), text_and_call, match="leaves out the answer's text", tools=TOOLS)


IDENTITY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
FINAL = "<|channel|>final<|message|>"


def analysis(text):
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


def test_gpt_oss():
    hi, more = (f"<|start|>user<|message|>{text}<|end|><|start|>assistant" for text in ("hi", "more"))
    start = IDENTITY + "<|end|>"
    history = start + hi + FINAL + "yes<|end|>" + more
    check("gpt-oss", TURNS, start + hi + f"[[{FINAL}yes<|return|>]]", history + f"[[{FINAL}no<|return|>]]")
    thought = start + hi + f"[[{analysis('r')}{FINAL}yes<|return|>]]"
    check("gpt-oss", THOUGHTS, thought, history + f"[[{analysis('q')}{FINAL}no<|return|>]]")
    brief = start + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
    check("gpt-oss", (SYSTEM, *TURNS[:2]), brief + hi + f"[[{FINAL}yes<|return|>]]")
    empty = start + hi + FINAL + "<|end|>" + more
    check("gpt-oss", EMPTY, start + hi + f"[[{FINAL}<|return|>]]", empty + f"[[{FINAL}no<|return|>]]")


def test_gpt_oss_calls():
    tools = (
        IDENTITY + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Adds.\ntype add = (_: {\na?: number,\n}) => any;\n\n} // namespace functions<|end|>"
    )
    question = tools + "<|start|>user<|message|>1+1?<|end|><|start|>assistant"
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    given = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    answer = f"[[{FINAL}It is 2.<|return|>]]"
    check("gpt-oss", PLAIN_CALLS, question + f"[[{call}]]" + given + answer, tools=TOOLS)
    # Rendered with the final answer, the analysis before the call is gone; the target saw it when it answered.
    thought = f"[[{analysis('r')}{call}]]{given}[[{analysis('q')}{FINAL}It is 2.<|return|>]]"
    check("gpt-oss", CALLS, question + thought, tools=TOOLS)
