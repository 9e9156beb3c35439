// Package bpftest has nodes for tests of programs, and compiles programs without one of their checks, for tests that
// name the packets that a check is for.
package bpftest

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// Mutation removes one check.
type Mutation struct {
	File     string   // below bpf/
	Old, New string   // Old occurs once in the file
	Cases    []string // that fail without the check, and no others
}

// Mutations are those of one object file.
type Mutations struct {
	Root    string // the folder bpf/
	Source  string // file below Root with the programs
	Headers string // folder below Root that the files are in, except Source
	All     []Mutation
}

// Each calls try for each mutation with MUTATION=all, else for two of them, with the changed programs. try returns the
// cases that fail. Whatever MUTATION says, Each fails if a text does not occur once in its file.
func (m Mutations) Each(t *testing.T, try func(*testing.T, Mutation, *ebpf.CollectionSpec) (failed []string)) {
	t.Helper()
	for _, one := range m.All {
		if n := strings.Count(m.read(t, one.File), one.Old); n != 1 {
			t.Errorf("%s has %q %d times, want once", one.File, one.Old, n)
		}
	}
	tried := m.All
	if os.Getenv("MUTATION") != "all" {
		tried = tried[:2]
	}
	for _, one := range tried {
		t.Run(one.File+" "+one.Old, func(t *testing.T) {
			failed := slices.Compact(slices.Sorted(slices.Values(try(t, one, m.compile(t, one)))))
			if want := slices.Sorted(slices.Values(one.Cases)); !slices.Equal(failed, want) || len(want) == 0 {
				t.Errorf("failed cases %q, want %q", failed, want)
			}
		})
	}
}

func (m Mutations) read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(m.Root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// compile compiles the programs as go generate does, without the check.
func (m Mutations) compile(t *testing.T, one Mutation) *ebpf.CollectionSpec {
	t.Helper()
	dir := t.TempDir()
	write := func(file, text string) {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(dir, m.Headers), os.DirFS(filepath.Join(m.Root, m.Headers))); err != nil {
		t.Fatal(err)
	}
	write(m.Source, m.read(t, m.Source)) // includes what lies beside it
	write(one.File, strings.Replace(m.read(t, one.File), one.Old, one.New, 1))
	object := filepath.Join(dir, "programs.o")
	build := exec.CommandContext(t.Context(), "clang-16", "-target", "bpfel", "-mcpu=v3", "-O2", "-g",
		"-I"+dir, "-I"+m.Root, "-c", filepath.Join(dir, m.Source), "-o", object)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build.Args, err, out)
	}
	spec, err := ebpf.LoadCollectionSpec(object)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}
