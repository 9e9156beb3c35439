// Package mutation_test removes the checks of bpf/ one at a time and runs the tests of internal/datapath: the cases for
// the removed check must fail, and no other cases of the same test. By default it tries a few entries of the table,
// with MUTATION=all every entry. Likewise, every fuzz target must find a planted bug, and a small simulation must
// detect faults in the allocation and distribution of addresses.
package mutation_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	sources  = "../../bpf"
	datapath = "../../internal/datapath"
	bpfobj   = datapath + "/bpfobj" // the compiled programs
)

// mutation removes or inverts one check.
type mutation struct {
	name     string
	old, new string // old must occur exactly once in the source
	test     string // of internal/datapath
	// The names of the cases that must fail, in any order. The changed program must still load, and no other case may
	// fail.
	cases []string
}

// table returns the mutations of each file. A list of mutations may be for several files: each mutation applies to the
// first of these files that contains its old text.
func table(t *testing.T) map[string][]mutation {
	t.Helper()
	byFile := map[string][]mutation{}
	add := func(list []mutation, files ...string) {
		for _, m := range list {
			file := files[0]
			for _, f := range files {
				if strings.Contains(read(t, f), m.old) {
					file = f
					break
				}
			}
			byFile[file] = append(byFile[file], m)
		}
	}
	add(packet(), "common/packet.h", "common/csum.h")
	add(device(), "common/device.h")
	add(event(), "common/event.h")
	add(icmpError(), "common/icmp_error.h", "net/netpila/icmp.h")
	add(tunnel(), "common/tunnel.h")
	add(conntrack(), "policy/ct.h")
	add(conntrackTable(), "policy/ct_table.h", "policy/ct_evict.h", "policy/ct_session.h", "policy/ct_move.h")
	add(policyCheck(), "policy/policy.h", "net/netpila/policy.h")
	add(rules(), "policy/rules.h")
	add(crypto(), "net/netpila/crypto.h")
	add(flow(), "net/netpila/flow.h")
	add(forward(), "net/netpila/forward.h", "net/netpila/leave.h", "common/rewrite.h")
	add(nimitz(), "net/nimitz/stages.h")
	add(nimitzDirect(), "net/nimitz/direct.h")
	add(nimitzTables(), "net/nimitz/tables.h")
	add(nimitzICMP(), "net/nimitz/icmp.h", "common/icmp_error.h")
	add(nimitzGateway(), "net/nimitz/gateway.h")
	add(nimitzNAT(), "net/nimitz/nat.h", "common/packet4.h")
	add(nimitzPolicy(), "net/nimitz/policy.h")
	add(frontends(), "net/nimitz/offload_nsh.h", "net/nimitz/policy.h", "policy/policy.h")
	add(nimitzOVSPort(), "net/nimitz/ovs_port.h")
	add(container(), "hooks/container.h", "net/netpila/resolve.h", "net/netpila/next_hop.h", "net/netpila/flow.h",
		"net/netpila/identify.h")
	add(egress(), "net/netpila/egress.h", "net/netpila/egress_stages.h", "net/netpila/gateway.h", "net/netpila/icmp.h")
	add(gatewayAddresses(), "hooks/uplink.h", "hooks/host_if.h")
	add(egressSessions(), "policy/policy.h", "policy/ct_session.h", "policy/verdict.h")
	add(ways(), "common/ways.h")
	add(gateway(), "net/netpila/gateway.h", "net/netpila/gateway_nat.h", "net/netpila/gateway_stages.h")
	add(services(), "net/netpila/service_stages.h", "net/netpila/service_answers.h", "net/netpila/service.h",
		"net/netpila/service_table.h",
		"net/netpila/tcp_reset.h", "net/netpila/icmp.h", "net/netpila/forward.h", "net/netpila/gateway_nat.h",
		"hooks/container.h", "hooks/uplink.h")
	add(serviceHost(), "net/netpila/service_sock.h", "net/netpila/service_host.h", "net/netpila/service_table.h")
	add(exposed(), "net/netpila/exposed_stages.h", "net/netpila/exposed_nat.h", "net/netpila/exposed.h",
		"net/netpila/exposed_table.h",
		"net/netpila/policy.h", "net/netpila/egress_stages.h", "policy/policy.h", "policy/ct.h", "policy/ct_table.h",
		"hooks/uplink_class.h", "hooks/uplink.h", "hooks/host_if.h")
	add(hostIf(), "hooks/host_if.h", "common/border.h", "common/address.h")
	add(macvlanBackstop(), "hooks/macvlan_backstop.h")
	add(node(), "hooks/node.h", "net/netpila/resolve.h")
	add(uplink(), "hooks/uplink.h", "common/icmp_source.h", "hooks/uplink_class.h")
	add(uplinkClass(), "hooks/uplink_class.h")
	return byFile
}

