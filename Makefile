# Everything a person runs on this repository. `make help` lists it.
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory

# One build cache for binaries, tests and tools: nothing here links C.
export CGO_ENABLED := 0

CLANG := clang-16

# The plugin does without Go's runtime where we have the few instructions that takes.
plugin_entry = $(if $(filter amd64,$(shell go env GOARCH)),-E main.start)

# One line and exit status 2: what follows needs namespaces and eBPF.
as_root = $(if $(filter 0,$(shell id -u)),,$(error make $@ needs root: it makes network namespaces and loads eBPF programs))

.PHONY: help build plugin demo test fuzz fuzz-long deps lint generate bench soak survive macvlan netkit nexthop policies chaos mutation vm vm-ovs budget

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

# How long each package and test took; .ci/test-times makes the table dist/test-times.txt of it.
times := dist/test-times.raw

test: ## every test, as root; a skipped test is a failed one
	@$(as_root)
	@$(MAKE) deps build
	@mkdir -p dist; rm -f $(times)
	@trap '.ci/test-times $(times)' EXIT; go test -v -count=1 -timeout 15m ./... | awk -v times=$(times) -f .ci/test-output.awk

# Seeds alone run in every `go test`. FUZZ=PATTERN runs those targets only.
fuzz: ## each fuzz target for FUZZTIME=5s, FUZZ_PARALLEL=1 at once
	@$(as_root)
	@go run ./test/fuzz -time $(or $(FUZZTIME),5s) -parallel $(or $(FUZZ_PARALLEL),1) -only '$(FUZZ)'

fuzz-long: ## each fuzz target for FUZZTIME=10m
	@$(MAKE) fuzz FUZZTIME=$(or $(FUZZTIME),10m)

deps: ## the Debian packages that tests, lint and generate use (.ci/packages)
	@.ci/deps

