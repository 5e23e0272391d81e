# Everything a newcomer needs: make demo, make test. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
FLOOR := .venv-floor
BIN := $(VENV)/bin
# Tests wait for the processes they start: three workers keep two cores busy (12 min with two workers, 7 with three).
JOBS ?= 3
# Packages are compiled when they are first imported (--no-compile): most of their files never are.
# That needs bytecode to be written, also where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
# One thread per test worker: two workers with two threads each are slower than two with one.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: help setup demo test pytest report test-every test-engine test-serve test-ray test-compiler test-floor mutants docs release check format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(VENV)/.ready  ## the virtual environment, with pinned versions

# torch by pip, which on a machine without a GPU finds its CPU build; the other 160 packages by uv, in a fifth of pip's
# time. uv does not read pip's configuration: where it reaches no package index, pip installs everything.
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check
define install  # $(1): environment, $(2): constraints, $(3): what to install
	$(PYTHON) -m venv $(1)
	$(1)/bin/python $(PIP_INSTALL) -c $(2) torch==2.13.0 uv
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python -c $(2) $(3) \
	  || { echo "uv could not install the packages; pip installs them"; $(1)/bin/python $(PIP_INSTALL) -c $(2) $(3); }
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=…"; exit 1; }
	$(call install,$(VENV),constraints.txt,-e '.[dev]')
	@touch $@

demo: setup  ## pretrain a small model on the Python standard library and show what it learned
	@HF_HUB_OFFLINE=1 $(BIN)/adaponder demo

test: setup  ## style, types and the tests, beside each other: the type checker uses one core
	@$(MAKE) --no-print-directory -j2 check pytest

# In a fresh clone one process collects the tests first, so that the workers do not all compile the same modules.
pytest: setup
	@test -d tests/__pycache__ || $(PYTEST) $(BIN)/python -m pytest --collect-only -qq > /dev/null || true
	$(PYTEST) $(BIN)/python -m pytest -n $(JOBS)

test-every: setup  ## further cases of what make test takes some of: two hundred kills of a run, every byte flipped, …
	$(PYTEST) $(BIN)/python -m pytest -n $(JOBS) -m "every and not gpu"

test-engine: setup  ## two thousand mixed requests and random engines: each says what it says alone
	$(PYTEST) $(BIN)/python tests/laws/engine_soak.py --record

test-serve: setup  ## a server for minutes: 500 streams, 1,000 hang-ups, 10,000 schema cases, broken bytes, the page
	$(PYTEST) $(BIN)/python tests/serving/soak.py --record
	$(PYTEST) $(BIN)/python tests/serving/schema_check.py --record
	$(PYTEST) $(BIN)/python tests/serving/fuzz.py --record
	$(PYTEST) $(BIN)/python tests/serving/page_check.py --record

test-ray: setup  ## replicas on Ray Serve: throughput, a killed replica, keys and limits (installs the extra scale)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,scale]'
	$(PYTEST) $(BIN)/python tests/serving/ray_check.py --record

test-compiler: setup  ## what torch's compiler changes, in every variant; every kernel compiles for a GPU
	$(PYTEST) $(BIN)/python -m pytest -n $(JOBS) -m compiler

$(FLOOR)/.ready: pyproject.toml constraints.txt
	@mkdir -p build
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > build/floor-constraints.txt
	$(call install,$(FLOOR),build/floor-constraints.txt,transformers==5.17.0 -e '.[dev]')
	@touch $@

test-floor: $(FLOOR)/.ready  ## laws and contracts on the oldest supported transformers
	$(PYTEST) $(FLOOR)/bin/python -m pytest -n $(JOBS) tests/laws tests/contract

mutants: setup  ## make each mistake of tests/laws/mistakes in a copy of the source: its tests must fail
	$(PYTEST) $(BIN)/python tests/laws/mistakes --jobs $(JOBS) --record

report: setup  ## how large the project is: lines, files, longest functions, words of prose
	@$(BIN)/python tests/repo/report.py

release:  ## build the archives, install each where nothing else is, and run puzzle, server and examples there
	deploy/release.sh

docs: setup  ## the documentation site: open build/site/index.html
	$(BIN)/sphinx-build -q -W --keep-going -c docs/site . build/site

check: setup  ## ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environments and caches
	rm -rf $(VENV) $(FLOOR) .pytest_cache .ruff_cache .hypothesis
