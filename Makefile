# Daily commands. Every target sets up the virtual environment that it needs; PYTHON selects the interpreter.
PYTHON ?= python3
TORCH  ?= 2.13.0
TORCHES ?= 2.13.0 2.14.1
VENV   ?= .venv$(if $(filter-out 2.13.0,$(TORCH)),-torch-$(TORCH))
BIN    := $(VENV)/bin
WHEEL  := $(BIN)/python -m build --wheel --no-isolation --outdir dist
CORE   := agent/rankmesh_agent/native/core.abi3.so
NPROC  ?= 4
EPOCHS ?= 30
SEEDS  ?= 100
SANITIZED ?= tests/agent/native tests/security/test_hostile_slots.py tests/sdk/test_sweep.py
# The address of the project, for the metadata of the wheel and a link in the site.
export REPOSITORY ?=
# A virtual environment has its Python for good: another one that is asked for would be ignored.
VERSION := -c 'import sys; print(sys.version)'
ifeq ($(if $(filter command environment,$(origin PYTHON)),$(wildcard $(BIN)/python)$(filter clean,$(MAKECMDGOALS))),$(BIN)/python)
ifneq ($(shell $(PYTHON) $(VERSION)),$(shell $(BIN)/python $(VERSION)))
$(error $(VENV) has another Python than $(PYTHON): add VENV=.venv-other, or remove $(VENV) with 'make clean')
endif
endif
# Most tests wait for processes; a file's tests share worlds, so they stay together. The longest files come first, as
# tests/conftest.py has them.
PARALLEL ?= --numprocesses 4 --dist loadfile --no-loadscope-reorder
# If the environment forbids bytecode files, as many containers do, each process of a test compiles everything anew.
export PYTHONDONTWRITEBYTECODE :=

# Without the tests of init methods, launcher and command line, which run before a rank has joined, and of calls that
# fail before any data is sent.
ATTACHED ?= $(patsubst %,tests/sdk/test_%.py,failures stores_agent sweep) \
	$(patsubst %,tests/sdk/collectives/test_%.py,async coalescing gather objects p2p reduce shared_memory) \
	$(patsubst %,tests/sdk/session/test_%.py,groups shrink)

.PHONY: help demo test test-fast coverage test-attached test-sanitized test-torch test-torch-suite test-torch-versions test-integrations test-integrations-part test-mpi test-browser test-gpu gpu-session gpu-wheels test-hosts test-faults test-recovery test-fuzz mutate check bench bench-many docs docs-site docs-serve test-docs-site wheel dashboard-screenshot clean cluster cluster-test cluster-down lock

help:  ## Print the targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.examples  ## Train a model on real data, four ranks over the mesh
	$(BIN)/rankmesh run --nproc-per-node $(NPROC) examples/train_digits.py --epochs $(EPOCHS) $(ARGS)

test: $(VENV)/.dev  ## Run the tests; needs no torch, MPI or Docker
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# Slower than the tests alone; one that is too slow for its time limits fails here, and the figure is that of the rest.
coverage: $(VENV)/.dev  ## Run the tests and print the share of lines and branches that they run, in all processes
	mkdir -p out && rm -rf out/coverage
	-$(BIN)/coverage run -m pytest $(PARALLEL) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report | tail -n 1

# ROOM is a folder of the agent, the gateway or the SDK, or a file, as it is called under tests/: ROOM=agent/store.
test-fast: $(VENV)/.dev  ## Run the tests that start no processes, of one ROOM, or of all without the slow ones
	$(BIN)/python -m pytest $(if $(ROOM),tests/$(ROOM),tests/agent tests/gateway tests/sdk) \
		-m "not processes$(if $(ROOM),, and not slow)" $(if $(ROOM),,$(PARALLEL)) $(ARGS)

test-attached: $(VENV)/.dev  ## Run the SDK's tests with ranks that attach to standalone agents
	RANKMESH_TEST_HOSTING=attached $(BIN)/python -m pytest $(ATTACHED) $(PARALLEL) $(ARGS)