lint: deps ## gofmt, vet, staticcheck, clang warnings, clang-format
	@test -z "$$(gofmt -l api cmd internal test)" || { echo "not as gofmt writes it:"; gofmt -l api cmd internal test; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	@for f in bpf/*.bpf.c; do echo "$(CLANG) -Wall -Werror $$f"; \
	    $(CLANG) -target bpf -O2 -g -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Werror -c "$$f" -o /dev/null; done
	git ls-files 'bpf/*.c' 'bpf/*.h' ':!bpf/vmlinux.h' | xargs $(CLANG:clang%=clang-format%) --dry-run -Werror

generate: deps ## protobuf, eBPF objects, drop reasons and the command reference anew, and who made them
	go generate ./...
	@PILASTER_DOCS=write go test -count=1 -run '^TestReference$$' ./internal/cli
	@{ $(CLANG) --version | head -1; protoc --version; } > .ci/toolchain

# FORM=full takes 28 minutes and, of policies, some nine; FORM=smoke is for CI and its figures mean little.
bench: ## the datapath beside native, routed and VXLAN, in one run, and rules beside netfilter: FORM=quick (5 minutes), full or smoke
	@$(as_root)
	@$(MAKE) build
	@bin/pilaster bench datapath --$(or $(FORM),quick) -o dist/bench
	@bin/pilaster bench policy --$(or $(FORM),quick) -o dist/bench/policy

# SOAK is how long, as Go writes durations; SEED=N makes the choices of the run that printed it.
soak: ## a lab under churn, kills, rotations, flaps, resets and attacks against a model, for SOAK=30m
	@$(as_root)
	@$(MAKE) build
	@PILASTER_SOAK=$(or $(SOAK),30m) $(if $(SEED),PILASTER_SOAK_SEED=$(SEED)) go test -v -count=1 -timeout 0 ./test/soak

# On a machine with nothing else to do: it judges times too, those of containers behind veths and then behind macvlans, whose limits are stricter.
survive: export PILASTER_SURVIVE_KILLS      := $(or $(KILLS),100)
survive: export PILASTER_SURVIVE_CONTAINERS := $(or $(CONTAINERS),1000)
survive: export PILASTER_SURVIVE_ROUNDS     := $(or $(ROUNDS),20)
survive: export PILASTER_SURVIVE_LIMITS     := 1
survive: export PILASTER_SURVIVE_SYNS       := 1000000
survive: ## 100 kills of agents under traffic; a million half-open connections; 1,000 containers on a node, 20 times, behind veths and behind macvlans
	@$(as_root)
	@$(MAKE) build
	@PILASTER_TEST_DEVICE=veth go test -v -count=1 -timeout 0 ./test/survive
	@PILASTER_TEST_DEVICE=macvlan go test -v -count=1 -timeout 0 -run '^TestChurn$$' ./test/survive

macvlan: ## the suites of containers behind macvlans, and a minute of soak
	@$(as_root)
	@$(MAKE) deps build
	@PILASTER_TEST_DEVICE=macvlan PILASTER_SOAK=1m go test -v -count=1 -timeout 15m \
	    ./internal/datapath ./test/survive ./test/cni ./test/attack ./test/operations ./test/wire ./test/nexthop ./test/soak | awk -f .ci/test-output.awk

# FORM=smoke is what CI runs, in a minute. Pods are left out: containerd's overlays cannot lie on the machine's root, which is one.
netkit: export PILASTER_TEST_DEVICE := netkit
netkit: ## the suites of containers behind netkits, on Linux 6.12 in a virtual machine: 20 minutes, FORM=smoke one
ifeq ($(FORM),smoke)
	@$(MAKE) vm CPUS=1 RUN='^Test(TenContainers|MissingProgramDrops|CheckNamesAndRestoreRepairs|ChooseDevice)$$$$'
else
	@$(MAKE) build
	@PILASTER_TEST_BINARY=$(CURDIR)/bin/pilaster $(MAKE) vm CPUS=1 PKG='./internal/datapath ./internal/bench ./test/attack ./test/operations ./test/cni' \
	    SKIP='TestBudget|TestMacvlan[^K]|TestScale|TestPods'
endif

policies: ## all cases of cyclonus and 10,000 by chance in the kernel's tables, cyclonus's with packets on each network, 5,000 policies on a node, how soon a change judges and 100,000 connections meanwhile: the long run of test/policies
	@$(as_root)
	@$(MAKE) build
	@PILASTER_POLICIES_LONG=1 go test -v -count=1 -timeout 30m ./internal/datapath -run '^TestPoliciesInKernel$$'
	@PILASTER_POLICIES_LONG=1 go test -v -count=1 -timeout 30m ./test/policies

nexthop: ## routers that die in every way, and advertisements of 30 s: the long run of test/nexthop
	@$(as_root)
	@$(MAKE) build
	@PILASTER_NEXTHOP_LONG=1 go test -v -count=1 ./test/nexthop

chaos: ## CHANGES=10000 registrations and tenant changes while orchestrators and etcd are killed, stopped and cut off
	@$(as_root)
	@$(MAKE) deps
	@PILASTER_CHAOS_CHANGES=$(or $(CHANGES),10000) go test -v -count=1 -timeout 0 ./test/registrations

# KERNEL is a Debian package; PKG are packages as `go test` names them, RUN and SKIP their tests; what they write is gone with the
# machine, but in the folder WRITE. No KVM is needed; ACCEL=kvm uses it. Without it, two CPUs now and then stumble over code
# that the kernel changes as it runs; CPUS=1 does not.
vm: ## tests of PKG=./internal/datapath on Linux 6.12 in a virtual machine, RUN=pattern only those
	@.ci/deps packages-vm
	@go build -o dist/vm/run ./test/vm
	@kernel=$$(.ci/kernel $(or $(KERNEL),linux-image-6.12-amd64)); \
	    go test -v -count=1 -timeout $(or $(LIMIT),60m) $(if $(RUN),-run '$(RUN)') $(if $(SKIP),-skip '$(SKIP)') \
	    -exec "$$PWD/dist/vm/run -kernel $$kernel -limit $(or $(LIMIT),60m)$(if $(ACCEL), -accel $(ACCEL))$(if $(CPUS), -cpus $(CPUS))$(if $(WRITE), -write $(WRITE))" $(or $(PKG),./internal/datapath)

# The kernel of most machines that run this has no module openvswitch.
vm-ovs: export PILASTER_TEST_OVS := system
vm-ovs: ## network nimitz on the kernel datapath of Open vSwitch, with its flows in tc, on Linux 6.12 in a virtual machine
	@$(MAKE) vm CPUS=1 PKG=./internal/network/nimitz/ovs RUN='$(or $(RUN),TestPackets$$$$)'

budget: export PILASTER_BUDGET := write
budget: ## what each program may ask of the verifier, measured anew here and on Linux 6.12: internal/datapath/budget.json
	@$(as_root)
	@go test -v -count=1 -run 'TestBudget$$' ./internal/datapath
	@$(MAKE) vm RUN='TestBudget$$$$' WRITE=$(CURDIR)/internal/datapath

mutation: ## every check of the datapath taken away in turn, a bug planted for every fuzz target, faults for the simulation: tests must notice
	@$(as_root)
	@$(MAKE) deps
	@MUTATION=all go test -v -count=1 -timeout 0 ./test/mutation
