package steering

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/statefile"
)

// TableFile is the size of the machine's table of flows. Only the first network namespace has the file.
const TableFile = "/proc/sys/net/core/rps_sock_flow_entries"

// tableDir has the machine's one record of the table, whatever the run directories of agents.
const tableDir = "/run/pilaster/flow-table"

// TableRecord is the file of the record.
const TableRecord = tableDir + "/record.json"

// table is the record: the table is restored when it has no user any more.
type table struct {
	Version int      `json:"version"`
	Before  int      `json:"before"`
	Set     int      `json:"set"`
	Users   []string `json:"users"` // steering records with devices that have RFS
}

// tableSetting returns the size of the table; ok is false if this process is not in the first network namespace.
func tableSetting() (entries int, ok bool, err error) {
	entries, err = readNumber(TableFile)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("%s: %w", TableFile, err)
	}
	return entries, true, nil
}

func setTable(entries int) error {
	if err := os.WriteFile(TableFile, []byte(strconv.Itoa(entries)), 0); err != nil {
		return fmt.Errorf("%s = %d: %w", TableFile, entries, shorten(err))
	}
	return nil
}

// lockFolder creates a folder and waits until this process has it exclusively, until the returned file is closed.
func lockFolder(dir string) (*os.File, error) {
	err := os.MkdirAll(filepath.Dir(dir), 0o755) // of the agent, too
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("folder of the steering record: %w; nothing was changed", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, statefile.LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the steering record: %w; nothing was changed", err)
	}
	for {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w; nothing was changed", lock.Name(), err), lock.Close())
		}
		return lock, nil
	}
}

// readTable returns the record of the table; ok is false if there is none.
func readTable() (t table, ok bool, err error) {
	err = statefile.Read(TableRecord, recordVersion, &t)
	if errors.Is(err, fs.ErrNotExist) {
		return table{Version: recordVersion}, false, nil
	}
	return t, err == nil, err
}

// settleTable makes a steering record a user of the table or, with 0 entries, no user, and sets or restores the table's
// size. It never makes the table smaller than it was: another program may need it. In another network namespace than
// the first one, the record stays a user until a later change in the first.
func settleTable(user string, entries int) error {
	has, here, err := tableSetting()
	if err != nil || !here {
		return err
	}
	if _, err := os.Stat(TableRecord); entries == 0 && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	lock, err := lockFolder(tableDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	t, recorded, err := readTable()
	if err != nil {
		return err
	}
	t.Users = slices.DeleteFunc(t.Users, func(other string) bool {
		_, err := os.Stat(other)
		return other == user || errors.Is(err, fs.ErrNotExist)
	})
	if entries > 0 {
		t.Users = append(t.Users, user)
	}
	switch {
	case len(t.Users) == 0 && !recorded:
		return nil
	case len(t.Users) == 0:
		return errors.Join(setTable(t.Before), statefile.Remove(TableRecord))
	case !recorded:
		t.Before, t.Set = has, has
	}
	t.Set = max(t.Set, entries)
	if err := statefile.Write(TableRecord, t, 0o600); err != nil {
		return err
	}
	if has >= t.Set {
		return nil
	}
	return setTable(t.Set)
}