# The compiled core with gcc's AddressSanitizer and UndefinedBehaviorSanitizer, and Python's memory from malloc, which they watch.
test-sanitized: $(VENV)/.dev  ## Run SANITIZED tests (the sweep) with a compiled core that checks its use of memory
	set -e; trap '$(BIN)/python hatch_build.py' EXIT; trap 'exit 130' INT TERM; \
	RANKMESH_NATIVE=1 CC=gcc CFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover" $(BIN)/python hatch_build.py; \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	  $(BIN)/python -m pytest --capture=sys $(SANITIZED) $(ARGS)

# TORCH=2.14.1 is another version, in an environment of its own.
test-torch: $(VENV)/.torch  ## Run the tests that need torch: tensors, and the same calls on gloo
	$(BIN)/python -m pytest tests/torch $(PARALLEL) $(ARGS)

# ARGS=3-ranks-as-for-gloo runs a part, and takes the rest of the page from earlier runs.
test-torch-suite: $(VENV)/.torch  ## Run all of torch's own distributed tests, over gloo too; writes docs/torch-suite.md
	$(BIN)/python -m tools.torch_suite $(ARGS)

# TORCHES=2.14.1 runs one, and takes the rest of the page from earlier runs.
test-torch-versions:  ## Run that, and all other tests with torch, with each of TORCHES; writes docs/torch-suite.md
	status=0; for torch in $(TORCHES); do \
	  run() { $(MAKE) $$1 TORCH=$$torch ARGS="--junitxml=out/torch-suite/$$torch/$$2.xml $$3" || status=1; }; \
	  run test-torch tests; run test-hosts hosts "-k torch"; run test-integrations integrations "-k weights"; \
	  $(MAKE) test-torch-suite TORCH=$$torch || status=1; \
	done; exit $$status

# RANKMESH_REQUIRE_INTEGRATIONS=1 makes a missing library an error; otherwise its tests are skipped with a reason.
# ARGS=--page writes the table of docs/torch.md.
test-integrations: $(VENV)-integrations/.installed  ## Run the programs of docs/torch.md; ends with a table of digests
	RANKMESH_REQUIRE_INTEGRATIONS=1 $(VENV)-integrations/bin/python -m pytest tests/integrations --numprocesses 2 $(ARGS)

test-integrations-part: $(VENV)/.ignite  ## Run those that need torch, or ignite, alone
	$(BIN)/python -m pytest tests/integrations $(ARGS)

# RANKMESH_REQUIRE_MPI=1 makes a missing MPI an error; otherwise the tests are skipped with a reason. The ranks of stuck
# jobs poll without end, on all cores: nothing else runs beside those.
test-mpi: $(VENV)/.mpi  ## Run the tests that need MPI: backend "mpi", under mpirun
	$(BIN)/python -m pytest tests/mpi --ignore tests/mpi/test_observe.py --numprocesses 2 --dist loadfile $(ARGS)
	$(BIN)/python -m pytest tests/mpi/test_observe.py $(ARGS)

# RANKMESH_REQUIRE_BROWSER=1 makes a missing Chromium an error; otherwise the tests are skipped with a reason.
test-browser: $(VENV)/.browser  ## Run the dashboard's tests; need Chromium (apt-get install chromium)
	$(BIN)/python -m pytest tests/dashboard $(PARALLEL) $(ARGS)

# Over the double of CuPy if CuPy finds no GPU; then ARGS=-rs lists the tests that need one.
test-gpu: $(VENV)/.dev  ## Run the tests of arrays on GPUs, on NVIDIA's where available (pip install '.[gpu]')
	RANKMESH_TEST_GPU=all $(BIN)/python -m pytest tests/gpu $(PARALLEL) $(ARGS)

