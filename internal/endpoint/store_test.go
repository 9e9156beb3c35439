package endpoint

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// clock is a clock that the test sets.
type clock struct{ t time.Time }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func newClock() *clock { return &clock{time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)} }

func open(t testing.TB, dir string, c *clock) *Store {
	t.Helper()
	s, err := OpenStore(StoreConfig{Dir: dir, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var key = CursorKey{Tenant: 7, App: 3}

func record(id ID, i address.Index) Record {
	plain := address.Plain{
		Node:   netip.MustParsePrefix("fd70:696c:6100:1::/64"),
		Tenant: key.Tenant,
		App:    key.App,
		Index:  i,
	}.Addr()
	return Record{
		ID: id, ContainerID: "c" + string(rune('a'+id)), Interface: "eth0", Netns: "/run/netns/x", CNINetwork: "net",
		Pod:    "ns/p",
		Tenant: "blue", TenantID: key.Tenant, App: key.App, Labels: map[string]string{"app": "web"}, State: Active,
		Attachments: []Attachment{{
			Network: "netpila", Plaintext: plain, Address: netip.MustParseAddr("fc00::1"),
			Gateway: netip.MustParseAddr("fe80::1"),
			Routes:  []netip.Prefix{netip.MustParsePrefix("fc00::/8")},
		}},
		Device: Device{
			"veth",
			"pil1",
			5,
			net.HardwareAddr{2, 0, 0, 0, 0, 1},
			net.HardwareAddr{2, 0, 0, 0, 0, 2},
			1500,
		},
		Created: time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC),
	}
}

func TestRecords(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	i := allocate(t, s)
	want := record(1, i)
	other, preparing := record(2, allocate(t, s)), record(3, allocate(t, s))
	preparing.State, preparing.Device = Preparing, Device{}
	for _, r := range []Record{want, other} {
		if err := s.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Hold(preparing); err != nil {
		t.Fatal(err)
	}
	if got := s.List(); len(got) != 3 {
		t.Fatalf("got %+v in memory, want three records", got)
	}
	s = open(t, dir, c)
	if got := s.List(); !reflect.DeepEqual(got, []Record{want, other}) {
		t.Fatalf("read\n%+v, want\n%+v", got, []Record{want, other})
	}
	if got, ok := s.Find(want.ContainerID, "eth0"); !ok || got.ID != 1 {
		t.Errorf("found %+v, %v; want endpoint 1", got, ok)
	}
	if err := s.Delete(1); err != nil {
		t.Fatal(err)
	}
	if got := open(t, dir, c).List(); len(got) != 1 || got[0].ID != 2 {
		t.Errorf("after a delete: got %+v, want endpoint 2", got)
	}
}

// TestRecordVersions: a record has the version of what it uses. The file of a record without a locator is the one that
// older builds write and read, byte for byte.
func TestRecordVersions(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	plain, changed, located, keyed := record(1, 1), record(2, 2), record(3, 3), record(4, 4)
	changed.AppNow = 9
	located.Attachments[0].Locator = netip.MustParsePrefix("fd70:696c:6200:1::/64")
	keyed.AddressKey, keyed.Attachments[0].Sequence = "db-0", 2
	leaves, addressed, inside := record(5, 5), record(6, 6), record(7, 7)
	leaves.Attachments[0].Routes = append(leaves.Attachments[0].Routes, DefaultRoute)
	addressed.Attachments[0].Egress = netip.MustParseAddr("fd70:696c:6100:1:0:ff:101:1")
	unready := record(8, 8)
	unready.Conditions.NotReady = true
	publishes := record(9, 9)
	publishes.HostPorts = []HostPort{
		{80, 8080, "TCP", netip.Addr{}}, {53, 53, "UDP", netip.MustParseAddr("2001:db8::1")},
	}
	// the default route of a network with tunnels leads to the tenant's containers, also in older builds
	inside.Attachments[0].Plaintext, inside.Attachments[0].Routes = netip.Addr{}, []netip.Prefix{DefaultRoute}
	for id, want := range map[ID]struct {
		Record
		version int
	}{
		1: {plain, 1}, 2: {changed, 4}, 3: {located, 5}, 4: {keyed, 6}, 5: {leaves, 8}, 6: {addressed, 8},
		7: {inside, 2}, 8: {unready, 9}, 9: {publishes, 10},
	} {
		if err := s.Put(want.Record); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(s.RecordPath(id))
		if err != nil || !strings.Contains(string(b), fmt.Sprintf(`"version": %d`, want.version)) {
			t.Errorf("endpoint %d: %s, %v; want version %d", id, b, err, want.version)
		}
		if got, err := DecodeRecord(b); err != nil || !reflect.DeepEqual(got, want.Record) {
			t.Errorf("endpoint %d was read as %+v, %v; want %+v", id, got, err, want.Record)
		}
	}
	b, err := os.ReadFile(s.RecordPath(1))
	if err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(filepath.Join("testdata", "version1.json"))
	if err != nil || string(b) != string(old) {
		t.Errorf("written\n%s, by older builds\n%s, %v", b, old, err)
	}
}

func TestPutRefusesInvalidRecords(t *testing.T) {
	s := open(t, t.TempDir(), newClock())
	valid := record(1, 1).Attachments[0]
	for name, change := range map[string]func(*Attachment){
		"no network":      func(a *Attachment) { a.Network = "" },
		"no address":      func(a *Attachment) { a.Address = netip.Addr{} },
		"IPv4 in IPv6":    func(a *Attachment) { a.Address = netip.MustParseAddr("::ffff:10.0.0.1") },
		"gateway of IPv4": func(a *Attachment) { a.Gateway = netip.MustParseAddr("169.254.1.1") },
		"route of IPv4": func(a *Attachment) {
			a.Routes = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		},
		"plaintext of IPv4":      func(a *Attachment) { a.Plaintext = netip.MustParseAddr("10.0.0.1") },
		"not of its subnet":      func(a *Attachment) { a.Subnet = netip.MustParsePrefix("2001:db8::/64") },
		"subnet not masked":      func(a *Attachment) { a.Subnet = netip.PrefixFrom(a.Address, 64) },
		"sequence without a key": func(a *Attachment) { a.Sequence = 2 },
		"locator of 63 bits":     func(a *Attachment) { a.Locator = netip.MustParsePrefix("fd00::/63") },
		"locator of IPv4":        func(a *Attachment) { a.Locator = netip.MustParsePrefix("10.0.0.0/8") },
		"locator not masked":     func(a *Attachment) { a.Locator = netip.MustParsePrefix("fd00::1/64") },
		"negative overhead":      func(a *Attachment) { a.Overhead = -1 },
		"more overhead than MTU": func(a *Attachment) { a.Overhead = 1500 },
	} {
		r, a := record(1, 1), valid
		change(&a)
		r.Attachments = []Attachment{a}
		if err := s.Put(r); err == nil {
			t.Errorf("%s: %+v was written, want an error", name, a)
		}
	}
	if len(s.List()) != 0 {
		t.Error("a refused record is in memory")
	}
}

// TestNimitzRecords: addresses of a subnet of the node, and addresses that the cluster allocates. Two tenants may have
// the same address.
func TestNimitzRecords(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	subnet := netip.MustParsePrefix("10.0.3.0/24")
	of := CursorKey{Tenant: 7, Subnet: subnet}
	first, err := s.AllocateIndex(of, every)
	if err != nil {
		t.Fatal(err)
	}
	addr, ok := AddressIn(subnet, first)
	if !ok {
		t.Fatal(first)
	}
	a := Attachment{
		Network:  "nimitz",
		Address:  addr,
		Gateway:  netip.MustParseAddr("169.254.1.1"),
		Routes:   []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")},
		Subnet:   subnet,
		Overhead: 70,
	}
	r, other := record(1, 1), record(2, 1)
	r.Attachments = []Attachment{a}
	a.Subnet = netip.Prefix{}
	other.TenantID++
	other.Attachments = []Attachment{a}
	for _, r := range []Record{r, other} {
		if err := s.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	for n, version := range map[string]string{"1": "2", "2": "2", "3": "1"} {
		if err := s.Put(record(3, allocate(t, s))); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, "endpoints", n+".json"))
		if err != nil || !strings.Contains(string(b), `"version": `+version) {
			t.Errorf("record %s: got %s %v, want version %s", n, b, err, version)
		}
	}
	if err := s.Delete(3); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, c)
	if got := s.List(); !reflect.DeepEqual(got, []Record{r, other}) {
		t.Fatalf("read\n%+v, want\n%+v", got, []Record{r, other})
	}
	if key, i, allocated := r.AllocatedIndex(r.Attachments[0]); key != of || i != first || !allocated {
		t.Errorf("%v: got index %d of %v, want %d of %v", addr, i, key, first, of)
	}
	if second, err := s.AllocateIndex(of, every); err != nil || second <= first {
		t.Errorf("allocated %d after %d, %v; want a larger index", second, first, err)
	}
	other.TenantID--
	if err := s.Put(other); err != nil {
		t.Fatal(err)
	}
	var corrupt *statefile.CorruptError
	if _, err := OpenStore(StoreConfig{Dir: dir}); !errors.As(err, &corrupt) ||
		!strings.Contains(err.Error(), addr.String()) {
		t.Errorf("two endpoints of a tenant with one address: got error %v, want a CorruptError with it", err)
	}
}

func TestAddressIn(t *testing.T) {
	for _, s := range []string{"10.0.3.0/24", "10.0.0.0/8", "10.0.3.240/28", "255.255.255.0/24", "2001:db8:0:7::/64",
		"fd00:1::ff00/120"} {
		subnet := netip.MustParsePrefix(s)
		for _, i := range []address.Index{0, 1, 15, 16, 255, 256, 65535, address.MaxIndex} {
			a, ok := AddressIn(subnet, i)
			fits := uint64(i)>>min(subnet.Addr().BitLen()-subnet.Bits(), 32) == 0
			if ok != fits || ok && indexIn(subnet, a) != i {
				t.Errorf("index %d of %v: got address %v (%v) with index %d", i, subnet, a, ok, indexIn(subnet, a))
			}
		}
	}
}

func TestFailedOpenReturnsNoStore(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, LastIDFile), 0o700); err != nil {
		t.Fatal(err)
	}
	if s, err := OpenStore(StoreConfig{Dir: dir}); err == nil || s != nil {
		t.Errorf("got store %v, error %v; want only an error", s, err)
	}
}

