package main

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/tenant"
)

// networkFolders are the folders of networks, and the table of their traits. Everything else asks for a capability.
var networkFolders = []string{"internal/network", "internal/modules", "bpf/net", "internal/tenant/networks.go"}

// namedNetworks are the other files and folders of the product that name a network, with the number of lines in them.
// The numbers may only shrink. A folder stands for its files that are not listed themselves.
var namedNetworks = map[string]struct {
	lines  int
	reason string
}{
	"api/pilaster/v1":                        {30, "comments say which messages are of which network's tenants"},
	"bpf/common":                             {8, "comments, packet4.h of one network, addresses of another"},
	"bpf/ila.bpf.c":                          {6, "the entry programs of a network"},
	"internal/address/ila.go":                {26, "the addresses of a network"},
	"bpf/evpn.bpf.c":                         {6, "the entry programs of a network"},
	"internal/evpn":                          {101, "the protocol that a network is named after"},
	"internal/orchestrator/evpnroutes":       {56, "the protocol that a network is named after"},
	"internal/orchestrator/evpn.go":          {13, "the protocol that a network is named after"},
	"internal/orchestrator/server.go":        {4, "the protocol that a network is named after"},
	"internal/orchestrator/store/cluster.go": {2, "the protocol that a network is named after"},
	"internal/cli/evpn.go":                   {29, "the protocol that a network is named after"},
	"internal/cli/orchestrator.go":           {3, "the protocol that a network is named after"},
	"internal/cli/root.go":                   {1, "the protocol that a network is named after"},
	"internal/tenant/network.go":             {1, "the protocol that a network is named after"},
	"internal/address/segment.go":            {1, "the addresses of a network"},
	"internal/lab/spec.go":                   {1, "the addresses of a network, which the fabric routes"},
	"internal/orchestrator/store/tenants.go": {1, "the addresses of a network"},
	"internal/tenant/overlay.go":             {2, "the addresses of a network"},
	"internal/lab/up.go":                     {2, "the addresses of a network, which the fabric routes"},
	"bpf/hooks":                              {16, "the hook of containers begins with one network's lookup"},
	"bpf/pilaster.bpf.c":                     {12, "the entry programs of networks"},
	"deploy/systemd/pilaster-agent.service":  {1, "an example of flags"},
	"internal/bench":                         {152, "scenarios, gates and reports are about one network"},
	"internal/bench/networks":                {54, "a comparison of all networks, a row for each"},
	"internal/cli/explain.go":                {1, "the addresses of a network"},
	"internal/cli/bench.go":                  {5, "help: which networks are compared"},
	"internal/cli/bench_compare.go":          {2, "a scenario's name"},
	"internal/cli/bench_tables.go":           {4, "measurements of NIMITZ alone"},
	"internal/cli/bench_nic.go":              {3, "a model and a measurement of NIMITZ alone"},
	"internal/cli/sim_paper.go":              {2, "the title of the paper"},
	"internal/datapath/bpfobj/doc.go":        {1, "a type of the programs"},
	"internal/datapath/hook":                 {37, "NIMITZ's tunnel, gateway and Open vSwitch ports, ILA's program"},
	"internal/datapath/dump.go":              {1, "a key of the JSON"},
	"internal/datapath/networks.go":          {6, "the list of the networks' parts of the data path"},
	"internal/datapath/netpila.go":           {14, "a network's part of the data path"},
	"internal/datapath/nimitz.go":            {30, "a network's part of the data path"},
	"internal/datapath/nimitz_entries.go":    {4, "a network's part of the data path"},
	"internal/datapath/nimitz_part.go":       {10, "a network's part of the data path"},
	"bpf/trace.bpf.c":                        {14, "the entry programs of networks, with tracing"},
	"bpf/trace_evpn.bpf.c":                   {6, "the entry programs of a network, with tracing"},
	"internal/agent/daemon/run.go":           {1, "the type of a pipeline's entries, which a trace reads"},
	"internal/agent/trace":                   {15, "the stages of a trace, a file per network"},
	"internal/datapath/follow/follow.go":     {2, "the entry programs of networks, with tracing"},
	"internal/datapath/trace.go":             {1, "the entry programs of networks, with tracing"},
	"internal/cli/migrate.go":                {7, "the help text of moves between networks"},
	"internal/trace/live.go":                 {2, "stages that only one network has"},
	"internal/dpapi/trace.go":                {2, "stages that only one network has"},
	"internal/dropreason/reasons.txt":        {4, "texts for users"},
	"internal/lab/supervisor.go":             {1, "an import: the lab runs Open vSwitch"},
	"internal/nic":                           {8, "a model of NIMITZ's offloading"},
	"internal/paper":                         {107, "figures of the paper, which compares the two"},
	"internal/preflight/machine.go":          {1, "a scenario's name"},
}

