package ila

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t *testing.T, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%v; want an error with %q", err, words)
	}
}

var (
	plan   = address.DefaultPlan()
	use, _ = plan.ILA()
	green  = tenantOf("green", 7)
	gold   = tenantOf("gold", 8)
)

func tenantOf(name string, id address.TenantID) tenant.Tenant {
	return tenant.Tenant{
		Name: name, Network: Name, Addressing: tenant.Clear, IDs: []tenant.ID{{ID: id}},
		Overlays: []tenant.Overlay{{CIDR: use.Range(id)}},
	}
}

func locator(node uint64) netip.Prefix {
	l, err := use.Locator(plan.Node(node))
	if err != nil {
		panic(err)
	}
	return l
}

// at returns the index-th address of a tenant.
func at(of tenant.Tenant, index byte) netip.Addr {
	b := of.Overlays[0].CIDR.Addr().As16()
	b[15] = index
	return netip.AddrFrom16(b)
}

func mapping(of tenant.Tenant, index byte, node uint64, app address.AppID) network.Mapping {
	a := at(of, index)
	return network.Mapping{Tenant: of.Name, To: netip.PrefixFrom(a, 128), Node: plan.Node(node), App: app}
}

// bed is the network with fake tables and a fake cluster.
type bed struct {
	*Network
	locals  map[netip.Addr]Local
	far     map[netip.Addr]Peer
	fail    error
	given   []netip.Addr
	asked   []string // requests to the cluster
	refuses error
}

func newBed(t *testing.T) *bed {
	b := &bed{locals: map[netip.Addr]Local{}, far: map[netip.Addr]Peer{}}
	b.start(t)
	return b
}

// start begins anew with the tables as they are.
func (b *bed) start(t *testing.T) {
	b.Network = New(Config{ILA: use, Locator: locator(1), Cluster: cluster{b}, Tables: fake{b}, MaxMappings: 4})
	must(t, b.PutTenant(t.Context(), green))
	must(t, b.PutTenant(t.Context(), gold))
}

type fake struct{ *bed }

func (f fake) Locals() (map[netip.Addr]Local, error) { return maps.Clone(f.locals), f.fail }
func (f fake) Peers() (map[netip.Addr]Peer, error)   { return maps.Clone(f.far), f.fail }
func (f fake) Capacity() (int, int)                  { return 100, 4 }

func (f fake) SetLocal(a netip.Addr, to *Local) error {
	if f.fail != nil {
		return f.fail
	}
	delete(f.locals, a)
	if to != nil {
		f.locals[a] = *to
	}
	return nil
}

func (f fake) SetPeers(put map[netip.Addr]Peer, remove []netip.Addr) error {
	if f.fail != nil {
		return f.fail
	}
	for _, a := range remove {
		delete(f.far, a)
	}
	maps.Copy(f.far, put)
	return nil
}

type cluster struct{ *bed }

func (c cluster) NodeCIDRs(context.Context, string) ([]netip.Prefix, error) {
	return nil, errors.New("none")
}

func (c cluster) Allocate(_ context.Context, name, key string, app address.AppID) ([]netip.Addr, error) {
	c.asked = append(c.asked, fmt.Sprintf("%s %s %d", name, key, app))
	c.bed.asked = c.asked
	return c.given, c.refuses
}

func (c cluster) Free(_ context.Context, name, key string) error {
	c.bed.asked = append(c.bed.asked, "free "+name+" "+key)
	return nil
}

func record(of tenant.Tenant, id endpoint.ID, index byte) endpoint.Record {
	return endpoint.Record{
		ID: id, ContainerID: fmt.Sprint("c", id), Interface: "eth0", Tenant: of.Name, TenantID: of.IDs[0].ID, App: 5,
		Device: endpoint.Device{HostIfindex: 100 + int(id)},
		Attachments: []endpoint.Attachment{{
			Network: Name, Address: at(of, index), Gateway: gateway, Routes: []netip.Prefix{use.SIR},
			Locator: locator(1),
		}},
	}
}

func TestPrepare(t *testing.T) {
	b := newBed(t)
	r := record(green, 1, 1)
	r.Attachments = nil
	b.given = []netip.Addr{at(green, 1)}
	all, err := b.Prepare(t.Context(), green, 5, r)
	must(t, err)
	if want := record(green, 1, 1).Attachments; len(all) != 1 || all[0].Address != want[0].Address ||
		all[0].Locator != locator(1) || !slices.Equal(b.asked, []string{"green c1/eth0 5"}) {
		t.Errorf("attachments %+v, asked %q", all, b.asked)
	}
	r.Attachments = all
	must(t, b.Release(t.Context(), r))
	if last := b.asked[len(b.asked)-1]; last != "free green c1/eth0" {
		t.Errorf("asked %q", last)
	}
	for name, given := range map[string][]netip.Addr{
		"of another tenant": {at(gold, 1)}, "two": {at(green, 1), at(green, 2)}, "none": nil,
		"whose last bits are 0": {at(green, 0)}, "of the fabric": {use.ToWire(at(green, 1), locator(2))},
	} {
		b.given, b.asked = given, nil
		_, err := b.Prepare(t.Context(), green, 5, r)
		refused(t, err, "none can be used")
		if len(b.asked) != 2 {
			t.Errorf("an address %s: the cluster was asked %q", name, b.asked)
		}
	}
	_, err = b.Prepare(t.Context(), green, address.FirstReservedApp, r)
	refused(t, err, "reserved")
	b.refuses = endpoint.ErrExhausted
	if _, err := b.Prepare(t.Context(), green, 5, r); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("a full cluster: %v", err)
	}
}