func TestCorruptFiles(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir string) string{
		"record cut off": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "endpoints/1.json"), func(b string) string { return b[:len(b)/2] })
		},
		"record of a later version": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "endpoints/1.json"), func(b string) string {
				return strings.Replace(b, `"version": 1`, fmt.Sprintf(`"version": %d`, recordVersion+1), 1)
			})
		},
		"record with an unknown state": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "endpoints/1.json"),
				func(b string) string { return strings.Replace(b, `"active"`, `"asleep"`, 1) })
		},
		"record under another id": func(t *testing.T, dir string) string {
			to := filepath.Join(dir, "endpoints/9.json")
			if err := os.Rename(filepath.Join(dir, "endpoints/1.json"), to); err != nil {
				t.Fatal(err)
			}
			return to
		},
		"two records with one address": func(t *testing.T, dir string) string {
			b, err := os.ReadFile(filepath.Join(dir, "endpoints/1.json"))
			if err != nil {
				t.Fatal(err)
			}
			to := filepath.Join(dir, "endpoints/2.json")
			if err := os.WriteFile(to, []byte(strings.Replace(string(b), `"id": 1`, `"id": 2`, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			return to
		},
		"cursor empty": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "cursors/7-3.json"), func(string) string { return "" })
		},
		"cursor below a record": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "cursors/7-3.json"),
				func(string) string { return `{"version": 1, "reserved": 0}` })
		},
		"cursor beyond the last index": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "cursors/7-3.json"),
				func(string) string { return `{"version": 1, "reserved": 16777216}` })
		},
		"cursor missing, with a record": func(t *testing.T, dir string) string {
			return remove(t, filepath.Join(dir, "cursors/7-3.json"))
		},
		"cursor with an invalid name": func(t *testing.T, dir string) string {
			path := filepath.Join(dir, "cursors/blue.json")
			if err := os.WriteFile(path, []byte(`{"version": 1, "reserved": 5}`), 0o600); err != nil {
				t.Fatal(err)
			}
			return path
		},
		"invalid line in the release log": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "cursors/7-3.released"), func(b string) string { return "zz\n" + b })
		},
		"release of an index never allocated": func(t *testing.T, dir string) string {
			return rewrite(t, filepath.Join(dir, "cursors/7-3.released"),
				func(b string) string { return "16777215 2026-11-01T00:00:00Z\n" + b })
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, c := t.TempDir(), newClock()
			s := open(t, dir, c)
			if err := s.Put(record(1, allocate(t, s))); err != nil {
				t.Fatal(err)
			}
			if err := s.ReleaseIndex(key, allocate(t, s)); err != nil {
				t.Fatal(err)
			}
			path := damage(t, dir)
			_, err := OpenStore(StoreConfig{Dir: dir, Now: c.now})
			var corrupt *statefile.CorruptError
			if !errors.As(err, &corrupt) || corrupt.Path != path {
				t.Fatalf("got error %v, want a CorruptError with %s", err, path)
			}
		})
	}
}

