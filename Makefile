# Everything a person runs on this repository. `make help` lists it.
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory

# One build cache for binaries, tests and tools: nothing here links C.
export CGO_ENABLED := 0
# Without paths of this checkout in them, results of the build cache serve every checkout.
export GOFLAGS ?= -trimpath

CLANG := clang-16

# The plugin does without Go's runtime where we have the few instructions that takes.
plugin_entry = $(if $(filter amd64,$(shell go env GOARCH)),-E main.start)

# One line and exit status 2: what follows needs namespaces and eBPF.
as_root = $(if $(filter 0,$(shell id -u)),,$(error make $@ needs root: it makes network namespaces and loads eBPF programs))

# The suites of `make long`, in its order. test/README.md says what each one runs and how long it takes.
suites := policies routing restart churn chaos fuzz soak mutation macvlan netkit vm-ovs paper bench

.PHONY: help build plugin demo check test tests long $(suites) survive fuzz-long deps lint generate generated vm budget

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

build: plugin ## bin/pilaster and bin/pilaster-cni
	go build -o bin/pilaster ./cmd/pilaster

# A position independent program, as GOFLAGS may ask for, would need a dynamic linker to start it. Tests set the variables.
plugin      = bin/pilaster-cni
plugin_link = -s -w
plugin:
	go build -buildmode=exe -trimpath -ldflags '$(plugin_link) $(plugin_entry)' -o $(plugin) ./cmd/pilaster-cni

demo: ## a network of 3 nodes on this machine, proven and taken down again; KEEP=1 leaves it up
	@$(as_root)
	@$(MAKE) build
	@bin/pilaster demo $(if $(KEEP),--keep)

# Lint has vetted the packages, and tests need no debugging information.
go_test := go test -v -count=1 -vet=off -ldflags=-w

# Seconds of each package and test. .ci/test-times makes the table dist/test-times.txt of them.
times  := dist/test-times.raw
judged := | awk -f .ci/test-output.awk -v times=$(times)

check: ## without root, with go's cache: lint, generated files as committed, short tests of packages that need no kernel
	@$(MAKE) lint generated
	@go test -short -vet=off -ldflags=-w $$(.ci/pure)

test: ## what a change must pass, as root: lint, generated files as committed, every test, one boot of Linux 6.12, bench as smoke
	@$(as_root)
	@$(MAKE) deps
	@$(MAKE) lint generated
	@$(MAKE) tests PILASTER_TEST_OBJECTS=$(CURDIR)/dist/generated
	@$(MAKE) netkit FORM=smoke
	@$(MAKE) bench FORM=smoke

# Labs mostly wait, and these run longest: go test starts packages in this order, three at once.
slowest := ./test/nimitz ./internal/datapath ./test/policies ./test/ops ./internal/bench ./test/restart \
    ./internal/orchestrator/store ./test/mutation ./test/fuzz

tests: export PILASTER_TEST_BINARY := $(CURDIR)/bin/pilaster
tests: ## every test, as root; a skipped test is a failed one; the slowest are in dist/test-times.txt
	@$(as_root)
	@$(MAKE) build
	@mkdir -p dist; rm -f $(times)
	@trap '.ci/test-times $(times)' EXIT; \
	    $(go_test) -p 3 -timeout 25m -skip '$(judges_times)' $(slowest) ./... $(judged); \
	    $(go_test) ./test/policies -run '$(judges_times)' $(judged) -v least=1; \
	    PILASTER_TEST_DEVICE=macvlan $(go_test) ./internal/datapath -run '$(few_macvlans)' $(judged) -v least=5
# It wants the machine for itself.
judges_times := ^TestChangeToEnforcement$$
few_macvlans := ^Test(WhoReachesWhom|MissingProgramDrops|SeesWhoStandsBeforeIt|CheckNamesAndRestoreRepairs|AnotherNode)$$

