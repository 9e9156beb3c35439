package restart_test

import (
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/lab/labtest"
)

// builds are two builds of Pilaster. The binary of the lab is a symlink to one of them.
type builds struct {
	binary  string // path of the symlink
	targets [2]string
	next    int // index of the build to which the symlink points
}

func newBuilds(t *testing.T) *builds {
	t.Helper()
	folder := t.TempDir()
	b := &builds{binary: filepath.Join(folder, "pilaster"),
		targets: [2]string{labtest.Binary(t), labtest.OtherBinary(t)}}
	plugin := filepath.Join(filepath.Dir(b.targets[0]), "pilaster-cni")
	if err := os.Symlink(plugin, filepath.Join(folder, "pilaster-cni")); err != nil {
		t.Fatal(err)
	}
	b.choose(t, 0)
	return b
}

// choose selects the build of processes that start later.
func (b *builds) choose(t *testing.T, build int) {
	t.Helper()
	b.next = build
	link := b.binary + ".new"
	if err := os.Symlink(b.targets[build], link); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(link, b.binary); err != nil {
		t.Fatal(err)
	}
}
