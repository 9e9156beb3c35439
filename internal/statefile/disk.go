package statefile

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Disk is a file system. The zero Disk is the machine's own; a simulation of many machines has a Disk for each.
type Disk struct{ medium Medium }

// Medium implements a Disk. For a path that does not exist, it returns an error that wraps fs.ErrNotExist.
type Medium interface {
	// MakeFolder creates a folder and its parents with mode 0700, unless they exist.
	MakeFolder(path string) error
	Read(path string) ([]byte, error)
	// Replace replaces a file atomically. Its content is durable when Replace returns, its name after a Sync of the
	// folder.
	Replace(path string, b []byte, mode os.FileMode) error
	// Append adds a line or, on an error, nothing. The line is durable after a Sync of the file.
	Append(path, line string, mode os.FileMode) error
	// Rename and Remove are durable after a Sync of the folder.
	Rename(from, to string) error
	Remove(path string) error
	// Sync makes earlier changes durable: of a file's content, or of the names in a folder.
	Sync(path string) error
	// List returns the entries of a folder, sorted by name.
	List(folder string) ([]fs.DirEntry, error)
	// Open opens a file that is written in place, and creates it if it does not exist. Writes need not be durable.
	Open(path string) (Open, error)
}

// Open is a file that is written in place.
type Open interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// On returns a Disk on a medium.
func On(m Medium) Disk { return Disk{m} }

func (d Disk) on() Medium {
	if d.medium == nil {
		return machine{}
	}
	return d.medium
}

// MakeFolder creates a folder unless it exists.
func (d Disk) MakeFolder(path string) error { return d.on().MakeFolder(path) }

// ReadFile returns the content of a file.
func (d Disk) ReadFile(path string) ([]byte, error) { return d.on().Read(path) }

// Open opens a file that is written in place.
func (d Disk) Open(path string) (Open, error) { return d.on().Open(path) }

// Rename renames a file within its folder, and syncs the folder.
func (d Disk) Rename(from, to string) error {
	if err := d.on().Rename(from, to); err != nil {
		return advise(filepath.Dir(to), err)
	}
	return d.on().Sync(filepath.Dir(to))
}

// Walk calls visit for every file below a folder, also for those of interrupted writes.
func (d Disk) Walk(folder string, visit func(path string, entry fs.DirEntry)) error {
	entries, err := d.on().List(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if !e.IsDir() {
			visit(path, e)
		} else if err := d.Walk(path, visit); err != nil {
			return err
		}
	}
	return nil
}

// The functions below work on the machine's own disk.

func Write(path string, v any, mode os.FileMode) error { return Disk{}.Write(path, v, mode) }
func WriteBytes(path string, b []byte, mode os.FileMode) error {
	return Disk{}.WriteBytes(path, b, mode)
}
func Append(path, line string, mode os.FileMode) error { return Disk{}.Append(path, line, mode) }
func Remove(path string) error                         { return Disk{}.Remove(path) }
func Read(path string, version int, v any) error       { return Disk{}.Read(path, version, v) }
func Names(dir, suffix string) ([]string, error)       { return Disk{}.Names(dir, suffix) }
func NewFolder(path string) Folder                     { return Disk{}.NewFolder(path) }
func SyncDir(dir string) error                         { return machine{}.Sync(dir) }

// machine is this machine's file system.
type machine struct{}

func (machine) MakeFolder(path string) error              { return os.MkdirAll(path, 0o700) }
func (machine) Read(path string) ([]byte, error)          { return os.ReadFile(path) }
func (machine) Rename(from, to string) error              { return os.Rename(from, to) }
func (machine) Remove(path string) error                  { return os.Remove(path) }
func (machine) List(folder string) ([]fs.DirEntry, error) { return os.ReadDir(folder) }

func (machine) Open(path string) (Open, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}

// Sync calls fsync, for a folder too.
func (machine) Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
