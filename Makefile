# `make quickstart` trains a small model on simulated devices, `make test` runs what CI runs; Python and make will do.
# `make quickstart PYTHON=python3.12` takes another interpreter, with an environment of its own, .venv-python3.12.
SHELL := /bin/sh
PYTHON :=
VENV := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
FAST := $(filter-out tests/test_plan_contract.py, $(foreach name, cli commands_plan config files hardware imports \
  models_counts output plan predict program rendezvous report rules schedule search units version, $(wildcard tests/test_$(name).py tests/test_$(name)_*.py)))

.PHONY: quickstart check test-fast test docs dist clean

quickstart: $(VENV)/installed
	$(BIN)/sppo train configs/quickstart.yaml

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

# What compiles no training step.
test-fast: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 -q $(FAST)

# `check` has run the import rule.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -q --durations 20 --ignore tests/test_imports.py

# The site in build/site, of the pages that lie in the repository; a warning is an error.
docs: $(VENV)/installed-docs
	$(BIN)/python docs/make_site.py
	$(BIN)/zensical build --strict --clean

# The sdist, and the wheel that it builds; with TAG=vX.Y.Z only if X.Y.Z is the version of the package.
dist: $(VENV)/installed-release
	@$(BIN)/python -c 'import sys; from sppo_jax.version import __version__; \
	  sys.exit(sys.argv[1] not in ("", f"v{__version__}") and f"TAG must be v{__version__}, got {sys.argv[1]}")' "$(TAG)"
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

# Python compiles a module when it is first imported: of torch and transformers few are, and pip would compile all of them.
# The default python3 if it is new enough, else the newest that runs; a shim may be on the path and yet not run.
$(VENV)/installed: pyproject.toml
	@python=; for name in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "needs Python 3.11 or newer with venv, got $(or $(PYTHON),none); install one, or name one: make PYTHON=PATH" >&2; exit 2; \
	fi; \
	echo "installing into $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	@$(BIN)/python -c 'from sppo_jax.compat import installed_text; print(installed_text())'
	@touch $@

# What the tests compare with is large (transformers and torch), so the quickstart does without.
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

$(VENV)/installed-docs $(VENV)/installed-release: $(VENV)/installed-%: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$*]'
	@touch $@
