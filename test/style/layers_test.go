package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "pilaster.io/pilaster/"

// layers are all packages, the lowest layer first. A package may import only packages of its own layer and of lower
// layers. A folder stands for all packages below it that are not listed themselves.
var layers = []struct {
	name    string
	folders []string
}{
	{"tools of no domain", []string{
		"internal/statefile", "internal/keymutex", "internal/unixrpc", "internal/netns", "internal/humanize",
		"internal/debugserver", "internal/sdnotify", "internal/openflow", "internal/plot", "internal/specfile",
		"internal/fuzzmutate", "internal/manifest",
		"internal/batch", "internal/bpftest", "internal/choice", "internal/version", "internal/bgp", "internal/probe",
	}},
	{"the domain, pure", []string{
		"api", "internal/address", "internal/tenant", "internal/policy", "internal/dropreason", "internal/packet",
		"internal/network/nimitz/pipeline", "internal/trace", "internal/evpn", "internal/offload",
		"internal/service",
	}},
	{"records of a node, and its part of the CNI", []string{
		"internal/endpoint", "internal/egress", "internal/join", "internal/cniserver", "internal/cniclient",
	}},
	{"networks", []string{"internal/network"}},
	{"the interface between agent and data path", []string{"internal/dpapi"}},
	{"data path", []string{
		"internal/datapath", "internal/oncache", "internal/steering", "internal/tunnel", "internal/network/nimitz/ovs",
		"internal/network/ila/tables", "internal/network/evpn/tables", "internal/network/evpn/traced",
	}},
	{"modules of networks", []string{"internal/modules"}},
	{"daemons", []string{"internal/accelerate", "internal/agent", "internal/orchestrator"}},
	{"labs, benchmarks and simulation", []string{
		"internal/bench", "internal/demo", "internal/lab", "internal/nic", "internal/paper", "internal/preflight",
		"internal/sim", "internal/sysdump",
	}},
	{"command line", []string{"internal/cli"}},
	{"programs and tests", []string{"cmd", "deploy", "test"}},
}

// forbidden are packages (from) that must not import others (to), not even indirectly.
var forbidden = []struct{ from, to []string }{{
	from: []string{"internal/datapath", "internal/network", "internal/policy", "internal/address"},
	to:   []string{"internal/agent", "internal/orchestrator", "internal/cli", "internal/bench"},
}}

// knownImports are temporary exceptions from the tables above, with their remedy. The list may only shrink.
var knownImports = map[string]string{}

// maxFiles is the maximum number of files of a package, without tests and generated files.
const maxFiles = 15

// knownLarge are packages with more files than maxFiles, with a limit and a reason. The limits may only decrease,
// except that internal/cli gets a file for each new command family.
var knownLarge = map[string]struct {
	files  int
	reason string
}{
	"internal/agent":              {21, "Core and Tenants share locks: endpoints, tenants and migration"},
	"internal/cli":                {57, "one file per command family, two for large ones, which share all helpers"},
	"internal/lab":                {20, "one type, the lab"},
	"internal/orchestrator/store": {31, "methods over one transaction, of which 25 would be exported"},
	"internal/sim":                {23, "one type, the simulated world"},
}

// minPackages is a lower bound for the number of packages, to detect an incomplete list.
const minPackages = 60

// listed is a package as go list describes it.
type listed struct {
	Dir, ImportPath  string
	GoFiles, Imports []string
}

func (p listed) folder() string { return strings.TrimPrefix(p.ImportPath, module) }

// packages returns the packages of the module, by folder.
func packages(t *testing.T) map[string]listed {
	all, err := listOnce()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < minPackages {
		t.Fatalf("%d packages; the module has at least %d", len(all), minPackages)
	}
	return all
}

var listOnce = sync.OnceValues(list)

func list() (map[string]listed, error) {
	root, err := rootOf(".")
	if err != nil {
		return nil, err
	}
	command := exec.Command("go", "list", "-json=Dir,ImportPath,GoFiles,Imports", "./...")
	command.Dir, command.Stderr = root, os.Stderr
	out, err := command.Output()
	if err != nil {
		return nil, err
	}
	all := map[string]listed{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all[p.folder()] = p
	}
}

// imports returns the packages of the module that a package imports, as folders.
func imports(p listed) (folders []string) {
	for _, i := range p.Imports {
		if folder, ours := strings.CutPrefix(i, module); ours {
			folders = append(folders, folder)
		}
	}
	return folders
}

// layerOf returns the index of a package's layer, by the longest folder that contains it; -1 if there is none.
func layerOf(folder string) (layer int) {
	layer, longest := -1, 0
	for i, l := range layers {
		for _, f := range l.folders {
			if isIn(folder, f) && len(f) > longest {
				layer, longest = i, len(f)
			}
		}
	}
	return layer
}

// upward returns the imports from a package to a package of a higher layer, as "from → to", with the names of their
// layers.
func upward(all map[string]listed) map[string]string {
	found := map[string]string{}
	for from, p := range all {
		for _, to := range imports(p) {
			if a, b := layerOf(from), layerOf(to); a >= 0 && b > a {
				found[from+" → "+to] = "layer " + layers[a].name + " is below layer " + layers[b].name
			}
		}
	}
	return found
}

