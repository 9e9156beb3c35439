package endpoint

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// MinQuarantine is how long a released index is quarantined at least. In this time peers that used the address end
// their cache entries, retries and open connections.
const MinQuarantine = 5 * time.Minute

// reserveAhead is how many indexes beyond the last allocated one are marked as used on disk, so that the next
// allocations need no write. After a crash these indexes are not allocated.
const reserveAhead = 4096

// The release log is rewritten when it has more void lines than valid lines plus compactAbove.
const compactAbove = 1024

// CursorKey identifies a cursor: indexes are allocated per app, or per subnet.
type CursorKey struct {
	Tenant address.TenantID
	App    address.AppID
	Subnet netip.Prefix
}

// String returns the key as text, which is also the name of its files.
func (k CursorKey) String() string {
	if k.Subnet.IsValid() {
		return fmt.Sprintf("%d-%s", k.Tenant, strings.Replace(k.Subnet.String(), "/", "_", 1))
	}
	return fmt.Sprintf("%d-%d", k.Tenant, k.App)
}

func parseCursorKey(name string) (key CursorKey, ok bool) {
	id, of, _ := strings.Cut(name, "-")
	tenant, err := strconv.ParseUint(id, 10, 32)
	key.Tenant = address.TenantID(tenant)
	if app, notApp := strconv.ParseUint(of, 10, 16); notApp == nil {
		key.App = address.AppID(app)
	} else if key.Subnet, notApp = netip.ParsePrefix(strings.Replace(of, "_", "/", 1)); notApp != nil {
		return key, false
	}
	return key, err == nil && key.String() == name
}

// AllocatedIndex returns the cursor that an attachment's address was allocated from, and its index. It returns false
// for an address that was not allocated on this node.
func (r Record) AllocatedIndex(a Attachment) (CursorKey, address.Index, bool) {
	switch {
	case a.Subnet.IsValid():
		return CursorKey{Tenant: r.TenantID, Subnet: a.Subnet}, indexIn(a.Subnet, a.Address), true
	case a.Plaintext.IsValid():
		p := address.Split(a.Plaintext)
		return CursorKey{Tenant: p.Tenant, App: p.App}, p.Index, true
	}
	return CursorKey{}, 0, false
}

