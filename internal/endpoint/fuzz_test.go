package endpoint

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/fuzzmutate"
)

// FuzzCursor: for any content of its files, a cursor allocates no index that may be in use, and ignores no line of the
// log.
func FuzzCursor(f *testing.F) {
	log := "3 2026-11-01T00:00:00Z\n4 2026-11-01T00:00:01Z\n3 2026-11-01T00:05:00Z\n"
	for _, s := range []string{log, log[:len(log)-4], "", "0 2026-11-01T00:00:00Z\n", "9 2026-11-01T00:00:00Z\n",
		"3 2026-11-01T00:00:00Z junk\n",
		"3 2026-11-01T02:00:00+02:00\n", string(bytes.Repeat([]byte("3"), 1<<17)) + "\n" + log} {
		f.Add([]byte(`{"version": 1, "reserved": 8}`), []byte(s), uint32(4))
	}
	f.Add([]byte(`{"version": 1, "reserved": 16777215}`), []byte(log), uint32(16777215))
	f.Add([]byte(`{"version": 1, "reserved": 16777216}`), []byte(log), uint32(0))
	path := filepath.Join(f.TempDir(), "7-3")
	s := &Store{now: time.Now}
	f.Fuzz(func(t *testing.T, file, log []byte, inUse uint32) {
		write(t, path+".json", file)
		write(t, path+".released", log)
		live := map[address.Index]bool{address.Index(inUse): true}
		c, err := s.loadCursor(CursorKey{Tenant: 7, App: 3}, path, live, true)
		if err != nil {
			return
		}
		last := map[string]string{}
		complete := log[:bytes.LastIndexByte(log, '\n')+1]
		for line := range bytes.Lines(complete) {
			index, _, _ := bytes.Cut(line, []byte(" "))
			last[string(index)] = string(line)
		}
		delete(last, fmt.Sprint(inUse))
		if len(c.quarantined) != len(last) {
			t.Fatalf("%d indexes are quarantined, want %v", len(c.quarantined), last)
		}
		for _, r := range c.quarantined {
			if last[fmt.Sprint(r.index)] != r.line() || r.index == 0 || r.index > c.reserved {
				t.Fatalf("%+v is quarantined, want %v", r, last)
			}
		}
		if c.next != c.reserved+1 || c.next > address.MaxIndex+1 || address.Index(inUse) >= c.next {
			t.Fatalf("next is %d with %d reserved and %d in use", c.next, c.reserved, inUse)
		}
		again, err := s.loadCursor(CursorKey{Tenant: 7, App: 3}, path, live, true)
		if err != nil || fmt.Sprint(again.quarantined) != fmt.Sprint(c.quarantined) {
			t.Fatalf("loaded again: got %+v, %v; want %+v", again, err, c)
		}
	})
}

// FuzzDecodeRecord: an accepted record is complete and has all content of the file. Written and read again, it is the
// same.
func FuzzDecodeRecord(f *testing.F) {
	var good []string
	for _, r := range []Record{record(1, 5), record(MaxID, address.MaxIndex)} {
		text, err := json.Marshal(recordFile{recordVersion, r})
		if err != nil {
			f.Fatal(err)
		}
		good = append(good, string(text))
		f.Add(text, fuzzmutate.Nothing)
		f.Add(bytes.Replace(text, []byte("02:00:00:00:00:01"), nil, 1), fuzzmutate.Nothing)
		f.Add(bytes.Replace(text, []byte("fc00::1"), []byte("fc00::1%eth0"), 1), fuzzmutate.Nothing)
		f.Add(bytes.Replace(text, []byte("fc00::1"), []byte("::ffff:192.0.2.1"), 1), fuzzmutate.Nothing)
	}
	f.Add([]byte(`{"version": 1, "endpoint": {}}`), fuzzmutate.Nothing)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text, script []byte) {
		text = fuzzmutate.JSON(text, script, good...)
		r, err := DecodeRecord(text)
		if err != nil {
			return
		}
		checkRecord(t, r)
		var decoded struct {
			Endpoint struct {
				ID     uint64
				Device struct{ HostMac, ContainerMac string }
			}
		}
		if err := json.Unmarshal(text, &decoded); err != nil || decoded.Endpoint.ID != uint64(r.ID) ||
			!strings.EqualFold(digits(decoded.Endpoint.Device.HostMac), digits(r.Device.HostMAC.String())) ||
			!strings.EqualFold(digits(decoded.Endpoint.Device.ContainerMac), digits(r.Device.ContainerMAC.String())) {
			t.Fatalf("%s was read as %+v, %v", text, r, err)
		}
		// An accepted record can be written, and read again without a change.
		s := open(t, dir, newClock())
		defer os.RemoveAll(filepath.Join(dir, "endpoints"))
		if err := s.Put(r); err != nil {
			t.Fatalf("Put of an accepted record: %v", err)
		}
		written, err := os.ReadFile(s.RecordPath(r.ID))
		if err != nil {
			t.Fatal(err)
		}
		back, err := DecodeRecord(written)
		if err != nil {
			t.Fatalf("the written record is refused: %v\n%s", err, written)
		}
		if !reflect.DeepEqual(normal(back), normal(r)) {
			t.Fatalf("read %+v, want %+v", back, r)
		}
	})
}

// checkRecord checks what callers of DecodeRecord rely on.
func checkRecord(t *testing.T, r Record) {
	t.Helper()
	if r.ID < 1 || r.ID > 65535 || r.TenantID < 1 || r.TenantID > 1<<24-1 || r.App >= 0xff00 ||
		len(r.Attachments) == 0 {
		t.Fatalf("accepted %+v", r)
	}
	for _, a := range r.Attachments {
		for _, addr := range []netip.Addr{a.Plaintext, a.Address, a.Gateway} {
			if again, err := address.Parse(addr.String()); err != nil || again != addr {
				t.Fatalf("accepted the address %v: %v", addr, err)
			}
		}
		if b := a.Plaintext.As16(); uint32(b[8])<<16|uint32(b[9])<<8|uint32(b[10]) != uint32(r.TenantID) ||
			uint16(b[11])<<8|uint16(b[12]) != uint16(r.App) {
			t.Fatalf("address %v, want tenant %d and app %d in it", a.Plaintext, r.TenantID, r.App)
		}
	}
}

// digits returns the digits of a MAC in any of its formats.
func digits(mac string) string { return strings.NewReplacer(":", "", "-", "", ".", "").Replace(mac) }

// normal makes empty and missing lists equal, which JSON does not distinguish.
func normal(r Record) Record {
	if len(r.Labels) == 0 {
		r.Labels = nil
	}
	for i := range r.Attachments {
		if len(r.Attachments[i].Routes) == 0 {
			r.Attachments[i].Routes = nil
		}
	}
	if r.Created.IsZero() {
		r.Created = time.Time{}
	}
	r.Created = r.Created.UTC()
	return r
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
