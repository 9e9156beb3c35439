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

// Syncer makes changes of a file or folder durable. Concurrent calls share one fsync.
type Syncer struct{ rounds *batch.Rounds[struct{}] }

func (d Disk) NewSyncer(path string) Syncer {
	return Syncer{batch.New(new(sync.Mutex), func(all []struct{}) []error {
		return slices.Repeat([]error{d.on().Sync(path)}, len(all))
	})}
}

// Sync returns when all changes from before the call are durable.
func (s Syncer) Sync() error { return s.rounds.Do(struct{}{}) }

// Folder is a directory whose files may be written concurrently.
type Folder struct {
	disk   Disk
	path   string
	syncer Syncer
}

func (d Disk) NewFolder(path string) Folder { return Folder{d, path, d.NewSyncer(path)} }

// Path returns the path of a file in the folder.
func (f Folder) Path(name string) string { return filepath.Join(f.path, name) }

// Write replaces a file in the folder by v as JSON; see Disk.Write.
func (f Folder) Write(name string, v any, mode os.FileMode) error {
	b, err := encode(f.Path(name), v)
	if err != nil {
		return err
	}
	return f.disk.replace(f.Path(name), b, mode, f.syncer.Sync)
}

// Rename renames a file. Other processes see the new name at once, but it is not durable: a crash of the machine may
// undo it.
func (f Folder) Rename(from, to string) error {
	return advise(f.path, f.disk.on().Rename(f.Path(from), f.Path(to)))
}

// Remove deletes files durably. It ignores files that do not exist.
func (f Folder) Remove(names ...string) error {
	removed := false
	for _, name := range names {
		err := f.disk.on().Remove(f.Path(name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return advise(f.path, err)
		}
		removed = removed || err == nil
	}
	if !removed {
		return nil
	}
	return f.syncer.Sync()
}
