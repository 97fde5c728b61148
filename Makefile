# Everything runs in .venv, made from the tested versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/fcc111-flt
EXAMPLE := datasets/fcc111/structures

.DEFAULT_GOAL := help
.PHONY: help install test check demo clean

help:
	@echo "make demo   train on datasets/fcc111, print energy MAE and EwT per split, predict one structure file"
	@echo "make test   run the tests"
	@echo "make check  ruff, pyright, import directions"
	@echo "make clean  remove .venv and runs/"

.venv/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "molflt needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

install: .venv/installed

test: .venv/installed-test
	$(BIN)/python -m pytest

check: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

demo: .venv/installed
	$(BIN)/molflt train configs/fcc111/flt.yaml --training.output $(RUN) --overwrite
	$(BIN)/molflt evaluate $(RUN)/checkpoints/best.ckpt
	$(BIN)/molflt data baseline fcc111
	$(BIN)/molflt predict $(RUN)/checkpoints/best.ckpt $(firstword $(wildcard $(EXAMPLE)/*))

clean:
	rm -rf .venv runs
