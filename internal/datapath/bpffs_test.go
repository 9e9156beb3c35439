package datapath

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPrivateBPFFSIsSaid: pins in a mount namespace that nobody else is in end with the agent.
func TestPrivateBPFFSIsSaid(t *testing.T) {
	shared := bpffs(t)
	must(t, mountBPFFS(shared))
	if said := endsWithUs(shared); said != "" {
		t.Errorf("of a bpffs that all see: %s", said)
	}
	alone := filepath.Join(t.TempDir(), "bpf")
	said := make(chan string)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends, and with it its namespace
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			said <- err.Error()
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			said <- err.Error()
			return
		}
		if err := mountBPFFS(alone); err != nil {
			said <- err.Error()
			return
		}
		said <- endsWithUs(shared) + "|" + endsWithUs(alone)
	}()
	outside, inside, _ := strings.Cut(<-said, "|")
	if outside != "" || !strings.Contains(inside, alone) || !strings.Contains(inside, "packets stop when the agent ends") {
		t.Errorf("of the machine's: %q; of its own: %q", outside, inside)
	}
}
