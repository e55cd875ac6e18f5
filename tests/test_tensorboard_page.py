"""TensorBoard itself reads the record of a run, and a real browser shows what is to be seen there.

Needs the packages tensorboard and selenium, and a Chromium with its driver (Debian: chromium, chromium-driver).
The picture of the README is made from a real run, whose log is entered into a fresh record:

    DFLASH_RUN=runs/quickstart DFLASH_SCREENSHOT=docs/tensorboard.png pytest -m slow tests/test_tensorboard_page.py
"""

import base64
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest

from dflash_jax.monitor.board import Board
from dflash_jax.monitor.json_lines import read_lines

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STEPS, RESUMED_AT, EVALUATE_EVERY = 40, 30, 20
BLOCKS = 256.0  # of a step
PATIENCE_S = 60.0
WIDTH, DOTS = 1500, 1600  # of the picture: on the page, and in the file

# Elements in shadow trees too; what a chart card says, and how many of its curves have a length.
PAGE_SCRIPT = """
const skipped = ["STYLE", "SCRIPT", "TEMPLATE", "DOM-MODULE"];
const visit = (node, found) => {
  found(node);
  if (node.shadowRoot) visit(node.shadowRoot, found);
  node.childNodes.forEach(child => { if (!skipped.includes(child.tagName)) visit(child, found); });
};
const elements = (root, tag) => {
  const all = [];
  visit(root, node => { if (node.tagName === tag) all.push(node); });
  return all;
};
const texts = root => {
  const all = [];
  visit(root, node => { if (node.nodeType === 3 && node.data.trim()) all.push(node.data.trim()); });
  return all;
};
"""
TEXTS = PAGE_SCRIPT + "return texts(document.body);"
CATEGORIES = (
    PAGE_SCRIPT
    + """
return elements(document.body, "TF-CATEGORY-PAGINATED-VIEW").map(category => ({
  top: category.getBoundingClientRect().top,
  bottom: category.getBoundingClientRect().bottom,
  cards: elements(category, "TF-CUSTOM-SCALAR-MULTI-LINE-CHART-CARD").map(card => ({
    texts: texts(card),
    curves: elements(card, "path").filter(
      path => path.getAttribute("class") === "line" && path.getTotalLength() > 0
    ).length,
  })),
}));
"""
)

pytestmark = pytest.mark.slow


def line_of(step, *, loss_added=0.0):
    learnt = 1 - math.exp(-step / 15)
    survival = [int(BLOCKS * (0.7 * learnt) ** k) / BLOCKS for k in range(1, 6)]
    return {
        "step": step,
        "loss": 8 - 5 * learnt + loss_added,
        "acc_by_position": [0.7 * learnt * 0.9**k for k in range(5)],
        "survival_by_position": survival,
        "accept_len": 1 + sum(survival),
        "blocks": BLOCKS,
        "bucket": step % 2,
        "lr": 1e-3 * (1 - step / STEPS),
        "step_s": 0.5,
        "drafter_tok_s": 1000.0 + step,
        "prefetch_queue": step % 3,
        "drafter_memory_gib": 1.5,
    }


def evaluation_of(step):
    line = line_of(step)
    return {name: line[name] for name in ("step", "loss", "accept_len", "acc_by_position")} | {"walk_tau": 1.5}


def write_record(folder, steps, evaluations, *, resumed_at=0, text=None):
    said = []
    with contextlib.closing(Board(folder, resumed_at=resumed_at, warn=said.append)) as board:
        if text is not None:
            board.text("recipe", text, resumed_at)
        lines = [(board.add_step, line) for line in steps] + [(board.add_evaluation, line) for line in evaluations]
        for add, line in sorted(lines, key=lambda pair: pair[1]["step"]):
            add(line)
    assert not said


def resumed_run(folder):
    """A run that went a few steps further than its last checkpoint, and then took these again."""
    beyond = (line_of(step, loss_added=100.0) for step in range(RESUMED_AT + 1, RESUMED_AT + 6))
    steps = [*(line_of(step) for step in range(1, RESUMED_AT + 1)), *beyond]
    write_record(folder, steps, map(evaluation_of, (0, EVALUATE_EVERY)), text="lr: 0.001")
    steps = (line_of(step) for step in range(RESUMED_AT + 1, STEPS + 1))
    write_record(folder, steps, [evaluation_of(STEPS)], resumed_at=RESUMED_AT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board") / "runs"
    resumed_run(folder / "tiny" / "tensorboard")
    return folder


@contextlib.contextmanager
def served(runs, *, fast):
    """TensorBoard's address for a folder of runs. fast: which of its two readers of event files is used."""
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("the package tensorboard is not installed")
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        runs.name,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    log = runs.parent / f"tensorboard-{fast}.log"
    with log.open("w") as said:
        server = subprocess.Popen(
            [*command, f"--load_fast={fast}", "--reload_interval=1"], cwd=runs.parent, stdout=said, stderr=said
        )
    try:
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), server.poll)
        yield address.group()
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