// reached returns the forbidden chains of imports, "from → … → to", by the last import of the chain, "from → to". It
// ignores imports in known.
func reached(all map[string]listed, known map[string]string) map[string]string {
	found := map[string]string{}
	for _, rule := range forbidden {
		for start := range all {
			if !slices.ContainsFunc(rule.from, func(f string) bool { return isIn(start, f) }) {
				continue
			}
			seen := map[string]bool{start: true}
			var follow func(from, path string)
			follow = func(from, path string) {
				for _, to := range imports(all[from]) {
					edge := from + " → " + to
					if seen[to] || known[edge] != "" {
						continue
					}
					if slices.ContainsFunc(rule.to, func(f string) bool { return isIn(to, f) }) {
						found[edge] = path + " → " + to
						continue
					}
					seen[to] = true
					follow(to, path+" → "+to)
				}
			}
			follow(start, start)
		}
	}
	return found
}

func TestLayers(t *testing.T) {
	all := packages(t)
	for _, folder := range slices.Sorted(maps.Keys(all)) {
		if layerOf(folder) < 0 {
			t.Errorf("package %s is in no layer: add it to the table of layers", folder)
		}
	}
	for _, l := range layers {
		for _, f := range l.folders {
			below := func(folder string) bool { return isIn(folder, f) }
			if !slices.ContainsFunc(slices.Collect(maps.Keys(all)), below) {
				t.Errorf("there is no package below %s: remove it from the table of layers", f)
			}
		}
	}
	for _, rule := range forbidden {
		for _, f := range slices.Concat(rule.from, rule.to) {
			if _, exists := all[f]; !exists {
				t.Errorf("there is no package %s: correct the table of forbidden imports", f)
			}
		}
	}
	above := upward(all)
	for _, i := range slices.Sorted(maps.Keys(above)) {
		if knownImports[i] == "" {
			t.Errorf("import %s: %s", i, above[i])
		}
	}
	for _, path := range reached(all, knownImports) {
		t.Errorf("imports %s are not allowed", path)
	}
	direct := reached(all, nil)
	for i, reason := range knownImports {
		if above[i] == "" && direct[i] == "" {
			t.Errorf("import %s (%s) is gone: remove it from the list", i, reason)
		}
	}
}

func TestPackageSizes(t *testing.T) {
	all := packages(t)
	for _, folder := range slices.Sorted(maps.Keys(all)) {
		files := 0
		for _, name := range all[folder].GoFiles {
			text, err := os.ReadFile(filepath.Join(all[folder].Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if !generated.Match(text) {
				files++
			}
		}
		switch large, listed := knownLarge[folder]; {
		case listed && files <= maxFiles:
			t.Errorf("%s has %d files: remove it from the list of large packages", folder, files)
		case listed && files > large.files:
			t.Errorf("%s has %d files; at most %d: %s", folder, files, large.files, large.reason)
		case listed && files < large.files:
			t.Logf("%s has %d files: write that in place of %d", folder, files, large.files)
		case !listed && files > maxFiles:
			t.Errorf("%s has %d files; at most %d: split it by responsibility", folder, files, maxFiles)
		}
	}
	for folder := range knownLarge {
		if _, exists := all[folder]; !exists {
			t.Errorf("there is no package %s: remove it from the list of large packages", folder)
		}
	}
}

func TestLayerRules(t *testing.T) {
	planted := map[string]listed{}
	for from, to := range map[string][]string{
		"internal/datapath/x": {"internal/lab"},
		"internal/lab":        {"internal/agent/y", "fmt"},
		"internal/agent/y":    {"internal/address", "internal/bench"},
		"internal/address":    nil,
		"internal/bench":      nil,
	} {
		p := listed{ImportPath: module + from}
		for _, i := range to {
			p.Imports = append(p.Imports, module+i)
		}
		planted[from] = p
	}
	above := slices.Sorted(maps.Keys(upward(planted)))
	want := []string{"internal/agent/y → internal/bench", "internal/datapath/x → internal/lab"}
	if !slices.Equal(above, want) {
		t.Errorf("imports of layers above: %v, want %v", above, want)
	}
	if got, want := reached(planted, nil), map[string]string{
		"internal/lab → internal/agent/y": "internal/datapath/x → internal/lab → internal/agent/y",
	}; !maps.Equal(got, want) {
		t.Errorf("forbidden imports: %v, want %v", got, want)
	}
	if got := reached(planted, map[string]string{"internal/lab → internal/agent/y": "known"}); len(got) != 0 {
		t.Errorf("forbidden imports without those known: %v", got)
	}
	network, below := layerOf("internal/network/nimitz"), layerOf("internal/network/nimitz/pipeline")
	if below >= network {
		t.Errorf("the pipeline is in layer %d, its network in %d", below, network)
	}
	if layerOf("internal/unheard") != -1 {
		t.Error("a package that no folder holds is in a layer")
	}
}
