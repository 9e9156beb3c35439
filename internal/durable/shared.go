package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// Syncer makes changes of a file or folder last, once for all who ask while it does so for others.
type Syncer struct {
	path string

	mu   sync.Mutex
	next *round     // whoever asks now belongs to it
	one  sync.Mutex // held by the round that is on
}

// round is one sync and those who wait for it.
type round struct {
	done chan struct{}
	err  error
}

func NewSyncer(path string) *Syncer { return &Syncer{path: path} }

// Sync returns when what was changed before the call lasts.
func (s *Syncer) Sync() error {
	s.mu.Lock()
	r := s.next
	if r != nil {
		s.mu.Unlock()
		<-r.done
		return r.err
	}
	r = &round{done: make(chan struct{})}
	s.next = r
	s.mu.Unlock()

	s.one.Lock()
	defer s.one.Unlock()
	s.mu.Lock()
	s.next = nil // who comes from now on may have changed something too late
	s.mu.Unlock()
	r.err = SyncDir(s.path) // a file is synced as a folder is
	close(r.done)
	return r.err
}

// Folder is a directory of files that several write at a time.
type Folder struct {
	path   string
	syncer *Syncer
}

func NewFolder(path string) Folder { return Folder{path, NewSyncer(path)} }

// Path is that of a file in the folder.
func (f Folder) Path(name string) string { return filepath.Join(f.path, name) }

// Write is Write of a file in the folder.
func (f Folder) Write(name string, v any, mode os.FileMode) error {
	b, err := encode(f.Path(name), v)
	if err != nil {
		return err
	}
	return replace(f.Path(name), b, mode, f.syncer.Sync)
}

// Rename gives a file another name, for whoever looks, but not yet for good: a crash of the machine may undo it.
func (f Folder) Rename(from, to string) error {
	return advise(f.path, os.Rename(f.Path(from), f.Path(to)))
}

// Remove deletes files for good; one that is not there is no error.
func (f Folder) Remove(names ...string) error {
	there := false
	for _, name := range names {
		err := os.Remove(f.Path(name))
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
