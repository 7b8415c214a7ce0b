# Two commands need nothing but Python 3.10-3.13 and a C++ compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Python compiles what it imports, which is a seventh of what is installed, and keeps that: hence --no-compile, and no
# word against keeping it, which each of hundreds of processes would pay for.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
PIP    := $(INSTALL) -qq --use-pep517
# uv resolves and unpacks many wheels at a time: the test tools come in 5 seconds instead of 40. It does not know pip's
# settings: where the index is another one, it fails, and pip does all of it. torch is always pip's, by these settings.
UV     := $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# The first import of these takes 9 seconds, in which they are compiled, and both of pytest's workers would do it. Beside
# pip a core is idle.
FIRST_IMPORTS := import torch, transformers.models.bert.modeling_bert
SOURCES := setup.py build_backend.py fastbert/native/recipe.py pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: demo test checked lint type format docs unit test-full sanitize fuzz bench bench-ops gpu clean help

help:           ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

# The build tools come first: the extension is compiled against the torch that runs it, without build isolation.
$(VENV)/.installed: $(SOURCES)
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)  # also one that was left half made
	@echo "installing torch and the build tools into $(VENV) ..."
	@$(PIP) torch numpy setuptools wheel ninja uv
	@$(UV) -r pyproject.toml --extra demo 2> /dev/null || true
	@echo "building fastbert ..."
	@$(BIN)/python -c "$(FIRST_IMPORTS)" > /dev/null 2>&1 & \
		$(INSTALL) --no-build-isolation --verbose -e ".[demo]" > $(VENV)/build.log 2>&1; built=$$?; wait; \
		[ $$built -eq 0 ] || (tail -n 40 $(VENV)/build.log; false)
	@grep -h "^ *fastbert: " $(VENV)/build.log | tail -n 1
	@touch $@

# An extra of what is installed already: pip adds what it names and builds nothing again.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools ..."
	@$(UV) "fastbert-kernels[test]" 2> /dev/null || $(PIP) "fastbert-kernels[test]"
	@touch $@

demo: $(VENV)/.installed  ## set everything up, then embed and search real text with a real model
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test lint checked  ## set everything up, then lint, type check and test

# mypy takes one core for half a minute where it has no cache: beside the tests, that is nothing. What it says comes last.
checked: $(VENV)/.installed-test
	@mkdir -p build
	@$(BIN)/mypy > build/mypy.log 2>&1 & types=$$!; trap "kill $$types 2> /dev/null" INT TERM; \
		$(UNIT); unit=$$?; wait $$types; typed=$$?; cat build/mypy.log; \
		[ $$unit -eq 0 ] || echo "make test: pytest failed ($$unit)"; [ $$typed -eq 0 ] || echo "make test: mypy failed ($$typed)"; \
		[ $$unit -eq 0 ] && [ $$typed -eq 0 ]

CPP_SOURCES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

lint: $(VENV)/.installed-test  ## ruff and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

type: $(VENV)/.installed-test  ## mypy
	@$(BIN)/mypy

format: $(VENV)/.installed-test  ## rewrite the sources in the house style
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_SOURCES)
	@$(BIN)/ruff check --fix .

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "installing the benchmark's peers ..."
	@$(PIP) "fastbert-kernels[bench]"
	@touch $@

bench: $(VENV)/.installed-bench  ## whole encoders against their peers, 25 minutes on 2 quiet cores
	@$(BIN)/fastbert bench --output build/bench

bench-ops: $(VENV)/.installed-bench  ## ops one by one, with pytest-benchmark
	@mkdir -p build/bench
	@$(BIN)/python -m pytest benchmarks/bench_ops.py --benchmark-json build/bench/ops.json

# On the machine with the GPU, with the Python that has its build of torch: nothing is installed, `make gpu PYTHON=...`.
# OUT=folder for the results.
OUT ?= build/gpu
gpu: build/.gpu-extension  ## the tests of ops and of a GPU's code, on the GPU
	@mkdir -p $(OUT)
	@$(PYTHON) -m pytest tests/ops tests/gpu -m "" --junitxml $(OUT)/tests.xml

# Without it the kernels in CUDA C++ are skipped by name, and the others run.
build/.gpu-extension: $(SOURCES)
	@mkdir -p build
	@echo "building the extension ..."
	@$(PYTHON) setup.py build_ext --inplace > build/gpu-extension.log 2>&1 || tail -n 20 build/gpu-extension.log
	@grep "^ *fastbert: " build/gpu-extension.log | tail -n 1
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what makes the documentation ..."
	@$(PIP) "fastbert-kernels[docs]"
	@touch $@

