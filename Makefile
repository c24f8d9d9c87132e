# make serve and make test do all set-up themselves.

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch besides the package index: an index with CPU builds saves gigabytes.
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-container lint format reference quality smoke pressure chaos constraints

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c constraints.txt -e '.[dev]'
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/embedsvc serve

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow"

# Builds the image and runs it; needs podman and mmdebstrap, minutes and 6 GB of disk.
test-container: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m container -o faulthandler_timeout=0

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

reference: $(STAMP)
	$(BIN)/python -m embedsvc.reference > docs/reference.md

# The versions in the environment, for everyone; the remarks stay.
constraints: $(STAMP)
	{ grep '^#' constraints.txt; \
		$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > .constraints
	mv .constraints constraints.txt

# SciFact nDCG@10 through HTTP; needs the data of loadtest/workload.py.
quality: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m loadtest.quality

# Locust's users at a weightless server, for 20 seconds.
smoke: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m loadtest.smoke

# The served model under pressure; about five minutes. ARGS="--backend hash" is quicker.
pressure: $(STAMP)
	failed=; for run in overload burst ghosts idle restart; do \
		echo "== $$run"; HF_HUB_OFFLINE=1 $(BIN)/python -m loadtest.$$run $(ARGS) || failed=1; \
	done; test -z "$$failed"

# Ten minutes of random load while processes are killed, stopped and poisoned; every answer checked.
# ARGS="--backend auto --seconds 180 --most-texts 32" does it with the served model.
chaos: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m loadtest.chaos $(ARGS)
