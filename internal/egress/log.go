package egress

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/statefile"
)

// logFile is the log of allocations: one line for the begin of each, and one for its end, each with all of the entry.
// When the file has its size, it replaces the previous one, and a new file begins with the allocations that go on. So
// the file alone says which addresses are in use. An allocation that was released a moment before is in the previous
// file.
type logFile struct {
	disk      statefile.Disk
	path      string // of the file that lines are appended to
	max, size int    // bytes of lines after those that it began with
	syncer    statefile.Syncer
}

// previous is the suffix of the file before.
const previous = ".1"

// openLog reads the log and returns its entries, oldest first.
func openLog(disk statefile.Disk, dir string, max int, log *slog.Logger) (*logFile, []Entry, error) {
	folder := filepath.Join(dir, Folder)
	if err := disk.MakeFolder(folder); err != nil {
		return nil, nil, err
	}
	l := &logFile{disk: disk, path: filepath.Join(folder, "log"), max: max}
	l.syncer = disk.NewSyncer(l.path)
	var all []Entry
	for _, path := range []string{l.path + previous, l.path} {
		b, err := l.read(path)
		if err != nil {
			return nil, nil, err
		}
		entries, damaged := parse(b)
		if damaged > 0 {
			log.Warn("the log of egress addresses has lines that cannot be read, as after a crash; the others are used",
				"path", path, "lines", damaged)
		}
		all = append(all, entries...)
		l.size = len(b)
		if path == l.path && l.size > 0 && b[l.size-1] != '\n' {
			if err := disk.Append(path, "\n", 0o600); err != nil {
				return nil, nil, err
			}
		}
	}
	return l, all, nil
}

// read returns the content of a file; nothing if it does not exist.
func (l *logFile) read(path string) ([]byte, error) {
	b, err := l.disk.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// parse returns the entries of a file, and how many lines are none.
func parse(b []byte) (all []Entry, damaged int) {
	for line := range bytes.Lines(b) {
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		var e Entry
		if json.Unmarshal(line, &e) != nil || !e.Address.IsValid() || e.Container == "" || e.From.IsZero() {
			damaged++
			continue
		}
		all = append(all, e)
	}
	return all, damaged
}

// append adds an entry. used returns the allocations that a new file begins with.
func (l *logFile) append(e Entry, used func() []Entry) error {
	line, err := encode(e)
	if err != nil {
		return err
	}
	if l.size+len(line) > l.max {
		if err := l.rotate(used()); err != nil {
			return err
		}
	}
	if err := l.disk.Append(l.path, string(line), 0o600); err != nil {
		return err
	}
	l.size += len(line)
	return nil
}

// rotate makes the file the previous one. After a crash in between there is no file, and the previous one has all.
func (l *logFile) rotate(used []Entry) error {
	var b bytes.Buffer
	for _, e := range used {
		line, err := encode(e)
		if err != nil {
			return err
		}
		b.Write(line)
	}
	if err := l.sync(); err != nil {
		return err
	}
	err := l.disk.Rename(l.path, l.path+previous)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := l.disk.WriteBytes(l.path, b.Bytes(), 0o600); err != nil {
		return err
	}
	l.size = 0
	return nil
}

func encode(e Entry) ([]byte, error) {
	b, err := json.Marshal(e)
	return append(b, '\n'), err
}

// sync makes the appended lines durable. Calls that wait at the same time share the work.
func (l *logFile) sync() error {
	err := l.syncer.Sync()
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was appended
	}
	return err
}

// find returns the entries of an address, each allocation once, and the time of the first entry of the log.
func (l *logFile) find(addr netip.Addr) (had []Entry, since time.Time, err error) {
	is := fmt.Appendf(nil, "%q", addr.String())
	for _, path := range []string{l.path + previous, l.path} {
		b, err := l.read(path)
		if err != nil {
			return nil, since, err
		}
		for line := range bytes.Lines(b) {
			if !since.IsZero() && !bytes.Contains(line, is) {
				continue
			}
			entries, _ := parse(line)
			for _, e := range entries {
				if since.IsZero() {
					since = e.From
				}
				if e.Address != addr {
					continue
				}
				if i := slices.IndexFunc(had, e.same); i >= 0 {
					had[i] = e
				} else {
					had = append(had, e)
				}
			}
		}
	}
	return had, since, nil
}
