package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// fakeSwitch records the entries it receives, and is its own cluster.
type fakeSwitch struct {
	mu      sync.Mutex
	entries map[any]pipeline.Entry
	ports   map[pipeline.Port]string
	fail    error
	given   byte
	subnets []netip.Prefix // of the node
	during  func(call string)
	mtu     int
	dropped map[dropreason.Reason]uint64

	unpoliced error
}

func newFakeSwitch() *fakeSwitch {
	return &fakeSwitch{
		entries: map[any]pipeline.Entry{},
		ports:   map[pipeline.Port]string{},
		subnets: []netip.Prefix{netip.MustParsePrefix("10.0.3.0/24")},
	}
}

func (s *fakeSwitch) Plug(_ context.Context, p pipeline.Port, device pipeline.Device) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports[p] = device.Name
	return nil
}

func (s *fakeSwitch) Unplug(_ context.Context, p pipeline.Port) error {
	if s.during != nil {
		s.during("Unplug")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ports, p)
	return nil
}

func (s *fakeSwitch) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	if s.during != nil {
		s.during("Apply")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	for _, e := range remove {
		delete(s.entries, e.Match())
	}
	for _, e := range add {
		s.entries[e.Match()] = e
	}
	return nil
}

func (s *fakeSwitch) Check(_ context.Context, p pipeline.Port, device pipeline.Device, entries []pipeline.Entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name, plugged := s.ports[p]; !plugged || name != device.Name {
		return fmt.Errorf("%s is not %v", device.Name, p)
	}
	for _, e := range entries {
		if s.entries[e.Match()] != e {
			return fmt.Errorf("%v is not there", e)
		}
	}
	return nil
}

func (s *fakeSwitch) Drops(context.Context) (map[dropreason.Reason]uint64, error) {
	return s.dropped, s.fail
}

func (s *fakeSwitch) PolicyError() error { return s.unpoliced }

func (s *fakeSwitch) Lacks() []string { return []string{"traceroute"} }

func (s *fakeSwitch) SetMTU(mtu int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mtu = mtu
	return nil
}

func (s *fakeSwitch) Entries(context.Context) (all []pipeline.Entry, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		all = append(all, e)
	}
	return all, nil
}

// remote is which node's VTEP each prefix of a VNI leads to, sorted: "10.0.2.0/24 fd70:696c:6100:2::2".
func (s *fakeSwitch) remote(vni uint32) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var words []string
	for _, e := range s.entries {
		if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN && uint32(f.VNI) == vni {
			words = append(words, fmt.Sprint(f.To, " ", f.VTEP))
		}
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

func (s *fakeSwitch) NodeCIDRs(context.Context, string) ([]netip.Prefix, error) {
	return s.subnets, nil
}

func (s *fakeSwitch) Allocate(context.Context, string, string) ([]netip.Addr, error) {
	s.given++
	return []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 77, s.given})}, nil
}

func (s *fakeSwitch) Free(context.Context, string, string) error { return nil }

// newBedOfTwo has tenant green on nimitz, beside the others.
func newBedOfTwo(t *testing.T) *bed {
	b := newBed(t)
	b.orchestrator.tenants["green"] = tenant.Tenant{
		Name: "green", Network: tenant.Nimitz, Addressing: tenant.Own, IDs: []tenant.ID{{ID: 3, Key: address.Key{3}}},
		Overlays: []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), NodeBits: 24}},
	}
	b.nimitz = newFakeSwitch()
	b.reopen()
	return b
}

func (b *bed) green(container string) AddRequest {
	q := b.request(container)
	q.Tenant = "green"
	return q
}

