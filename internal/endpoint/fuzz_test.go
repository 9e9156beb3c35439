package endpoint

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

// FuzzCursor: of what lies on disk, no index is given out that may be in use, and no line of the log is
// passed over in silence.
func FuzzCursor(f *testing.F) {
	log := "3 2026-11-01T00:00:00Z\n4 2026-11-01T00:00:01Z\n3 2026-11-01T00:05:00Z\n"
	for _, s := range []string{log, log[:len(log)-4], "", "0 2026-11-01T00:00:00Z\n", "9 2026-11-01T00:00:00Z\n", "3 2026-11-01T00:00:00Z junk\n",
		"3 2026-11-01T02:00:00+02:00\n", string(bytes.Repeat([]byte("3"), 1<<17)) + "\n" + log} {
		f.Add([]byte(`{"version": 1, "reserved": 8}`), []byte(s), uint32(4))
	}
	f.Add([]byte(`{"version": 1, "reserved": 16777215}`), []byte(log), uint32(16777215))
	f.Add([]byte(`{"version": 1, "reserved": 16777216}`), []byte(log), uint32(0))
	path := filepath.Join(f.TempDir(), "7-3")
	f.Fuzz(func(t *testing.T, file, log []byte, inUse uint32) {
		write(t, path+".json", file)
		write(t, path+".released", log)
		live := map[address.Index]bool{address.Index(inUse): true}
		c, err := loadCursor(path, live)
		if err != nil {
			return
		}
		last := map[string]string{}
		whole := log[:bytes.LastIndexByte(log, '\n')+1]
		for line := range bytes.Lines(whole) {
			index, _, _ := bytes.Cut(line, []byte(" "))
			last[string(index)] = string(line)
		}
		delete(last, fmt.Sprint(inUse))
		if len(c.resting) != len(last) {
			t.Fatalf("%d indexes rest, the log says %v", len(c.resting), last)
		}
		for _, r := range c.resting {
			if last[fmt.Sprint(r.index)] != r.line() || r.index == 0 || r.index > c.reserved {
				t.Fatalf("%+v rests, the log says %v", r, last)
			}
		}
		if c.next != c.reserved+1 || c.next > address.MaxIndex+1 || address.Index(inUse) >= c.next {
			t.Fatalf("next is %d, reserved %d, in use %d", c.next, c.reserved, inUse)
		}
		again, err := loadCursor(path, live)
		if err != nil || fmt.Sprint(again.resting) != fmt.Sprint(c.resting) {
			t.Fatalf("a second start has %+v, %v; the first had %+v", again, err, c)
		}
	})
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
