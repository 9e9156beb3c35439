package endpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

const (
	recordsFolder = "endpoints"
	cursorsFolder = "cursors"
)

// Folders are those that a store makes in its directory.
func Folders() []string { return []string{recordsFolder, cursorsFolder} }

// Store keeps records and index cursors below one directory:
//
//	endpoints/<id>.json                  one record each
//	endpoints/<id>.deleting              the record of one whose removal has begun
//	last-id                              the id that was taken last
//	cursors/<tenant id>-<app>.json       up to where indexes may have been used; <app> may be a subnet, as in 7-10.0.3.0_24
//	cursors/<tenant id>-<app>.released   one line for each index given back
//
// Memory and disk agree whenever no call is running. All methods may be called concurrently; calls about one endpoint
// must be made one after the other.
type Store struct {
	dir   string
	disk  statefile.Disk
	files statefile.Folder // of the records
	last  statefile.Open   // the id taken last
	rest  time.Duration
	now   func() time.Time

	mu      sync.Mutex // may be taken with a cursor's held, not the other way around
	records map[ID]Record
	ids     map[interfaceOf]ID // of those records
	given   map[ID]bool        // those with an address that was not drawn on this node
	cursors map[CursorKey]*cursor
}

// interfaceOf names one interface of one container.
type interfaceOf struct{ container, name string }

// StoreConfig says where the store is and what it takes from outside.
type StoreConfig struct {
	Dir  string
	Disk statefile.Disk   // that the directory is on
	Rest time.Duration    // how long an index rests before it is used again; 0 means MinRest
	Now  func() time.Time // nil means time.Now
}

// OpenStore reads everything below the directory, which the caller has locked. A file that does
// not say what it should is a *durable.CorruptError.
func OpenStore(c StoreConfig) (*Store, error) {
	s := &Store{
		dir:     c.Dir,
		disk:    c.Disk,
		files:   c.Disk.NewFolder(filepath.Join(c.Dir, recordsFolder)),
		rest:    cmp.Or(c.Rest, MinRest),
		now:     c.Now,
		records: map[ID]Record{},
		ids:     map[interfaceOf]ID{},
		given:   map[ID]bool{},
		cursors: map[CursorKey]*cursor{},
	}
	if s.now == nil {
		s.now = time.Now
	}
	for _, sub := range Folders() {
		if err := c.Disk.MakeFolder(filepath.Join(c.Dir, sub)); err != nil {
			return nil, err
		}
	}
	if err := s.loadRecords(); err != nil {
		return nil, err
	}
	if err := s.loadCursors(); err != nil {
		return nil, err
	}
	var err error
	if s.last, err = c.Disk.Open(filepath.Join(c.Dir, LastIDFile)); err != nil {
		return nil, err
	}
	return s, nil
}

// LastIDFile is not waited for to be on disk, and may hold anything after a crash of the machine: that also ends
// whatever ids were used for.
const LastIDFile = "last-id"

// NoteLastID keeps the id that was taken last, for the next process.
func (s *Store) NoteLastID(id ID) error {
	_, err := s.last.WriteAt(fmt.Appendf(nil, "%5d\n", id), 0)
	return err
}

// LastID is the one noted last; 0 where that is not known.
func (s *Store) LastID() ID {
	b := make([]byte, 6)
	if _, err := s.last.ReadAt(b, 0); err != nil {
		return 0
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 16)
	if err != nil {
		return 0
	}
	return ID(id)
}

func (s *Store) loadRecords() error {
	inUse := map[string]ID{}
	for _, suffix := range []string{recordSuffix, markedSuffix} {
		names, err := s.disk.Names(filepath.Join(s.dir, recordsFolder), suffix)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := s.loadRecord(name, suffix, inUse); err != nil {
				return err
			}
		}
	}
	return nil
}

