package store_test

import (
	"net/netip"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

func testNodes(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if got := register(t, s, 1).Prefix; got != "fd70:696c:6100:1::/64" {
		t.Errorf("first prefix %s, want fd70:696c:6100:1::/64", got)
	}
	if got := register(t, s, 1).Prefix; got != "fd70:696c:6100:1::/64" {
		t.Errorf("registered again: prefix %s, want fd70:696c:6100:1::/64", got)
	}
	_, err := s.Register(ctx, store.Registration{Node: pki.Node{Name: "n1", UUID: storetest.UUID(99)}})
	refused(t, err, store.Refused, "n1", storetest.UUID(1), "node delete")
	_, err = s.Register(ctx, store.Registration{Node: pki.Node{Name: "other", UUID: storetest.UUID(1)}})
	refused(t, err, store.Refused, "n1", "other")

	request := func(n int, prefix string) (*pilasterv1.Node, error) {
		return s.Register(ctx, store.Registration{Node: node(n), Prefix: netip.MustParsePrefix(prefix)})
	}
	_, err = request(1, "fd70:696c:6100:7::/64")
	refused(t, err, store.Refused, "fd70:696c:6100:1::/64")
	_, err = request(2, "fd70:696c:6100:1::/64")
	refused(t, err, store.Refused, storetest.UUID(1))
	for _, p := range []string{"2001:db8::/64", "fd70:696c:6100:2::/63", "fd70:696c:6100:2::1/64"} {
		_, err = request(2, p)
		refused(t, err, store.Invalid, "fd70:696c:6100::/40")
	}
	if n, err := request(2, "fd70:696c:6100:2::/64"); err != nil || n.Prefix != "fd70:696c:6100:2::/64" {
		t.Errorf("requested prefix fd70:696c:6100:2::/64: got %v, %v", n, err)
	}
	if _, err := request(3, "fd70:696c:61ff:ffff::/64"); err != nil {
		t.Errorf("requested the last prefix: %v", err)
	}
	if got := register(t, s, 4).Prefix; got != "fd70:696c:6100:3::/64" {
		t.Errorf("after the requested prefixes: %s, want fd70:696c:6100:3::/64", got)
	}

	refused(t, s.DeleteNode(ctx, "unknown", false), store.NotFound, "unknown")
	if err := s.DeleteNode(ctx, "n2", false); err != nil {
		t.Fatal(err)
	}
	_, err = s.Register(ctx, store.Registration{Node: node(2)})
	refused(t, err, store.Refused, "deleted", "state directory")
	refused(t, s.Admit(ctx, node(2)), store.Refused, "deleted")
	_, err = request(5, "fd70:696c:6100:2::/64")
	refused(t, err, store.Refused, "never reused")
	renewed, err := s.Register(ctx, store.Registration{Node: pki.Node{Name: "n2", UUID: storetest.UUID(22)}})
	if err != nil || renewed.Prefix != "fd70:696c:6100:4::/64" {
		t.Errorf("a new machine with the name of a deleted one: got %v, %v; want a new prefix", renewed, err)
	}
}

func testPrefixesRunOut(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{Base: netip.MustParsePrefix("fd11:0:0:ff00::/56")})
	mark := netip.MustParsePrefix("fd11:0:0:fffe::/64")
	if _, err := s.Register(t.Context(), store.Registration{Node: node(1), Prefix: mark}); err != nil {
		t.Fatal(err)
	}
	if got := register(t, s, 2).Prefix; got != "fd11:0:0:ffff::/64" {
		t.Errorf("above the mark: prefix %s, want fd11:0:0:ffff::/64", got)
	}
	_, err := s.Register(t.Context(), store.Registration{Node: node(3)})
	refused(t, err, store.Full, "256", "fd11:0:0:ff00::/56")
}
