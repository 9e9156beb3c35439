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

// Folders returns the names of the folders that a store creates in its directory.
func Folders() []string { return []string{recordsFolder, cursorsFolder} }

// Store keeps records and index cursors below one directory:
//
//	endpoints/<id>.json                  one record each
//	endpoints/<id>.deleting              the record of an endpoint whose removal has begun
//	last-id                              the id that was allocated last
//	cursors/<tenant id>-<app>.json       indexes up to here may have been used; <app> may be a subnet: 7-10.0.3.0_24
//	cursors/<tenant id>-<app>.released   one line for each released index
//
// Memory and disk agree whenever no call is running. All methods may be called concurrently; calls about one endpoint
// must be made one after the other.
type Store struct {
	dir        string
	disk       statefile.Disk
	files      statefile.Folder // of the records
	last       statefile.Open   // the id allocated last
	quarantine time.Duration
	now        func() time.Time
	damages    *statefile.Damages

	mu      sync.Mutex // may be locked while a cursor is locked, not the other way around
	records map[ID]Record
	ids     map[interfaceOf]ID // of those records
	given   map[ID]bool        // endpoints with an address that was not allocated on this node
	damaged map[ID]bool        // endpoints without a record, of which a damaged one was set aside

	unusable []error // of records, while the store is being opened
	cursors  map[CursorKey]*cursor
}

// interfaceOf names one interface of one container.
type interfaceOf struct{ container, name string }

// StoreConfig configures a Store.
type StoreConfig struct {
	Dir        string
	Disk       statefile.Disk   // the file system of Dir
	Quarantine time.Duration    // how long an index is quarantined before it is used again; 0 means MinQuarantine
	Now        func() time.Time // nil means time.Now
	// sets damaged files aside; nil: a damaged file makes OpenStore fail
	Damages *statefile.Damages
}

// OpenStore reads everything below the directory, which the caller has locked. It sets damaged files aside. Without
// StoreConfig.Damages, and for a file of a later build, it returns a *statefile.CorruptError.
func OpenStore(c StoreConfig) (*Store, error) {
	s := &Store{
		dir:        c.Dir,
		disk:       c.Disk,
		files:      c.Disk.NewFolder(filepath.Join(c.Dir, recordsFolder)),
		quarantine: cmp.Or(c.Quarantine, MinQuarantine),
		now:        c.Now,
		records:    map[ID]Record{},
		ids:        map[interfaceOf]ID{},
		given:      map[ID]bool{},
		damaged:    map[ID]bool{},
		damages:    c.Damages,
		cursors:    map[CursorKey]*cursor{},
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
	// After the cursors, which quarantine the addresses of damaged records. After a crash in between, the next start
	// repeats both.
	if err := s.setRecordsAside(); err != nil {
		return nil, err
	}
	var err error
	if s.last, err = c.Disk.Open(filepath.Join(c.Dir, LastIDFile)); err != nil {
		return nil, err
	}
	return s, nil
}

// LastIDFile is not synced to disk. After a crash of the machine it may have any content, which does no harm: the crash
// also ends the devices and packets that the ids were used for.
const LastIDFile = "last-id"

// NoteLastID stores the id that was allocated last, for the next process.
func (s *Store) NoteLastID(id ID) error {
	_, err := s.last.WriteAt(fmt.Appendf(nil, "%5d\n", id), 0)
	return err
}

// LastID returns the id noted last. If that is unknown, it returns the highest id of the records; 0 without records.
func (s *Store) LastID() ID {
	b := make([]byte, 6)
	if _, err := s.last.ReadAt(b, 0); err != nil {
		return s.highest()
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 16)
	if err != nil {
		return s.highest()
	}
	return ID(id)
}

func (s *Store) highest() (id ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for of := range s.records {
		id = max(id, of)
	}
	for of := range s.damaged {
		id = max(id, of)
	}
	return id
}

func (s *Store) loadRecords() error {
	inUse := map[string]ID{}
	for _, suffix := range []string{recordSuffix, markedSuffix} {
		names, err := s.disk.Names(filepath.Join(s.dir, recordsFolder), suffix)
		if err != nil {
			return err
		}
		for _, name := range names {
			damaged := s.loadRecord(name, suffix, inUse)
			if damaged == nil {
				continue
			}
			if err := s.damages.Check(damaged); err != nil {
				return err
			}
			s.unusable = append(s.unusable, damaged)
		}
	}
	return nil
}

// setRecordsAside sets damaged records aside. It also notes the endpoints of all records that are set aside, now or
// earlier, because a crash may have prevented the removal of their devices.
func (s *Store) setRecordsAside() error {
	for _, damaged := range s.unusable {
		if err := s.damages.SetAside(damaged, "the agent removes the endpoint of this file: its container has no "+
			"network until the runtime recreates it"); err != nil {
			return err
		}
	}
	names, err := s.disk.Names(filepath.Join(s.dir, recordsFolder), "")
	if err != nil {
		return err
	}
	for _, name := range names {
		id, ok := damagedID(name)
		if _, has := s.records[id]; ok && !has {
			s.damaged[id] = true
		}
	}
	return nil
}

// loadRecord reads a record file, enters its addresses into inUse, and keeps the record.
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
		return &statefile.CorruptError{Path: path, Err: fmt.Errorf("it has endpoint %d", r.ID)}
	}
	if suffix == markedSuffix {
		if _, reused := s.records[r.ID]; reused {
			// An older build, which ignores marked records, has allocated the id to another endpoint.
			return s.files.Remove(name + suffix)
		}
		r.State = Deleting
	}
	for _, a := range r.Attachments {
		// A plaintext address belongs to one endpoint of the node, a container's own address to one endpoint of the
		// tenant.
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

// keep stores a record in memory. The caller holds the lock, or is OpenStore.
func (s *Store) keep(r Record) {
	s.records[r.ID] = r
	delete(s.damaged, r.ID)
	s.ids[interfaceOf{r.ContainerID, r.Interface}] = r.ID
	if delete(s.given, r.ID); slices.ContainsFunc(
		r.Attachments,
		func(a Attachment) bool { _, _, allocated := r.AllocatedIndex(a); return !allocated },
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

// IsDamaged reports whether an endpoint has no record because a damaged one was set aside.
func (s *Store) IsDamaged(id ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.damaged[id]
}

// Damaged returns the endpoints whose record is damaged.
func (s *Store) Damaged() []ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.damaged))
}

