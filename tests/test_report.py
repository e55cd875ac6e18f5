"""Reports of decodings, against numbers computed by hand."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode.simulate import Simulated
from dflash_jax.decode.ways import CHAIN, PLAIN, TREE, Way
from dflash_jax.evaluation.difference import Difference
from dflash_jax.evaluation.measure import Answer, Measured, batches, shapes
from dflash_jax.evaluation.report import by_set, entries
from dflash_jax.evaluation.table import comparison_lines, main_table, position_table
from dflash_jax.prompts.prompt import Prompt

PLAINLY = Way(PLAIN)
OURS, OURS_TREE, THEIRS = Way(CHAIN, "ours", slots=4), Way(TREE, "ours", 6, 4), Way(CHAIN, "theirs", slots=3)
WAYS = (PLAINLY, OURS, OURS_TREE, THEIRS)


def answer(tokens, rounds, seconds, difference=None):
    """rounds: (accepted, emitted) of each."""
    accepted, emitted = (np.array([each[part] for each in rounds], np.int32) for part in (0, 1))
    return Answer(np.arange(tokens, dtype=np.int32), accepted, emitted, seconds, difference)


def prompt(name, length=3):
    return Prompt(name, np.zeros(length, np.int32))


@pytest.fixture
def measured():
    """Three prompts in two sets, not in their order.

    Prompt 1 ends in a round that accepted three drafts, of which a stop token left one and no token of the target;
    prompt 2 is an answer of one token, which takes no round.
    """
    near, far = Difference(4, 1e-4, tie=True), Difference(2, float("inf"), tie=False)
    return [
        Measured(
            1,
            prompt("code"),
            {
                PLAINLY: answer(7, [], 2.0),
                OURS: answer(7, [(0, 1), (2, 3), (0, 1), (3, 1)], 1.0, near),
                OURS_TREE: answer(7, [(2, 3), (3, 3)], 0.5),
                THEIRS: answer(7, [(1, 2), (2, 3), (2, 1)], 1.0, far),
            },
        ),
        Measured(
            2,
            prompt("talk"),
            {
                PLAINLY: answer(1, [], 0.5),
                OURS: answer(1, [], 0.5),
                OURS_TREE: answer(1, [], 0.5),
                THEIRS: answer(1, [], 0.5),
            },
        ),
        Measured(
            0,
            prompt("code", 5),
            {
                PLAINLY: answer(5, [], 1.0),
                OURS: answer(5, [(3, 4)], 0.5),
                OURS_TREE: answer(5, [(3, 4)], 1.5),
                THEIRS: answer(5, [(1, 2), (1, 2)], 1.0),
            },
        ),
    ]


def test_accept_lengths_rates_and_shares(measured):
    code, talk, everything = by_set(measured, WAYS, compared=WAYS[1:], simulated={})
    assert [(report.set, report.prompts) for report in (code, talk, everything)] == [
        ("code", 2),
        ("talk", 1),
        ("all", 3),
    ]
    ours = code.of(OURS)
    assert (ours.tokens, ours.rounds) == (12, 5)
    assert ours.accept_len == pytest.approx((4 + 1 + 3 + 1 + 1) / 5)
    assert ours.accept_len_by_request == pytest.approx((4 / 1 + 6 / 4) / 2)
    assert ours.drafts_accepted == pytest.approx((3 + 0 + 2 + 0 + 3) / 5)
    assert ours.survival_by_position == pytest.approx([3 / 5, 3 / 5, 2 / 5])
    assert ours.rounds_by_tokens == [3, 0, 1, 1]
    assert ours.tokens_s == pytest.approx(12 / 1.5)
    assert ours.ratio == pytest.approx((12 / 1.5) / (12 / 3.0))
    assert (ours.compared, ours.identical, ours.ties, ours.different) == (2, 1, 1, 0)
    theirs = code.of(THEIRS)
    assert theirs.accept_len == pytest.approx((2 + 2 + 2 + 3 + 1) / 5)
    assert theirs.survival_by_position == pytest.approx([1.0, 2 / 5])
    assert theirs.rounds_by_tokens == [1, 3, 1]
    assert (theirs.identical, theirs.ties, theirs.different) == (1, 0, 1)
    plain = everything.of(PLAINLY)
    assert (plain.tokens, plain.rounds, plain.accept_len, plain.ratio) == (13, 0, None, 1.0)
    assert plain.survival_by_position == plain.rounds_by_tokens == []
    # The prompt without a round is in the rates, and in no accept length.
    assert everything.of(OURS).accept_len == ours.accept_len
    assert everything.of(OURS).tokens_s == pytest.approx(13 / 2.0)


def test_a_set_without_a_round_has_no_accept_length(measured):
    _, talk, _ = by_set(measured, WAYS, compared=(), simulated={})
    ours = talk.of(OURS)
    assert (ours.accept_len, ours.accept_len_by_request, ours.rounds_by_tokens) == (None, None, [])
    assert (ours.compared, ours.identical, ours.different) == (0, 0, 0)


def test_without_plain_decoding_there_is_nothing_to_compare_with(measured):
    for item in measured:
        del item.answers[PLAINLY]
    code, *_ = by_set(measured, WAYS[1:], compared=(), simulated={})
    assert code.of(OURS).ratio is None
    assert "8.0      -  -" in main_table([code, code], in_distribution=False)


def sums(blocks, accepted, walk_tokens, walk_rounds, budgets=()):
    numbers = (
        jnp.array(values, jnp.float32)
        for values in (blocks, accepted, 0, [0] * len(accepted), walk_tokens, walk_rounds)
    )
    return Simulated(*numbers, budgets=budgets)


def test_simulated_numbers_are_pooled_over_the_sets(measured):
    simulated = {
        "code": {"ours": sums(10, [5, 8], [12, 12], [6, 4], (6,)), "theirs": sums(10, [1], [12], [12])},
        "talk": {"ours": sums(30, [5, 12], [8, 8], [4, 1], (6,)), "theirs": sums(30, [3], [8], [8])},
    }
    code, talk, everything = by_set(measured, WAYS, compared=WAYS[1:], simulated=simulated)

    def check(report, way, *wanted):
        forced = report.of(way).simulated
        assert (forced.accept_len, forced.walk_tau) == pytest.approx(wanted)

    check(code, OURS, 1.5, 2.0)
    check(code, OURS_TREE, 1.8, 3.0)
    check(talk, OURS_TREE, 1.4, 8.0)
    check(everything, OURS_TREE, 1 + 20 / 40, 20 / 5)
    check(everything, THEIRS, 1.1, 1.0)
    assert code.of(PLAINLY).simulated is None
    lines = main_table([code, talk, everything], in_distribution=False).splitlines()
    assert "  by request  simulated  walk  tok/s  " in lines[0]
    assert "ours     tree 6             3.33" in lines[4]
    assert "1.80  3.00" in lines[4]


def test_the_table_says_it_all_set_by_set(measured):
    reports = by_set(measured, WAYS, compared=WAYS[1:], simulated={})
    assert main_table(reports, in_distribution=False).splitlines() == [
        "prompts  n  drafter  decoding  accept length  by request  tok/s  ratio  lossless",
        "-------  -  -------  --------  -------------  ----------  -----  -----  ----------------",
        "code     2           plain                 -           -    4.0  1.00x  -",
        "            ours     chain              2.00        2.75    8.0  2.00x  1/2, 1 tie",
        "            ours     tree 6             3.33        3.50    6.0  1.50x  2/2",
        "            theirs   chain              2.00        2.00    6.0  1.50x  1/2, 1 DIFFERENT",
        "talk     1           plain                 -           -    2.0  1.00x  -",
        "            ours     chain                 -           -    2.0  1.00x  1/1",
        "            ours     tree 6                -           -    2.0  1.00x  1/1",
        "            theirs   chain                 -           -    2.0  1.00x  1/1",
        "all      3           plain                 -           -    3.7  1.00x  -",
        "            ours     chain              2.00        2.75    6.5  1.75x  2/3, 1 tie",
        "            ours     tree 6             3.33        3.50    5.2  1.40x  3/3",
        "            theirs   chain              2.00        2.00    5.2  1.40x  2/3, 1 DIFFERENT",
    ]


def test_a_single_set_is_not_shown_twice(measured):
    code = [item for item in measured if item.prompt.set == "code"]
    reports = by_set(code, WAYS, compared=WAYS[1:], simulated={})
    assert [report.set for report in reports] == ["code", "all"]
    assert "all " not in main_table(reports, in_distribution=False)
    assert len(list(comparison_lines(reports))) == 1


def test_rejection_sampling_is_said_to_keep_the_distribution(measured):
    reports = by_set(measured, WAYS, compared=[OURS_TREE], simulated={})
    endings = [line.split("x  ")[-1] for line in main_table(reports, in_distribution=True).splitlines()[2:6]]
    assert endings == ["-", "in distribution", "2/2", "in distribution"]


def test_positions_are_shares_of_all_rounds(measured):
    reports = by_set(measured, WAYS, compared=WAYS[1:], simulated={})
    assert [line.split() for line in position_table(reports).splitlines()] == [
        ["of", "all", "rounds", "1", "2", "3", "4"],
        ["-" * 32, "-" * 4, "-" * 4, "-" * 3, "-" * 3],
        ["accepted", "at", "least", "so", "many", "drafts"],
        ["ours", "chain", "60%", "60%", "40%"],
        ["ours", "tree", "6", "100%", "100%", "67%"],
        ["theirs", "chain", "100%", "40%"],
        ["gave", "so", "many", "tokens"],
        ["ours", "chain", "60%", "0%", "20%", "20%"],
        ["ours", "tree", "6", "0%", "0%", "67%", "33%"],
        ["theirs", "chain", "20%", "60%", "20%"],
    ]
    plain_only = by_set(measured, [PLAINLY], compared=(), simulated={})
    assert position_table(plain_only) == ""


def test_each_further_drafter_is_compared_with_the_first(measured):
    reports = by_set(measured, WAYS, compared=WAYS[1:], simulated={})
    assert list(comparison_lines(reports)) == [
        "code: accept length of theirs against ours: chain 2.00 / 2.00 = 1.00x",
        "all: accept length of theirs against ours: chain 2.00 / 2.00 = 1.00x",
    ]


def test_entries_are_in_the_order_of_the_prompts_and_valid_json(measured):
    found = json.loads(json.dumps(entries(measured), allow_nan=False))
    assert [(item["prompt"], item["set"], item["prompt_tokens"]) for item in found] == [
        (0, "code", 5),
        (1, "code", 3),
        (2, "talk", 3),
    ]
    plain, ours, tree, theirs = found[1]["answers"]
    assert plain["token_ids"] == list(range(7))
    assert ours == {
        "drafter": "ours",
        "decoding": "chain",
        "tokens": 7,
        "seconds": 1.0,
        "accept_len": 1.5,
        "accepted": [0, 2, 0, 3],
        "difference": {"position": 4, "logit_gap": 1e-4, "tie": True},
        "token_ids": list(range(7)),
    }
    assert "token_ids" not in tree
    assert theirs["difference"] == {"position": 2, "logit_gap": None, "tie": False}


def test_batches_hold_prompts_of_one_set_and_few_shapes():
    lengths = [("a", 5), ("b", 100), ("a", 40), ("a", 33), ("b", 7), ("a", 70)]
    found = list(batches([prompt(*each) for each in lengths], 2))
    assert found == [([5, 2], 128), ([3, 0], 64), ([1, 4], 128)]
    assert shapes(100) == [32, 64, 128]
    assert shapes(32) == [32]
    assert shapes(33) == [32, 64]
    assert shapes(1000) == [256, 512, 1024]
