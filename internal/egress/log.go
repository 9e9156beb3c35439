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
// When the file has its size, it replaces the previous one, and a new file begins with the time, and with the
// allocations that go on or have ended a moment before. So the file alone says which addresses cannot be allocated.
type logFile struct {
	disk      statefile.Disk
	path      string // of the file that lines are appended to
	max, size int    // bytes of lines after those that it began with
	syncer    statefile.Syncer
}

// previous is the suffix of the file before.
const previous = ".1"

// openLog opens the log and calls note with its entries, oldest first.
func openLog(disk statefile.Disk, dir string, max int, log *slog.Logger, note func(Entry)) (*logFile, error) {
	folder := filepath.Join(dir, Folder)
	if err := disk.MakeFolder(folder); err != nil {
		return nil, err
	}
	l := &logFile{disk: disk, path: filepath.Join(folder, "log"), max: max}
	l.syncer = disk.NewSyncer(l.path)
	b, err := l.read(l.path)
	if err == nil && b == nil { // before the first entry, or after a crash in rotate, which the next entry repeats
		err = disk.Rename(l.path+previous, l.path)
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		if err == nil {
			b, err = l.read(l.path)
		}
	}
	if err != nil {
		return nil, err
	}
	l.size = len(b)
	if damaged := parse(b, note); damaged > 0 {
		log.Warn("the log of egress addresses has lines that cannot be read, as after a crash; the others are used",
			"path", l.path, "lines", damaged)
	}
	if l.size > 0 && b[l.size-1] != '\n' {
		return l, disk.Append(l.path, "\n", 0o600)
	}
	return l, nil
}

// read returns the content of a file; nil if it does not exist.
func (l *logFile) read(path string) ([]byte, error) {
	b, err := l.disk.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// line is a line of the log: an entry, or the first line of a file, with the time since when it has all changes.
type line struct {
	Entry
	Since time.Time `json:"since,omitzero"`
}

// parse calls note with the entries of a file, and returns how many lines are none.
func parse(b []byte, note func(Entry)) (damaged int) {
	for text := range bytes.Lines(b) {
		if text = bytes.TrimSpace(text); len(text) == 0 {
			continue
		}
		var l line
		err := json.Unmarshal(text, &l)
		if err == nil && !l.Since.IsZero() {
			continue
		}
		if err != nil || !l.Address.IsValid() || l.Container == "" || l.From.IsZero() {
			damaged++
			continue
		}
		note(l.Entry)
	}
	return damaged
}

// append adds an entry, made at a time. carried returns the entries that a new file begins with.
func (l *logFile) append(e Entry, now time.Time, carried func() []Entry) error {
	line, err := encode(e)
	if err != nil {
		return err
	}
	if l.size+len(line) > l.max {
		if err := l.rotate(now, carried()); err != nil {
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
func (l *logFile) rotate(now time.Time, carried []Entry) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"since\":%q}\n", now.UTC().Format(time.RFC3339Nano))
	for _, e := range carried {
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

// find returns the entries of an address, each allocation once, and since when the log has all changes.
func (l *logFile) find(addr netip.Addr) (had []Entry, since time.Time, err error) {
	is := fmt.Appendf(nil, "%q", addr.String())
	note := func(e Entry) {
		if e.Address != addr {
			return
		}
		if i := slices.IndexFunc(had, e.same); i >= 0 {
			had[i] = e
		} else {
			had = append(had, e)
		}
	}
	for _, path := range []string{l.path + previous, l.path} {
		b, err := l.read(path)
		if err != nil {
			return nil, since, err
		}
		for text := range bytes.Lines(b) {
			if since.IsZero() {
				since = begin(text)
			}
			if bytes.Contains(text, is) {
				parse(text, note)
			}
		}
	}
	return had, since, nil
}

// begin returns since when a file with this first line has all changes; zero if the line cannot be read. The first file
// of a node begins with an entry.
func begin(text []byte) time.Time {
	var l line
	if json.Unmarshal(text, &l) != nil {
		return time.Time{}
	}
	if l.Since.IsZero() {
		return l.From
	}
	return l.Since
}
