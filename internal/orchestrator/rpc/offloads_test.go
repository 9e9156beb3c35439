package rpc

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

func TestChooseFrontends(t *testing.T) {
	able := func(name, rack string) *pilasterv1.Node {
		return &pilasterv1.Node{
			Name: name, Rack: rack, Offloads: true, Connected: true, Enforces: []string{tenant.Nimitz},
		}
	}
	edge, old, away, lax := able("e1", "a"), able("o1", "a"), able("d1", "a"), able("l1", "a")
	edge.Edge, old.Offloads, away.Connected, lax.Enforces = true, false, false, nil
	nodes := []*pilasterv1.Node{
		able("n5", ""), able("n4", "b"), able("n3", "a"), able("n2", "a"), able("n1", "a"), edge, old, away, lax,
	}
	busy := []*pilasterv1.Tenant{
		{Offloads: []*pilasterv1.Offload{{Frontends: []*pilasterv1.Frontend{{Node: "n2"}, {Node: "n4"}}}}},
		{Offloads: []*pilasterv1.Offload{{Frontends: []*pilasterv1.Frontend{{Node: "n2"}, {Node: "n3"}}}}},
	}
	for _, c := range []struct {
		tenants []*pilasterv1.Tenant
		backend string
		n       int
		want    string
	}{
		{nil, "n1", 2, "n2 n3"},
		{nil, "n1", 8, "n2 n3 n4 n5"},
		{busy, "n1", 8, "n3 n2 n5 n4"},
		{busy, "n4", 8, "n1 n5 n3 n2"}, // no other node of its rack
		{busy, "n5", 2, "n1 n3"},       // nodes without a rack do not share one
		{nil, "n1", 0, ""},
	} {
		if got := strings.Join(chooseFrontends(nodes, c.tenants, tenant.Nimitz, c.backend, c.n), " "); got != c.want {
			t.Errorf("%d frontends of %s: got %q, want %q", c.n, c.backend, got, c.want)
		}
	}
}

// Reports about offloads that no agent sends are refused before the store reads them.
func TestCheckOffloaded(t *testing.T) {
	many := &pilasterv1.OffloadedEndpoint{App: 1}
	for range tenant.MaxOffloaded/2 + 1 {
		many.Addresses = append(many.Addresses, []byte{10, 0, 0, 1})
	}
	for name, c := range map[string]struct {
		reports []*pilasterv1.Hosting
		valid   bool
	}{
		"none": {nil, true},
		"a container": {[]*pilasterv1.Hosting{
			{Offloaded: []*pilasterv1.OffloadedEndpoint{many}, LostFrontends: []string{"n1"}}}, true},
		"too many": {[]*pilasterv1.Hosting{
			{Offloaded: []*pilasterv1.OffloadedEndpoint{many}}, {Offloaded: []*pilasterv1.OffloadedEndpoint{many}},
		}, false},
		"no app": {[]*pilasterv1.Hosting{{Offloaded: []*pilasterv1.OffloadedEndpoint{
			{Addresses: [][]byte{{10, 0, 0, 1}}}}}}, false},
		"no address": {[]*pilasterv1.Hosting{{Offloaded: []*pilasterv1.OffloadedEndpoint{
			{Addresses: [][]byte{{10, 0, 0}}, App: 1}}}}, false},
		"no name":    {[]*pilasterv1.Hosting{{LostFrontends: []string{"N1\x1b"}}}, false},
		"many names": {[]*pilasterv1.Hosting{{LostFrontends: make([]string, tenant.MaxFrontends+1)}}, false},
	} {
		if err := checkOffloaded(c.reports); (err == nil) != c.valid ||
			err != nil && connect.CodeOf(refusal(err)) != connect.CodeInvalidArgument {
			t.Errorf("%s: got %v, want valid: %v", name, err, c.valid)
		}
	}
}
