// Package steeringtest keeps tests apart that set the machine's table of flows.
package steeringtest

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// LockTable waits until no other test of this machine sets net.core.rps_sock_flow_entries, and keeps others waiting
// until the end of the test.
func LockTable(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "pilaster-steering-test.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		t.Cleanup(func() { f.Close() })
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
}
