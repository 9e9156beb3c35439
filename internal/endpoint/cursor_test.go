package endpoint

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
)

// every finds each index. sparse finds one in 64, up to last, like a cipher with a private prefix.
func every(from address.Index) (address.Index, error) { return from, nil }

func sparse(last address.Index) func(address.Index) (address.Index, error) {
	return func(from address.Index) (address.Index, error) {
		if i := (from + 63) / 64 * 64; i <= last {
			return i, nil
		}
		return 0, address.ErrExhausted
	}
}

func allocate(t testing.TB, s *Store) address.Index {
	t.Helper()
	i, err := s.AllocateIndex(key, every)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// NP1, §6.1: no index is allocated twice, also if the agent crashes at any time. The test simulates a crash: it opens
// the store again, so only the state on disk remains.
func TestNoIndexIsAllocatedTwice(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		dir, c := t.TempDir(), newClock()
		s := open(t, dir, c)
		held := map[address.Index]ID{}              // allocated, and in a record
		releasedAt := map[address.Index]time.Time{} // by the last ReleaseIndex that returned
		var nextID ID
		find := sparse(64 * 200)
		for range 300 {
			switch n := rng.IntN(100); {
			case n < 50:
				i, err := s.AllocateIndex(key, find)
				if errors.Is(err, ErrExhausted) {
					c.advance(MinQuarantine / 2)
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if id, taken := held[i]; taken {
					t.Fatalf("seed %d: index %d allocated again while endpoint %d holds it", seed, i, id)
				}
				if at, ok := releasedAt[i]; ok && c.t.Sub(at) < MinQuarantine {
					t.Fatalf("seed %d: index %d allocated again after %v", seed, i, c.t.Sub(at))
				}
				if n < 5 {
					// A crash or failure before the record was written may lose the index.
					continue
				}
				nextID++
				if err := s.Put(record(nextID, i)); err != nil {
					t.Fatal(err)
				}
				held[i] = nextID
			case n < 85:
				for i, id := range held {
					if err := s.ReleaseIndex(key, i); err != nil {
						t.Fatal(err)
					}
					releasedAt[i] = c.t
					if rng.IntN(4) == 0 { // crash between the two steps: the record still has the index
						s = open(t, dir, c)
						if err := s.ReleaseIndex(key, i); err != nil {
							t.Fatal(err)
						}
					}
					if err := s.Delete(id); err != nil {
						t.Fatal(err)
					}
					delete(held, i)
					break
				}
			case n < 92:
				s = open(t, dir, c) // crash
			case n < 94:
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open(t, dir, c)
			default:
				c.advance(time.Duration(rng.IntN(int(MinQuarantine))))
			}
		}
	}
}

func TestQuarantineOrder(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	find := sparse(64 * 3)
	for want := address.Index(64); want <= 192; want += 64 {
		if i, err := s.AllocateIndex(key, find); err != nil || i != want {
			t.Fatalf("allocated %d, %v; want %d", i, err, want)
		}
	}
	for _, i := range []address.Index{128, 64, 192} {
		if err := s.ReleaseIndex(key, i); err != nil {
			t.Fatal(err)
		}
		c.advance(time.Minute)
	}
	if _, err := s.AllocateIndex(key, find); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "2m0s") {
		t.Fatalf("with all quarantined: got error %v, want ErrExhausted with 2m0s", err)
	}
	c.advance(2 * time.Minute)
	s = open(t, dir, c) // the order is on disk too
	for _, want := range []address.Index{128, 64, 192} {
		if i, err := s.AllocateIndex(key, find); err != nil || i != want {
			t.Fatalf("allocated %d, %v; want %d, which was released first", i, err, want)
		}
		c.advance(time.Minute)
	}
	if _, err := s.AllocateIndex(key, find); !errors.Is(err, ErrExhausted) {
		t.Fatalf("with all in use: got error %v, want ErrExhausted", err)
	}
}

func TestUnusedIndexesBeforeReleasedOnes(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), c)
	first := allocate(t, s)
	if err := s.ReleaseIndex(key, first); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Hour)
	if i := allocate(t, s); i == first {
		t.Fatalf("allocated the released index %d, want one that was never used", i)
	}
}

func TestCloseReleasesReservedIndexes(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	last := allocate(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, c)
	if i := allocate(t, s); i != last+1 {
		t.Fatalf("after a clean stop allocated %d, want %d", i, last+1)
	}
	s = open(t, dir, c) // as after a crash
	if i := allocate(t, s); i != last+2+reserveAhead {
		t.Fatalf("after a crash allocated %d, want %d, beyond the reserved block", i, last+2+reserveAhead)
	}
}

// A power failure may leave part of the log's last line. That release was not acknowledged.
func TestIncompleteReleaseLog(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	a, b := allocate(t, s), allocate(t, s)
	for _, i := range []address.Index{a, b} {
		if err := s.ReleaseIndex(key, i); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "cursors/7-3.released")
	rewrite(t, path, func(b string) string { return b[:len(b)-5] })
	s = open(t, dir, c)
	if err := s.ReleaseIndex(key, b); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || strings.Count(string(text), "\n") != 2 {
		t.Fatalf("log after the repair: %q, %v", text, err)
	}
	open(t, dir, c) // fails if the log is invalid
}

// A full disk may write part of a line. Lines that are appended when there is room again must be separate.
func TestReleaseLogOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, c := t.TempDir(), newClock()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	s := open(t, dir, c)
	var allocated []address.Index
	for range 1000 {
		allocated = append(allocated, allocate(t, s))
	}
	released := 0
	release := func() error {
		err := s.ReleaseIndex(key, allocated[released])
		released++
		return err
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	for {
		if err := release(); err != nil {
			if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "make room on the disk of "+dir) {
				t.Error(err)
			}
			break
		}
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	open(t, dir, c)
}

func TestReleaseLogStaysShort(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	find := sparse(64)
	path := filepath.Join(dir, "cursors/7-3.released")
	for range compactAbove + 100 {
		i, err := s.AllocateIndex(key, find)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.ReleaseIndex(key, i); err != nil {
			t.Fatal(err)
		}
		c.advance(MinQuarantine)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(b), "\n"); lines > compactAbove/2 {
		t.Errorf("after %d releases of one index, the log has %d lines, want at most %d",
			compactAbove+100, lines, compactAbove/2)
	}
}

func TestConcurrentAllocations(t *testing.T) {
	s := open(t, t.TempDir(), newClock())
	const each = 50
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[CursorKey]map[address.Index]bool{}
	for n := range 8 {
		k := CursorKey{Tenant: 7, App: address.AppID(n % 2)}
		wg.Go(func() {
			for range each {
				i, err := s.AllocateIndex(k, every)
				mu.Lock()
				if seen[k] == nil {
					seen[k] = map[address.Index]bool{}
				}
				if err != nil || seen[k][i] {
					t.Errorf("%v: allocated %d, %v; allocated before %v", k, i, err, seen[k][i])
				}
				seen[k][i] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}
