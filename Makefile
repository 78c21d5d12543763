# `make` alone lists what there is. Everything runs in .venv, which scripts/bootstrap makes from requirements/all.lock.

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
PYTEST ?=
PAPER ?=

.DEFAULT_GOAL := help
.PHONY: help bootstrap demo test test-extra check format helper lock worker-image services-image bench-main bench-control bench-env bench-gateway bench-cli bench-evaluation bench-web bench-train paper train-demo chaos matrix down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

bootstrap: ## make .venv; nothing to do when it matches the lock
	@sh scripts/bootstrap

demo: bootstrap ## set everything up and run the main job on the demo dataset
	@$(BIN)/megaflow demo

test: bootstrap ## all tests but those marked `extra`; PYTEST="tests/unit -k state" chooses
	@sh scripts/test $(PYTEST)

test-extra: bootstrap ## tests marked `extra`: fuzzing, and the rest of the agents' contract; an hour
	@sh scripts/test -m extra $(PYTEST)

check: bootstrap ## format, lint, types, import rules, budgets, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/budgets.py
	$(BIN)/python scripts/words.py

format: bootstrap ## put the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

helper: bootstrap ## build the programs of app/environments/prebuilt again, for x86-64 and arm64
	@PYTHONPATH=. $(BIN)/python scripts/build_programs.py

lock: bootstrap ## renew requirements/*.lock; UPGRADE=--upgrade takes newer versions
	cd requirements && ../$(BIN)/uv pip compile $(LOCK_OPTIONS) $(LOCKED:%=--extra %) -o all.lock ../pyproject.toml
	cd requirements && ../$(BIN)/uv pip compile $(LOCK_OPTIONS) -c all.lock -o bootstrap.lock bootstrap.in
	cd requirements && ../$(BIN)/uv pip compile $(LOCK_OPTIONS) --no-emit-find-links -c all.lock --extra worker --extra model --extra translate --extra stores --extra datasets --extra kubernetes \
		-o ../worker_images/worker/requirements.lock ../pyproject.toml ../worker_images/worker/requirements.in

# All extras but `train`, whose torch each platform has in builds of its own.
LOCKED = worker model translate stores alibaba embedded demo datasets traces mcp notebook report plots kubernetes dev
# One lock for every platform and Python of ours, with the hash of every file, and without any index's address.
LOCK_OPTIONS = --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)

worker-image: bootstrap ## build the image of instances in containers (docs/howto/cluster.md)
	@sh scripts/worker-image

services-image: bootstrap ## build PostgreSQL and Redis for docker-compose.yml without an image registry
	@sh scripts/services-image

bench-main: bootstrap ## tasks per minute in both modes, and the overhead per task; writes bench/results
	@$(BIN)/python -m bench.main

bench-control: bootstrap ## enqueue, dispatch, 10,000 at once, reaction, fairness; beside Celery and procrastinate
	@$(BIN)/python -m bench.control && $(BIN)/python -m bench.standing

bench-env: bootstrap ## environments beside mini-swe-agent, SWE-ReX, Harbor, Inspect, swebench and the bare engine; image cache
	@$(BIN)/python -m bench.images && $(BIN)/python -m bench.environments && $(BIN)/python -m bench.standing

bench-gateway: bootstrap ## the model gateway beside LiteLLM's proxy: overhead, saturation, streams, memory, a rollout
	@$(BIN)/python -m bench.gateway && $(BIN)/python -m bench.standing

bench-cli: bootstrap ## how long the command takes to start; beside python -c "import typer"
	@$(BIN)/python -m bench.cli

bench-evaluation: bootstrap ## datasets of 50,000 rows, logs judged a second, kept reports judged again
	@$(BIN)/python -m bench.evaluation

bench-web: bootstrap ## pages and the API over a run of 50,000 tasks, a hundred viewers; three minutes
	@$(BIN)/python -m bench.web && $(BIN)/python -m bench.standing

paper: bootstrap ## the paper's figures 3, 4 and 5, and beyond; writes docs/paper.md; twenty minutes; PAPER=--quick
	@$(BIN)/python -m bench.paper $(PAPER) && $(BIN)/python -m bench.standing

bench-train: bootstrap ## experience store, waste by faults, stragglers, steps an hour in three modes; twenty minutes
	@$(BIN)/python -m bench.train && $(BIN)/python -m bench.standing

train-demo: bootstrap ## a small policy learns through containers, gateway and experience store; installs torch apart
	@sh scripts/train-environment
	@.venv-train/bin/python -m bench.training.demo

chaos: bootstrap ## break everything, one case after the other, and count what was lost, doubled or unexpected
	@$(BIN)/python -m tests.chaos --long

matrix: bootstrap ## every framework on every dataset, on replayed models; writes docs/compatibility.md; ten minutes
	@$(BIN)/python -m tests.matrix

down: ## end the system; data stays
	@if [ -x $(BIN)/megaflow ]; then $(BIN)/megaflow down; else echo "nothing is installed here"; fi

clean: ## delete .venv and caches (after `make down`)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
