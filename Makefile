# All commands for this repository. `make help` lists them.
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory

# No C is linked, so binaries, tests and tools share one build cache.
export CGO_ENABLED := 0
# Without the checkout's path in the results, all checkouts share the build cache.
export GOFLAGS ?= -trimpath

CLANG := clang-16

# On amd64 the plugin has its own entry point, which does not start Go's runtime.
plugin_entry = $(if $(filter amd64,$(shell go env GOARCH)),-E main.start)

# Fails with one line and exit status 2 if the user is not root.
as_root = $(if $(filter 0,$(shell id -u)),,$(error make $@ needs root: it creates network namespaces and loads eBPF programs))

# The suites of `make long`, in its order. test/README.md describes each one and its duration.
suites := policies routing restart churn egress services scans chaos flannel kube-proxy accelerate fuzz soak mutation macvlan \
    netkit vm-ovs network vm-ila packets offload evpn paper bench

.PHONY: help build plugin demo check test tests long $(suites) survive fuzz-long deps lint generate generated vm budget

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

build: plugin ## bin/pilaster and bin/pilaster-cni
	go build -o bin/pilaster ./cmd/pilaster

# A position-independent executable, which GOFLAGS may request, would need a dynamic linker. Tests set the variables.
plugin      = bin/pilaster-cni
plugin_link = -s -w
plugin:
	go build -buildmode=exe -trimpath -ldflags '$(plugin_link) $(plugin_entry)' -o $(plugin) ./cmd/pilaster-cni

demo: ## a network of 3 nodes on this machine, checked and removed again; KEEP=1 keeps it
	@$(as_root)
	@$(MAKE) build
	@bin/pilaster demo $(if $(filter 1,$(KEEP)),--keep)

# Lint already runs vet, and tests need no debugging information.
go_test := go test -v -count=1 -vet=off -ldflags=-w

# Durations of all packages and tests, from which .ci/test-times creates dist/test-times.txt.
times  := dist/test-times.raw
report := | awk -f .ci/test-output.awk -v times=$(times)

check: ## without root, with go's cache: lint, generated files, short tests of packages that do not need the kernel
	@$(MAKE) lint generated
	@go test -short -vet=off -ldflags=-w $$(.ci/pure)

test: ## required for every change, as root: lint, generated files, every test, one boot of Linux 6.12, bench with FORM=smoke
	@$(as_root)
	@$(MAKE) deps
	@$(MAKE) lint generated
	@$(MAKE) tests PILASTER_TEST_OBJECTS=$(CURDIR)/dist/generated
	@$(MAKE) netkit FORM=smoke
	@$(MAKE) bench FORM=smoke

# The longest packages first: go test starts packages in this order, three concurrently. Labs mostly wait.
slowest := ./test/nimitz ./internal/datapath ./test/policies ./test/ops ./internal/bench ./test/restart \
    ./internal/orchestrator/store ./test/mutation ./test/fuzz

tests: export PILASTER_TEST_BINARY := $(CURDIR)/bin/pilaster
tests: ## every test, as root; a skipped test counts as failed; durations are in dist/test-times.txt
	@$(as_root)
	@$(MAKE) build
	@mkdir -p dist; rm -f $(times)
	@trap '.ci/test-times $(times)' EXIT; \
	    $(go_test) -p 3 -timeout 55m -skip '$(timed_tests)|$(evpn_tests)' $(slowest) ./... $(report); \
	    $(go_test) -p 1 ./test/policies ./test/restart ./test/move ./internal/datapath ./internal/accelerate \
	        ./test/services ./test/egress ./internal/bench/suites -run '$(timed_tests)' $(report) -v least=11; \
	    PILASTER_TEST_DEVICE=macvlan $(go_test) ./internal/datapath -run '$(few_macvlans)' $(report) -v least=5; \
	    PILASTER_TEST_ACCELERATE=oncache $(go_test) ./internal/datapath -run '^TestNimitz' $(report) -v least=19
# Tests that check durations or shares of CPUs, which need an otherwise idle machine.
timed_names := MoveGap|ChangeToEnforcement|ManyRulesDelayNo(ADD|OtherTenant)|Model(Notices)?|Steering|KillsOfServices|Announced
timed_tests := ^Test($(timed_names))$$
# Tests of BGP peers that depend on the heap's size, or on timers of GoBGP. `make evpn` runs them.
evpn_tests := ^Test(MemoryIsReleased|PeerLimits)$$
few_macvlans := ^Test(WhoReachesWhom|MissingProgramDrops|SeesWhoStandsBeforeIt|CheckNamesAndRestoreRepairs|AnotherNode)$$