// A release log without its cursor file is an error: the cursor would start from 1 again.
func TestMissingCursorWithReleaseLog(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	if err := s.ReleaseIndex(key, allocate(t, s)); err != nil {
		t.Fatal(err)
	}
	path := remove(t, filepath.Join(dir, "cursors/7-3.json"))
	_, err := OpenStore(StoreConfig{Dir: dir, Now: c.now})
	var corrupt *statefile.CorruptError
	if !errors.As(err, &corrupt) || corrupt.Path != path {
		t.Fatalf("got error %v, want a CorruptError with %s", err, path)
	}
}

func rewrite(t *testing.T, path string, change func(string) string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(change(string(b))), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func remove(t *testing.T, path string) string {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// After a crash, the next process finds a removal that has begun. An older build ignores its record.
func TestMark(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	r := record(1, allocate(t, s))
	if err := s.Put(r); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Mark(r); err != nil {
			t.Fatal(err)
		}
		if got, ok := s.Get(1); !ok || got.State != Deleting {
			t.Errorf("after Mark: got %+v, want state deleting", got)
		}
	}
	again := open(t, dir, c)
	if seen := Peek(dir); len(seen) != 1 {
		t.Errorf("Peek returned %v, want one record", seen)
	}
	if got, ok := again.Get(1); !ok || got.State != Deleting || !reflect.DeepEqual(got.Attachments, r.Attachments) {
		t.Errorf("after a crash: got %+v, %v; want state deleting", got, ok)
	}
	second := record(1, allocate(t, again))
	if err := again.Put(second); err != nil { // as by an older build, which ignores marked records
		t.Fatal(err)
	}
	if got, _ := open(t, dir, c).Get(1); got.State != Active {
		t.Errorf("endpoint with the id of a marked one: got %+v, want state active", got)
	}
	if err := again.Mark(second); err != nil {
		t.Fatal(err)
	}
	if err := again.Delete(1); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, recordsFolder)); err != nil || len(left) > 0 {
		t.Errorf("got files %v, %v; want none", left, err)
	}
	if err := again.Mark(record(2, 1)); err != nil { // never written
		t.Error(err)
	}
}
