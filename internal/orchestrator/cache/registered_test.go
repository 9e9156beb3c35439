package cache

import (
	"net/netip"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// The cache answers a registration that equals its records. The store decides on all others.
func TestRegisteredByTheCache(t *testing.T) {
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
				Offloads:        true,
				MtuReserve:      96,
				Rack:            "a",
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
		store  bool // the store decides
	}{
		"all equal": {func(*store.Registration, *pilasterv1.Tenant) {}, false},
		"fewer ids": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Ids = held.Ids[:1]
		}, false},
		"fewer changes": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Changes = 2
		}, false},
		"unknown time of creation": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Created = nil
		}, false},
		"another node": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Node = testNode(2)
		}, true},
		"another machine": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Node.UUID = testNode(2).UUID
		}, true},
		"another boot": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Instance = "b"
		}, true},
		"another prefix": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Prefix = netip.MustParsePrefix("fd70:696c:6100:2::/64")
		}, true},
		"no prefix": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Prefix = netip.Prefix{}
		}, true},
		"another version": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Version = "v2"
		}, true},
		"another uplink": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Uplinks[0] = netip.MustParseAddr("2001:db8::3")
		}, true},
		"an Edge Switch": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Edge = true
		}, true},
		"no gateway": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Gateway = false
		}, true},
		"no offloads": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Offloads = false
		}, true},
		"another reserve of the MTU": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.MTUReserve = 50
		}, true},
		"another rack": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Rack = "b"
		}, true},
		"a publication": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Published = 1
		}, true},
		"an unknown tenant": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Name = "red"
		}, true},
		"another time of creation": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Created = timestamppb.New(time.Unix(2, 0))
		}, true},
		"more changes": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Changes = 4
		}, true},
		"another network": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Network = "nimitz"
		}, true},
		"another addressing": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
		}, true},
		"an unknown id": {func(_ *store.Registration, held *pilasterv1.Tenant) {
			held.Ids[1].Id = 9
		}, true},
		"an unknown app": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Apps[0].Id = 41
		}, true},
		"an app with other labels": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Apps[0].Labels = nil
		}, true},
		"an unknown subnet": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Mappings[0].To = "10.0.3.0/24"
		}, true},
		"another node's subnet": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Mappings[0].To = "10.0.2.0/24"
		}, true},
		"an endpoint's address as a subnet": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Mappings[0].To = "10.0.4.1/32"
		}, true},
		"an endpoint's address": {func(r *store.Registration, _ *pilasterv1.Tenant) {
			r.Mappings[0].Key = "c1/eth0"
		}, true},
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
				Node:     is,
				Prefix:   netip.MustParsePrefix("fd70:696c:6100:1::/64"),
				Version:  "v1",
				Uplinks:  []netip.Addr{netip.MustParseAddr("2001:db8::2")},
				Gateway:  true,
				Instance: "a",
				Offloads: true, MTUReserve: 96, Rack: "a",
				Tenants:  []*pilasterv1.Tenant{held},
				Apps:     []*pilasterv1.App{{Tenant: "blue", Id: 40, Labels: map[string]string{"app": "db"}}},
				Mappings: []*pilasterv1.Mapping{{Tenant: "green", To: "10.0.1.0/24"}},
			}
			c.change(&r, held)
			if n := m.Registered(r); (n == nil) != c.store || n != nil && n.Name != is.Name {
				t.Errorf("the cache answers %v; want nil, for the store to decide: %v", n, c.store)
			}
		})
	}
}

// A stream that begins does not record a report again that the store already has, unless the store has to decide on it.
func TestAlreadyRecorded(t *testing.T) {
	one, two := []*pilasterv1.TenantId{{Id: 1}}, []*pilasterv1.TenantId{{Id: 1}, {Id: 2}}
	for name, c := range map[string]struct {
		tenant   *pilasterv1.Tenant
		recorded *pilasterv1.Hosting
		again    bool
	}{
		"equal": {
			&pilasterv1.Tenant{Ids: one},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, false,
		},
		"different report": {
			&pilasterv1.Tenant{Ids: one},
			&pilasterv1.Hosting{Node: "n1", Sequence: 5}, true,
		},
		"of another node": {
			&pilasterv1.Tenant{Ids: one},
			&pilasterv1.Hosting{Node: "n2", Accepts: []uint32{1}, Sequence: 5}, true,
		},
		"later report": {
			&pilasterv1.Tenant{Ids: one},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 7}, true,
		},
		"rotating its key": {
			&pilasterv1.Tenant{Ids: two},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, true,
		},
		"migrating": {
			&pilasterv1.Tenant{Ids: one, Leaving: "nimitz"},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, true,
		},
		"offloaded": {
			&pilasterv1.Tenant{Ids: one, Offloads: []*pilasterv1.Offload{{Id: 1, Node: "n3"}}},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5}, true,
		},
		"other changes applied": {
			&pilasterv1.Tenant{Ids: one},
			&pilasterv1.Hosting{Node: "n1", Accepts: []uint32{1}, Sequence: 5, AppliedChanges: 7}, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newTestCache()
			c.tenant.Name, c.recorded.Tenant = "blue", "blue"
			m.Apply(
				store.Batch{
					Revision: 11,
					Events: []store.Event{
						{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n1"}},
						{Tenant: c.tenant},
						{Hosting: c.recorded},
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
				t.Errorf("add %v, remove %v; want a report to add: %v, none to remove", add, remove, c.again)
			}
		})
	}
}