// loadRecord reads a file and notes whose its addresses are.
func (s *Store) loadRecord(name, suffix string, inUse map[string]ID) error {
	path := s.files.Path(name + suffix)
	b, err := s.disk.ReadFile(path)
	if err != nil {
		return err
	}
	r, err := DecodeRecord(b)
	if err != nil {
		return &statefile.CorruptError{Path: path, Err: err}
	}
	if name != strconv.Itoa(int(r.ID)) {
		return &statefile.CorruptError{Path: path, Err: fmt.Errorf("it holds endpoint %d", r.ID)}
	}
	if suffix == markedSuffix {
		if _, again := s.records[r.ID]; again {
			// An older build, which passes over marked records, has given the id to another endpoint.
			return s.files.Remove(name + suffix)
		}
		r.State = Deleting
	}
	for _, a := range r.Attachments {
		// What nodes see is one endpoint's on the node; what containers see, one's in the tenant.
		whose := fmt.Sprint(a.Network, " ", a.Plaintext)
		if !a.Plaintext.IsValid() {
			whose = fmt.Sprint(a.Network, " ", r.TenantID, " ", a.Address)
		}
		if other, twice := inUse[whose]; twice {
			return &statefile.CorruptError{
				Path: path,
				Err:  fmt.Errorf("address %v belongs to endpoint %d", cmp.Or(a.Plaintext, a.Address), other),
			}
		}
		inUse[whose] = r.ID
	}
	s.keep(r)
	return nil
}

// keep is called with the lock held, or before anybody else knows the store.
func (s *Store) keep(r Record) {
	s.records[r.ID] = r
	s.ids[interfaceOf{r.ContainerID, r.Interface}] = r.ID
	if delete(s.given, r.ID); slices.ContainsFunc(
		r.Attachments,
		func(a Attachment) bool { _, _, drawn := r.Drawn(a); return !drawn },
	) {
		s.given[r.ID] = true
	}
}

const (
	recordSuffix = ".json"
	markedSuffix = ".deleting"
)

func recordName(id ID) string { return strconv.Itoa(int(id)) + recordSuffix }
func markedName(id ID) string { return strconv.Itoa(int(id)) + markedSuffix }

// RecordPath is the file of an endpoint's record.
func (s *Store) RecordPath(id ID) string { return s.files.Path(recordName(id)) }

// Hold keeps a record that is being made. It is not on disk, so a crash forgets it.
func (s *Store) Hold(r Record) error {
	if err := r.validate(); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(r)
	return nil
}

// Put writes the record, new or changed.
func (s *Store) Put(r Record) error {
	if err := r.validate(); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	if err := s.files.Write(recordName(r.ID), recordFile{r.version(), r}, 0o600); err != nil {
		return fmt.Errorf("writing endpoint %d: %w", r.ID, err)
	}
	return s.Hold(r)
}

// Mark says that the endpoint's removal has begun, for whoever goes on after a crash of this process. After one of the
// machine there is nothing to remove, so the disk is not waited for, and a full one is no hindrance.
func (s *Store) Mark(r Record) error {
	r.State = Deleting
	if err := s.Hold(r); err != nil {
		return err
	}
	err := s.files.Rename(recordName(r.ID), markedName(r.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is marked, or was never written
	}
	return err
}

// Delete forgets the record. Its indexes must have been released before.
func (s *Store) Delete(id ID) error {
	if err := s.files.Remove(recordName(id), markedName(id)); err != nil {
		return fmt.Errorf("removing endpoint %d: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.records[id]
	delete(s.records, id)
	delete(s.given, id)
	if of := (interfaceOf{r.ContainerID, r.Interface}); s.ids[of] == id {
		delete(s.ids, of)
	}
	return nil
}

// Get is the record with this id.
func (s *Store) Get(id ID) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.records[id]
	return r, ok
}

// List is all records, by id.
func (s *Store) List() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.records), func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
}

// WithGiven is the records, by id, with an address that was not drawn on this node.
func (s *Store) WithGiven() (some []Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.given {
		some = append(some, s.records[id])
	}
	slices.SortFunc(some, func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
	return some
}

// Find is the record of one interface of one container.
func (s *Store) Find(containerID, iface string) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.ids[interfaceOf{containerID, iface}]
	return s.records[id], ok
}

// Close gives back the indexes that were reserved and not used. Nothing may be drawn afterwards.
func (s *Store) Close() error {
	s.mu.Lock()
	cursors := slices.Collect(maps.Values(s.cursors))
	s.mu.Unlock()
	errs := []error{s.last.Close()}
	for _, c := range cursors {
		errs = append(errs, c.close())
	}
	return errors.Join(errs...)
}

// live is every index that a record holds, by cursor.
func (s *Store) live() map[CursorKey]map[address.Index]bool {
	live := map[CursorKey]map[address.Index]bool{}
	for _, r := range s.records {
		for _, a := range r.Attachments {
			key, i, drawn := r.Drawn(a)
			if !drawn {
				continue
			}
			if live[key] == nil {
				live[key] = map[address.Index]bool{}
			}
			live[key][i] = true
		}
	}
	return live
}
