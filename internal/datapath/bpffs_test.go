package datapath

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
)

// TestPrivateBPFFSIsRefused: pins in a mount namespace that only the agent uses are removed with the agent.
func TestPrivateBPFFSIsRefused(t *testing.T) {
	shared, unmounted := bpffs(t), filepath.Join(t.TempDir(), "not", "yet")
	must(t, host.MountBPFFS(shared))
	outlives := func(dir, what string) {
		if err := host.CheckBPFFS(dir); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	ends := func(dir, what string) {
		if err := host.CheckBPFFS(dir); err == nil || !strings.Contains(err.Error(), dir) ||
			!strings.Contains(err.Error(), "mount bpffs on the machine") {
			t.Errorf("%s: %v", what, err)
		}
	}
	outlives(shared, "the machine's")
	outlives(unmounted, "none, in the machine's mount namespace")
	must(t, netns.OnThread(func() error {
		must(t, unix.Unshare(unix.CLONE_NEWNS))
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		outlives(shared, "the machine's, in another mount namespace")
		inside := t.TempDir()
		must(t, unix.Mount(shared, inside, "", unix.MS_BIND, ""))
		outlives(inside, "the machine's, in another place")
		ends(unmounted, "none")
		if _, err := os.Stat(filepath.Dir(unmounted)); !os.IsNotExist(err) {
			t.Errorf("asking made %s: %v", unmounted, err)
		}
		alone := filepath.Join(t.TempDir(), "bpf")
		must(t, host.MountBPFFS(alone))
		ends(alone, "one of its own")
		return nil
	}))
}
