package servicemap

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// bed has the maps of services of a node, without programs.
type bed struct {
	*Tables
	host    *host.Host
	invalid int   // calls of invalidate
	fails   error // what invalidate returns
}

// newBed makes the maps; frontends is the capacity of the map of their numbers.
func newBed(t testing.TB, frontends uint32) *bed {
	t.Helper()
	spec, err := bpfobj.LoadSpec()
	must(t, err)
	b := &bed{host: &host.Host{}}
	o := &b.host.Objects
	for _, m := range []struct {
		name     string
		capacity uint32
		to       **ebpf.Map
	}{
		{bpfobj.PilasterMapPilSvcV1, 1000, &o.PilSvcV1},
		{bpfobj.PilasterMapPilSvcfrontsV1, frontends, &o.PilSvcfrontsV1},
		{bpfobj.PilasterMapPilSvcsetsV1, 1000, &o.PilSvcsetsV1},
		{bpfobj.PilasterMapPilSvcbacksV1, 1000, &o.PilSvcbacksV1},
		{bpfobj.PilasterMapPilSvcpeersV1, 1000, &o.PilSvcpeersV1},
		{bpfobj.PilasterMapPilExposedV1, 1000, &o.PilExposedV1},
		{bpfobj.PilasterMapPilExtargetsV1, 1000, &o.PilExtargetsV1},
		{bpfobj.PilasterMapPilMaglevV1, 1000, &o.PilMaglevV1},
		{bpfobj.PilasterMapPilExconnsV1, 1000, &o.PilExconnsV1},
	} {
		s := spec.Maps[m.name].Copy()
		s.MaxEntries, s.Pinning = m.capacity, ebpf.PinNone
		*m.to, err = ebpf.NewMap(s)
		must(t, err)
		t.Cleanup(func() { (*m.to).Close() })
	}
	b.restart()
	return b
}

// restart forgets what is not in the kernel, like a new agent.
func (b *bed) restart() {
	b.Tables = New(b.host, func() error { b.invalid++; return b.fails })
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func key(at string) dpapi.FrontendKey {
	return dpapi.FrontendKey{Address: netip.MustParseAddrPort(at), Protocol: 6}
}

var (
	web   = key("[fd70:696c:7300:7::1]:80")
	db    = key("[fd70:696c:7300:7::2]:5432")
	other = key("[fd70:696c:7300:8::1]:80") // of another tenant
)

// backendsOf returns backends of a port, each with its own addresses.
func backendsOf(port uint16, indices ...byte) (all []dpapi.Backend) {
	for _, i := range indices {
		plain, seen := netip.MustParseAddr("fd70:696c:6100:1::").As16(), netip.MustParseAddr("fd70:696c:6200::").As16()
		plain[15], seen[15] = i, i
		all = append(all, dpapi.Backend{Plain: netip.AddrFrom16(plain), Seen: netip.AddrFrom16(seen), Port: port})
	}
	return all
}

func frontendOf(k dpapi.FrontendKey, backends ...byte) dpapi.Frontend {
	return dpapi.Frontend{FrontendKey: k, Backends: backendsOf(8080, backends...)}
}

// contents is what the kernel has.
type contents struct {
	Services map[bpfobj.PilasterSvcKey]bpfobj.PilasterSvc
	Fronts   map[uint32]bpfobj.PilasterSvcFrontend
	Members  map[bpfobj.PilasterSvcMember]uint32 // without the counter
	Backs    map[uint32]bpfobj.PilasterSvcBackend
	Peers    map[netip.Addr]uint32
	Counter  uint32
}

func entries[K comparable, V any](t testing.TB, m *ebpf.Map) map[K]V {
	t.Helper()
	all := map[K]V{}
	must(t, bpfobj.ForEachEntry(m, func(k K, v V) { all[k] = v }))
	return all
}

func (b *bed) contents(t testing.TB) contents {
	t.Helper()
	o := &b.host.Objects
	c := contents{
		Services: entries[bpfobj.PilasterSvcKey, bpfobj.PilasterSvc](t, o.PilSvcV1),
		Fronts:   entries[uint32, bpfobj.PilasterSvcFrontend](t, o.PilSvcfrontsV1),
		Members:  entries[bpfobj.PilasterSvcMember, uint32](t, o.PilSvcsetsV1),
		Backs:    entries[uint32, bpfobj.PilasterSvcBackend](t, o.PilSvcbacksV1),
		Peers:    map[netip.Addr]uint32{},
	}
	for a, count := range entries[bpfobj.PilasterAddr, uint32](t, o.PilSvcpeersV1) {
		c.Peers[a.Addr()] = count
	}
	c.Counter = c.Members[counterKey]
	delete(c.Members, counterKey)
	return c
}

// highest returns the highest number that is in use.
func (c contents) highest() (n uint32) {
	for _, s := range c.Services {
		n = max(n, s.Frontend, s.Set)
	}
	for number := range c.Backs {
		n = max(n, number)
	}
	return n
}

// expect compares what the kernel has with what it should have.
func (c contents) expect(t testing.TB, when string, want contents) {
	t.Helper()
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%s: the kernel has\n%+v\nwant\n%+v", when, c, want)
	}
}