long: ## all suites, one after the other: hours, on a machine with nothing else to do; each appends a line to test/LEDGER.md
	@$(as_root)
	@failed=(); for suite in $(suites); do $(MAKE) $$suite FUZZTIME=$(or $(FUZZTIME),1m) || failed+=($$suite); done; \
	    [ $${#failed[@]} -eq 0 ] || { echo "error: these suites failed: $${failed[*]}"; exit 1; }

# A suite of `make long` and its settings, which go into the ledger. Its labs run what `make build` made.
$(suites): export PILASTER_TEST_BINARY := $(CURDIR)/bin/pilaster
suite = @.ci/ledger '$@$(if $(1), $(1))'

# Seeds alone run in every `go test`. FUZZ=PATTERN runs those targets only.
fuzz: ## each fuzz target for FUZZTIME=5s, FUZZ_PARALLEL=1 at once
	@$(as_root)
	$(call suite,FUZZTIME=$(fuzz_time)) go run ./test/fuzz -time $(fuzz_time) -parallel $(or $(FUZZ_PARALLEL),1) -only '$(FUZZ)'
fuzz_time = $(or $(FUZZTIME),5s)

fuzz-long: ## each fuzz target for FUZZTIME=10m
	@$(MAKE) fuzz FUZZTIME=$(or $(FUZZTIME),10m)

deps: ## the Debian packages that tests, lint and generate use (.ci/packages)
	@.ci/deps

lint: deps ## gofmt, vet, staticcheck, clang warnings, clang-format
	@test -z "$$(gofmt -l api cmd internal test)" || { echo "not as gofmt writes it:"; gofmt -l api cmd internal test; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	@for f in bpf/*.bpf.c; do echo "$(CLANG) -Wall -Werror $$f"; \
	    $(CLANG) -target bpf -Ibpf -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Werror "$$f"; done
	git ls-files 'bpf/*.c' 'bpf/*.h' ':!bpf/vmlinux.h' | xargs $(CLANG:clang%=clang-format%) --dry-run -Werror

generate: deps ## protobuf, eBPF objects, drop reasons and the command reference anew, and who made them
	go generate ./...
	@PILASTER_DOCS=write go test -count=1 -run '^TestReference$$' ./internal/cli
	@{ $(CLANG) --version | head -1; protoc --version; } > .ci/toolchain

generated: deps ## what make generate would write, in a copy of the tree: it must be as committed
	@.ci/generated

# FORM=full takes 28 minutes and, of policies, some nine; FORM=smoke is for CI and its figures mean little.
bench: ## the datapath beside native, routed and VXLAN, in one run, and rules beside netfilter: FORM=quick (5 minutes), full or smoke
	@$(as_root)
	@$(MAKE) build
	$(if $(filter smoke,$(FORM)),@,$(call suite,FORM=$(or $(FORM),quick))) bash -ec 'bin/pilaster bench datapath --$(or $(FORM),quick) -o dist/bench; \
	    bin/pilaster bench policy --$(or $(FORM),quick) -o dist/bench/policy'

paper: ## the paper's figures from this machine: FORM=quick (2 minutes) or full; all without it (10 minutes)
	@$(as_root)
	@$(MAKE) build
	$(call suite,$(if $(FORM),FORM=$(FORM))) bin/pilaster sim paper $(if $(FORM),--$(FORM)) -o dist/paper

# SOAK is how long, as Go writes durations; SEED=N makes the choices of the run that printed it.
soak: export PILASTER_SOAK := $(or $(SOAK),30m)
soak: ## a lab under churn, kills, rotations, flaps, resets and attacks against a model, for SOAK=30m
	@$(as_root)
	@$(MAKE) build
	$(call suite,SOAK=$(PILASTER_SOAK)) env $(if $(SEED),PILASTER_SOAK_SEED=$(SEED)) $(go_test) -timeout 0 ./test/soak

restart: export PILASTER_TEST_DEVICE   := veth
restart: export PILASTER_RESTART_KILLS := $(or $(KILLS),100)
restart: export PILASTER_RESTART_SYNS  := 1000000
restart: ## KILLS=100 of agents under traffic, upgrades, damaged state; a million half-open connections
	@$(as_root)
	@$(MAKE) build
	$(call suite,KILLS=$(PILASTER_RESTART_KILLS)) $(go_test) -timeout 0 -skip '^TestChurn$$' ./test/restart

# On a machine with nothing else to do: it judges times too, and those behind macvlans have stricter limits.
churn: export PILASTER_RESTART_CONTAINERS := $(or $(CONTAINERS),1000)
churn: export PILASTER_RESTART_ROUNDS     := $(or $(ROUNDS),20)
churn: export PILASTER_RESTART_LIMITS     := 1
churn: ## CONTAINERS=1000 on a node, ROUNDS=20 times, behind veths and behind macvlans
	@$(as_root)
	@$(MAKE) build
	$(call suite,CONTAINERS=$(PILASTER_RESTART_CONTAINERS) ROUNDS=$(PILASTER_RESTART_ROUNDS)) bash -ec \
	    'for device in veth macvlan; do PILASTER_TEST_DEVICE=$$device $(go_test) -timeout 0 -run "^TestChurn$$" ./test/restart; done'

survive: ## restart and churn
	@$(MAKE) restart
	@$(MAKE) churn

macvlan: export PILASTER_TEST_DEVICE := macvlan
macvlan: export PILASTER_SOAK := 1m
macvlan: ## the suites of containers behind macvlans, and a minute of soak
	@$(as_root)
	@$(MAKE) deps build
	$(call suite) bash -o pipefail -ec '$(go_test) -timeout 15m ./internal/datapath ./test/restart ./test/cni ./test/attack \
	    ./test/ops ./test/wire ./test/routing ./test/soak | awk -f .ci/test-output.awk'

# FORM=smoke is a part of make test; it has one boot for TestBudget too, which does not ask for a device. Pods are left
# out: containerd's overlays cannot lie on the machine's root, which is one.
netkit: export PILASTER_TEST_DEVICE := netkit
netkit: ## the suites of containers behind netkits, on Linux 6.12 in a virtual machine: 20 minutes; FORM=smoke, and the budget of programs: one
ifeq ($(FORM),smoke)
	@$(MAKE) vm CPUS=1 RUN='^Test(Budget|TenContainers|MissingProgramDrops|CheckNamesAndRestoreRepairs|ChooseDevice)$$$$' | awk -v least=5 -f .ci/test-output.awk
else
	@$(MAKE) build
	$(call suite) $(MAKE) vm CPUS=1 PKG='./internal/datapath ./internal/bench/... ./test/attack ./test/ops ./test/cni' \
	    SKIP='TestBudget|TestMacvlan[^K]|TestScale|TestPods'
endif

policies: export PILASTER_POLICIES_LONG := 1
policies: ## all cases of cyclonus and 10,000 by chance in the kernel's tables, cyclonus's with packets on each network, 5,000 policies on a node, how soon a change is in force, 100,000 connections meanwhile
	@$(as_root)
	@$(MAKE) build
	$(call suite) bash -ec '$(go_test) -timeout 30m -run "^TestPoliciesInKernel$$" ./internal/datapath; $(go_test) -timeout 30m ./test/policies'

routing: export PILASTER_ROUTING_LONG := 1
routing: ## routers that die in every way, and advertisements of 30 s
	@$(as_root)
	@$(MAKE) build
	$(call suite) $(go_test) -timeout 30m ./test/routing

chaos: export PILASTER_CHAOS_CHANGES := $(or $(CHANGES),10000)
chaos: ## CHANGES=10000 registrations and tenant changes while orchestrators and etcd are killed, stopped and cut off
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,CHANGES=$(PILASTER_CHAOS_CHANGES)) $(go_test) -timeout 0 ./test/chaos

# KERNEL is a Debian package; PKG are packages as `go test` names them, RUN and SKIP their tests; what they write is gone with the
# machine, but in the folder WRITE. No KVM is needed; ACCEL=kvm uses it. Without it, two CPUs now and then stumble over code
# that the kernel changes as it runs; CPUS=1 does not.
vm: ## tests of PKG=./internal/datapath on Linux 6.12 in a virtual machine, RUN=pattern only those
	@.ci/deps packages-vm
	@go build -o dist/vm/run ./test/vm
	@kernel=$$(.ci/kernel $(or $(KERNEL),linux-image-6.12-amd64)); \
	    $(go_test) -timeout $(or $(LIMIT),60m) $(if $(RUN),-run '$(RUN)') $(if $(SKIP),-skip '$(SKIP)') \
	    -exec "$$PWD/dist/vm/run -kernel $$kernel -limit $(or $(LIMIT),60m)$(if $(ACCEL), -accel $(ACCEL))$(if $(CPUS), -cpus $(CPUS))$(if $(WRITE), -write $(WRITE))" $(or $(PKG),./internal/datapath)

# The kernel of most machines that run this has no module openvswitch.
vm-ovs: export PILASTER_TEST_OVS := system
vm-ovs: ## network nimitz on the kernel datapath of Open vSwitch, with its flows in tc, on Linux 6.12 in a virtual machine
	$(call suite) $(MAKE) vm CPUS=1 PKG=./internal/network/nimitz/ovs RUN='$(or $(RUN),TestPackets$$$$)'

budget: export PILASTER_BUDGET := write
budget: ## what each program may ask of the verifier, measured anew here and on Linux 6.12: internal/datapath/budget.json
	@$(as_root)
	@$(go_test) -run 'TestBudget$$' ./internal/datapath
	@$(MAKE) vm RUN='TestBudget$$$$' WRITE=$(CURDIR)/internal/datapath

mutation: export MUTATION := all
mutation: ## every check of the datapath taken away in turn, a bug planted for every fuzz target, faults for the simulation: tests must notice
	@$(as_root)
	@$(MAKE) deps build
	$(call suite) $(go_test) -timeout 0 ./test/mutation
