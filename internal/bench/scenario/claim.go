package scenario

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// Claim locks a folder for one run, and removes what a killed run left in it.
func Claim(dir string) (release func() error, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the folder for namespaces: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("create the folder for namespaces: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w; is another bench running? "+
			"Concurrent runs would disturb each other", dir, err)
	}
	wires, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, wire := range wires {
		err = errors.Join(err, clearWire(wire))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("clean up after an earlier bench: %w", err)
	}
	return func() error { return errors.Join(os.Remove(dir), f.Close()) }, nil
}

func clearWire(dir string) error {
	mounts, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, folder := range mounts { // daemons may run in these
		if strings.HasSuffix(folder, "ovs") {
			err = errors.Join(err, ovs.StopIn(folder))
		}
	}
	for _, mount := range mounts {
		err = errors.Join(err, Unmount(mount))
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// interruptDelay is how long Interrupted waits for the signal to this process. If a signal goes to a whole process
// group, a child may end before this process gets the signal.
const interruptDelay = 200 * time.Millisecond

// Interrupted returns an error that names the interrupt if ctx was cancelled, instead of the error that the interrupt
// caused.
func Interrupted(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-ctx.Done():
	case <-time.After(interruptDelay):
		return err
	}
	return fmt.Errorf("interrupted: %w; nothing was kept: only a complete run has a report", context.Cause(ctx))
}