// TestRestart: the same frontends after a restart change no entry. A changed backend changes the numbers of nothing
// else. No number is used again.
func TestRestart(t *testing.T) {
	b := newBed(t, 1000)
	all := []dpapi.Frontend{frontendOf(web, 1, 2), frontendOf(db, 2, 3)}
	all[1].Draining = backendsOf(8080, 4)
	must(t, b.PutServices(all))
	before := b.contents(t)
	if len(before.Services) != 2 || len(before.Members) != 4 || len(before.Backs) != 5 || len(before.Peers) != 4 {
		t.Fatalf("%+v", before)
	}
	b.restart()
	must(t, b.PutServices(all))
	b.contents(t).expect(t, "after a restart", before)

	must(t, b.DeleteServices([]dpapi.FrontendKey{db}))
	b.restart()
	all[0].Backends = backendsOf(8080, 1, 5)
	must(t, b.PutServices(all))
	after := b.contents(t)
	was, is := before.Services[keyOf(web)], after.Services[keyOf(web)]
	if is.Frontend != was.Frontend || is.Set <= before.highest() {
		t.Errorf("a frontend %+v became %+v with another backend; highest number %d", was, is, before.highest())
	}
	if again := after.Services[keyOf(db)]; again.Frontend <= before.highest() || again.Set <= before.highest() {
		t.Errorf("a frontend that was deleted has numbers %+v again; highest number %d", again, before.highest())
	}
	for number, v := range after.Backs {
		had, known := before.Backs[number]
		kept := v.Frontend == was.Frontend && v.Plain.Addr() == backendsOf(0, 1)[0].Plain
		if known != kept || known && v != had || !known && number <= before.highest() {
			t.Errorf("backend %d is %+v, was %+v (%v)", number, v, had, known)
		}
	}
}

// TestNumbersStartAtTheClock: numbers of tables that were removed are not used again, as sessions may hold them.
func TestNumbersStartAtTheClock(t *testing.T) {
	b := newBed(t, 1000)
	begun := uint32(time.Now().Unix())
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1)}))
	c := b.contents(t)
	for number := range c.Fronts {
		if number <= begun || number > c.Counter {
			t.Errorf("the first number is %d, want more than the time %d, at most the counter %d", number, begun,
				c.Counter)
		}
	}
	if len(c.Fronts) != 1 {
		t.Errorf("%+v", c)
	}
}

// TestRepair: the first use removes what a crash has left, and nothing else.
func TestRepair(t *testing.T) {
	b := newBed(t, 1000)
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2)}))
	want := b.contents(t)
	o, n, stray := &b.host.Objects, want.highest(), backendsOf(80, 9)[0]
	must(t, o.PilSvcfrontsV1.Put(n+1, bpfobj.PilasterSvcFrontend{Key: keyOf(db)}))
	must(t, o.PilSvcbacksV1.Put(n+2, entryOf(stray, n+1, false)))
	must(t, o.PilSvcpeersV1.Put(bpfobj.ToAddr(stray.Plain), uint32(1)))
	must(t, o.PilSvcsetsV1.Put(bpfobj.PilasterSvcMember{Set: n + 3}, n+2))
	for _, v := range want.Services { // beyond the end of a set in use
		must(t, o.PilSvcsetsV1.Put(bpfobj.PilasterSvcMember{Set: v.Set, Index: v.Count}, n+2))
	}
	b.restart()
	_, err := b.Services()
	must(t, err)
	b.contents(t).expect(t, "after a crash", want)
}

// TestInvalidates: cached flows end once an address has become one of a backend, also if PutServices has failed in
// between, and only then.
func TestInvalidates(t *testing.T) {
	b := newBed(t, 2)
	expect := func(calls int, when string) {
		t.Helper()
		if b.invalid != calls {
			t.Errorf("%s: %d calls of invalidate, want %d", when, b.invalid, calls)
		}
		b.invalid = 0
	}
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1)}))
	expect(1, "a new backend")
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1), frontendOf(db, 1)}))
	expect(0, "a second frontend with the backend")

	// The maps have room for two frontends.
	if err := b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2), frontendOf(other, 3)}); err == nil ||
		!strings.Contains(err.Error(), other.Address.String()) {
		t.Fatalf("a frontend without room: %v", err)
	}
	expect(0, "a frontend without room")
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2)}))
	expect(1, "a backend that a failed call has added")

	b.fails = errors.New("no generation")
	before := b.contents(t).Services
	if err := b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2, 3)}); !errors.Is(err, b.fails) {
		t.Fatalf("invalidate failed, PutServices says %v", err)
	}
	expect(1, "it fails")
	if is := b.contents(t).Services; !reflect.DeepEqual(is, before) {
		t.Errorf("packets use a backend before cached flows ended: %+v, was %+v", is, before)
	}
	b.fails = nil
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2, 3)}))
	expect(1, "again")
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1, 2, 3)}))
	expect(0, "nothing new")
}