// few are the mutations that run without MUTATION=all.
func few() []string {
	return []string{
		"hooks/container.h/source", "hooks/uplink.h/own source", "common/border.h/spoofed node address",
		"common/packet.h/routing header", "net/netpila/forward.h/quoted destination", "net/netpila/flow.h/source",
		"net/netpila/crypto.h/keys", "net/nimitz/direct.h/tunnel addresses alone",
	}
}

func TestEveryCheckHasItsAttack(t *testing.T) {
	all := os.Getenv("MUTATION") == "all"
	binary := linkAttacks(t)
	slots := make(chan struct{}, 2) // each run needs a compiler and two nodes
	tests := map[string]bool{}
	for file, mutations := range table(t) {
		for _, m := range mutations {
			name := file + "/" + m.name
			if !all && !slices.Contains(few(), name) {
				continue
			}
			tests[m.test] = true
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				slots <- struct{}{}
				defer func() { <-slots }()
				m.mustBeNoticed(t, binary, file)
			})
		}
	}
	t.Run("none", func(t *testing.T) {
		overlay := compile(t, "net/netpila/flow.h", read(t, "net/netpila/flow.h"))
		used := "^(" + strings.Join(slices.Sorted(maps.Keys(tests)), "|") + ")$"
		if out, err := attack(t, binary, overlay, used); err != nil {
			t.Fatalf("the tests fail without a mutation: %v\n%s", err, out)
		}
	})
}

func (m mutation) mustBeNoticed(t *testing.T, binary, file string) {
	mutated := strings.Replace(read(t, file), m.old, m.new, 1)
	out, err := attack(t, binary, compile(t, file, mutated), "^"+m.test+"$")
	var failed *exec.ExitError
	if err == nil {
		t.Fatalf("%s passed without this check", m.test)
	} else if !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if got, want := complaints(out), slices.Sorted(slices.Values(m.cases)); !slices.Equal(got, want) {
		t.Errorf("%s: got failed cases\n%q, want\n%q:\n%s", m.test, got, want, out)
	}
}

// complaint matches a line of a test's output, with the name of the failed case.
var complaint = regexp.MustCompile(`(?m)^ +\w+_test\.go:\d+: ([^:\n]*)`)

func complaints(out []byte) (cases []string) {
	for _, line := range complaint.FindAllSubmatch(out, -1) {
		cases = append(cases, string(line[1]))
	}
	slices.Sort(cases)
	return slices.Compact(cases)
}

// linkAttacks compiles the tests of the datapath to a binary.
func linkAttacks(t *testing.T) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), "datapath.test")
	link := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-ldflags=-w", "-o", binary, ".")
	link.Dir = datapath
	if said, err := link.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", link.Args, err, said)
	}
	return binary
}

// attack runs tests of the datapath with the changed object file, which is in the folder of the overlay.
func attack(t *testing.T, binary, overlay, tests string) ([]byte, error) {
	run := exec.CommandContext(t.Context(), binary, "-test.timeout=10m", "-test.run", tests)
	run.Dir = datapath
	run.Env = append(os.Environ(), "PILASTER_TEST_OBJECT="+filepath.Join(filepath.Dir(overlay), "pilaster_bpfel.o"))
	return run.CombinedOutput()
}

// compile compiles the object file of the datapath from a changed header, as go generate does, and writes an overlay
// that replaces the committed one.
func compile(t *testing.T, file, text string) (overlay string) {
	t.Helper()
	return compileIn(t, bpfobj, file, text)
}

