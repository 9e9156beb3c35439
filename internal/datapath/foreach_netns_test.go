package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/netns"
)

// TestNoNamespaceIsPassedOverInSilence: a namespace that cannot be opened may have ended, which is no error. An error
// inside an open namespace is returned.
func TestNoNamespaceIsPassedOverInSilence(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ns")
	ns, err := netns.Create(path)
	must(t, err)
	defer netns.Remove(path)
	defer ns.Close()
	for _, why := range []error{os.ErrNotExist, os.ErrPermission, netns.ErrNone} {
		fails := fmt.Errorf("list its links: %w", why)
		err := device.WalkNetns(func(at string, _ *device.ContainerNS) (bool, error) {
			if at == path {
				return false, fails
			}
			return false, nil
		})
		if !errors.Is(err, fails) {
			t.Errorf("%v: became %v", fails, err)
		}
	}
}
