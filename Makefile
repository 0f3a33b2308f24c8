# make demo: install into .venv and run the embedded default.  make test: install what tests need and pass them.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test lint docs wheel install clean

demo: .venv/installed
	$(BIN)/outrider generate "Once upon a time there was a brave little fox" --max-tokens 120 --compare

install: .venv/installed

test: .venv/tested .venv/clients/installed lint
	OUTRIDER_CLIENTS=.venv/clients $(BIN)/python -m pytest -n auto --dist worksteal --durations=10

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# into build/site; the tests build it too
docs: .venv/tested
	$(BIN)/python -m mkdocs build --strict

# into dist/, from what is installed; tests/test_package.py looks into such a wheel
wheel: .venv/tested
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

.venv/bin/pip:
	$(PYTHON) -m venv .venv

# torch first and by its exact version: any other way of asking may bring gigabytes of CUDA along
.venv/installed: .venv/bin/pip pyproject.toml constraints.txt
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	touch $@

.venv/tested: .venv/installed
	$(PIP) --editable ".[test]"
	touch $@

# clients of other people, in an environment of their own: every version is named, and they do not agree on all
.venv/clients/installed: .venv/bin/pip tests/clients/requirements.txt
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement tests/clients/requirements.txt
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
