package statefile

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Disk is where files are kept. The zero Disk is the machine's own; one process that stands for many machines gives
// each of them another.
type Disk struct{ medium Medium }

// Medium is what a Disk is made of. A path that is not there is an error wrapping fs.ErrNotExist.
type Medium interface {
	// MakeFolder makes a folder and those it is in, for the owner alone, where they are not there.
	MakeFolder(path string) error
	Read(path string) ([]byte, error)
	// Replace writes all of a file or leaves it as it was. Its content lasts; its name, when the folder is synced.
	Replace(path string, b []byte, mode os.FileMode) error
	// Append adds a line, all of it or nothing. It lasts when the file is synced.
	Append(path, line string, mode os.FileMode) error
	// Rename and Remove last when the folder is synced.
	Rename(from, to string) error
	Remove(path string) error
	// Sync makes what was done before to a file, or to a folder's names, last.
	Sync(path string) error
	// List is what is in a folder, by name.
	List(folder string) ([]fs.DirEntry, error)
	// Open gives a file that is written in place, and makes it where it is not there. What is written need not last.
	Open(path string) (Open, error)
}

// Open is a file that is written in place.
type Open interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// On is a disk made of a medium.
func On(m Medium) Disk { return Disk{m} }

func (d Disk) on() Medium {
	if d.medium == nil {
		return machine{}
	}
	return d.medium
}

// MakeFolder makes a folder where it is not there.
func (d Disk) MakeFolder(path string) error { return d.on().MakeFolder(path) }

// ReadFile is all of a file's bytes.
func (d Disk) ReadFile(path string) ([]byte, error) { return d.on().Read(path) }

// Open gives a file that is written in place.
func (d Disk) Open(path string) (Open, error) { return d.on().Open(path) }

// Walk visits every file below a folder, unfinished ones included.
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

// What has one file or folder on the machine's own disk.

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

// machine is this machine's disk.
type machine struct{}

func (machine) MakeFolder(path string) error              { return os.MkdirAll(path, 0o700) }
func (machine) Read(path string) ([]byte, error)          { return os.ReadFile(path) }
func (machine) Rename(from, to string) error              { return os.Rename(from, to) }
func (machine) Remove(path string) error                  { return os.Remove(path) }
func (machine) List(folder string) ([]fs.DirEntry, error) { return os.ReadDir(folder) }

func (machine) Open(path string) (Open, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}

// Sync syncs a folder as a file.
func (machine) Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
