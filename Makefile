# The one door. `make` alone lists what there is; every target makes or refreshes .venv first, if it has to.
# Needs Python 3.11-3.14 and make. PYTHON=/path/to/python picks the interpreter.
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
FAST_TESTS = $(wildcard tests/unit tests/property)
BENCH = $(BIN)/python -m benchmarks

# A setting of the caller's shell must not decide how tests come out.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV SPARK_HOME JAVA_TOOL_OPTIONS
# Nor how long they take: every worker and every process of a test would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo lint check test faults soak proofs flake bench services-up services-down lock fmt docs site dist clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: ## make .venv from the pinned requirements, or bring it up to date
	@PYTHON="$(PYTHON)" scripts/bootstrap

demo: install ## deliver reminders for real flights on time, and prove it
	$(BIN)/python -m examples.flights

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache # a cache from before a file appeared tells of breaks that are none
	$(BIN)/python scripts/house --check

check: install ## lint, formatting, types, import rules and the fast tests: 75 seconds
	@$(MAKE) -k -j2 --output-sync=target lint test-fast

test: install ## the gate: all of check, and all that must hold before a change lands; nine minutes
	@$(MAKE) -j2 --output-sync=target lint test-ready
	$(BIN)/pytest $(SAME) -n $(WORKERS)

# The same order and the same random numbers at each run: what is red has been broken by somebody. `make soak` draws others.
SAME := --randomly-seed=1

.PHONY: test-ready
test-ready:
	@scripts/services up
	@$(BIN)/python -m tests.java # starts Spark in half the time
	@tests=$$($(BIN)/pytest --collect-only -qq) || { echo "$$tests"; exit 1; } # else each of the workers compiles every test

# Tests wait most of the time, for servers, processes and Spark: more of them run than there are processors. Which of
# them one worker runs one after the other is in tests/side_by_side.py.
WORKERS ?= $(shell echo $$((2 * $$(nproc) + 1)))

.PHONY: test-fast
test-fast:
	@$(BIN)/pytest $(SAME) -q -n $$(nproc) $(FAST_TESTS)

faults: install ## break everything that can break, account for every message, write docs/faults.md: half an hour
	rm -rf build/faults
	$(BIN)/pytest tests/faults --soak=faults
	$(BIN)/python -m tests.faults.table build/faults

PART ?= all
soak: install ## what the gate leaves out: PART=kills, faults, silence, clocks, spark, cluster, docs, bench, random (SEEDS=20000 FIRST_SEED=N), servers
	@scripts/services up
	@$(BIN)/python -m tests.java
	$(BIN)/python scripts/soak $(PART) --workers $(WORKERS) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(FIRST_SEED),--first-seed $(FIRST_SEED)) $(if $(KILL_ROUNDS),--rounds $(KILL_ROUNDS))

proofs: install ## write the table of docs/proofs.md anew from the marks of the tests
	$(BIN)/pytest -q --proofs || test $$? -eq 5 # no test is run

N ?= 200
flake: install ## run TEST=tests/….py::test_… again and again, N=200 times, four side by side, beside processes that keep all processors busy
	@test -n "$(TEST)" || { echo "flake: say which: make flake TEST=tests/unit/test_poller.py::test_… (K=words of a variant)" >&2; exit 2; }
	@scripts/services up
	scripts/busy $(BIN)/pytest -n 4 --times $(N) $(if $(K),-k "$(K)") "$(TEST)"

bench: install ## measure this machine with the embedded store and transport, beside its physical limits
	$(BENCH) drain --store sqlite --transport local
	$(BENCH) backlog --store sqlite --transport local
	$(BENCH) lateness --store sqlite --transport local

services-up: install ## start the servers the tests need
	@scripts/services up

services-down: ## stop them
	@scripts/services down

lock: install ## write the requirement files anew from pyproject.toml (UPGRADE=1: newest versions)
	scripts/lock $(if $(UPGRADE),--upgrade)

fmt: install ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install ## run the snippets and command lines of the documentation; the longest pages: make soak PART=docs
	$(BIN)/pytest tests/docs

site: install ## build the documentation as a site; to read it: python3 -m http.server -d build/site
	$(BIN)/python scripts/build_site.py

dist: install ## build sdist, wheel and bill of materials into dist/, twice, and check them; publishes nothing
	@scripts/dist

clean: ## remove .venv and everything generated
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache spark-warehouse metastore_db derby.log
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