// NoteDamagedRemoved renames the damaged records, whose endpoints the caller has removed: a later start then does not
// assign a device with one of their numbers to them.
func (s *Store) NoteDamagedRemoved() error {
	folder := filepath.Join(s.dir, recordsFolder)
	names, err := s.disk.Names(folder, "")
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if _, ok := damagedID(name); ok {
			errs = append(errs, s.disk.Rename(filepath.Join(folder, name), filepath.Join(folder, name+removedSuffix)))
		}
	}
	return errors.Join(errs...)
}

// removedSuffix ends the name of a damaged record whose endpoint has been removed.
const removedSuffix = "-removed"

// damagedID returns the endpoint of a damaged record that was set aside and not removed, by its file name.
func damagedID(name string) (ID, bool) {
	original, ok := statefile.DamagedName(name)
	number, _, _ := strings.Cut(original, ".")
	id, err := strconv.ParseUint(number, 10, 16)
	return ID(id), ok && err == nil && !strings.HasSuffix(name, removedSuffix)
}

// RecordPath returns the path of an endpoint's record.
func (s *Store) RecordPath(id ID) string { return s.files.Path(recordName(id)) }

// Hold keeps a record in memory while its endpoint is being prepared. It is not on disk, so a crash loses it.
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

// Mark records on disk that the endpoint's removal has begun, so that the next process continues it if this one
// crashes. After a crash of the machine there is nothing to remove. So Mark need not be durable; it succeeds on a full
// disk.
func (s *Store) Mark(r Record) error {
	r.State = Deleting
	if err := s.Hold(r); err != nil {
		return err
	}
	err := s.files.Rename(recordName(r.ID), markedName(r.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the record is marked already, or was never written
	}
	return err
}

// Delete removes the record. Its indexes must have been released before.
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

// Get returns the record with this id.
func (s *Store) Get(id ID) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.records[id]
	return r, ok
}

// List returns all records, sorted by id.
func (s *Store) List() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.records), func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
}

// WithClusterAddresses returns the records with an address that was not allocated on this node, sorted by id.
func (s *Store) WithClusterAddresses() (some []Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.given {
		some = append(some, s.records[id])
	}
	slices.SortFunc(some, func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
	return some
}

// Find returns the record of one interface of one container.
func (s *Store) Find(containerID, iface string) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.ids[interfaceOf{containerID, iface}]
	return s.records[id], ok
}

// Close releases the indexes that were reserved and not used. The store must not be used afterwards.
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

// live returns every index that a record holds, by cursor.
func (s *Store) live() map[CursorKey]map[address.Index]bool {
	live := map[CursorKey]map[address.Index]bool{}
	for _, r := range s.records {
		for _, a := range r.Attachments {
			key, i, allocated := r.AllocatedIndex(a)
			if !allocated {
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
