package agenttest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/netns"
)

// NewNetns returns a network namespace for one test. Without root it skips the test.
func NewNetns(t *testing.T) *netns.Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	ns, err := netns.Create(filepath.Join(t.TempDir(), "netns", "c1"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(ns.Close(), netns.Remove(ns.Path())); err != nil {
			t.Error(err)
		}
	})
	return ns
}

// MakeNetns returns the path of a namespace of NewNetns.
func MakeNetns(t *testing.T) string { return NewNetns(t).Path() }
