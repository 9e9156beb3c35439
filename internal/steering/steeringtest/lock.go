// Package steeringtest keeps tests apart that set the machine's table of flows.
package steeringtest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/steering"
)

// LockTable waits until no other test of this machine sets net.core.rps_sock_flow_entries, and keeps others waiting
// until the end of the test. The test starts with an empty table without a record. Both are restored at its end.
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
	replace(t, steering.TableRecord, nil)
	replace(t, steering.TableFile, []byte("0"))
}

// replace writes a file, or removes it if content is nil, and restores it at the end of the test. A file that does not
// exist stays so.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	before, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		t.Cleanup(func() {
			if err := os.WriteFile(path, before, 0o600); err != nil {
				t.Error(err)
			}
		})
		if content == nil {
			err = os.Remove(path)
		} else {
			err = os.WriteFile(path, content, 0o600)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}
