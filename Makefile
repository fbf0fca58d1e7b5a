# One target per thing that a person does. Needs Python >= 3.11 and make, nothing else.
#
#   make demo [ARGS=--keep]     train, export, serve and measure three tasks on one shared trunk
#   make test [ARGS='-k name']  the whole suite
#   make lint                   ruff (rules, format) and mypy
#   make bench [ARGS=...]       the pipeline benchmark: one engine, four ways, in ten minutes
#   make bench-pipeline [ARGS=...]  the same with all engines, and throughput; half an hour
#   make bench-hops [ARGS=...]  one hop, by size and way
#   make gpu [JOBS=6]           the first ten minutes on a machine with a GPU: what tells most first
#   make bench-gpu [ARGS=--quick]  the same pipeline on a GPU: handles, whole tensors, one process
#   make bench-batching [ARGS=--quick]  batching policies beside their papers; an hour
#   make bench-updates [ARGS='--updates 100']  live updates under load: nothing failed, nothing mixed
#   make bench-tasks [ARGS=--quick]  what thousands of tasks on the same blocks cost; ten minutes
#   make bench-front-door [ARGS=--quick]  processor time per request in client, Dispatcher, worker; three minutes
#   make bench-replicas [ARGS=--quick]  several processes of one model: memory, rows, loads; seven minutes
#   make bench-reliability [ARGS=--quick]  what the promises of reliability.md come to; half an hour
#   make chaos [ARGS='--seconds 120 --seed 1']  faults under load, judged by the clients' ledger
#   make chaos ARGS='--kills 1000'  processes of all roles are killed, one after the other; 25 minutes
#   make soak                   the same for an hour
#   make faultsim [ARGS='--seeds 100 --hours 24']  faults under virtual time, every invariant at each step
#   make bench-neighbours [ARGS=--quick]  what a task that asks too much does to one beside it; two minutes
#   make bench-overload [ARGS=--quick]  goodput at one to four times the capacity; four minutes
#   make bench-mlperf [LENGTH=]  LoadGen's verdicts on the demo's tasks (after make demo); short runs, or hours
#   make bench-thesis [ARGS='--only pipeline']  the thesis's experiments, our figures beside its own; half an hour
#   make bench-thesis-memory [ARGS='--constants thesis']  modular and traditional memory, as in the thesis
#   make bench-compare BASE=<rev> [ARGS=--fail]  is the working tree faster or slower than a revision?
#   make bench-plots            pictures of what the benchmarks have found
#   make bench-docs [ARGS='--take results']  performance.md and the table of promises from stored results
#   make fuzz [ARGS='--seed 7']  a million malformed frames at every decoder and socket; two minutes
#   make clean                  remove what the other targets made, but for what lies in blocks/

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Processes of `make test`: they wait for those that they start; on two cores four are faster than three.
JOBS   ?= 4

# On Linux, PyPI's torch brings several GB of CUDA libraries. The machine's own index configuration
# decides by default; for the small CPU build from PyTorch's own index:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH       := torch==2.13.0

export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help demo test gpu lint format fuzz bench-reliability bench bench-pipeline bench-hops bench-gpu bench-batching bench-updates bench-tasks bench-front-door bench-replicas bench-neighbours bench-overload bench-mlperf bench-thesis bench-thesis-memory bench-compare bench-plots bench-docs chaos soak faultsim clean

help:
	@sed -n 's/^#   \(make .*  \)/\1/p' Makefile

# The stamp, not the folder, is the target: an installation that broke off is done again.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("BlockFlow needs Python >= 3.11, but $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v[:2])'
	@echo "[1/3] $(VENV)"
	@$(PYTHON) -m venv $(VENV)
# torch first and by itself: it alone takes TORCH_INDEX, and whatever depends on it finds it there.
	@echo "[2/3] $(TORCH) (the largest download)"
	@$(BIN)/pip install --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c constraints.txt) '$(TORCH)'
	@echo "[3/3] BlockFlow and the other pinned packages (about a minute)"
	@$(BIN)/pip install --no-compile -c constraints.txt -e '.[demo,dev]'
# pip would compile one file after the other, and the packages' own tests with them. (Some packages
# bring templates that are no Python.)
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || :
	@touch $@

.PHONY: .venv
.venv: $(VENV)/.ready

demo: $(VENV)/.ready
	@$(BIN)/blockflow demo $(ARGS)

# Files in the order of tests/conftest.py, not those with the most tests first: those are the quick ones.
test: $(VENV)/.ready
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# What tells most comes first. A step is ended when its time is over, as by Ctrl-C, and by force 20 s later.
GPU_TESTS := $(BIN)/python -m pytest -m gpu -n $(JOBS) --dist loadfile --no-loadscope-reorder
gpu: $(VENV)/.ready
	@failed=0; \
	step() { echo "== $$*"; timeout --foreground -s INT -k 20 "$$@" || failed=1; }; \
	step 20 $(BIN)/blockflow doctor; \
	step 170 $(GPU_TESTS) tests/contract/test_channels_processes.py $(addprefix tests/gpu/test_,$(addsuffix _on_gpu.py,ipc paths kpis)); \
	step 230 $(BIN)/python -m blockflow.bench.gpu --effort 0.1; \
	step 100 $(GPU_TESTS) --dist load $(addprefix tests/gpu/test_,$(addsuffix _on_gpu.py,engine_options models)); \
	exit $$failed

lint: $(VENV)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

fuzz: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.fuzz.run $(ARGS)

bench: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.pipeline $(ARGS)

bench-pipeline: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.pipeline --all $(ARGS)

bench-hops: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.hops $(ARGS)

bench-gpu: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.gpu $(ARGS)

bench-batching: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.batching $(ARGS)

bench-tasks: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.tasks $(ARGS)

bench-front-door: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.front_door $(ARGS)

bench-replicas: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.replicas $(ARGS)

bench-updates: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.updates $(ARGS)

chaos: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.chaos.run $(ARGS)

soak: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.chaos.run --target=soak --seconds=3600 --gap=5 --spare=0.5 $(ARGS)

faultsim: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.faultsim $(ARGS)

bench-neighbours: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.neighbours $(ARGS)

bench-overload: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.overload $(ARGS)

# Short runs, unless LENGTH is empty: then those of the rules. The figures are gathered also when a
# run is INVALID; an older summary goes first, lest it pass for this call's when there is none.
bench-mlperf: LENGTH ?= --short
bench-mlperf: $(VENV)/.ready
	@rm -f results/mlperf/summary.json
	@$(BIN)/blockflow bench --topology topology.json --task digit=2,parity=1,high=1 --data digits \
		--scenario single-stream --scenario multistream --scenario server --scenario offline \
		--mode performance --mode accuracy --preset image-classification-light \
		--validate all --out results/mlperf $(LENGTH) $(ARGS); status=$$?; \
	{ test ! -e results/mlperf/summary.json || \
		$(BIN)/python -m blockflow.bench.mlperf.figures results/mlperf; } && exit $$status

bench-thesis: $(VENV)/.ready
	@$(BIN)/blockflow bench thesis $(ARGS)

bench-reliability: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.reliability.run $(ARGS)

bench-thesis-memory: $(VENV)/.ready
	@$(BIN)/blockflow bench thesis --only deployment $(ARGS)

bench-compare: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.compare.run '$(BASE)' $(ARGS)

bench-plots: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.plots $(ARGS)

bench-docs: $(VENV)/.ready
	@$(BIN)/python -m blockflow.bench.docs $(ARGS)

clean:
	@rm -rf $(VENV) build dist results .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis blockflow.egg-info
	@find blockflow tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