// AddressIn returns the address with an index in a subnet, and whether the subnet has this address.
func AddressIn(subnet netip.Prefix, i address.Index) (netip.Addr, bool) {
	b := subnet.Masked().Addr().AsSlice()
	for at := len(b) - 1; i > 0 && at >= 0; at, i = at-1, i>>8 {
		sum := uint32(b[at]) + uint32(i&0xff)
		b[at] = byte(sum)
		i += address.Index(sum>>8) << 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a, subnet.Contains(a)
}

// indexIn is the inverse of AddressIn.
func indexIn(subnet netip.Prefix, a netip.Addr) address.Index {
	first, b := subnet.Masked().Addr().AsSlice(), a.AsSlice()
	var i address.Index
	for at := range b {
		i = i<<8 | address.Index(b[at]-first[at])
	}
	return i
}

// ErrExhausted means that every index is in use or quarantined.
var ErrExhausted = errors.New("every address of this node is in use or quarantined")

// cursor allocates the indexes of one key, upward. When all have been allocated, it allocates the index that was
// released first, if the quarantine of this index is over.
type cursor struct {
	disk statefile.Disk
	path string           // without suffix
	log  statefile.Syncer // of the release log

	mu          sync.Mutex
	removed     bool          // the key has another cursor now, or none
	used        time.Time     // when an index was last allocated or released, or the cursor was read from disk
	next        address.Index // the next index to try; from here on only those in taken were allocated
	taken       map[address.Index]bool
	top         address.Index // the largest of taken
	reserved    address.Index // on disk: all indexes up to here may be in use
	quarantined []released    // oldest first
	lines       int           // in the release log, void ones included
}

const cursorVersion = 1

type cursorFile struct {
	Version  int           `json:"version"`
	Reserved address.Index `json:"reserved"`
}

type released struct {
	index address.Index
	at    time.Time
}

// AllocateIndex allocates an index that no endpoint of the key holds. find returns the first usable index that is not
// below from, or address.ErrExhausted. When AllocateIndex returns, the index is marked as used on disk. A caller that
// does not put the index into a record must call ReleaseIndex.
func (s *Store) AllocateIndex(key CursorKey, find func(from address.Index) (address.Index, error)) (address.Index,
	error) {
	c := s.lockCursor(key)
	defer c.mu.Unlock()
	c.used = s.now()
	for c.next <= address.MaxIndex {
		i, err := find(c.next)
		if err == nil && c.taken[i] {
			c.next = i + 1
			continue
		}
		if err == nil {
			if err := c.reserve(i); err != nil {
				return 0, err
			}
			c.next = i + 1
			return i, nil
		}
		if !errors.Is(err, address.ErrExhausted) {
			return 0, err
		}
		if err := c.reserve(address.MaxIndex); err != nil {
			return 0, err
		}
		c.next = address.MaxIndex + 1
	}
	if len(c.quarantined) == 0 {
		return 0, ErrExhausted
	}
	oldest := c.quarantined[0]
	if wait := s.quarantine - s.now().Sub(oldest.at); wait > 0 {
		return 0, fmt.Errorf("%w; the quarantine of the next one ends in %v", ErrExhausted, wait.Round(time.Second))
	}
	// The index stays in the log. The record that the caller writes next makes that line void.
	c.quarantined = c.quarantined[1:]
	return oldest.index, nil
}

// ReleaseIndex puts an index into quarantine, and writes that to disk. Call it before you remove the record with the
// index.
func (s *Store) ReleaseIndex(key CursorKey, i address.Index) error {
	c := s.lockCursor(key)
	err := c.release(i, s.now())
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return c.log.Sync() // without the lock: Forget does not remove a cursor that was just used
}

func (c *cursor) release(i address.Index, now time.Time) error {
	c.used = now
	r := released{i, now}
	for _, old := range c.quarantined {
		if old.index == i {
			return nil // a repeated call
		}
	}
	c.quarantined = append(c.quarantined, r)
	if c.lines > 2*len(c.quarantined)+compactAbove {
		return c.compact()
	}
	if err := c.disk.Append(c.path+".released", r.line(), 0o600); err != nil {
		return err
	}
	c.lines++
	return nil
}

func newCursor(disk statefile.Disk, path string, reserved address.Index) *cursor {
	return &cursor{
		disk:     disk,
		path:     path,
		log:      disk.NewSyncer(path + ".released"),
		next:     reserved + 1,
		reserved: reserved,
	}
}

// lockCursor finds or creates the key's cursor and locks it; the caller unlocks it.
func (s *Store) lockCursor(key CursorKey) *cursor {
	for {
		c := s.cursor(key)
		c.mu.Lock()
		if !c.removed {
			return c
		}
		c.mu.Unlock()
	}
}

func (s *Store) cursor(key CursorKey) *cursor {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.cursors[key]
	if c == nil {
		c = newCursor(s.disk, filepath.Join(s.dir, cursorsFolder, key.String()), 0)
		s.cursors[key] = c
	}
	return c
}

// Forget removes the cursors of tenant ids that this node no longer has. It keeps a cursor until its quarantines are
// over, because the node may get the tenant id again. Only callers that use a removed cursor wait for the disk.
func (s *Store) Forget(has func(address.TenantID) bool) error {
	var errs []error
	for key, c := range s.unused(has) {
		if err := s.forget(key, c); err != nil {
			errs = append(errs, fmt.Errorf("removing the cursor %v: %w", key, err))
		}
	}
	return errors.Join(errs...)
}

// unused returns the cursors of tenant ids that the node does not have and no record uses. If such a cursor allocates
// meanwhile, forget keeps it, because it was just used.
func (s *Store) unused(has func(address.TenantID) bool) map[CursorKey]*cursor {
	s.mu.Lock()
	defer s.mu.Unlock()
	unused, live := maps.Clone(s.cursors), s.live()
	maps.DeleteFunc(unused, func(key CursorKey, _ *cursor) bool { return has(key.Tenant) || live[key] != nil })
	return unused
}

func (s *Store) forget(key CursorKey, c *cursor) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.removed || s.now().Sub(c.used) < s.quarantine {
		return nil
	}
	// The log is removed first, because a start takes a log without its cursor file for a lost cursor.
	for _, suffix := range []string{".released", ".json"} {
		if err := s.disk.Remove(c.path + suffix); err != nil {
			return err
		}
	}
	c.removed = true
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.cursors, key)
	return nil
}

// reserve marks i and the next indexes as used on disk, unless i is marked already.
func (c *cursor) reserve(i address.Index) error {
	if i <= c.reserved {
		return nil
	}
	return c.writeReserved(min(i+reserveAhead, address.MaxIndex))
}

func (c *cursor) writeReserved(to address.Index) error {
	if err := c.disk.Write(c.path+".json", cursorFile{cursorVersion, to}, 0o600); err != nil {
		return fmt.Errorf("reserving indexes: %w", err)
	}
	c.reserved = to
	return nil
}

func (c *cursor) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	used := max(c.next-1, c.top)
	if c.removed || used == c.reserved {
		return nil
	}
	return c.writeReserved(used)
}

func (r released) line() string {
	return fmt.Sprintf("%d %s\n", r.index, r.at.UTC().Format(time.RFC3339))
}

// compact rewrites the release log without void lines.
func (c *cursor) compact() error {
	var b bytes.Buffer
	for _, r := range c.quarantined {
		b.WriteString(r.line())
	}
	if err := c.disk.WriteBytes(c.path+".released", b.Bytes(), 0o600); err != nil {
		return err
	}
	c.lines = len(c.quarantined)
	return nil
}
