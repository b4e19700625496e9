# Everything runs in .venv, which is made from pyproject.toml and constraints.txt when it is not
# there or when they have changed. Only GNU make and Python 3.11 or newer with venv are needed.
#
#   make demo         three islands on this machine, with a page to watch them
#   make test         the fast tests            make test ARGS="-k wire"
#   make test-swarm   real processes that are killed, minutes each
#   make test-browser the dashboard in a headless chromium, where there is one
#   make test-faults  every fault at every stage of a round, as root on Linux, 15 minutes
#   make test-layouts every layout of an island against one process, 5 minutes
#   make test-gpu     an island on a CUDA device, and on several with NCCL; passed over without
#   make test-slow    256 members on a virtual clock, and more seeds and modes of what the fast tests hold
#   make lint         style, types, and which package may import which
#   make clean        remove .venv and caches

PYTHON ?= python3
ARGS ?=
# processes that share the fast tests: one a core, each of half a gigabyte; 0: none beside pytest's own
WORKERS ?= auto
BIN := .venv/bin
STAMP := .venv/.complete

.PHONY: demo test test-swarm test-faults test-layouts test-gpu test-slow test-browser lint lint-style lint-format lint-types \
	lint-imports format clean

demo: $(STAMP)
	$(BIN)/python -m node demo $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 $(ARGS)

test-swarm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m swarm $(ARGS)

test-browser: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser $(ARGS)

test-faults: $(STAMP)
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults --junitxml=build/faults.xml $(ARGS); failed=$$?; \
	$(BIN)/python -m benchmarks.faults build/faults.xml --json benchmarks/results/faults.json; exit $$failed

test-layouts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m layouts $(ARGS)

test-gpu: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu $(ARGS)

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

# targets of their own, so that `make --keep-going lint` shows everything there is
lint: lint-style lint-format lint-types lint-imports

lint-style: $(STAMP)
	$(BIN)/ruff check .

lint-format: $(STAMP)
	$(BIN)/ruff format --check .

lint-types: $(STAMP)
	$(BIN)/mypy

lint-imports: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv: $(STAMP)

# torch first and pinned: nothing that comes after it can then bring a newer one
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there; try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Atoll needs Python 3.11 or newer and %s is %s; try: make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	@echo "making .venv: torch and its friends take some minutes"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e ".[test,lint]"
	@touch $(STAMP)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
