package egress

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	node    = netip.MustParsePrefix("fd70:696c:6100:3::/64")
	private = netip.MustParsePrefix("fc00::/8")
	toAny   = netip.MustParsePrefix("fd70:696c:7300::/40") // to all services
	direct  = tenant.Tenant{Name: "blue", Egress: []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true}}}
	gateway = tenant.Tenant{Name: "blue", Egress: []tenant.EgressRule{
		{To: endpoint.DefaultRoute, Allow: true, Via: []tenant.EgressGateway{{Node: "n7"}}},
	}}
	plain = endpoint.Attachment{Network: tenant.Netpila, Routes: []netip.Prefix{private}}
)

// bed has addresses on a disk that outlives them.
type bed struct {
	*Addresses
	t      *testing.T
	dir    string
	now    time.Time
	draws  []address.Index // the next ones; then all others in turn
	next   address.Index
	max    int
	plan   address.Plan
	logged bytes.Buffer
}

func newBed(t *testing.T) *bed {
	b := &bed{t: t, dir: t.TempDir(), now: time.Unix(1e9, 0).UTC(), next: tenant.FirstEgressIndex,
		plan: address.DefaultPlan()}
	b.reopen()
	return b
}

func (b *bed) reopen(records ...endpoint.Record) {
	b.t.Helper()
	var err error
	if b.Addresses, err = Open(Config{
		Dir: b.dir, Plan: b.plan, Node: node, Records: records, Now: func() time.Time { return b.now }, MaxLog: b.max,
		Log: slog.New(slog.NewTextHandler(&b.logged, nil)),
		Pick: func() address.Index {
			if len(b.draws) > 0 {
				i := b.draws[0]
				b.draws = b.draws[1:]
				return i
			}
			b.next++
			return b.next
		},
	}); err != nil {
		b.t.Fatal(err)
	}
}

// record is an endpoint of tenant blue with an egress address; the zero Addr: without one.
func record(container string, addr netip.Addr) endpoint.Record {
	at := plain
	at.Egress = addr
	return endpoint.Record{
		ContainerID: container, Interface: "eth0", Pod: "shop/" + container, Tenant: "blue",
		Attachments: []endpoint.Attachment{at},
	}
}

func (b *bed) give(container string) netip.Addr {
	b.t.Helper()
	at, err := b.Settle(direct, record(container, netip.Addr{}), plain)
	if err != nil {
		b.t.Fatal(err)
	}
	return at.Egress
}

func (b *bed) release(addr netip.Addr) {
	b.t.Helper()
	if err := b.Release(addr); err != nil {
		b.t.Fatal(err)
	}
}

// who returns the containers that had an address at a time.
func (b *bed) who(addr netip.Addr, at time.Time) (all []string) {
	b.t.Helper()
	had, _, err := b.Find(addr)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, e := range had {
		if e.Had(at) {
			all = append(all, e.Container)
		}
	}
	return all
}

