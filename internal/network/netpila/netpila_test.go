package netpila

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	node = netip.MustParsePrefix("fd70:696c:6100:3::/64")
	blue = tenant.Tenant{Name: "blue", Addressing: tenant.Encrypted, IDs: []tenant.ID{
		{ID: 4, Key: address.Key{1}}, {ID: 9, Key: address.Key{2}},
	}}
)

// memory allocates indexes without a disk.
type memory struct {
	next     map[endpoint.CursorKey]address.Index
	released []address.Index
}

func (m *memory) AllocateIndex(
	key endpoint.CursorKey,
	find func(address.Index) (address.Index, error),
) (address.Index, error) {
	i, err := find(m.next[key])
	if errors.Is(err, address.ErrExhausted) {
		return 0, endpoint.ErrExhausted
	}
	m.next[key] = i + 1
	return i, err
}

func (m *memory) ReleaseIndex(_ endpoint.CursorKey, i address.Index) error {
	m.released = append(m.released, i)
	return nil
}

func newNetwork(t *testing.T) (*Network, *memory) {
	t.Helper()
	m := &memory{next: map[endpoint.CursorKey]address.Index{}}
	addresses, err := egress.Open(egress.Config{
		Dir: t.TempDir(), Plan: address.DefaultPlan(), Node: node, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	n, err := New(network.Node{Plan: address.DefaultPlan(), Prefix: node, Indexes: m, Egress: addresses}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return n, m
}

func prepare(t *testing.T, n *Network, of tenant.Tenant, app address.AppID) endpoint.Attachment {
	t.Helper()
	a, err := n.Prepare(t.Context(), of, app, endpoint.Record{TenantID: of.Current().ID})
	if err != nil || len(a) != 1 {
		t.Fatal(a, err)
	}
	return a[0]
}

// NP1 and NP4, §6.1 and §6.2: the plaintext address encodes the container's location; the container sees the ciphertext
// under its tenant's current key, in the private prefix.
func TestPrepareEncrypted(t *testing.T) {
	n, m := newNetwork(t)
	seen := map[netip.Addr]bool{}
	for range 50 {
		a := prepare(t, n, blue, 5)
		p := address.Split(a.Plaintext)
		if p.Node != node || p.Tenant != 9 || p.App != 5 || p.Index == 0 {
			t.Fatalf("plaintext %v has unexpected parts %+v", a.Plaintext, p)
		}
		if !address.DefaultPlan().Private.Contains(a.Address) ||
			address.NewCipher(address.Key{2}).Decrypt(a.Address) != a.Plaintext {
			t.Fatalf("%v is not %v under the current key in the private prefix", a.Address, a.Plaintext)
		}
		routes := []netip.Prefix{address.DefaultPlan().Private, netip.MustParsePrefix("fd70:696c:7300::/40")}
		if !slices.Equal(a.Routes, routes) || a.Gateway.String() != "fe80::1" || a.Network != Name {
			t.Fatalf("unexpected attachment %+v", a)
		}
		if seen[a.Address] {
			t.Fatalf("%v was allocated twice", a.Address)
		}
		seen[a.Address] = true
		if err := n.Release(t.Context(), endpoint.Record{Attachments: []endpoint.Attachment{a}}); err != nil ||
			m.released[len(m.released)-1] != p.Index {
			t.Fatalf("released %v, %v; want %d", m.released, err, p.Index)
		}
	}
}

// A container whose tenant may leave has the default route, and an egress address if packets leave at this node.
// Release frees it, and so does a failure.
func TestPrepareEgress(t *testing.T) {
	n, m := newNetwork(t)
	leaves := blue
	leaves.Egress = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true}}
	a := prepare(t, n, leaves, 5)
	if !slices.Contains(a.Routes, endpoint.DefaultRoute) || !tenant.IsEgressAddress(a.Egress) ||
		!node.Contains(a.Egress) {
		t.Errorf("attachment %+v", a)
	}
	if err := n.Validate(endpoint.Record{TenantID: 9, App: 5, Attachments: []endpoint.Attachment{a}}); err != nil {
		t.Error(err)
	}
	if err := n.Release(t.Context(), endpoint.Record{Attachments: []endpoint.Attachment{a}}); err != nil ||
		n.on.Egress.Used() != 0 {
		t.Errorf("after the release %d egress addresses are in use, %v", n.on.Egress.Used(), err)
	}
	n.on.Egress = nil
	released := len(m.released)
	if _, err := n.Prepare(t.Context(), leaves, 5, endpoint.Record{TenantID: 9}); err == nil ||
		len(m.released) != released+1 {
		t.Errorf("without an egress address: %v; %d indexes were released", err, len(m.released)-released)
	}
}

func TestPrepareClear(t *testing.T) {
	n, m := newNetwork(t)
	red := tenant.Tenant{Name: "red", Addressing: tenant.Clear, IDs: []tenant.ID{{ID: 2}}}
	a := prepare(t, n, red, 1)
	if a.Address != a.Plaintext || a.Routes[0] != address.DefaultPlan().Base {
		t.Errorf("attachment %+v; want the plaintext and the base prefix", a)
	}
	m.next[endpoint.CursorKey{Tenant: 2, App: 1}] = address.MaxIndex + 1
	if _, err := n.Prepare(t.Context(), red, 1, endpoint.Record{TenantID: 2}); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("beyond the last index: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	n, _ := newNetwork(t)
	if _, err := n.Prepare(t.Context(), blue, address.FirstReservedApp, endpoint.Record{TenantID: 9}); err == nil {
		t.Error("Prepare allocated an address for a reserved app")
	}
	if _, err := n.Prepare(t.Context(), blue, 5, endpoint.Record{TenantID: 5}); err == nil {
		t.Error("Prepare accepted an id that the tenant does not have")
	}
	sound := endpoint.Record{TenantID: 9, App: 5, Attachments: []endpoint.Attachment{prepare(t, n, blue, 5)}}
	if err := n.Validate(sound); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*endpoint.Record, *endpoint.Attachment){
		"another app":       func(r *endpoint.Record, _ *endpoint.Attachment) { r.App++ },
		"another tenant id": func(r *endpoint.Record, _ *endpoint.Attachment) { r.TenantID++ },
		"no plaintext":      func(_ *endpoint.Record, a *endpoint.Attachment) { a.Plaintext = netip.Addr{} },
		"index 0": func(_ *endpoint.Record, a *endpoint.Attachment) {
			p := address.Split(a.Plaintext)
			p.Index = 0
			a.Plaintext = p.Addr()
		},
		"an egress address of another node": func(_ *endpoint.Record, a *endpoint.Attachment) {
			a.Egress = tenant.EgressAddress(netip.MustParsePrefix("fd70:696c:6100:4::/64"), tenant.FirstEgressIndex)
		},
		"IPv4": func(_ *endpoint.Record, a *endpoint.Attachment) { a.Address = netip.MustParseAddr("10.0.0.1") },
	} {
		r, a := sound, sound.Attachments[0]
		spoil(&r, &a)
		r.Attachments = []endpoint.Attachment{a}
		if err := n.Validate(r); err == nil {
			t.Errorf("%s: Validate accepted %+v", name, r)
		}
	}
	if _, err := New(network.Node{
		Plan: address.DefaultPlan(), Prefix: netip.MustParsePrefix("fd71::/64"),
	}, nil); err == nil {
		t.Error("New accepted a node outside the base prefix")
	}
}