# On a machine without a network: python3 tools/gpu_session.py run (docs/gpu.md). ARGS=--double needs no GPU.
gpu-session: $(VENV)/.dev  ## All checks and figures of arrays on GPUs in eight minutes, into out/gpu-session
	$(BIN)/python tools/gpu_session.py run $(ARGS)

gpu-wheels:  ## Download what such a machine lacks into out/wheels
	$(PYTHON) tools/gpu_session.py wheels $(ARGS)

test-hosts: $(VENV)/.dev  ## Run the commands of docs/hosts.md on two test hosts; needs root and iproute2
	$(BIN)/python -m pytest tests/hosts $(ARGS)

# ARGS="--seed 17 --kind kill -v" repeats one run, and prints its program, its fault and what each rank reported.
test-faults: $(VENV)/.dev  ## Kill, stop and disturb ranks SEEDS times; ends with a table by kind of fault
	$(if $(ARGS),,$(BIN)/python -m pytest tests/faults --numprocesses 2)
	PYTHONPATH=tests $(BIN)/python -m tools.faults --seeds $(SEEDS) $(ARGS)

# ARGS="--kind shrink --rounds 5" runs a part; ARGS="--page FILE" writes the table of docs/fault-tolerance.md from --json FILE.
test-recovery: $(VENV)/.dev  ## Kill ranks of a training, which goes on; ends with a table of the seconds to the next step
	PYTHONPATH=tests $(BIN)/python -m tools.faults.recovery $(ARGS)

# ARGS="--sites 400 --seed 2 --rooms 'agent/(store|group)'" is another sample; --processes adds tests that start ranks.
mutate: $(VENV)/.dev  ## Change an operator in 100 places, one at a time; the share that tests notice, by room
	$(BIN)/python -m tools.mutate $(ARGS)

test-fuzz: $(VENV)/.dev  ## Send 50,000 sequences of mutated frames to each binary protocol, and 100 requests to each endpoint
	RANKMESH_FUZZ_EXAMPLES=50000 RANKMESH_HTTP_EXAMPLES=100 \
	  $(BIN)/python -m pytest tests/security/test_hostile_*.py tests/http/test_schemathesis.py $(PARALLEL) $(ARGS)

check: $(VENV)/.dev  ## Lint, formatting, spelling, types, layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

# ARGS='--only all_reduce --ranks 2' prints a part instead.
bench: $(VENV)/.bench  ## Measure beside gloo and Open MPI, inference, and large jobs at a gateway; writes docs/performance.md
ifdef ARGS
	$(BIN)/python -m benchmarks $(ARGS)
else
	$(BIN)/python -m benchmarks --json out/benchmarks.json
	$(BIN)/python -m benchmarks.page out/benchmarks.json
	$(BIN)/python -m benchmarks.inference --page docs/torch.md
	$(BIN)/python -m benchmarks.scale
endif

# ARGS='--descriptors 256' does so under ulimit -n 256.
bench-many: $(VENV)/.bench  ## Measure one world of 128 processes beside gloo and Open MPI; takes five minutes
	$(BIN)/python -m benchmarks.many $(ARGS)

docs: $(VENV)/.torch  ## Write docs/compatibility.md, the tables of algorithms and errors, and the chart of imports
	$(BIN)/python docs/compatibility.py
	$(BIN)/python docs/imports.py
	$(BIN)/python docs/errors.py
	$(BIN)/python docs/algorithms.py

# The site loads nothing from other hosts. A warning, such as a link to nothing, is an error.
docs-site: $(VENV)/.docs  ## Build the documentation as a site in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-docs-site: $(VENV)/.dev $(VENV)/.docs  ## Build the site, and test that it is complete and works offline
	$(BIN)/python -m pytest tests/docs/test_site.py $(ARGS)

