# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set everything up in .venv; once it exists they need no network.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := dev,docs,hopper

.PHONY: demo env test docs figures lint clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/flash-ladder doctor
	$(BIN)/flash-ladder run

env: $(READY)

test: $(READY) lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m pytest -q -rs $(PYTEST_ARGS)

docs: $(READY)
	$(BIN)/python -m flash_ladder.common.site

figures: $(READY)
	$(BIN)/python -m flash_ladder.common.figures

lint: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

# An installed torch is kept, whatever its version; TORCH says which one to take otherwise.
$(READY): pyproject.toml
	@echo "setting up $(VENV) (once; about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -qq "$(TORCH)"
	@$(BIN)/python -m pip install -qq --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) site site-zensical screenshots build dist *.egg-info
