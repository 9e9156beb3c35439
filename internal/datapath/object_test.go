package datapath

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// TestCommittedObject compiles bpf/ again and compares the meaning of the two objects. Their bytes may differ: clang
// orders some BTF by its addresses in memory, so a longer path to the sources changes the order.
// PILASTER_TEST_OBJECTS names a copy of the tree where `go generate` has compiled them (.ci/generated).
func TestCommittedObject(t *testing.T) {
	for pkg, parts := range map[string]int{
		"datapath/bpfobj": 50, "datapath/follow": 40, "oncache": 10, "network/nimitz/ovs": 4, "tunnel": 7,
		"network/ila/tables": 20, "network/evpn/tables": 20, "network/evpn/traced": 20,
	} {
		t.Run(pkg, func(t *testing.T) { testCommittedObject(t, pkg, parts) })
	}
}

func testCommittedObject(t *testing.T, pkg string, parts int) {
	folder := filepath.Join(os.Getenv("PILASTER_TEST_OBJECTS"), "internal", pkg)
	if os.Getenv("PILASTER_TEST_OBJECTS") == "" {
		folder = compileObject(t, pkg)
	}
	made, err := filepath.Glob(filepath.Join(folder, "*.o"))
	if err != nil || len(made) != 1 {
		t.Fatalf("%s holds the objects %q: %v", folder, made, err)
	}
	fresh, err := os.ReadFile(made[0])
	if err != nil {
		t.Fatal(err)
	}
	committed, err := os.ReadFile(filepath.Join("..", pkg, filepath.Base(made[0])))
	if err != nil {
		t.Fatal(err)
	}

	want, got := meaning(t, fresh), meaning(t, committed)
	if len(want) < parts {
		t.Fatalf("only %d parts in the object", len(want))
	}
	for part := range want {
		if want[part] != got[part] {
			t.Errorf(
				"the committed object is not what bpf/ gives; run make generate and commit it\n%s\ncommitted: "+
					"%s\nfrom bpf/: %s",
				part,
				got[part],
				want[part],
			)
		}
	}
	for part := range got {
		if _, known := want[part]; !known {
			t.Errorf("the committed object has %s, which bpf/ no longer gives; run make generate and commit it", part)
		}
	}
}

// compileObject does what `go generate` does for a package, into a folder of its own.
func compileObject(t *testing.T, pkg string) (folder string) {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("..", pkg, "doc.go"))
	if err != nil {
		t.Fatal(err)
	}
	_, directive, found := strings.Cut(string(doc), "//go:generate ")
	if !found {
		t.Fatal("doc.go has no go:generate directive")
	}
	directive, _, _ = strings.Cut(directive, "\n")
	folder = t.TempDir()
	args := strings.Fields(directive)[1:]
	args = slices.Insert(args, 2, "-output-dir", folder)
	build := exec.CommandContext(t.Context(), "go", args...)
	build.Dir, build.Env = filepath.Join("..", pkg), append(os.Environ(), "GOPACKAGE="+filepath.Base(pkg))
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build.Args, err, out)
	}
	return folder
}

// meaning describes what loading the object creates: programs by their instructions, maps, variables.
func meaning(t *testing.T, object []byte) map[string]string {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		t.Fatal(err)
	}
	parts := make(map[string]string)
	for name, p := range spec.Programs {
		parts["program "+name] = fmt.Sprint(p.Type, p.AttachType, p.SectionName, p.License, p.Flags, p.Instructions)
	}
	for name, m := range spec.Maps {
		parts["map "+name] = fmt.Sprint(m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Pinning, m.Contents)
	}
	for name, v := range spec.Variables {
		parts["variable "+name] = fmt.Sprint(v.SectionName, v.Offset, v.Size(), v.Constant())
	}
	return parts
}
