package endpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// lostAhead is how many indexes a cursor skips for its lost file and for each damaged record. Every allocated index is
// in a record or in the release log, except those of damaged records, of interrupted ADDs, and of a DEL that could not
// write the log. The draw of a ciphertext uses about one of 256 indexes, so lostAhead is room for about 256 of those.
const lostAhead = 1 << 16

func (s *Store) loadCursors() error {
	dir := filepath.Join(s.dir, cursorsFolder)
	names, err := s.disk.Names(dir, ".json")
	if err != nil {
		return err
	}
	// A key with a log or a record must have a cursor file. Otherwise its indexes would start from 1 again.
	all, err := s.disk.Names(dir, ".released")
	if err != nil {
		return err
	}
	live := s.live()
	for key := range live {
		all = append(all, key.String())
	}
	all = append(all, names...)
	slices.Sort(all)
	for _, name := range slices.Compact(all) {
		path := filepath.Join(dir, name)
		key, ok := parseCursorKey(name)
		if !ok {
			misnamed := errors.New("its name is not <tenant id>-<app>.json")
			if err := s.damages.SetAside(&statefile.CorruptError{Path: path + ".json", Err: misnamed},
				"the agent ignores this file"); err != nil {
				return err
			}
			continue
		}
		if s.cursors[key], err = s.loadCursor(key, path, live[key], slices.Contains(names, name)); err != nil {
			return err
		}
	}
	return nil
}

// loadCursor reads a key's cursor, or derives a safe one from the records and the release log.
func (s *Store) loadCursor(key CursorKey, path string, live map[address.Index]bool, exists bool) (*cursor, error) {
	reserved, badCursor := readReserved(s.disk, path, live)
	if !exists {
		badCursor = &statefile.CorruptError{
			Path: path + ".json",
			Err:  errors.New("it is missing, but its indexes were allocated"),
		}
	}
	if err := s.refuses(badCursor); err != nil {
		return nil, err
	}
	known := address.MaxIndex // limit of indexes in the log
	if badCursor == nil {
		known = reserved
	}
	log, badLog := readReleased(s.disk, path, known)
	if err := s.refuses(badLog); err != nil {
		return nil, err
	}
	c := newCursor(s.disk, path, reserved)
	c.used = s.now()
	if badCursor != nil || badLog != nil {
		highest := max(reserved, log.highest)
		for i := range live {
			highest = max(highest, i)
		}
		ahead := address.Index(lostAhead * (1 + len(s.unusable)))
		if key.Subnet.IsValid() {
			ahead = reserveAhead // enough, because restart makes the cursor allocate from 1 again
		}
		if badCursor != nil && badLog != nil {
			ahead = address.MaxIndex // skips all: any index may have been released a moment ago
		}
		c = newCursor(s.disk, path, min(highest+min(ahead, address.MaxIndex), address.MaxIndex))
		c.used = s.now()
		if err := s.replaceCursor(c, badCursor, badLog); err != nil {
			return nil, err
		}
	}
	if err := c.setReleased(log, live, badLog != nil); err != nil {
		return nil, err
	}
	if !key.Subnet.IsValid() || badCursor != nil && badLog != nil {
		return c, nil
	}
	if badLog != nil || len(s.unusable) > 0 {
		if err := c.quarantineUnknown(key.Subnet, reserved, live, s.now()); err != nil {
			return nil, err
		}
	}
	c.restart(live)
	return c, nil
}

// refuses returns the error if it prevents the start, and nil if its file can be set aside.
func (s *Store) refuses(err error) error {
	if err == nil {
		return nil
	}
	return s.damages.Check(err)
}

// replaceCursor sets damaged files aside and writes the derived cursor. After a crash at any point the next start
// repeats this, or finds a cursor that is higher than needed.
func (s *Store) replaceCursor(c *cursor, badCursor, badLog error) error {
	instead := fmt.Sprintf("new containers get indexes above %d", c.reserved)
	if c.reserved == address.MaxIndex {
		instead = "addresses of this tenant and app are not allocated on this node until it has none of the tenant's " +
			"containers for a while"
	}
	if badCursor != nil {
		if err := s.damages.SetAside(badCursor, instead); err != nil {
			return err
		}
	}
	if err := c.writeReserved(c.reserved); err != nil {
		return err
	}
	if badLog == nil {
		return nil
	}
	return s.damages.SetAside(badLog, "addresses that were released before are not allocated for now; "+instead)
}

