package cache

import (
	"fmt"
	"net/netip"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// leave gives a tenant an egress rule with these gateways.
func leave(m *Cache, revision int64, tenant string, gateways ...string) {
	rule := &pilasterv1.EgressRule{To: "::/0", Allow: true}
	for _, node := range gateways {
		rule.Gateways = append(rule.Gateways, &pilasterv1.EgressGateway{Node: node})
	}
	is := &pilasterv1.Tenant{Name: tenant, Changes: uint64(revision), Egress: []*pilasterv1.EgressRule{rule}}
	m.Apply(store.Batch{Revision: revision, Events: []store.Event{{Tenant: is}}})
}

func protect(m *Cache, revision int64, texts ...string) {
	all := []netip.Prefix{}
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	m.Apply(store.Batch{Revision: revision, Events: []store.Event{{Protected: &all}}})
}

// A node receives a tenant of which it is an egress gateway, and no tenant that it neither hosts nor is a gateway of.
func TestEgressGateways(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0)
	want(t, f, "[][][]0[]")
	leave(m, 11, "red")
	leave(m, 12, "blue", "n2")
	want(t, f)
	leave(m, 13, "red", "n2", "n1")
	want(t, f, "[red][red][red]0[]")
	leave(m, 14, "red", "n1")
	want(t, f, "[red][red][]0[]")
	leave(m, 15, "red", "n2")
	want(t, f, "[][red][]0[]") // the last update, with the node's record that no longer lists it
	leave(m, 16, "red", "n2")
	want(t, f)
}

// protected formats the protected prefixes of the tenants in the messages of a stream.
func protectedIn(f *Subscriber) (all []string) {
	for f.Queue.Len() > 0 {
		r := f.Queue.Next()
		for _, t := range append(r.GetSnapshot().GetTenants(), r.GetDelta().GetTenants()...) {
			all = append(all, fmt.Sprintf("%s%d%v", t.Name, t.Changes, t.Protected))
		}
	}
	return all
}

// A change of the protected prefixes updates the tenants with egress rules at their nodes, and no others. It does not
// count as a change of the tenant.
func TestProtected(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue", "red")
	check := func(want ...string) {
		t.Helper()
		if got := protectedIn(f); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	if got := protectedIn(f); len(got) != 2 {
		t.Errorf("the snapshot has %v", got)
	}
	protect(m, 11, "2001:db8:5::/48")
	check()
	leave(m, 12, "blue")
	check("blue12[2001:db8:5::/48]")
	leave(m, 13, "green") // which the node does not host
	protect(m, 14, "2001:db8:5::/48", "2001:db8:6::/48")
	check("blue12[2001:db8:5::/48 2001:db8:6::/48]")
	protect(m, 15, "2001:db8:5::/48", "2001:db8:6::/48")
	check()
	publish(m, 16, "blue") // the last rule is deleted
	check("blue16[]")
	leave(m, 17, "blue")
	protect(m, 18)
	check("blue17[2001:db8:5::/48 2001:db8:6::/48]", "blue17[]")
	if got := m.Protected(); len(got) != 0 {
		t.Errorf("the cache has %v", got)
	}
	protect(m, 19, "2001:db8:7::/48")
	resolved := &pilasterv1.Tenant{Name: "blue", Egress: m.Tenants["blue"].Egress}
	if got := m.WithDerived(resolved).Protected; fmt.Sprint(got) != "[2001:db8:7::/48]" {
		t.Errorf("an answer to Resolve has %v", got)
	}
	m.Apply(store.Batch{Revision: 30, Whole: true, Events: []store.Event{{Tenant: resolved}}})
	if got := m.Tenants["blue"].Protected; len(got) != 0 {
		t.Errorf("a store without protected prefixes gives %v", got)
	}
}
