package restart_test

import (
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/lab/labtest"
)

// builds are two builds of Pilaster, of which a lab starts the one that its binary leads to.
type builds struct {
	binary  string // a link
	targets [2]string
	next    int // which of them is started next
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

// choose makes whatever starts from now on be of that build.
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
