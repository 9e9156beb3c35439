package statefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"pilaster.io/pilaster/internal/batch"
)

// Syncer makes changes of a file or folder last, once for all who ask meanwhile.
type Syncer struct{ rounds *batch.Rounds[struct{}] }

func (d Disk) NewSyncer(path string) Syncer {
	return Syncer{batch.New(new(sync.Mutex), func(all []struct{}) []error {
		return slices.Repeat([]error{d.on().Sync(path)}, len(all))
	})}
}

// Sync returns when what was changed before the call lasts.
func (s Syncer) Sync() error { return s.rounds.Do(struct{}{}) }

// Folder is a directory of files that several write at a time.
type Folder struct {
	disk   Disk
	path   string
	syncer Syncer
}

func (d Disk) NewFolder(path string) Folder { return Folder{d, path, d.NewSyncer(path)} }

// Path is that of a file in the folder.
func (f Folder) Path(name string) string { return filepath.Join(f.path, name) }

// Write is Write of a file in the folder.
func (f Folder) Write(name string, v any, mode os.FileMode) error {
	b, err := encode(f.Path(name), v)
	if err != nil {
		return err
	}
	return f.disk.replace(f.Path(name), b, mode, f.syncer.Sync)
}

// Rename renames a file, visible at once to all processes, but not yet durably: a crash of the machine may undo it.
func (f Folder) Rename(from, to string) error {
	return advise(f.path, f.disk.on().Rename(f.Path(from), f.Path(to)))
}

// Remove deletes files for good; one that is not there is no error.
func (f Folder) Remove(names ...string) error {
	there := false
	for _, name := range names {
		err := f.disk.on().Remove(f.Path(name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return advise(f.path, err)
		}
		there = there || err == nil
	}
	if !there {
		return nil
	}
	return f.syncer.Sync()
}