@contextlib.contextmanager
def browsed(*, height, dots_per_pixel=1.0):
    """A browser without a screen, `height` pixels high."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    found = [path for name in BROWSERS if (path := shutil.which(name))]
    driver = shutil.which("chromedriver")
    if not found or driver is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed, or no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in (
        "--headless=new",
        "--no-sandbox",  # it is refused to root, as whom containers run
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{height}",
        f"--force-device-scale-factor={dots_per_pixel}",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def wait_for(found, ended=lambda: None):
    """What `found` returns once it is true; fails where that takes too long or `ended` says something."""
    until = time.monotonic() + PATIENCE_S
    while not (result := found()):
        assert ended() is None, "TensorBoard ended"
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.2)
    return result


def fetched(address, path, **query):
    with urllib.request.urlopen(f"{address}data/plugin/{path}?{urllib.parse.urlencode(query)}") as answer:
        return json.load(answer)


def opened(browser, address, page):
    browser.get("about:blank")  # what stands behind # alone loads nothing again
    browser.get(f"{address}{page}")


def cards_of(categories):
    """The charts of each category of the custom scalars' page: title -> tags, and how many curves are drawn."""
    shown = []
    for category in categories:
        charts = {}
        for card in category["cards"]:
            matches = [text.partition(" (")[0] for text in card["texts"] if re.search(r"\w+/\w+.* \(", text)]
            charts[card["texts"][0]] = (sorted(matches), card["curves"])
        shown.append(charts)
    return shown


@pytest.mark.parametrize("fast", ["true", "false"])
def test_tensorboard_reads_each_step_of_a_resumed_run_once(runs, fast):
    expected = [line_of(step) for step in range(1, STEPS + 1)]
    with served(runs, fast=fast) as address:
        run = "tiny/tensorboard"
        wait_for(lambda: "train/loss" in fetched(address, "scalars/tags").get(run, {}))
        query = {"run": run, "tag": "train/loss"}
        wait_for(lambda: len(fetched(address, "scalars/scalars", **query)) >= STEPS)
        points = fetched(address, "scalars/scalars", **query)
        assert [step for _, step, _ in points] == [line["step"] for line in expected]
        assert [value for *_, value in points] == pytest.approx([line["loss"] for line in expected], rel=1e-6)
        held_out = fetched(address, "scalars/scalars", run=run, tag="eval/accept_len")
        assert [step for _, step, _ in held_out] == [0, EVALUATE_EVERY, STEPS]
        histograms = fetched(address, "histograms/histograms", run=run, tag="train/blocks_by_accept_len")
        assert [sum(count for *_, count in bins) for *_, bins in histograms] == [BLOCKS] * len(histograms)
        assert all(high - low == 1 for *_, bins in histograms for low, high, _ in bins)
        layout = fetched(address, "custom_scalars/layout")
        titles = [category["title"] for category in layout["category"]]
        assert titles[:3] == ["Training", "Held-out", "Training beside held-out"]
        assert len(set(titles)) == len(titles)


def test_the_pages_show_the_run(runs):
    with browsed(height=4000) as browser, served(runs, fast="auto") as address:
        opened(browser, address, "#custom_scalars")

        def drawn():
            charts = cards_of(browser.execute_script(CATEGORIES))
            return charts if charts and all(curves for _, curves in charts[0].values()) else None

        training, held_out, beside, *_ = wait_for(drawn)
        positions = [f"acc_by_position/{k}" for k in range(1, 6)]
        # Of each tag there is a smooth curve and a pale one.
        assert training == {
            "loss, with its terms": (["train/loss"], 2),
            "accept length": (["train/accept_len"], 2),
            "accuracy by position": ([f"train/{name}" for name in positions], 10),
        }
        assert [tags for tags, _ in held_out.values()] == [
            ["eval/loss"],
            ["eval/accept_len", "eval/walk_tau"],
            [f"eval/{name}" for name in positions],
        ]
        assert beside["loss"][0] == ["eval/loss", "train/loss"]
        opened(browser, address, "?tagFilter=accept_len#timeseries")
        for tag in ("train/accept_len", "eval/accept_len", "bucket_0/accept_len", "train/blocks_by_accept_len"):
            wait_for(lambda tag=tag: tag in "".join(browser.execute_script(TEXTS)))
        opened(browser, address, "#scalars")
        for text in ("train", "eval", "optim", "data", "time", "memory", "bucket_1/loss"):
            wait_for(lambda text=text: text in browser.execute_script(TEXTS))
        opened(browser, address, "#histograms")
        wait_for(lambda: "train/blocks_by_accept_len" in browser.execute_script(TEXTS))
        opened(browser, address, "#text")
        wait_for(lambda: "lr: 0.001" in "\n".join(browser.execute_script(TEXTS)))


@pytest.mark.skipif("DFLASH_SCREENSHOT" not in os.environ, reason="DFLASH_SCREENSHOT names no file")
def test_the_picture_shows_how_training_went(tmp_path):
    runs = tmp_path / "runs"
    run = pathlib.Path(os.environ.get("DFLASH_RUN", "tiny"))
    folder = runs / run.name / "tensorboard"
    if "DFLASH_RUN" in os.environ:
        steps, evaluations = (read_lines(run / name) for name in ("train_log.jsonl", "eval_log.jsonl"))
        write_record(folder, steps, evaluations, text=(run / "recipe.yaml").read_text())
    else:
        resumed_run(folder)
    with (
        browsed(height=1000, dots_per_pixel=DOTS / WIDTH) as browser,
        served(runs, fast="auto") as address,
    ):
        opened(browser, address, "#custom_scalars&_smoothingWeight=0.9")

        def training():
            categories = browser.execute_script(CATEGORIES)
            drawn = categories and all(card["curves"] for card in categories[0]["cards"])
            return categories[0] if drawn else None

        wait_for(training)
        time.sleep(2)  # for the end of the animations
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": training()["bottom"] + 54, "scale": 1}
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})["data"]
    file = pathlib.Path(os.environ["DFLASH_SCREENSHOT"])
    file.write_bytes(base64.b64decode(picture))
    assert file.stat().st_size < 300_000
