"""A trace has the steps that were asked for, and the parts of the models under their names."""

import gzip
import json

import pytest

from dflash_jax import train
from dflash_jax.errors import UserError
from dflash_jax.training.trace import parse_steps

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_the_steps_that_were_asked_for_are_traced(recipe):
    asked = ["train.steps=8", "eval.every=0", "data.buckets=[192]", "profile.steps=3:4"]
    assert train.main(recipe.arguments("traced", *asked)) == 0
    (file,) = (recipe.root / "traced" / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"read", "request_features", "log"} <= names
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert steps == {"3", "4"}


@pytest.mark.parametrize("text", ["3", "4:3", "0:2", "a:b", "1:2:3", "1224", ":", "-1:4"])
def test_steps_that_are_none_are_refused(text):
    with pytest.raises(UserError, match=r"profile.steps: found '.*', allowed: first:last"):
        parse_steps(text)
    assert parse_steps("20:24") == (20, 24)
    assert parse_steps(None) is None
