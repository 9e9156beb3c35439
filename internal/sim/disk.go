package sim

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"pilaster.io/pilaster/internal/statefile"
)

// written counts the writes of agents to their disks.
type written struct{ files, bytes, syncs atomic.Int64 }

// discardDisk is the disk of an agent that never restarts: it counts writes and discards the data.
type discardDisk struct{ written *written }

func (d discardDisk) MakeFolder(string) error          { return nil }
func (d discardDisk) Read(path string) ([]byte, error) { return nil, missing("read", path) }
func (d discardDisk) Replace(_ string, b []byte, _ os.FileMode) error {
	d.written.add(len(b))
	return nil
}

func (d discardDisk) Append(_, line string, _ os.FileMode) error {
	d.written.add(len(line))
	return nil
}
func (d discardDisk) Rename(string, string) error { return nil }
func (d discardDisk) Remove(string) error         { return nil }
func (d discardDisk) Sync(string) error {
	d.written.syncs.Add(1)
	return nil
}
func (d discardDisk) List(string) ([]fs.DirEntry, error)  { return nil, nil }
func (d discardDisk) Open(string) (statefile.Open, error) { return &inPlace{}, nil }

// inPlace is a small file that is overwritten in place.
type inPlace struct {
	mu sync.Mutex
	b  []byte
}

func (f *inPlace) WriteAt(b []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if grow := int(at) + len(b) - len(f.b); grow > 0 {
		f.b = append(f.b, make([]byte, grow)...)
	}
	return copy(f.b[at:], b), nil
}

func (f *inPlace) ReadAt(b []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(b, f.b[min(int(at), len(f.b)):])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (f *inPlace) Close() error { return nil }

func (w *written) add(bytes int) {
	w.files.Add(1)
	w.bytes.Add(int64(bytes))
}

func missing(op, path string) error { return &fs.PathError{Op: op, Path: path, Err: fs.ErrNotExist} }

// disk keeps an agent's files across restarts of its process. Every write is durable immediately, because no simulated
// machine crashes.
type disk struct {
	discardDisk
	mu    sync.Mutex
	files map[string][]byte
	open  map[string]*inPlace
}

func newDisk(w *written) *disk {
	return &disk{discardDisk: discardDisk{w}, files: map[string][]byte{}, open: map[string]*inPlace{}}
}

func (d *disk) Open(path string) (statefile.Open, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[path] == nil {
		d.open[path] = &inPlace{}
	}
	return d.open[path], nil
}

func (d *disk) Read(path string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b, ok := d.files[path]
	if !ok {
		return nil, missing("read", path)
	}
	return slices.Clone(b), nil
}

func (d *disk) Replace(path string, b []byte, mode os.FileMode) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[path] = slices.Clone(b)
	return d.discardDisk.Replace(path, b, mode)
}

func (d *disk) Append(path, line string, mode os.FileMode) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[path] = append(d.files[path], line...)
	return d.discardDisk.Append(path, line, mode)
}

func (d *disk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	b, ok := d.files[from]
	if !ok {
		return missing("rename", from)
	}
	delete(d.files, from)
	d.files[to] = b
	return nil
}

func (d *disk) Remove(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[path]; !ok {
		return missing("remove", path)
	}
	delete(d.files, path)
	return nil
}

func (d *disk) List(folder string) ([]fs.DirEntry, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := map[string]entry{}
	for path, b := range d.files {
		below, ok := strings.CutPrefix(path, filepath.Clean(folder)+"/")
		if !ok {
			continue
		}
		name, _, inside := strings.Cut(below, "/")
		seen[name] = entry{name, inside, len(b)}
	}
	var all []fs.DirEntry
	for _, e := range seen {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return all, nil
}

// entry is a file, or a folder with its entries.
type entry struct {
	name   string
	folder bool
	size   int
}

func (e entry) Name() string               { return e.name }
func (e entry) IsDir() bool                { return e.folder }
func (e entry) Info() (fs.FileInfo, error) { return e, nil }
func (e entry) Type() fs.FileMode          { return e.Mode().Type() }
func (e entry) Size() int64                { return int64(e.size) }
func (e entry) ModTime() time.Time         { return time.Time{} }
func (e entry) Sys() any                   { return nil }
func (e entry) Mode() fs.FileMode {
	if e.folder {
		return fs.ModeDir | 0o700
	}
	return 0o600
}