// An attachment has the route to services, the default route if its tenant may leave or if it has a host port, and an
// address if packets leave at this node.
func TestSettle(t *testing.T) {
	b := newBed(t)
	r := record("c1", netip.Addr{})
	is := plain
	for i, step := range []struct {
		t           tenant.Tenant
		ports       []endpoint.HostPort
		route, addr bool
	}{
		{tenant.Tenant{}, nil, false, false},
		{gateway, nil, true, false},
		{direct, nil, true, true},
		{gateway, nil, true, false},
		{direct, nil, true, true},
		{tenant.Tenant{Egress: []tenant.EgressRule{{To: endpoint.DefaultRoute}}}, nil, false, false},
		{tenant.Tenant{}, []endpoint.HostPort{{Host: 80, Container: 80, Protocol: "TCP"}}, true, false},
	} {
		was := is
		r.HostPorts = step.ports
		if b.Settled(step.t, r, is) != (slices.Contains(was.Routes, endpoint.DefaultRoute) == step.route &&
			was.Egress.IsValid() == step.addr && slices.Contains(was.Routes, toAny)) {
			t.Errorf("step %d: Settled differs from what is needed", i)
		}
		var err error
		if is, err = b.Settle(step.t, r, is); err != nil {
			t.Fatal(err)
		}
		want := []netip.Prefix{private, toAny}
		if step.route {
			want = append(want, endpoint.DefaultRoute)
		}
		if !slices.Equal(is.Routes, want) || is.Egress.IsValid() != step.addr || !b.Settled(step.t, r, is) {
			t.Errorf("step %d: %+v, want routes %v, address %v", i, is, want, step.addr)
		}
		if step.addr {
			if err := b.Validate(is.Egress); err != nil || !tenant.IsEgressAddress(is.Egress) {
				t.Errorf("step %d: address %v: %v", i, is.Egress, err)
			}
		}
		again, err := b.Settle(step.t, r, is)
		if err != nil || again.Egress != is.Egress || !slices.Equal(again.Routes, is.Routes) {
			t.Errorf("step %d: once more: %+v, %v", i, again, err)
		}
	}
	other := endpoint.Attachment{Network: tenant.Nimitz, Routes: []netip.Prefix{endpoint.DefaultRoute}}
	for _, of := range []tenant.Tenant{{}, direct} {
		if is, err := b.Settle(of, r, other); err != nil || !reflect.DeepEqual(is, other) || !b.Settled(of, r, other) {
			t.Errorf("an attachment of a network without egress became %+v, %v", is, err)
		}
	}
	if len(plain.Routes) != 1 {
		t.Error("Settle changed the attachment that it was called with")
	}
}

// No two endpoints have an address, and none gets one within five minutes after its release, also after a restart.
func TestAllocation(t *testing.T) {
	b := newBed(t)
	b.draws = []address.Index{70000, 70000, 70001}
	first, second := b.give("c1"), b.give("c2")
	if want := tenant.EgressAddress(node, 70001); first == second || second != want {
		t.Fatalf("addresses %v and %v, want %v second", first, second, want)
	}
	b.release(first)
	b.release(first)
	if b.Used() != 1 {
		t.Errorf("%d are in use, want 1", b.Used())
	}
	for _, after := range []time.Duration{time.Second, endpoint.MinQuarantine - 2*time.Second} {
		b.now = b.now.Add(after)
		b.reopen(record("c2", second))
		b.draws = []address.Index{70000, 70001}
		if got := b.give("c3"); got == first || got == second {
			t.Fatalf("%v was allocated again", got)
		}
	}
	b.now = b.now.Add(2 * time.Second)
	b.draws = []address.Index{70000}
	if got := b.give("c4"); got != first {
		t.Errorf("after the quarantine: %v, want %v", got, first)
	}
	b.Addresses.pick = func() address.Index { return 70000 }
	if _, err := b.Settle(direct, record("c5", netip.Addr{}), plain); err == nil {
		t.Error("an address that is in use was allocated")
	}
}

// A cluster that gets an egress prefix later: addresses in the node's own /64 are valid, and are replaced.
func TestLaterPrefix(t *testing.T) {
	b := newBed(t)
	b.draws = []address.Index{70000, 70000, 70001}
	r := record("c1", b.give("c1"))
	b.plan.Egress = netip.MustParsePrefix("2001:db8:7::/48")
	b.reopen(r)
	at := r.Attachments[0]
	at.Routes = append(slices.Clone(at.Routes), endpoint.DefaultRoute)
	if b.Validate(at.Egress) != nil || b.Settled(direct, r, at) {
		t.Errorf("%v is invalid, or stays", at.Egress)
	}
	is, err := b.Settle(direct, r, at)
	if want := netip.MustParseAddr("2001:db8:7:3:0:ff:101:1171"); err != nil || is.Egress != want ||
		b.Validate(want) != nil || !b.Settled(direct, r, is) {
		t.Errorf("%v, %v; want %v, as the index of the first is in use", is.Egress, err, want)
	}
	b.release(at.Egress)
	if b.Used() != 1 {
		t.Errorf("%d are in use", b.Used())
	}
}

