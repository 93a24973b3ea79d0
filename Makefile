# Two commands matter:  make demo  |  make test      Both set everything up first.
PY  := .venv/bin/python
BIN := .venv/bin

.PHONY: demo test check slow chromium docs conformance fuzz bench plots gpu lint format types venv clean
.DEFAULT_GOAL := help

help:  ## Show this list.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: venv  ## Train a small GPT on two ranks for about a minute, then prove the bits equal torch's DDP.
	$(BIN)/minddp demo

# Tests wait for other ranks half of the time, so two cores have work for three workers. `make gpu` runs tests/gpu.
PYTEST := $(BIN)/pytest -q -n $(or $(WORKERS),3) --ignore tests/gpu

test: venv  ## Run the tests that decide (some six minutes on 2 cores).
	$(PYTEST) --dist worksteal -m "not slow"

check: test slow lint types  ## Everything that a change must pass: all tests, lint, types (some forty minutes).

slow: venv .venv/docs-installed chromium  ## Run the tests that `make test` leaves out: frameworks, browser, benchmarks, site.
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m slow

chromium:  ## Install Chromium for the browser tests, as root on Debian; elsewhere they are skipped without it.
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get && timeout 300 apt-get -qq update \
	     && timeout 600 apt-get -qq install -y chromium >/dev/null; } \
	|| echo "No Chromium here, and it could not be installed: tests/tools/xray/test_browser.py will be skipped."

docs: .venv/docs-installed  ## Build the site in build/site, which opens from disk: annotated source, API, all pages.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet -f docs/site/mkdocs.yml
	@echo "build/site/index.html"

conformance: venv  ## Run PyTorch's own tests of DDP with torch's class and with minddp's; then of collectives over both backends; renew docs/*conformance.md.
	$(PY) -m tests.conformance --table docs/conformance.md
	$(PY) -m tests.conformance --backend minddp --table docs/backend_conformance.md

fuzz: venv  ## Search longer for a difference from torch's DDP (MINDDP_FUZZ_EXAMPLES, default 3000).
	$(PY) -m tests.parity --count $${MINDDP_FUZZ_EXAMPLES:-3000}

bench: venv  ## Measure everything beside torch's DDP, and draw the figure (20 minutes, on an idle machine).
	$(PY) -m benchmarks everything

plots: venv  ## Draw the figure again, from what has been measured.
	$(PY) -m benchmarks plots

OUT ?= build/gpu

gpu:  ## Everything that needs an NVIDIA GPU, with the packages found there; docs/gpu.md. OUT=folder for results.
	$(if $(wildcard $(PY)),$(PY),python3) -m pytest tests/gpu -v -rfE --junitxml=$(OUT)/gpu.xml $(GPU)
	$(if $(wildcard $(PY)),$(PY),python3) -m benchmarks versus_torch --device cuda --out $(OUT)

lint: venv  ## ruff: lint and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv  ## ruff: rewrite.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv  ## mypy.
	$(BIN)/mypy

venv: .venv/installed  ## Only make .venv.

.venv/installed: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

.venv/docs-installed: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[docs]'
	@touch $@

clean:  ## Remove .venv and caches.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