func readReserved(disk statefile.Disk, path string, live map[address.Index]bool) (address.Index, error) {
	var f cursorFile
	if err := disk.Read(path+".json", cursorVersion, &f); err != nil {
		return 0, err
	}
	var err error
	if f.Reserved > address.MaxIndex {
		err = fmt.Errorf("it reserves index %d, beyond the last", f.Reserved)
	}
	for i := range live {
		if err == nil && i > f.Reserved {
			err = fmt.Errorf("index %d is in use beyond the cursor at %d", i, f.Reserved)
		}
	}
	if err == nil {
		return f.Reserved, nil
	}
	return 0, &statefile.CorruptError{Path: path + ".json", Err: err}
}

// releaseLog is the content of a release log.
type releaseLog struct {
	lines   []released
	cut     bool          // the last line is incomplete
	highest address.Index // of valid lines, also of those above the limit
}

// readReleased reads the release log. It ignores a last line without a line end: a crash has interrupted its write, so
// that release was not acknowledged. It returns the valid lines also with a CorruptError.
func readReleased(disk statefile.Disk, path string, limit address.Index) (log releaseLog, err error) {
	path += ".released"
	b, err := disk.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return log, nil
	}
	if err != nil {
		return log, err
	}
	complete := bytes.LastIndexByte(b, '\n') + 1
	log.cut = complete < len(b)
	n := 0
	for line := range bytes.Lines(b[:complete]) {
		n++
		r, wrong := parseReleased(string(line))
		if wrong == nil {
			log.highest = max(log.highest, r.index)
			if r.index > limit {
				wrong = neverAllocated(r.index)
			}
		}
		switch {
		case wrong == nil:
			log.lines = append(log.lines, r)
		case err == nil:
			err = &statefile.CorruptError{Path: path, Err: fmt.Errorf("line %d: %w", n, wrong)}
		}
	}
	return log, err
}

func neverAllocated(i address.Index) error { return fmt.Errorf("index %d was never allocated", i) }

// setReleased fills the quarantine. An index that was released twice is quarantined from the second release on.
func (c *cursor) setReleased(log releaseLog, live map[address.Index]bool, rewrite bool) error {
	last := map[address.Index]int{}
	for n, r := range log.lines {
		last[r.index] = n
	}
	for n, r := range log.lines {
		if last[r.index] == n && !live[r.index] {
			c.quarantined = append(c.quarantined, r)
		}
	}
	c.lines = len(log.lines)
	if rewrite || log.cut || c.lines > len(c.quarantined) {
		return c.compact()
	}
	return nil
}

// quarantineUnknown quarantines all indexes of a subnet from 1 to to, except those in records: the others may belong to
// a damaged record, or their release may be in the damaged log.
func (c *cursor) quarantineUnknown(subnet netip.Prefix, to address.Index, live map[address.Index]bool,
	now time.Time) error {
	known := maps.Clone(live)
	if known == nil {
		known = map[address.Index]bool{}
	}
	for _, r := range c.quarantined {
		known[r.index] = true
	}
	for i := address.Index(1); i <= to; i++ {
		a, ok := AddressIn(subnet, i)
		if !ok || a.Is4() && !subnet.Contains(a.Next()) { // the last address of an IPv4 subnet is never allocated
			break
		}
		if !known[i] {
			c.quarantined = append(c.quarantined, released{i, now})
		}
	}
	return c.compact()
}

// restart makes the cursor allocate from index 1 again, without the indexes in use or quarantined, because a subnet is
// too small to lose reserved indexes. This is safe: a reserved index that has no record and is not in the log was never
// used by a container.
func (c *cursor) restart(live map[address.Index]bool) {
	c.next, c.taken = 1, maps.Clone(live)
	if c.taken == nil {
		c.taken = map[address.Index]bool{}
	}
	for _, r := range c.quarantined {
		c.taken[r.index] = true
	}
	for i := range c.taken {
		c.top = max(c.top, i)
	}
}

func parseReleased(line string) (released, error) {
	var r released
	var at string
	if _, err := fmt.Sscanf(line, "%d %s", &r.index, &at); err != nil {
		return r, fmt.Errorf("%q is not an index and a time", line)
	}
	t, err := time.Parse(time.RFC3339, at)
	if err != nil {
		return r, err
	}
	if r.index == 0 || r.index > address.MaxIndex {
		return r, neverAllocated(r.index)
	}
	r.at = t
	if r.line() != line {
		return r, fmt.Errorf("%q is more than an index and a time", line)
	}
	return r, nil
}
