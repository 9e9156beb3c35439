package endpoint

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// A damaged file is set aside and named in the log and in the list of problems. The store opens, no index that was
// allocated before is allocated again, and the next start finds nothing damaged.
func TestDamagedFileIsSetAside(t *testing.T) {
	cutOff := func(b string) string { return b[:len(b)/2] }
	for name, c := range map[string]struct {
		file   string
		damage func(string) string
		lost   bool // the endpoint
	}{
		"record":        {"endpoints/1.json", cutOff, true},
		"record, empty": {"endpoints/1.json", func(string) string { return "" }, true},
		"cursor":        {"cursors/7-3.json", cutOff, false},
		"cursor below a record": {"cursors/7-3.json", func(string) string {
			return `{"version": 1, "reserved": 0}`
		}, false},
		"cursor beyond the last": {"cursors/7-3.json", func(string) string {
			return `{"version": 1, "reserved": 16777216}`
		}, false},
		"release log": {"cursors/7-3.released", func(b string) string { return "zz\n" + b }, false},
		"never allocated": {"cursors/7-3.released", func(b string) string {
			return "9999 2026-11-01T00:00:00Z\n" + b
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir, clock := t.TempDir(), newClock()
			s := open(t, dir, clock)
			used := map[address.Index]bool{}
			kept := allocate(t, s)
			used[kept] = true
			if err := s.Put(record(1, kept)); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				i := allocate(t, s)
				used[i] = true
				if err := s.ReleaseIndex(key, i); err != nil {
					t.Fatal(err)
				}
			}
			path := rewrite(t, filepath.Join(dir, c.file), c.damage)
			var log bytes.Buffer
			damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.NewTextHandler(&log, nil)), clock.now)
			again, err := OpenStore(StoreConfig{Dir: dir, Now: clock.now, Damages: damages})
			if err != nil {
				t.Fatal(err)
			}
			if aside, _ := filepath.Glob(path + ".damaged-*"); len(aside) != 1 {
				t.Errorf("set aside: got %v, want one file", aside)
			}
			if got := damages.Problems(); len(got) != 1 || !strings.Contains(got[0], path) {
				t.Errorf("got problems %q, want one with %s", got, path)
			}
			if got := log.String(); strings.Count(got, "level=ERROR") != 1 || !strings.Contains(got, path) {
				t.Errorf("got log %q, want one error with %s", got, path)
			}
			if _, ok := again.Get(1); ok == c.lost || again.IsDamaged(1) != c.lost {
				t.Errorf("endpoint 1: got a record: %v, damaged: %v; want lost: %v", ok, again.IsDamaged(1), c.lost)
			}
			third, err := OpenStore(StoreConfig{Dir: dir, Now: clock.now})
			if err != nil {
				t.Fatalf("the next start: %v", err)
			}
			for _, s := range []*Store{again, third} {
				for range 5 {
					if i := allocate(t, s); used[i] {
						t.Errorf("index %d was allocated twice", i)
					}
				}
			}
		})
	}
}

// A subnet has no room to skip indexes. Instead, the indexes that a damaged record may have are quarantined.
func TestSubnetOfDamagedRecord(t *testing.T) {
	dir, clock := t.TempDir(), newClock()
	s := open(t, dir, clock)
	subnet := CursorKey{Tenant: 7, Subnet: netip.MustParsePrefix("10.0.3.0/29")}
	first := func(from address.Index) (address.Index, error) {
		if from > 6 {
			return 0, address.ErrExhausted
		}
		return max(from, 1), nil
	}
	for range 2 {
		if _, err := s.AllocateIndex(subnet, first); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "endpoints/1.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), clock.now)
	for range 2 { // the second start finds nothing damaged
		s, err := OpenStore(StoreConfig{Dir: dir, Now: clock.now, Damages: damages})
		if err != nil {
			t.Fatal(err)
		}
		if i, err := s.AllocateIndex(subnet, first); err != nil || i < 3 {
			t.Errorf("got index %d, %v; want one above 2", i, err)
		}
	}
}

// A file of a later build is not damaged.
func TestLaterFileIsNotSetAside(t *testing.T) {
	dir, clock := t.TempDir(), newClock()
	s := open(t, dir, clock)
	if err := s.Put(record(1, allocate(t, s))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "endpoints/1.json")
	for _, text := range []string{`{"version": 99, "later": 1}`, `{"version": 1, "later": 1}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), clock.now)
		if _, err := OpenStore(StoreConfig{Dir: dir, Now: clock.now, Damages: damages}); err == nil {
			t.Errorf("%s: the store opened, want an error", text)
		}
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}
