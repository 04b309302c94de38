# make setup   an environment that serves and fetches (no torch)        make check   lint, types, import contracts
# make demo    the whole way, from a spec to bytes a worker can load    make test    every test that needs no GPU
# make serve   the service on 127.0.0.1:8400                            make bench   the kernel on this machine's GPU
# make test-sglang    the hook on sglang's real backends, in an environment of their own
# make kernel-check   what a change to a template does to bytes, registers and machine code, in seconds
# make check-deploy   the manifests against Kubernetes' schemas            make prove-image   the image, built and tried
#
# PYTHON names the interpreter to start from, VENV where the environment goes, ARGS what is passed on.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
bin := $(VENV)/bin
# --prefer-binary: a release without a wheel is no reason to start a compiler. -qq: hints about mirrors are noise.
pip := $(bin)/python -m pip install -qq --disable-pip-version-check --prefer-binary -c requirements.lock
# A stamp names what it was installed from, so an environment is renewed when that changes, and only then.
inputs := $(shell cat pyproject.toml requirements.lock clients/_layouts.c | sha256sum | cut -c1-16)
runtime := $(VENV)/.runtime-$(inputs)
develop := $(VENV)/.develop-$(inputs)

.PHONY: help setup setup-dev demo test soak test-sglang check kernel-check check-deploy prove-image serve bench docs templates lock clean

help:
	@sed -n '1,8s/^# \{0,1\}//p' Makefile

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit("mlaprep needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; pass PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(runtime): | $(bin)/python
	@echo "Installing the service, the client and NVRTC into $(VENV) …"
	@$(pip) -e '.[service,cuda12]'
	@rm -f $(VENV)/.runtime-* && touch $@

# torch is the reference that the kernel's bytes are compared with; only tests and benchmarks need it.
$(develop): | $(bin)/python
	@tests/install-tools
	@echo "Installing the development tools and torch into $(VENV) …"
	@$(pip) -e '.[dev]' torch
	@rm -f $(VENV)/.develop-* && touch $@ $(runtime)

setup: $(runtime)

setup-dev: $(develop)

demo: $(runtime)
	@$(bin)/python -m mlaprep.clients.demo $(ARGS)

serve: $(runtime)
	@exec $(bin)/mlaprep serve $(ARGS)

check: $(develop)
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy -p mlaprep
	@$(bin)/lint-imports --no-logo

# Ten minutes of mixed traffic on one server, whose memory has to stay flat.
soak: $(develop)
	@$(bin)/pytest -s -o timeout=1200 tests/faults/test_soak.py --soak-seconds 600 $(ARGS)

test: $(develop)
	@$(bin)/pytest -n 2 --dist loadfile $(ARGS)

# The torch that sglang pins brings CUDA libraries of several GB; SGLANG_TORCH='torch==2.13.0 triton==3.6.0' where a CPU
# build is to be had does as well, torchvision being stood in for.
SGLANG_TORCH ?= torch==2.14.1 torchvision==0.29.1
SGLANG ?= sglang==0.5.23
sglang := .sglang/$(shell echo '$(SGLANG_TORCH) $(SGLANG)' | cat - tests/sglang_backend/requirements.txt | sha256sum | cut -c1-16)

$(sglang)/.made:
	@echo "Installing $(SGLANG), $(SGLANG_TORCH) and what importing them takes into $(sglang) …"
	@$(PYTHON) -m venv $(sglang)
	@$(sglang)/bin/python -m pip install -qq --disable-pip-version-check --prefer-binary $(SGLANG_TORCH) -r tests/sglang_backend/requirements.txt
	@$(sglang)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(SGLANG)
	@touch $@

test-sglang: $(sglang)/.made
	@PYTHONPATH=tests/namespace $(sglang)/bin/python tests/sglang_backend/check_plugin.py
	@PYTHONPATH=tests/namespace $(sglang)/bin/python tests/sglang_backend/drive.py $(ARGS)

# What a change to a template does to bytes, registers and machine code, beside the last saved run.
kernel-check: $(develop)
	@PYTHONPATH=tests $(bin)/python -m sass.kernel_check $(ARGS)

# The manifests against Kubernetes' own schemas, which are 70 MB: in an environment of their own.
.deploy/bin/python:
	@$(PYTHON) -m venv .deploy
	@.deploy/bin/python -m pip install -qq --disable-pip-version-check kubernetes-validate==1.37.0 pyyaml

check-deploy: .deploy/bin/python
	@.deploy/bin/python deploy/check_manifests.py

# The image from the Dockerfile without a registry, and the service started from it. As root; minutes.
prove-image:
	@deploy/prove_image.sh $(ARGS)

bench: $(develop)
	@$(bin)/python benchmarks/bench_prepare.py $(ARGS)

# After a change to a template: a process that renders then need not parse it.
templates: $(develop)
	@$(bin)/python -m mlaprep.templates.precompile

docs: $(develop)
	@$(bin)/python docs/generate.py
	@$(bin)/python benchmarks/document.py

lock: | $(bin)/python
	@$(bin)/python deploy/lock.py

clean:
	rm -rf $(VENV) .deploy build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