// A random index is in the range of containers.
func TestRandomIndex(t *testing.T) {
	a, err := Open(Config{
		Dir: t.TempDir(), Plan: address.DefaultPlan(), Node: node, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[netip.Addr]bool{}
	for i := range 200 {
		at, err := a.Settle(direct, record(fmt.Sprint(i), netip.Addr{}), plain)
		if err != nil || a.Validate(at.Egress) != nil {
			t.Fatal(at, err)
		}
		seen[at.Egress] = true
	}
	if len(seen) != 200 {
		t.Errorf("%d different addresses of 200", len(seen))
	}
	for _, addr := range []netip.Addr{
		tenant.EgressAddress(node, tenant.FirstEgressIndex-1), tenant.EgressTunnel(node),
		tenant.EgressAddress(netip.MustParsePrefix("fd70:696c:6100:4::/64"), tenant.FirstEgressIndex),
		address.Plain{Node: node, Tenant: 1, App: address.EgressApp, Index: 70000}.Addr(),
		address.Plain{Node: node, App: 7, Index: 70000}.Addr(),
	} {
		if a.Validate(addr) == nil {
			t.Errorf("%v was accepted", addr)
		}
	}
	small := address.DefaultPlan()
	small.Egress = netip.MustParsePrefix("2001:db8:7::/64")
	if none, err := Open(Config{
		Dir: t.TempDir(), Plan: small, Node: node, Log: slog.New(slog.DiscardHandler),
	}); err != nil {
		t.Error(err)
	} else if _, err := none.Settle(direct, record("c", netip.Addr{}), plain); err == nil ||
		!strings.Contains(err.Error(), "egress gateways") {
		t.Errorf("a node without egress addresses: %v", err)
	}
}

// The log says who had an address when, across restarts.
func TestWho(t *testing.T) {
	b := newBed(t)
	b.draws = []address.Index{70000}
	start := b.now
	addr := b.give("c1")
	b.now = b.now.Add(time.Hour)
	b.reopen(record("c1", addr))
	b.release(addr)
	b.now = b.now.Add(time.Hour)
	b.draws = []address.Index{70000}
	b.give("c2")
	for after, want := range map[time.Duration][]string{
		-time.Second: nil, 0: {"c1"}, 59 * time.Minute: {"c1"}, time.Hour: nil, 2 * time.Hour: {"c2"},
		100 * time.Hour: {"c2"},
	} {
		if got := b.who(addr, start.Add(after)); !slices.Equal(got, want) {
			t.Errorf("after %v: %v, want %v", after, got, want)
		}
	}
	had, since, err := b.Find(addr)
	if want := (Entry{addr, "c1", "eth0", "shop/c1", "blue", start, start.Add(time.Hour)}); err != nil ||
		len(had) != 2 || had[0] != want || !since.Equal(start) {
		t.Errorf("%+v since %v, %v; want %+v first", had, since, err, want)
	}
}

// After a crash at any byte of the last line, the others are valid, the next line is too, and the records say who has
// which address.
func TestCrash(t *testing.T) {
	b := newBed(t)
	kept, gone := b.give("c1"), b.give("c2")
	path := filepath.Join(b.dir, Folder, "log")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := bytes.LastIndexByte(whole[:len(whole)-1], '\n') + 1
	for cut := last; cut <= len(whole); cut++ {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		b.logged.Reset()
		b.now = b.now.Add(time.Second)
		b.reopen(record("c1", kept))
		if torn := cut > last && cut < len(whole)-1; torn != strings.Contains(b.logged.String(), "lines=1") {
			t.Fatalf("cut at %d of %d: logged %q", cut, len(whole), &b.logged)
		}
		third := b.give("c3")
		b.reopen(record("c1", kept), record("c3", third), record("c4", tenant.EgressAddress(node, 99999)))
		for addr, want := range map[netip.Addr][]string{
			kept: {"c1"}, gone: nil, third: {"c3"}, tenant.EgressAddress(node, 99999): {"c4"},
		} {
			if got := b.who(addr, b.now); !slices.Equal(got, want) {
				t.Fatalf("cut at %d of %d: %v has %v, want %v", cut, len(whole), got, addr, want)
			}
		}
		if b.Used() != 3 {
			t.Fatalf("cut at %d: %d are in use", cut, b.Used())
		}
	}
}

// The log has a bounded size, and still says which addresses are in use or in quarantine. After a crash between the
// two steps of a change of files, nothing is lost.
func TestRotation(t *testing.T) {
	b := newBed(t)
	b.max = 20000
	b.reopen()
	kept, start, all := b.give("long"), b.now, []netip.Addr(nil)
	for i := range 300 {
		b.now = start.Add(time.Duration(i) * time.Hour)
		all = append(all, b.give(fmt.Sprint("c", i)))
		b.now = b.now.Add(time.Second)
		b.release(all[i])
		if i%50 == 0 {
			b.reopen(record("long", kept))
		}
	}
	path := filepath.Join(b.dir, Folder, "log")
	total := int64(0)
	for _, name := range []string{path, path + previous} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if total > int64(b.max)+1000 || total < int64(b.max)/2 {
		t.Errorf("the log has %d bytes, want about %d", total, b.max)
	}
	had, since, err := b.Find(kept)
	if err != nil || len(had) != 1 || !since.After(start) || !since.Before(b.now) {
		t.Errorf("%+v since %v, %v; want one, and since a time after %v", had, since, err, start)
	}
	forgotten := 0
	for i, addr := range all {
		if at := start.Add(time.Duration(i) * time.Hour); len(b.who(addr, at.Add(time.Second/2))) == 0 {
			if forgotten++; at.After(since) {
				t.Errorf("%v of %v is not in the log since %v", addr, at, since)
			}
		}
	}
	if forgotten == 0 {
		t.Error("the log has forgotten nothing")
	}
	last := b.give("last")
	b.release(last)
	b.draws = []address.Index{address.Split(last).Index}
	for _, step := range []func() error{
		func() error { return nil },
		func() error { return os.Rename(path, path+previous) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
		b.reopen(record("long", kept))
		if got := b.who(kept, b.now); !slices.Equal(got, []string{"long"}) {
			t.Errorf("%v has the address in use", got)
		}
		b.draws = []address.Index{address.Split(last).Index, address.Split(kept).Index}
		if got := b.give("next"); got == last || got == kept {
			t.Errorf("%v was allocated again", got)
		}
	}
}

// FuzzLog: what a file says is the same when it is written again, whatever it contains.
func FuzzLog(f *testing.F) {
	f.Add([]byte(`{"address":"fd70:696c:6100:3:0:ff:101:2f","container":"c1","interface":"eth0","tenant":"blue",` +
		`"from":"2026-11-20T13:58:12Z","until":"2026-11-20T15:20:40Z"}` + "\n" + `{"since":"2026-11-20T13:58:12Z"}` +
		"\n{\"addr"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var all, again []Entry
		parse(b, func(e Entry) { all = append(all, e) })
		var written bytes.Buffer
		for _, e := range all {
			line, err := encode(e)
			if err != nil {
				t.Fatal(err)
			}
			written.Write(line)
		}
		if damaged := parse(written.Bytes(), func(e Entry) { again = append(again, e) }); damaged > 0 ||
			!slices.EqualFunc(all, again, func(x, y Entry) bool { return x.same(y) && x.Until.Equal(y.Until) }) {
			t.Errorf("%+v became %+v, with %d damaged lines", all, again, damaged)
		}
	})
}