long: ## all suites in sequence: hours, on an otherwise idle machine; each appends a line to test/LEDGER.md
	@$(as_root)
	@failed=(); for suite in $(suites); do $(MAKE) $$suite FUZZTIME=$(or $(FUZZTIME),1m) || failed+=($$suite); done; \
	    [ $${#failed[@]} -eq 0 ] || { echo "error: these suites failed: $${failed[*]}"; exit 1; }

# Runs a suite of `make long` and records its settings in the ledger. Labs run the binaries of `make build`.
$(suites): export PILASTER_TEST_BINARY := $(CURDIR)/bin/pilaster
suite = @.ci/ledger '$@$(if $(1), $(1))'

# `go test` itself runs the seeds only. FUZZ=PATTERN runs matching targets only.
fuzz: ## each fuzz target for FUZZTIME=5s, FUZZ_PARALLEL=1 concurrently
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
	go vet -tags flannel ./test/flannel
	go tool staticcheck ./...
	go tool staticcheck -tags flannel ./test/flannel
	go vet -tags kernel_ila ./internal/bench/scenario
	go tool staticcheck -tags kernel_ila ./internal/bench/scenario
	@for f in bpf/*.bpf.c; do echo "$(CLANG) -Wall -Werror $$f"; \
	    $(CLANG) -target bpf -Ibpf -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Werror "$$f"; done
	git ls-files 'bpf/*.c' 'bpf/*.h' ':!bpf/vmlinux.h' | xargs $(CLANG:clang%=clang-format%) --dry-run -Werror

generate: deps ## protobuf, eBPF objects, drop reasons and command reference; records the tools' versions
	go generate ./internal/dropreason # bpf/ needs its result
	go generate ./...
	@PILASTER_DOCS=write go test -count=1 -run '^TestReference$$' ./internal/cli
	@{ $(CLANG) --version | head -1; protoc --version; } > .ci/toolchain

generated: deps ## runs make generate in a copy of the tree, and compares the result with the committed files
	@.ci/generated

# FORM=full takes 28 minutes, about nine for policies, ten for caches and five for egress, and by estimate half an hour
# more for networks.
# FORM=smoke is for CI; its figures mean little.
bench: ## the datapath, policy rules, caches of overlays, egress, services, networks side by side: FORM=quick (21 minutes), full or smoke
	@$(as_root)
	@$(MAKE) build
	$(if $(filter smoke,$(FORM)),@,$(call suite,FORM=$(or $(FORM),quick))) bash -ec 'bin/pilaster bench datapath --$(or $(FORM),quick) -o dist/bench; \
	    bin/pilaster bench policy --$(or $(FORM),quick) -o dist/bench/policy; \
	    bin/pilaster bench oncache --$(or $(FORM),quick) -o dist/bench/oncache; \
	    bin/pilaster bench egress --$(or $(FORM),quick) -o dist/bench/egress; \
	    bin/pilaster bench services --$(or $(FORM),quick) -o dist/bench/services; \
	    bin/pilaster bench networks --$(or $(FORM),quick) -o dist/bench/networks'

paper: ## the paper's figures from this machine: FORM=quick (2 minutes) or full; all without it (10 minutes)
	@$(as_root)
	@$(MAKE) build
	$(call suite,$(if $(FORM),FORM=$(FORM))) bin/pilaster sim paper $(if $(FORM),--$(FORM)) -o dist/paper

# SOAK is a Go duration; SEED=N repeats the choices of the run that printed it.
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

# Needs an otherwise idle machine: it also checks durations, with stricter limits for macvlans.
churn: export PILASTER_RESTART_CONTAINERS := $(or $(CONTAINERS),1000)
churn: export PILASTER_RESTART_ROUNDS     := $(or $(ROUNDS),20)
churn: export PILASTER_RESTART_LIMITS     := 1
churn: ## CONTAINERS=1000 on a node, ROUNDS=20 times, with veths and with macvlans
	@$(as_root)
	@$(MAKE) build
	$(call suite,CONTAINERS=$(PILASTER_RESTART_CONTAINERS) ROUNDS=$(PILASTER_RESTART_ROUNDS)) bash -ec \
	    'for device in veth macvlan; do PILASTER_TEST_DEVICE=$$device $(go_test) -timeout 0 -run "^TestChurn$$" ./test/restart; done'

survive: ## restart and churn
	@$(MAKE) restart
	@$(MAKE) churn

macvlan: export PILASTER_TEST_DEVICE := macvlan
macvlan: export PILASTER_SOAK := 1m
macvlan: ## the suites with macvlans for containers, and a minute of soak
	@$(as_root)
	@$(MAKE) deps build
	$(call suite) bash -o pipefail -ec '$(go_test) -timeout 30m -skip "$(timed_tests)" ./internal/datapath ./test/restart ./test/cni ./test/attack \
	    ./test/ops ./test/wire ./test/routing ./test/soak | awk -f .ci/test-output.awk'

# FORM=smoke is a part of make test; the same boot runs TestBudget, which does not depend on the device. Pods are left
# out: containerd's overlays do not work on the virtual machine's root, which is an overlay. So is Open vSwitch, whose
# ports Linux 6.12 cannot let forward alone.
netkit: export PILASTER_TEST_DEVICE := netkit
netkit: ## what depends on the device, with netkits, on Linux 6.12 in a virtual machine: by estimate an hour; FORM=smoke
ifeq ($(FORM),smoke)
	@$(MAKE) vm CPUS=1 RUN='^Test(Budget|TenContainers|MissingProgramDrops|CheckNamesAndRestoreRepairs|ChooseDevice)$$$$' | awk -v least=5 -f .ci/test-output.awk
else
	@$(MAKE) build
	$(call suite) bash -ec '$(MAKE) vm CPUS=1 LIMIT=$(or $(LIMIT),100m) \
	    PKG="./internal/datapath ./internal/bench/scenario ./test/attack ./test/cni" \
	    SKIP="TestBudget|TestMacvlan[^K]|TestScale|TestPods|TestManyRulesDelay|OnOpenVSwitch"; \
	    $(MAKE) vm CPUS=1 PKG="./internal/bench ./test/ops" \
	    RUN="^Test(RunOfAllScenarios|ResetLeaves|NodeResetRestores|TraceEnds|PreflightChoosesTheDevice)"'
endif

policies: export PILASTER_POLICIES_LONG := 1
policies: ## all cases of cyclonus and 10,000 random ones in the kernel's tables, cyclonus's with packets on each network, 5,000 policies on a node, the delay of a change, 100,000 connections during changes
	@$(as_root)
	@$(MAKE) build
	$(call suite) bash -ec '$(go_test) -timeout 30m -run "^TestPoliciesInKernel$$" ./internal/datapath; $(go_test) -timeout 30m ./test/policies'

routing: export PILASTER_ROUTING_LONG := 1
routing: ## all kinds of router failures, and advertisements of 30 s
	@$(as_root)
	@$(MAKE) build
	$(call suite) $(go_test) -timeout 30m ./test/routing

evpn: export PILASTER_TEST_EVPN_FLOOD := $(or $(ROUTES),100000)
evpn: ## ROUTES=100000 refused routes of a BGP peer, below and above its limits, and the memory that they take
	@$(as_root)
	@$(MAKE) deps
	$(call suite,ROUTES=$(PILASTER_TEST_EVPN_FLOOD)) $(go_test) -timeout 30m -run '^TestFlood$$|$(evpn_tests)' \
	    ./internal/evpn/speaker

# SEED=N repeats the choices of the run that printed it.
egress: export PILASTER_EGRESS_CHANGES := $(or $(CHANGES),10000)
egress: ## CHANGES=10000 of egress rules, gateways, policies, containers and nodes against a model, with veths and macvlans
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,CHANGES=$(PILASTER_EGRESS_CHANGES)) bash -ec 'for device in veth macvlan; do \
	    $(if $(SEED),PILASTER_EGRESS_SEED=$(SEED)) PILASTER_TEST_DEVICE=$$device $(go_test) -timeout 0 \
	    -run "^TestModel$$" ./test/egress; done'

# SEED=N repeats the choices of the run that printed it.
services: export PILASTER_SERVICES_CHANGES := $(or $(CHANGES),10000)
services: ## CHANGES=10000 of services, their endpoints, policies and nodes against a model of the backends, with veths and macvlans
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,CHANGES=$(PILASTER_SERVICES_CHANGES)) bash -ec 'for device in veth macvlan; do \
	    $(if $(SEED),PILASTER_SERVICES_SEED=$(SEED)) PILASTER_TEST_DEVICE=$$device $(go_test) -timeout 0 \
	    -run "^TestModel$$" ./test/services; done'

scans: export PILASTER_ATTACK_SCAN   := $(or $(ADDRESSES),1000000)
scans: export PILASTER_TEST_PATIENCE := 30m
scans: ## ADDRESSES=1000000 scanned by containers and from outside, and a tenth as many ports, beside flows of neighbours
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,ADDRESSES=$(PILASTER_ATTACK_SCAN)) $(go_test) -timeout 0 -run '^TestScans$$' ./test/attack

chaos: export PILASTER_CHAOS_CHANGES := $(or $(CHANGES),10000)
chaos: ## CHANGES=10000 registrations and tenant changes while orchestrators and etcd are killed, stopped and disconnected
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,CHANGES=$(PILASTER_CHAOS_CHANGES)) $(go_test) -timeout 0 ./test/chaos

# Flannel's backend udp has C code. The module's go.sum names all sources. Without the tags, the C library would be used for
# names too.
dist/flannel/flannel: test/flannel/binaries/go.mod test/flannel/binaries/go.sum
	cd test/flannel/binaries && CGO_ENABLED=1 CC=$(CLANG) go build -tags netgo,osusergo -ldflags '-s -w' -o $(CURDIR)/dist/flannel/ tool

flannel: export PILASTER_TEST_FLANNEL := $(CURDIR)/dist/flannel
flannel: ## pilaster accelerate beside the real Flannel, which it downloads and builds
	@$(as_root)
	@$(MAKE) deps build
	@.ci/deps packages-nftables
	@$(MAKE) dist/flannel/flannel
	$(call suite) $(go_test) -tags flannel -timeout 20m ./test/flannel

dist/kube-proxy/kubeproxy: $(wildcard test/e2e/kubeproxy/*)
	cd test/e2e/kubeproxy && go build -ldflags '-s -w' -o $(CURDIR)/$@ .

kube-proxy: export KUBE_PROXY := $(CURDIR)/dist/kube-proxy/kubeproxy
kube-proxy: ## pilaster bench services beside kube-proxy's nftables rules, whose code it downloads and builds: FORM=quick or full
	@$(as_root)
	@$(MAKE) deps build
	@.ci/deps packages-nftables
	@$(MAKE) dist/kube-proxy/kubeproxy
	$(call suite,FORM=$(or $(FORM),quick)) bin/pilaster bench services --$(or $(FORM),quick) -o dist/bench/kube-proxy \
	    --peer kube-proxy=test/e2e/kube-proxy.sh --peer kube-proxy-10000=test/e2e/kube-proxy-10000.sh \
	    --peer kube-proxy-node-port=test/e2e/kube-proxy-node-port.sh

# SEED=N repeats the choices of the run that printed it. LIMIT is a Go duration: 50ms on a quiet machine.
accelerate: export PILASTER_ACCELERATE_CHANGES := $(or $(CHANGES),1000)
accelerate: ## CHANGES=1000 of overlays beside `pilaster accelerate`, against a model; 600 starting containers, a stream of 1 GiB, datagrams for 10 minutes
	@$(as_root)
	@$(MAKE) deps
	$(call suite,CHANGES=$(PILASTER_ACCELERATE_CHANGES)$(if $(LIMIT), LIMIT=$(LIMIT))) env \
	    $(if $(SEED),PILASTER_ACCELERATE_SEED=$(SEED)) $(if $(LIMIT),PILASTER_ACCELERATE_LIMIT=$(LIMIT)) \
	    $(go_test) -timeout 0 -run '^Test(Model|ModelNotices|Churn|Stream|EntryOfDatagrams)$$' ./internal/accelerate

# KERNEL is a Debian package. PKG are arguments of `go test`, RUN and SKIP patterns of tests. Files outside of the folder WRITE are
# lost with the machine. No KVM is needed; ACCEL=kvm uses it. Without KVM, two CPUs sometimes fail on code that the kernel
# patches at run time; CPUS=1 avoids that.
vm: export PILASTER_TEST_PATIENCE := 15m
vm: ## tests of PKG=./internal/datapath on Linux 6.12 in a virtual machine, RUN=pattern only those
	@.ci/deps packages-vm
	@go build -o dist/vm/run ./test/vm
	@kernel=$$(.ci/kernel $(or $(KERNEL),linux-image-6.12-amd64)); \
	    $(go_test) -timeout $(or $(LIMIT),60m) $(if $(RUN),-run '$(RUN)') $(if $(SKIP),-skip '$(SKIP)') \
	    -exec "$$PWD/dist/vm/run -kernel $$kernel -limit $(or $(LIMIT),60m)$(if $(ACCEL), -accel $(ACCEL))$(if $(CPUS), -cpus $(CPUS))$(if $(WRITE), -write $(WRITE))" $(or $(PKG),./internal/datapath)

# The kernels of most development machines lack the module openvswitch.
vm-ovs: export PILASTER_TEST_OVS := system
vm-ovs: ## network nimitz on the kernel datapath of Open vSwitch, with its flows in tc, on Linux 6.12 in a virtual machine
	$(call suite) $(MAKE) vm CPUS=1 PKG=./internal/network/nimitz/ovs RUN='$(or $(RUN),TestPackets$$$$)'

# Further suites have tenants on all networks: attack, policies, and of make test: reset, CHECK, trace.
network: export PILASTER_TEST_NETWORK  := $(or $(NETWORK),evpn)
network: export PILASTER_RESTART_KILLS := $(or $(KILLS),100)
network: export PILASTER_SOAK          := $(or $(SOAK),5m)
network: ## the suites restart and soak with tenants on NETWORK=evpn (or ila): KILLS=100 of agents and SOAK=5m
	@$(as_root)
	@$(MAKE) deps build
	$(call suite,NETWORK=$(PILASTER_TEST_NETWORK) KILLS=$(PILASTER_RESTART_KILLS) SOAK=$(PILASTER_SOAK)) bash -ec \
	    '$(go_test) -timeout 0 -run "^TestKills$$" ./test/restart; \
	    env $(if $(SEED),PILASTER_SOAK_SEED=$(SEED)) $(go_test) -timeout 0 ./test/soak'

# Most kernels lack the module ila.
vm-ila: ## network ila with the kernel's ILA as its peer, on Linux 6.12 in a virtual machine
	$(call suite) $(MAKE) vm CPUS=1 PKG='-tags kernel_ila ./internal/bench/scenario' \
	    RUN='$(or $(RUN),^TestKernelILA$$$$)'

packets: export PACKETS := $(or $(PACKETS),1000000)
packets: ## PACKETS=1000000 random packets of network ila, and as many forged ones
	@$(as_root)
	$(call suite,PACKETS=$(PACKETS)) $(go_test) -timeout 0 -run 'TestRandomPackets|TestForgedPackets' ./internal/network/ila/tables

offload: export OFFLOAD_ACTIVATIONS     := $(or $(ACTIVATIONS),200)
offload: export OFFLOAD_KILLS           := $(or $(KILLS),50)
offload: export OFFLOAD_FAILOVERS       := $(or $(FAILOVERS),8)
offload: export OFFLOAD_FAILOVER_MS     := 500
offload: export OFFLOAD_CUTS            := $(or $(FAILOVERS),8)
offload: export OFFLOAD_RULES           := 1000
offload: export OFFLOAD_CONNECTIONS     := 2000
offload: export PILASTER_TEST_PACKETS   := $(or $(PACKETS),1000000)
offload: export PILASTER_POLICIES_LONG  := 1
offload: ## load sharing: ACTIVATIONS=200, KILLS=50, PACKETS=1000000 compared, all cases of cyclonus
	@$(as_root)
	@$(MAKE) build
	$(call suite,ACTIVATIONS=$(OFFLOAD_ACTIVATIONS) KILLS=$(OFFLOAD_KILLS) PACKETS=$(PILASTER_TEST_PACKETS)) bash -ec \
	    '$(go_test) -timeout 0 ./test/offload; $(go_test) -timeout 0 -run "^TestFrontend" ./internal/datapath; \
	    $(go_test) -timeout 30m -run "^TestPacketsAgainstCyclonus$$/^nimitz-offloaded$$" ./test/policies'

budget: export PILASTER_BUDGET := write
budget: ## measure the limits of each program for the verifier, here and on Linux 6.12: internal/datapath/budget.json
	@$(as_root)
	@$(go_test) -run 'TestBudget$$' ./internal/datapath
	@$(MAKE) vm RUN='TestBudget$$$$' WRITE=$(CURDIR)/internal/datapath

mutation: export MUTATION := all
mutation: ## remove each check of the datapath, plant a bug for every fuzz target and faults for the simulation: tests must detect them
	@$(as_root)
	@$(MAKE) deps build
	$(call suite) $(go_test) -timeout 0 ./test/mutation ./internal/tunnel ./internal/oncache \
	    ./internal/network/ila/tables ./internal/network/evpn/tables
