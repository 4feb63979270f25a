# make train    install, then train a small language model on Python code: about a minute, in outputs/
# make train CONFIG=job.toml ARGS='--training.steps 100'    the same with your own config and flags
# make install  create .venv with everything for development
# make test     install, then run every check: lint, format, types, tests, doctests; the studio in Chromium, where it is or apt has it
# make test-mesh    every layout of a mesh (FSDP2, tensor parallel, replicas) with every schedule
# make test-hosts   every launcher, many hosts (network namespaces) and every recovery
# make docs     build the website of the documentation into site/, and check all its links
# make test-browser  only the tests of the studio
# make format   fix and format with ruff
# make bench    run the benchmarks; each prints ratios against a peer in the same run

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

CONFIG ?=
ARGS ?=
JOBS ?= 3
APT := apt-get -qq -y --no-install-recommends -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o DPkg::Lock::Timeout=10

.PHONY: install train test lint types unit chromium test-mesh test-hosts test-browser docs format bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt src/stageline/_version.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"stageline needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

train: install
	$(BIN)/stageline train $(CONFIG) $(ARGS)

test: install lint
	@$(MAKE) --no-print-directory -j2 types unit  # mypy uses one core, and tests wait now and then

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Tests start many processes: bytecode is compiled once for all of them. Some tests wait, so JOBS is a little more than
# the cores; the slowest files start first (see conftest.py).
unit test-mesh test-hosts: export PYTHONDONTWRITEBYTECODE =
chromium: export DEBIAN_FRONTEND = noninteractive
unit: install chromium
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-mesh: install
	$(BIN)/python -m pytest -q -m mesh_matrix tests

test-hosts: install
	$(BIN)/python -m pytest -q -m host_matrix tests

# Only the first build needs the network, to install mkdocs.
docs: export NO_MKDOCS_2_WARNING = 1
docs: install
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict
	@echo 'open site/index.html, or with search: $(BIN)/python -m http.server -b 127.0.0.1 -d site'

# The tests of the studio say that they were skipped where Chromium is missing. Debian's is installed where that is
# allowed and quick: as root, with apt-get, from servers that answer. Only downloads are cut short, never an installation.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo 'installing Chromium for the tests of the studio' \
	  && timeout 30 $(APT) update >/dev/null 2>&1 && timeout 120 $(APT) install -d chromium >/dev/null 2>&1 \
	  && $(APT) install chromium >/dev/null 2>&1; } || echo 'no Chromium: the tests of the studio in a browser are skipped'

test-browser: install chromium
	$(BIN)/python -m pytest -q -n 0 tests/studio

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/schedule_speed.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/runtime_speed.py
	$(BIN)/python benchmarks/sleep_stages.py
	$(BIN)/python benchmarks/synthesis.py --quick
	$(BIN)/python benchmarks/partition_speed.py
	$(BIN)/python benchmarks/profile_accuracy.py
	$(BIN)/python benchmarks/plan_truth.py --rounds 1
	$(BIN)/python benchmarks/building.py
	$(BIN)/python benchmarks/checkpointing.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/mesh_speed.py --repeats 5
	$(BIN)/python benchmarks/continuous_steps.py
	$(BIN)/python benchmarks/replanning.py
	$(BIN)/python benchmarks/tracing.py
	$(BIN)/python benchmarks/endurance.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/kills.py --kills 20
	$(BIN)/python benchmarks/interrupts.py
	$(BIN)/python benchmarks/stragglers.py
	$(BIN)/python benchmarks/restarts.py
	$(BIN)/python benchmarks/crashes.py
	$(BIN)/python benchmarks/training_speed.py
	$(BIN)/python benchmarks/checkpoint_cost.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/studio.py

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