func TestEndpoints(t *testing.T) {
	b := newBed(t)
	r := record(green, 1, 1)
	must(t, b.Repair(t.Context(), nil, nil))
	must(t, b.Activate(t.Context(), r))
	want := Local{Device: 101, Endpoint: 1, App: 5}
	if b.locals[at(green, 1)] != want {
		t.Errorf("entries %+v", b.locals)
	}
	must(t, b.Check(t.Context(), r))

	relabelled := r
	relabelled.AppNow = 6
	must(t, b.Activate(t.Context(), relabelled))
	must(t, b.Activate(t.Context(), relabelled)) // asks no more
	if want.App = 6; b.locals[at(green, 1)] != want || !slices.Equal(b.asked, []string{"green c1/eth0 6"}) {
		t.Errorf("after new labels: entries %+v, asked %q", b.locals, b.asked)
	}
	refused(t, b.Check(t.Context(), r), "the entry")
	must(t, b.Activate(t.Context(), r)) // back
	if len(b.asked) != 2 {
		t.Errorf("asked %q", b.asked)
	}
	b.refuses = errors.New("away")
	refused(t, b.Activate(t.Context(), relabelled), "away")
	b.refuses = nil
	must(t, b.Activate(t.Context(), r)) // the cluster can have applied the request whose answer was lost
	if len(b.asked) != 4 || b.asked[3] != b.asked[1] {
		t.Errorf("asked %q", b.asked)
	}

	other := r
	other.ID = 2
	must(t, b.Deactivate(t.Context(), other)) // another endpoint's
	must(t, b.Check(t.Context(), r))
	must(t, b.Deactivate(t.Context(), r))
	if len(b.locals) != 0 {
		t.Errorf("entries %+v", b.locals)
	}
	must(t, b.Deactivate(t.Context(), r))
	r.Tenant = "lime"
	refused(t, b.Activate(t.Context(), r), "not known")
	refused(t, b.Check(t.Context(), r), "not known")
}

func TestValidate(t *testing.T) {
	b := newBed(t)
	must(t, b.Validate(record(green, 1, 1)))
	for name, change := range map[string]func(*endpoint.Record){
		"tenant":  func(r *endpoint.Record) { r.TenantID++ },
		"gateway": func(r *endpoint.Record) { r.Attachments[0].Gateway = at(green, 2) },
		"locator": func(r *endpoint.Record) { r.Attachments[0].Locator = locator(2) },
		"address": func(r *endpoint.Record) { r.Attachments[0].Address = locator(1).Addr() },
	} {
		r := record(green, 1, 1)
		change(&r)
		if b.Validate(r) == nil {
			t.Errorf("a record with another %s is accepted", name)
		}
	}
}