docs-serve: $(VENV)/.docs  ## Show the site at http://127.0.0.1:8000, and build it anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The pure one, and one for each processor with the compiled core, cross-compiled for glibc 2.17 (manylinux2014) and newer.
wheel: $(VENV)/.zig  ## Build the wheels into dist/
	RANKMESH_NATIVE=0 $(WHEEL)
	set -e; for processor in x86_64 aarch64; do \
	  RANKMESH_NATIVE=1 _PYTHON_HOST_PLATFORM=manylinux_2_17-$$processor \
	    CC="$(abspath $(BIN))/python -m ziglang cc -target $$processor-linux-gnu.2.17" $(WHEEL); \
	done
	@ls dist/*.whl

dashboard-screenshot: $(VENV)/.browser  ## Write docs/dashboard.png from a job that runs; needs Chromium
	$(BIN)/python docs/dashboard.py

# AGENTS writes compose.override.yaml, which every "docker compose" in this folder reads from then on.
cluster:  ## Start a gateway and four agents in containers, AGENTS=6 of them for example; print their use
ifdef AGENTS
	$(PYTHON) docker/agents.py $(AGENTS) >compose.override.yaml
endif
	docker compose up --detach --build --wait --wait-timeout 120 --remove-orphans
	@cat docker/welcome.txt

cluster-test: $(VENV)/.dev  ## Test a cluster of its own: needs Docker, and the ports 8700 to 8704
	$(BIN)/python -m pytest tests/compose $(ARGS)

cluster-down:  ## Stop the cluster, and remove its containers, network and volumes
	docker compose --profile demo down --volumes --remove-orphans

lock:  ## Write docker/locked anew: versions and hashes of the image's dependencies; needs uv
	for extra in core gpu gpu-cuda13 examples; do \
	  $(PYTHON) docker/requirements.py $${extra#core} | uv pip compile - --quiet --universal --generate-hashes \
	    --python-version 3.11 --no-header --no-annotate --upgrade -o docker/locked/$$extra.txt || exit; \
	done

clean:  ## Remove what the targets made
	rm -rf $(VENV) $(VENV)-integrations build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.examples: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	touch $@

# pip compiles the core; after a change it is compiled alone, and warnings are errors. Without a C compiler, or Python's
# headers, there is none.
HEADER := -c 'import sysconfig; print(sysconfig.get_path("include"))'
$(CORE): $(wildcard $(addprefix $(dir $(CORE)),*.pyx *.pxi)) hatch_build.py | $(VENV)/.packages
	$(if $(shell command -v cc && ls $$($(BIN)/python $(HEADER))/Python.h),RANKMESH_NATIVE=$${RANKMESH_NATIVE:-1}) \
	  $(BIN)/python hatch_build.py

$(VENV)/.packages: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.dev: $(VENV)/.packages | $(CORE)
	touch $@

# torch is pinned: with an open range, pip would take a build with gigabytes of CUDA libraries. Its own tests, of which
# tests/torch/test_suite.py runs some, import expecttest.
$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet torch==$(TORCH) expecttest
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(VENV)/.ignite: $(VENV)/.torch tests/integrations/requirements.txt
	$(BIN)/python -m pip install --quiet "$$(grep '^pytorch-ignite' tests/integrations/requirements.txt)"
	touch $@

# In an environment of their own, of 2.5 GB, for they bring a hundred packages. DeepSpeed compiles nothing.
$(VENV)-integrations/.installed: pyproject.toml $(wildcard tests/integrations/*.txt)
	$(PYTHON) -m venv $(VENV)-integrations
	DS_BUILD_OPS=0 $(VENV)-integrations/bin/python -m pip install --quiet torch==$(TORCH) \
	  --requirement tests/integrations/requirements.txt --editable '.[dev]'
	$(VENV)-integrations/bin/python -m pip install --quiet --no-deps --upgrade --target $(VENV)-integrations/beside \
	  --requirement tests/integrations/beside.txt
	touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	touch $@

# A C compiler for other processors and older versions of glibc.
$(VENV)/.zig: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet 'ziglang>=0.13'
	touch $@

$(VENV)/.mpi: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable '.[mpi]'
	touch $@

$(VENV)/.bench: $(VENV)/.torch $(VENV)/.mpi
	touch $@