// TestAfterAnError: a call that fails leaves the other frontends as they were, and the next one leaves nothing of it.
func TestAfterAnError(t *testing.T) {
	b := newBed(t, 1)
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1)}))
	want := b.contents(t)
	if err := b.PutServices([]dpapi.Frontend{frontendOf(web, 2), frontendOf(db, 3)}); err == nil {
		t.Fatal("a frontend without room is no error")
	}
	if is := b.contents(t).Services; !reflect.DeepEqual(is, want.Services) {
		t.Errorf("after the error: %+v, was %+v", is, want.Services)
	}
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1)}))
	b.contents(t).expect(t, "with the old backend again", want)
}

// TestKeep: KeepServices deletes the frontends of a prefix that are not listed, with all they have.
func TestKeep(t *testing.T) {
	b := newBed(t, 1000)
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1), frontendOf(other, 2)}))
	want := b.contents(t)
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(db, 2, 3)}))
	b.restart()
	must(t, b.KeepServices(netip.MustParsePrefix("fd70:696c:7300:7::/64"), []dpapi.FrontendKey{web}))
	got := b.contents(t)
	want.Counter = got.Counter
	got.expect(t, "kept", want)
	must(t, b.KeepServices(netip.MustParsePrefix("fd70:696c:7300:8::/64"), nil))
	all, err := b.Services()
	must(t, err)
	if !slices.Equal(all, []dpapi.FrontendKey{web}) {
		t.Errorf("services %v, want %v", all, web)
	}
}

// TestFits: frontends that have no room are refused before anything changes; those that replace others need none.
func TestFits(t *testing.T) {
	b := newBed(t, 1000)
	must(t, b.PutServices([]dpapi.Frontend{frontendOf(web, 1)}))
	want := b.contents(t)
	many := make([]dpapi.Backend, MaxBackends)
	for i := range many {
		many[i] = backendsOf(uint16(i), byte(i>>16))[0]
	}
	fronts := make([]dpapi.Frontend, MaxFrontends)
	for i := range fronts {
		fronts[i].FrontendKey = db
		fronts[i].Address = netip.AddrPortFrom(db.Address.Addr(), uint16(i))
	}
	for name, refused := range map[string][]dpapi.Frontend{
		"backends":  {frontendOf(other, 1), {FrontendKey: db, Backends: many[1:], Draining: many[:1]}},
		"frontends": fronts,
	} {
		if err := b.PutServices(refused); !errors.Is(err, endpoint.ErrExhausted) {
			t.Errorf("too many %s: %v", name, err)
		}
		b.contents(t).expect(t, "too many "+name, want)
	}
	if err := b.fits(fronts[1:]); err != nil {
		t.Error(err)
	}
	if err := b.fits([]dpapi.Frontend{{FrontendKey: web, Backends: many}}); err != nil {
		t.Error(err)
	}
}

// TestLookup: what was put is read from the kernel, and what the programs have counted.
func TestLookup(t *testing.T) {
	b := newBed(t, 1000)
	want := frontendOf(web, 1, 2)
	want.Affinity, want.Draining = 3*time.Hour, backendsOf(9090, 1, 3)
	must(t, b.PutServices([]dpapi.Frontend{want, frontendOf(db)}))
	for range 2 {
		got, found, err := b.LookupService(web)
		must(t, err)
		for _, list := range [][]dpapi.Backend{got.Backends, got.Draining} {
			slices.SortFunc(list, func(a, b dpapi.Backend) int { return a.Plain.Compare(b.Plain) })
		}
		if !found || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v; want %+v", got, found, want)
		}
		b.restart()
	}
	if got, found, err := b.LookupService(db); err != nil || !found || len(got.Backends)+len(got.Draining) != 0 {
		t.Errorf("a frontend without backends: %+v, %v, %v", got, found, err)
	}
	if _, found, err := b.LookupService(other); err != nil || found {
		t.Errorf("a frontend that was never put: %v, %v", found, err)
	}
	for number, v := range b.contents(t).Fronts {
		if frontendKeyOf(v.Key) == web {
			v.Flows, v.Refused = 5, 6
			must(t, b.host.Objects.PilSvcfrontsV1.Put(number, v))
		}
	}
	counts, err := b.ServiceCounts()
	must(t, err)
	wanted := map[dpapi.FrontendKey]dpapi.ServiceCounts{web: {Flows: 5, Refused: 6}, db: {}}
	if !reflect.DeepEqual(counts, wanted) {
		t.Errorf("counts %v, want %v", counts, wanted)
	}
	must(t, b.DeleteServices([]dpapi.FrontendKey{web}))
	if _, found, err := b.LookupService(web); err != nil || found {
		t.Errorf("a frontend that was deleted: %v, %v", found, err)
	}
}