func TestMappings(t *testing.T) {
	b := newBed(t)
	ctx := t.Context()
	must(t, b.Repair(ctx, nil, nil))
	refused(t, b.Apply(ctx, "green", []network.Mapping{mapping(green, 2, 2, 9)}, nil), "before their first list")
	must(t, b.Replace(ctx, "green", []network.Mapping{mapping(green, 1, 1, 5), mapping(green, 2, 2, 9)}))
	must(t, b.Replace(ctx, "lime", []network.Mapping{mapping(green, 2, 2, 9)}))
	want := map[netip.Addr]Peer{at(green, 2): {Locator: locator(2), App: 9}}
	check := func(when string) {
		t.Helper()
		if !maps.Equal(b.far, want) {
			t.Errorf("%s: mappings %+v, want %+v", when, b.far, want)
		}
	}
	check("after the list")
	must(t, b.Apply(ctx, "green", []network.Mapping{mapping(green, 2, 3, 9), mapping(green, 3, 2, 9)}, nil))
	want[at(green, 2)] = Peer{Locator: locator(3), Former: locator(2), App: 9}
	want[at(green, 3)] = Peer{Locator: locator(2), App: 9}
	check("after a move")
	must(t, b.Apply(ctx, "green", []network.Mapping{mapping(green, 2, 1, 9)},
		[]network.Mapping{{Tenant: "green", To: netip.PrefixFrom(at(green, 3), 128)}}))
	clear(want)
	check("after a move to this node and an end")
	if app, known := b.AppOf("green", at(green, 2)); known {
		t.Errorf("app %d", app)
	}

	for name, m := range map[string]network.Mapping{
		"of another tenant": mapping(gold, 2, 2, 9),
		"of a subnet":       {Tenant: "green", To: use.Range(7), Node: plan.Node(2)},
		"to no node":        {Tenant: "green", To: netip.PrefixFrom(at(green, 4), 128), Node: locator(2)},
		"to node 0":         mapping(green, 4, 0, 9),
		"with a next hop": {Tenant: "green", To: netip.PrefixFrom(at(green, 4), 128), Node: plan.Node(2),
			NextHops: []netip.Addr{at(green, 1)}},
	} {
		if b.Apply(ctx, "green", []network.Mapping{m}, nil) == nil ||
			b.Replace(ctx, "green", []network.Mapping{m}) == nil {
			t.Errorf("a mapping %s is accepted", name)
		}
	}
	check("after bad mappings")

	var many []network.Mapping
	for i := range byte(5) {
		many = append(many, mapping(green, 10+i, 2, 9))
	}
	if err := b.Replace(ctx, "green", many); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("more mappings than the limit: %v", err)
	}
	for i := range byte(4) {
		want[at(green, 10+i)] = Peer{Locator: locator(2), App: 9}
	}
	check("after too many")
	must(t, b.Replace(ctx, "green", many[:4]))
	// Without room, changes and removals of known mappings are done, because policies follow the apps.
	err := b.Apply(ctx, "green", []network.Mapping{mapping(green, 10, 2, 8), mapping(green, 20, 2, 9),
		mapping(green, 21, 2, 9)}, []network.Mapping{many[1]})
	if !errors.Is(err, endpoint.ErrExhausted) || !strings.Contains(err.Error(), "for 1 more") {
		t.Errorf("more mappings than the limit: %v", err)
	}
	delete(want, at(green, 11))
	want[at(green, 10)], want[at(green, 20)] = Peer{Locator: locator(2), App: 8}, Peer{Locator: locator(2), App: 9}
	check("after changes without room")
	must(t, b.DeleteTenant(ctx, tenant.Tenant{Name: "green", IDs: []tenant.ID{{ID: 1}}})) // an id that is not the VNID
	if len(b.far) != 4 {
		t.Errorf("mappings %+v", b.far)
	}
	must(t, b.DeleteTenant(ctx, green))
	clear(want)
	check("without the tenant")
	must(t, b.Replace(ctx, "gold", []network.Mapping{mapping(gold, 1, 2, 9)}))
}

// TestRepair: a restart keeps the mappings of hosted tenants until the cluster sends them, and nothing else.
func TestRepair(t *testing.T) {
	b := newBed(t)
	ctx := t.Context()
	must(t, b.Repair(ctx, nil, nil))
	must(t, b.Activate(ctx, record(green, 1, 1)))
	must(t, b.Activate(ctx, record(green, 2, 2)))
	must(t, b.Replace(ctx, "green", []network.Mapping{mapping(green, 3, 2, 9), mapping(green, 4, 2, 9)}))
	must(t, b.Replace(ctx, "gold", []network.Mapping{mapping(gold, 3, 2, 9)}))

	b.Network = New(b.config)
	must(t, b.PutTenant(ctx, green))
	must(t, b.Replace(ctx, "green", []network.Mapping{mapping(green, 4, 3, 9)})) // before Repair
	if len(b.far) != 3 {
		t.Errorf("before Repair: %+v", b.far)
	}
	b.fail = errors.New("broken")
	refused(t, b.Repair(ctx, nil, nil), "broken")
	b.fail = nil
	must(t, b.Repair(ctx, nil, []endpoint.Record{record(green, 2, 2)}))
	if want := map[netip.Addr]Peer{at(green, 4): {Locator: locator(3), App: 9}}; !maps.Equal(b.far, want) {
		t.Errorf("mappings %+v, want %+v", b.far, want)
	}
	if len(b.locals) != 1 || b.locals[at(green, 2)].Endpoint != 2 {
		t.Errorf("locals %+v", b.locals)
	}

	b.start(t)
	must(t, b.Repair(ctx, nil, nil))
	if app, known := b.AppOf("green", at(green, 4)); !known || app != 9 || len(b.locals) != 0 {
		t.Errorf("after a restart without the cluster: app %d, %v, locals %+v", app, known, b.locals)
	}
	entries, err := b.Entries(ctx)
	must(t, err)
	if len(entries) != 2 || entries[1].Used != 1 || entries[1].Capacity != 4 {
		t.Errorf("entries %+v", entries)
	}
	refused(t, b.PutTenant(ctx, tenant.Tenant{Name: "lime"}), "not one")
}