// TestNetworksSideBySide: an endpoint has entries of its tenant's network alone, keeps them over a restart, and leaves
// none.
func TestNetworksSideBySide(t *testing.T) {
	b := newBedOfTwo(t)
	blue := b.add("c1")
	green, err := b.Add(t.Context(), b.green("c2"))
	if err != nil {
		t.Fatal(err)
	}
	if a := green.Attachments; len(a) != 1 || a[0].Network != nimitz.Name || a[0].Address.String() != "10.0.3.1" ||
		green.Device.MTU != 1500-pipeline.Overhead {
		t.Errorf("record %+v", green)
	}
	here := b.Explain(netip.MustParseAddr("10.0.3.1")).Overlays
	if len(here) != 1 || here[0].Tenant != "green" || !here[0].CIDR.Contains(green.Attachments[0].Address) ||
		here[0].Endpoint == nil ||
		here[0].Endpoint.ID != green.ID {
		t.Errorf("its address is explained as %+v", here)
	}
	known, _, _ := b.tenants.get("green")
	known.Tenant.Services = []tenant.Service{
		{Name: "host", Virtual: netip.MustParseAddr("fd09::7"), Real: netip.MustParseAddr("2001:db8:70::2")},
	}
	if got := explainServices([]TenantState{known}, netip.MustParseAddr("fd09::7")); len(got) != 1 ||
		got[0].Tenant != "green" ||
		got[0].Name != "host" {
		t.Errorf("a service is explained as %+v", got)
	}
	if none := b.Explain(netip.MustParseAddr("192.0.2.1")).Overlays; len(none) > 0 {
		t.Errorf("a foreign address is explained as %+v", none)
	}
	check := func() {
		t.Helper()
		if len(b.driver.active) != 1 || len(b.driver.tenants) != 1 || b.driver.active[blue.ID].ID != blue.ID {
			t.Errorf("netpila has %v and tenants %v", b.driver.active, b.driver.tenants)
		}
		if fmt.Sprint(b.nimitz.ports) != fmt.Sprintf("map[container %d:%s]", green.ID, green.Device.HostName) ||
			len(b.nimitz.entries) != 4 {
			t.Errorf("nimitz has %v and %v", b.nimitz.ports, b.nimitz.entries)
		}
		for _, q := range []CheckRequest{{ContainerID: "c1"},
			{ContainerID: "c2", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.3.1/32")}}} {
			q.Interface, q.Netns = "eth0", "/run/netns/"+q.ContainerID
			if err := b.Check(t.Context(), q); err != nil {
				t.Error(err)
			}
		}
	}
	check()
	b.driver.mtu = 1400
	if err := b.FollowMTU(t.Context()); err != nil || b.mtus()["c1"] != 1400 ||
		b.mtus()["c2"] != 1400-pipeline.Overhead {
		t.Errorf("MTUs %v, %v", b.mtus(), err)
	}
	b.reopen()
	check()
	if r, err := b.Find("10.0.3.1"); err != nil || r.ID != green.ID {
		t.Errorf("found %+v, %v", r, err)
	}
	for _, c := range []string{"c1", "c2"} {
		if err := b.Delete(t.Context(), c, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.clean()
	if len(b.nimitz.ports) > 0 || len(b.nimitz.entries) != 1 {
		t.Errorf("nimitz has %v and %v", b.nimitz.ports, b.nimitz.entries)
	}
}

// TestNetworkThatIsNotHere: a node without a tenant's network takes none of its containers, and does not start over
// those that it has.
func TestNetworkThatIsNotHere(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.green("c1")); err != nil {
		t.Fatal(err)
	}
	with := b.nimitz
	b.nimitz = nil
	calls := len(b.driver.calls)
	if err := b.tryReopen(); err == nil ||
		!strings.Contains(
			err.Error(),
			"endpoint 1 is on network nimitz, which this node does not have\n  packets flow as before; start the "+
				"agent with --some switch, or",
		) ||
		len(b.driver.calls) != calls {
		t.Errorf("started with an endpoint on it: %v, %v", err, b.driver.calls[calls:])
	}
	b.nimitz = with
	b.reopen()
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.nimitz = nil
	b.reopen()
	if _, err := b.Add(t.Context(), b.green("c2")); !errors.Is(err, refusal.ErrUnavailable) ||
		!strings.Contains(
			err.Error(),
			"tenant green is on network nimitz, which this node does not have\n  nothing was changed; start the "+
				"agent with --some switch, or",
		) {
		t.Errorf("an ADD: %v", err)
	}
	b.clean()
}

// TestSwitchThatRefuses: an ADD leaves nothing, whatever fails.
func TestSwitchThatRefuses(t *testing.T) {
	b := newBedOfTwo(t)
	b.nimitz.fail = errFake
	if _, err := b.Add(t.Context(), b.green("c1")); !errors.Is(err, errFake) {
		t.Errorf("an ADD: %v", err)
	}
	b.clean()
	if len(b.nimitz.ports) > 0 {
		t.Errorf("ports are left: %v", b.nimitz.ports)
	}
}

// TestEndpointOnTwoNetworks has entries in both, as while its tenant moves from one to the other.
func TestEndpointOnTwoNetworks(t *testing.T) {
	b := newBedOfTwo(t)
	r, err := b.Add(t.Context(), b.green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	green := b.orchestrator.tenants["green"]
	more, err := b.networks[tenant.Netpila].Prepare(t.Context(), green, r.App, r)
	if err != nil {
		t.Fatal(err)
	}
	r.Attachments = append(r.Attachments, more...)
	if err := b.store.Put(r); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	if got := b.driver.active[r.ID]; len(got.Attachments) != 1 || got.Attachments[0].Network != tenant.Netpila ||
		len(b.nimitz.entries) != 4 {
		t.Errorf("netpila has %+v, nimitz %v", got, b.nimitz.entries)
	}
	if r, _ := b.store.Get(r.ID); r.Overhead() != pipeline.Overhead || r.State != endpoint.Active {
		t.Errorf("record %+v", r)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.clean()
}

// TestDropsOfSwitches: what a network's own switch drops is counted with the driver's, each time anew, and what it
// lacks is said once.
func TestDropsOfSwitches(t *testing.T) {
	b := newBedOfTwo(t)
	b.driver.status.Drops = []dpapi.Drops{{Reason: "src-not-own", Packets: 7}, {Reason: "no-route", Packets: 1}}
	b.nimitz.dropped = map[dropreason.Reason]uint64{dropreason.SrcNotOwn: 5}
	for range 2 {
		s, err := b.status(t.Context())
		if err != nil || fmt.Sprint(s.Drops) != "[{src-not-own 12} {no-route 1}]" || len(s.Problems) != 0 ||
			!slices.Equal(s.Without, []string{"traceroute"}) ||
			len(s.Switches) != 1 ||
			s.Switches[nimitz.Name] != "fake" {
			t.Errorf("drops %v, problems %v, without %v, %v", s.Drops, s.Problems, s.Without, err)
		}
	}
	b.nimitz.fail = errFake
	if s, err := b.status(t.Context()); err != nil || len(s.Problems) != 1 ||
		!strings.Contains(s.Problems[0], "reading the drop counters of network nimitz failed") {
		t.Errorf("problems %v, %v", s.Problems, err)
	}
}
