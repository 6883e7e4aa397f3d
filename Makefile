# make run    set up and prefill the packaged activations of a real KDA layer in parallel segments, checked
# make test   set up and pass the tests
# make lint   formatting, lint and types
# make dist   sdist and wheel in dist/
#
# Everything is installed into $(VENV), nothing outside it. PACKAGE may name a built wheel to install instead of this tree.

PYTHON ?= python3
VENV ?= .venv
PACKAGE ?= .
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py) $(shell find flash_kda -name '*.py' -o -name '*.safetensors')

.PHONY: run test lint dist clean

run: $(VENV)/.installed
	$(BIN)/flash-kda doctor
	$(BIN)/flash-kda run --repeat 3

test: $(VENV)/.installed
	$(BIN)/python -m pip check
	$(BIN)/pytest

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

dist: $(VENV)/.created
	$(PIP) install -q -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The package itself is installed again whenever a source changes, so that tests see what a user would get.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.created
	$(PIP) install -c constraints.txt "$(PACKAGE)[test,dev]"
	touch $@
