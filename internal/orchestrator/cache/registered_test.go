package cache

import (
	"net/netip"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A node that says what the model has is answered by it; of everything else the store judges.
func TestRegisteredByTheModel(t *testing.T) {
	made := timestamppb.New(time.Unix(1, 0))
	is := testNode(1)
	m := New("self", func(string) {})
	m.Apply(store.Batch{Revision: 10, Whole: true, Events: []store.Event{
		{
			Node: &pilasterv1.Node{
				Name:            is.Name,
				Uuid:            is.UUID,
				Prefix:          "fd70:696c:6100:1::/64",
				Version:         "v1",
				UplinkAddresses: []string{"2001:db8::2"},
				Gateway:         true,
			},
		},
		{
			Tenant: &pilasterv1.Tenant{
				Name:    "blue",
				Network: "netpila",
				Created: made,
				Changes: 3,
				Ids:     []*pilasterv1.TenantId{{Id: 1}, {Id: 2, OnlyAccepted: true}},
			},
		},
		{App: &pilasterv1.App{Tenant: "blue", Id: 40, Labels: map[string]string{"app": "db"}}},
		{Mapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.1.0/24", Name: is.Name}},
		{Mapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.2.0/24", Name: "n2"}},
		{Mapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.4.1/32", Name: is.Name, Key: "c1/eth0"}},
		{
			Session: &store.NodeSession{
				Node:    is.Name,
				Session: store.Session{Orchestrator: "other", Instance: "a", Stream: "s"},
			},
		},
	}})
	for name, c := range map[string]struct {
		change func(r *store.Registration, tenant *pilasterv1.Tenant)
		judges bool // the store does
	}{
		"all as it is":            {func(*store.Registration, *pilasterv1.Tenant) {}, false},
		"fewer ids":               {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Ids = held.Ids[:1] }, false},
		"fewer changes heard":     {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Changes = 2 }, false},
		"not known when it began": {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Created = nil }, false},
		"another node":            {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Node = testNode(2) }, true},
		"another machine":         {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Node.UUID = testNode(2).UUID }, true},
		"another boot":            {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Instance = "b" }, true},
		"another prefix": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Prefix = netip.MustParsePrefix("fd70:696c:6100:2::/64")
		}, true},
		"no prefix":           {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Prefix = netip.Prefix{} }, true},
		"another version":     {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Version = "v2" }, true},
		"another uplink":      {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Uplinks[0] = netip.MustParseAddr("2001:db8::3") }, true},
		"an Edge Switch":      {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Edge = true }, true},
		"no gateway":          {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Gateway = false }, true},
		"something published": {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Published = 1 }, true},
		"an unknown tenant":   {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Name = "red" }, true},
		"one made at another time": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Created = timestamppb.New(time.Unix(2, 0))
		}, true},
		"more changes":    {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Changes = 4 }, true},
		"another network": {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Network = "nimitz" }, true},
		"other addresses": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
		}, true},
		"an unknown id":                     {func(_ *store.Registration, held *pilasterv1.Tenant) { held.Ids[1].Id = 9 }, true},
		"an unknown app":                    {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Apps[0].Id = 41 }, true},
		"an app of other labels":            {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Apps[0].Labels = nil }, true},
		"an unknown subnet":                 {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Mappings[0].To = "10.0.3.0/24" }, true},
		"another node's subnet":             {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Mappings[0].To = "10.0.2.0/24" }, true},
		"an endpoint's address as a subnet": {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Mappings[0].To = "10.0.4.1/32" }, true},
		"an endpoint's address":             {func(r *store.Registration, _ *pilasterv1.Tenant) { r.Mappings[0].Key = "c1/eth0" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			held := &pilasterv1.Tenant{
				Name:    "blue",
				Network: "netpila",
				Created: made,
				Changes: 3,
				Ids:     []*pilasterv1.TenantId{{Id: 1}, {Id: 2}},
			}
			r := store.Registration{
				Node: is, Prefix: netip.MustParsePrefix("fd70:696c:6100:1::/64"), Version: "v1", Uplinks: []netip.Addr{netip.MustParseAddr("2001:db8::2")}, Gateway: true, Instance: "a",
				Tenants: []*pilasterv1.Tenant{
					held,
				}, Apps: []*pilasterv1.App{{Tenant: "blue", Id: 40, Labels: map[string]string{"app": "db"}}},
				Mappings: []*pilasterv1.Mapping{{Tenant: "green", To: "10.0.1.0/24"}},
			}
			c.change(&r, held)
			if n := m.Registered(r); (n == nil) != c.judges || n != nil && n.Name != is.Name {
				t.Errorf("the model answers %v", n)
			}
		})
	}
}

// What a stream says at its beginning is not noted again where the store has it, unless the store has to judge of it.
func TestAlreadyNoted(t *testing.T) {
	one, two := []*pilasterv1.TenantId{{Id: 1}}, []*pilasterv1.TenantId{{Id: 1}, {Id: 2}}
	for name, c := range map[string]struct {
		tenant *pilasterv1.Tenant
		noted  *pilasterv1.Hosting
		again  bool
	}{
		"as it is":        {&pilasterv1.Tenant{Ids: one}, &pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, false},
		"said otherwise":  {&pilasterv1.Tenant{Ids: one}, &pilasterv1.Hosting{Node: "n1", Sequence: 5}, true},
		"of another node": {&pilasterv1.Tenant{Ids: one}, &pilasterv1.Hosting{Node: "n2", Accepts: []uint32{1}, Sequence: 5}, true},
		"said later":      {&pilasterv1.Tenant{Ids: one}, &pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 7}, true},
		"changing its id": {&pilasterv1.Tenant{Ids: two}, &pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, true},
		"moving":          {&pilasterv1.Tenant{Ids: one, Leaving: "nimitz"}, &pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, true},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newTestModel()
			c.tenant.Name, c.noted.Tenant = "blue", "blue"
			m.Apply(
				store.Batch{
					Revision: 11,
					Events: []store.Event{
						{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n1"}},
						{Tenant: c.tenant},
						{Hosting: c.noted},
					},
				},
			)
			first := &pilasterv1.FollowRequest{
				HostedTenants: []string{"blue"},
				Hosting:       []*pilasterv1.Hosting{{Tenant: "blue", Accepts: []uint32{1}}},
				Sequence:      6,
			}
			f := m.Subscribe(testNode(1), store.Session{}, first, func(error) {})
			if add, remove := m.Rehost(f, first); len(remove) > 0 || (len(add) > 0) != c.again {
				t.Errorf("add %v, remove %v", add, remove)
			}
		})
	}
}