# A warning is an error: a dead link, an anchor that is not there, a docstring that cannot be read, a page that fails to run.
docs: $(VENV)/.installed-docs $(VENV)/.installed-test  ## the documentation as a site, in build/site
	@$(BIN)/python -m pytest -q -m "" tests/project/test_readme.py -k "examples or links"
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/docs-state . build/site
	@echo "open build/site/index.html"

UNIT := $(BIN)/python -m pytest -n 2 --dist worksteal

unit: $(VENV)/.installed-test  ## pytest
	@$(UNIT)

test-full: $(VENV)/.installed-test  ## what make test leaves out: every architecture, a wheel, cases whose path others take
	@FASTBERT_TEST_SEED=$${FASTBERT_TEST_SEED:-$$(($$(date +%s) % 4000 + 1))} $(BIN)/python -m pytest -n 2 --dist worksteal -m full

# A build of its own with AddressSanitizer and UBSan, and the tests of every C++ kernel on it. What torch and Python leak
# at exit is not ours, hence no leak detection; the first finding ends the run. AMX and AVX-VNNI, which few machines have,
# are emulated.
SANITIZED := $(CURDIR)/build/sanitized
SANITIZING = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED)
sanitize: $(VENV)/.installed-test  ## the C++ kernels' tests under AddressSanitizer and UBSan
	@rm -rf $(SANITIZED) && mkdir -p build
	@CXX=$(CURDIR)/tests/support/cxx_o1 CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer \
		-DFASTBERT_AMX_EMULATION='\"$(CURDIR)/tests/support/amx_emulation.h\"' \
		-DFASTBERT_AVX_VNNI_EMULATION='\"$(CURDIR)/tests/support/avx_vnni_emulation.h\"'" \
		$(BIN)/python setup.py -q build --build-base build/sanitized-base --build-lib $(SANITIZED) > build/sanitized.log 2>&1 \
		|| (tail -n 40 build/sanitized.log; false)
	@cd build && $(SANITIZING) $(abspath $(BIN))/python -c \
		"import torch; from fastbert import _C; isas = _C.isas(); assert 'avx_vnni' in isas and ('amx' in isas or 'avx512_bf16' not in isas), isas"
	@$(SANITIZING) OMP_NUM_THREADS=1 $(BIN)/pytest -q -s -p no:cacheprovider -o pythonpath="$(SANITIZED) tests/support" \
		tests/ops/test_isa.py::test_make_sanitize_tests_its_own_build tests/ops/test_contract.py tests/ops/test_maxsim.py tests/ops/test_linear.py tests/ops/test_feed_forward.py tests/ops/test_attention.py \
		tests/ops/test_layer_norm.py tests/ops/test_int8.py tests/ops/test_ops.py tests/models/test_training.py tests/ops/test_embedding.py \
		tests/ops/test_packed_weights.py tests/ops/test_packed_memory.py tests/ops/test_foreign_memory.py tests/ops/test_activation_ends.py \
		tests/ops/test_attention_kinds.py tests/ops/test_attention_num_keys.py tests/ops/test_attention_relative.py tests/ops/test_attention_traced.py tests/ops/test_attention_bad_input.py tests/ops/test_encoder_layers.py \
		tests/ops/test_encoder_layers_training.py tests/ops/test_bad_gradients.py tests/ops/test_adamw.py tests/ops/test_deferred_rows.py \
		tests/ops/test_renewed_weights.py tests/ops/test_without_copies.py tests/ops/test_unrecorded_writes.py tests/ops/test_sparse_embedding.py tests/ops/test_dropout.py tests/ops/test_attention_dropout.py \
		tests/ops/test_pooling.py tests/sentences/test_one_text.py -k "not triton and not cuda"

# MINUTES for all fuzzers together, SEED to do a run again, FUZZERS="ops models" for some of them. docs/fuzzing.md tells more.
MINUTES ?= 60
fuzz: $(VENV)/.installed-test  ## ops, models, optimizer, instruction sets, files, runs and the command line under random input, for an hour
	@$(BIN)/python tests/fuzz $(FUZZERS) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) build dist *.egg-info fastbert/_C.*
