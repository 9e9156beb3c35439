package hostnet

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/netns"
)

// testNetns is a network namespace for one test.
func testNetns(t *testing.T) *netns.Namespace {
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