// countNames returns, by file of the product outside of networkFolders, the number of lines that name a network. A
// section of a paper, such as NIMITZ §3.1, is no name of a network.
func countNames(files []file, networks []string) map[string]int {
	var words []string
	for _, n := range networks {
		if word := "(?i:" + n + ")"; len(n) > 4 {
			words = append(words, word)
		} else { // part of other words
			words = append(words, `(?:\b|_)`+word+`(?:\b|_)`, `(?:\b|[a-z_])`+strings.ToUpper(n))
		}
	}
	names := "(?:" + strings.Join(words, "|") + ")"
	name, citation := regexp.MustCompile(names), regexp.MustCompile(names+" (?:§|appendix )")
	found := map[string]int{}
	for _, f := range files {
		isCode := f.language == golang || f.language == clang || f.language == protobuf || f.language == plain
		its := func(folder string) bool { return isIn(f.path, folder) }
		if !isCode || f.isTest() || slices.ContainsFunc(networkFolders, its) {
			continue
		}
		for _, line := range f.lines() {
			if name.MatchString(citation.ReplaceAllString(line, "")) {
				found[f.path]++
			}
		}
	}
	return found
}

// listedFor returns the longest entry of namedNetworks that contains a file.
func listedFor(path string) (entry string) {
	for e := range namedNetworks {
		if isIn(path, e) && len(e) > len(entry) {
			entry = e
		}
	}
	return entry
}

func TestNetworkNames(t *testing.T) {
	root, err := rootOf(".")
	if err != nil {
		t.Fatal(err)
	}
	files, err := ours(root, []string{"api", "bpf", "cmd", "deploy", "internal"})
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]int{}
	for path, lines := range countNames(files, tenant.Networks()) {
		entry := listedFor(path)
		if entry == "" {
			t.Errorf("%s names a network in %d lines: ask for a capability (internal/tenant/network.go), or move the "+
				"code to the network's folder", path, lines)
		}
		sums[entry] += lines
	}
	for _, entry := range slices.Sorted(maps.Keys(namedNetworks)) {
		switch is, listed := sums[entry], namedNetworks[entry]; {
		case is > listed.lines:
			t.Errorf("%s names networks in %d lines, at most %d: %s", entry, is, listed.lines, listed.reason)
		case is == 0:
			t.Errorf("%s names no network: remove it from the list", entry)
		case is < listed.lines:
			t.Logf("%s names networks in %d lines: write that in place of %d", entry, is, listed.lines)
		}
	}
}

func TestCountNames(t *testing.T) {
	got := countNames([]file{
		{"internal/x/x.go", golang, []byte("// Nimitz\n// NIMITZ §3.1\n// NIMITZ appendix A, netpila\nx(nimitz)\n")},
		{"internal/x/x_test.go", golang, []byte("nimitz\n")},
		{"internal/network/nimitz/y.go", golang, []byte("nimitz\n")},
		{"internal/x/x.md", markdown, []byte("nimitz\n")},
		{"bpf/z.h", clang, []byte("int z;\n")},
	}, []string{"netpila", "nimitz"})
	if want := map[string]int{"internal/x/x.go": 3}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