// compileIn does the same for a folder with a go:generate line.
func compileIn(t *testing.T, folder, file, text string) (overlay string) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range sourceFiles(t) {
		source, err := filepath.Abs(filepath.Join(sources, name))
		must(t, err)
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		must(t, os.Symlink(source, filepath.Join(dir, name)))
	}
	must(t, os.Remove(filepath.Join(dir, file)))
	must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))

	generate := generateCommand(t, folder)
	source := slices.IndexFunc(generate, func(s string) bool { return strings.HasSuffix(s, ".bpf.c") })
	include := slices.IndexFunc(generate, func(s string) bool { return strings.HasPrefix(s, "-I") })
	if source < 0 || include < 0 {
		t.Fatalf("unexpected go:generate command: %q", generate)
	}
	entry, name := filepath.Base(generate[source]), strings.ToLower(generate[source-1])+"_bpfel.o"
	generate[source], generate[include] = filepath.Join(dir, entry), "-I"+dir
	out := t.TempDir()
	generate = slices.Insert(generate, slices.Index(generate, "bpf2go")+1, "-output-dir", out)
	run := exec.CommandContext(t.Context(), generate[0], generate[1:]...)
	run.Dir = folder
	if said, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%s does not compile: %v\n%s", file, err, said)
	}

	object, err := filepath.Abs(filepath.Join(folder, name))
	must(t, err)
	_, err = os.Stat(object)
	must(t, err) // else the overlay replaces nothing
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {object: filepath.Join(out, name)}})
	must(t, err)
	overlay = filepath.Join(out, "overlay.json")
	must(t, os.WriteFile(overlay, replace, 0o600))
	return overlay
}

// fewestSources is the minimum number of C files below bpf/. If there are fewer, files have moved to a folder that this
// test does not read.
const fewestSources = 30

// fewestReasons is the minimum number of places where headers name a drop reason.
const fewestReasons = 135

// sourceFiles returns the C files below bpf/, by relative path.
func sourceFiles(t *testing.T) (names []string) {
	t.Helper()
	must(t, filepath.WalkDir(sources, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !slices.Contains([]string{".c", ".h"}, filepath.Ext(path)) {
			return err
		}
		name, err := filepath.Rel(sources, path)
		names = append(names, name)
		return err
	}))
	if len(names) < fewestSources {
		t.Fatalf("bpf/ has %d C files, expected %d or more: %q", len(names), fewestSources, names)
	}
	return names
}

func generateCommand(t *testing.T, folder string) []string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join(folder, "doc.go"))
	must(t, err)
	for line := range strings.Lines(string(doc)) {
		if command, ok := strings.CutPrefix(line, "//go:generate "); ok {
			return strings.Fields(command)
		}
	}
	t.Fatalf("%s has no go:generate line", folder)
	return nil
}

// TestTableIsComplete: every place with a drop reason has a mutation, or is listed as unreachable with an explanation.
func TestTableIsComplete(t *testing.T) {
	reason := regexp.MustCompile(`\bREASON_\w+`)
	mutations, unreachable := table(t), unreachable()
	names, seen := sourceFiles(t), 0
	for _, name := range slices.Concat(slices.Collect(maps.Keys(mutations)), slices.Collect(maps.Keys(unreachable))) {
		if !slices.Contains(names, name) {
			t.Errorf("%s: the table has mutations of this file, but bpf/ lacks it", name)
		}
	}
	for _, name := range names {
		if strings.HasPrefix(name, "net/ila/") || strings.HasPrefix(name, "net/evpn/") {
			continue // of objects of their own, whose mutations are in internal/network/ila/tables and evpn/tables
		}
		if base := filepath.Base(name); base == "reason.h" || base == "vmlinux.h" || filepath.Ext(base) != ".h" {
			continue
		}
		text := []byte(read(t, name))
		cover := func(what, part string) {
			if n := bytes.Count(text, []byte(part)); n != 1 {
				t.Errorf("%s: %s: found %d times, want once:\n%s", name, what, n, part)
			}
		}
		covered := slices.Clone(text)
		seen += len(reason.FindAll(text, -1))
		hide := func(part string) {
			if at := bytes.Index(text, []byte(part)); at >= 0 {
				copy(covered[at:], bytes.Repeat([]byte{' '}, len(part)))
			}
		}
		for _, m := range mutations[name] {
			cover(m.name, m.old)
			hide(m.old)
		}
		for part, why := range unreachable[name] {
			cover(why, part)
			hide(part)
		}
		for _, at := range reason.FindAllIndex(covered, -1) {
			line := 1 + bytes.Count(text[:at[0]], []byte{'\n'})
			t.Errorf("%s:%d: no mutation has this %s", name, line, text[at[0]:at[1]])
		}
	}
	if seen < fewestReasons {
		t.Errorf("the headers name reasons in %d places, expected %d or more", seen, fewestReasons)
	}
	known := map[string]bool{}
	for file, list := range mutations {
		for _, m := range list {
			name := file + "/" + m.name
			if known[name] || len(m.cases) == 0 || m.old == m.new {
				t.Errorf("%s: the name is not unique, old and new are equal, or no case is expected", name)
			}
			known[name] = true
		}
	}
	for _, name := range few() {
		if !known[name] {
			t.Errorf("%s is in the list of few mutations, but not in the table", name)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(sources, file))
	must(t, err)
	return string(text)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
