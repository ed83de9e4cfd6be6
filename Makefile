# The three commands people need: make serve, make test, make bench. Each sets up what is missing.
#   make serve ARGS="-m model.gguf --port 8081"
#   make test ARGS="-k config"
#   make bench NAME=switch ARGS="--quick"
#   make simulate SEEDS=50
#   make soak
#   make first-hour
#   make arm64
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
NAME ?= resume

.DEFAULT_GOAL := help
.PHONY: help setup serve ui models test test-all lint simulate bench docs architectures update-llama-cpp conformance agents vllm soak fuzz wheel sdist first-hour arm64 clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: ## Make .venv with everything (compiles llama.cpp once, 5 to 10 minutes), fetch SmolLM2
	@deploy/setup.sh

serve: setup ## Run the daemon with SmolLM2; ARGS="-m FILE.gguf" serves another
	@$(BIN)/towerd serve $(ARGS) </dev/null  # setup has tried: no question about the model

ui: setup ## Build llama.cpp's web UI, the chat page at / (npm; a minute or two)
	@deploy/llama.cpp/build_ui.sh $(BIN)/python towerd/data/ui

models: setup ## Fetch the models that tests use, Gemma 3 270M under https://ai.google.dev/gemma/terms
	@$(BIN)/towerd models get smollm2
	@$(BIN)/towerd models get gemma3-270m --yes

lint: setup
	$(BIN)/ruff format --check towerd codec kernels slots cli lab tests
	$(BIN)/ruff check towerd codec kernels slots cli lab tests
	$(BIN)/mypy

test: lint ## Format check, lint, type check, the quick tests on all cores; ARGS="-n 0 -k config" for one process
	$(BIN)/pytest -n auto --dist loadfile --max-worker-restart 0 -m "not soak and not slow" $(ARGS)

test-all: lint ## All of that and the slow tests: daemons, llama-server, trained models; what CI runs
	$(BIN)/pytest -n auto --dist loadfile --max-worker-restart 0 $(ARGS)

simulate: setup ## A store on a disk that fails, alone and under many threads, and a router: SEEDS=50 of them, or SEED=17 KIND=house again
	@PYTHONHASHSEED=0 PYTHONPATH=tests/support $(BIN)/python tests/support/simulate.py $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),50)) $(if $(KIND),--kind $(KIND))

bench: setup ## Run one benchmark: NAME=resume|switch|store|concurrency ARGS=--quick
	@$(BIN)/towerctl bench $(NAME) $(ARGS)

architectures: setup ## Try random models of every architecture of llama.cpp; writes the table of docs/models.md
	@PYTHONPATH=tests/support:. $(BIN)/python tests/support/arch_table.py

docs: setup ## Write the tables of docs/settings.md
	@PYTHONPATH=tests/support $(BIN)/python tests/support/settings_page.py

update-llama-cpp: setup ## Move to the newest llama-cpp-python (VERSION=0.3.36 for one), try it, list what changed; an hour
	@deploy/llama.cpp/update.sh $(BIN)/python

conformance: setup ## llama.cpp's own server tests on llama-server and on both engines; writes docs/conformance.md
	$(BIN)/python tests/conformance/run.py $(ARGS)

agents: setup ## Agent programs from npm and PyPI in a session with towerd; writes docs/clients.md
	@PYTHONPATH=tests/support $(BIN)/python tests/agents/agent_sessions.py $(ARGS)

vllm: setup ## Make .venv-vllm with vLLM for the CPU, test the connector there and measure it; 20 minutes on two cores
	@deploy/vllm.sh $(BIN)/python .venv-vllm
	TOWERD_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest -n 0 -v tests/connectors $(ARGS)
	@$(BIN)/towerctl bench vllm --python $(CURDIR)/.venv-vllm/bin/python

soak: setup ## The long attacks of the suite, then 10,000 requests under budgets that are far too small; about an hour
	$(BIN)/pytest -m soak -v
	@$(BIN)/towerctl bench soak

fuzz: setup ## New examples for every property, then the C++ code under sanitizers for twice ten minutes; FUZZ_SECONDS=60 for less
	$(BIN)/pytest -m hypothesis --hypothesis-profile=explore $(ARGS)
	$(MAKE) -C tests/kernels/fuzz run SECONDS=$(or $(FUZZ_SECONDS),600)
	$(MAKE) -C tests/wire/fuzz run SECONDS=$(or $(FUZZ_SECONDS),600)

wheel: setup ## Build the wheel for this system and Python into dist/, with a llama.cpp for all CPUs in it (20 minutes on two cores)
	@deploy/wheel.sh $(BIN)/python dist

sdist: wheel ## Build the sdist into dist/, and a wheel from it, which must have the same files
	@deploy/sdist.sh $(BIN)/python dist

first-hour: wheel ## Install that wheel where no compiler is; chat, chat page, tool call, kill -9, the same chat continued; timed
	@PYTHON=$(BIN)/python tests/first_hour.sh dist/towerd-*.whl $(ARGS)

arm64: setup ## Kernels, blobs and a chat for Linux on arm64 under qemu-user (root on Debian; half an hour)
	@tests/arm64.sh $(BIN)/python

clean: ## Remove build outputs and caches, but not .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find towerd codec kernels slots cli lab tests -name __pycache__ -prune -exec rm -rf {} +
