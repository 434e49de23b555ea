# `make demo` and `make test` do all the set-up; everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test check docs coverage format clean reproduce reproduce-paper reproduce-quick faults mutants flower-long flower-versions

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 24

$(VENV)/.base: pyproject.toml
	@echo "Setting up $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

# torch is pinned: this exact version has a build for the CPU alone.
$(VENV)/.dev: pyproject.toml $(VENV)/.base
	@echo "Setting up $(VENV) for development: this takes a few minutes the first time ..."
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.base   ## FIFO, class-balanced FIFO, ODE, both gists and unlimited storage (a minute)
	@$(BIN)/fedkeep demo --out runs/demo

test: $(VENV)/.dev    ## run the tests
	@$(BIN)/pytest --numprocesses=2 --dist=worksteal --quiet -m "not real"
	@$(BIN)/pytest --numprocesses=2 --dist=worksteal --quiet -m real || { \
	    echo "A real fleet failed: what failed is run once more, alone."; $(BIN)/pytest --quiet --last-failed --last-failed-no-failures=none -m real; }

faults: $(VENV)/.dev  ## the fault tests in their long forms: kills, power cuts, full disks, corruption (an hour)
	@$(BIN)/python -m tests.faults.agent_table; agent=$$?; $(BIN)/python -m tests.faults.flower_table && exit $$agent

flower-long: $(VENV)/.dev   ## every strategy and mod of Flower's by `flwr run`, three rounds each: a table in docs/flower.md (half an hour)
	@$(BIN)/python -m tests.flower.strategies_table

# Each in an environment of its own. FLWR="1.41.0" tries others.
FLWR ?= 1.40.0 1.42.0
flower-versions:      ## the tests of Keeper and fleets with the oldest and the newest flwr, each in its own environment
	@set -e; for version in $(FLWR); do environment=.venv-flwr-$$version; echo "flwr $$version"; \
	    test -x $$environment/bin/python || $(PYTHON) -m venv $$environment; \
	    install="$$environment/bin/pip install --quiet --disable-pip-version-check"; \
	    $$install torch==2.13.0; \
	    $$install --editable '.[torch,agent,flower,privacy,web]' "flwr[simulation]==$$version" pytest hypothesis; \
	    $$environment/bin/python -m pytest --quiet $(FLOWER_TESTS); \
	done

FLOWER_TESTS := tests/flower/test_keeper.py tests/flower/test_keeper_models.py tests/flower/test_keeper_strategies.py \
    tests/flower/test_strategy.py tests/flower/test_codec.py tests/flower/test_real_simulation.py tests/flower/test_real_resume.py

mutants: $(VENV)/.dev ## the mutation score of the core, and which mutants no test kills (an hour; AREA=agent, AREA=privacy)
	@$(BIN)/python -m tests.mutation.run $(or $(AREA),core) --per-file $(or $(PER_FILE),20)

check: $(VENV)/.dev   ## formatting, lint, types, imports, documentation
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(VENV)/.dev    ## write what is generated (command line, public names, RESULTS, all tables), build the site into site/
	@$(BIN)/python docs/generate_cli.py
	@$(BIN)/python docs/generate_api.py
	@$(BIN)/python docs/generate_gist.py
	@$(BIN)/python experiments/reproduce.py report
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

coverage: $(VENV)/.dev ## run the tests with coverage (half an hour), print the number, write htmlcov/ and the table in CONTRIBUTING.md
	@$(BIN)/pytest --quiet -m "not real" --cov --cov-report= -p no:cacheprovider; tests=$$?; \
	    $(BIN)/coverage html --quiet; $(BIN)/coverage report; $(BIN)/python -m tests.coverage_table; exit $$tests

format: $(VENV)/.dev  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:                ## remove what the other targets made
	rm -rf $(VENV) .venv-flwr-* runs site htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

reproduce: $(VENV)/.dev             ## the arena, the gist, the choice, when it helps, bytes: goes on where it stopped
	@for part in gist choice arena helps paper bytes; do $(BIN)/python experiments/reproduce.py $$part || exit 1; done

reproduce-paper: $(VENV)/.dev       ## the paper's Table 2, ablations, claims, theory, Table 3: a night on two cores
	@$(BIN)/python experiments/reproduce.py a

reproduce-quick: $(VENV)/.dev       ## every experiment, tiny: shows that all of them run
	@$(BIN)/python experiments/reproduce.py --quick
