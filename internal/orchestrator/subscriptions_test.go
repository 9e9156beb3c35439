package orchestrator

import (
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// subscriptions is a list of addresses of a tenant.
func subscriptions(tenant string, addresses ...string) []*pilasterv1.Subscriptions {
	of := &pilasterv1.Subscriptions{Tenant: tenant}
	for _, a := range addresses {
		of.Addresses = append(of.Addresses, netip.MustParseAddr(a).AsSlice())
	}
	return []*pilasterv1.Subscriptions{of}
}

// TestSubscriptions: a node that pulls the mappings of a network receives only those that it subscribes to: the answer,
// then each change, also of an address that had no mapping. Other nodes and other networks are as before.
func TestSubscriptions(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	for _, c := range []string{"green", "lime"} {
		resolve(t, n2, c, "web")
	}
	resolve(t, n1, "green", "web")
	pulling := hosting("green")
	pulling.PulledNetworks = []string{tenant.Nimitz}
	f, all := follow(t, n1, pulling), follow(t, n2, hosting("green", "lime"))
	if first := f.next(t); !first.WithSubscriptions {
		t.Errorf("the first message does not say that the orchestrator accepts subscriptions: %v", first)
	}
	all.next(t)
	get := func(of stream, what string) {
		t.Helper()
		d := of.next(t).GetDelta()
		got := describe(&pilasterv1.ListMappingsResponse{
			Mappings: d.GetMappings(), EndedMappings: d.GetEndedMappings(),
		})
		if got != what {
			t.Errorf("received %q, want %q", got, what)
		}
	}
	ask := func(begin, end []*pilasterv1.Subscriptions) {
		t.Helper()
		f.send(t, &pilasterv1.FollowRequest{OnlySubscriptions: true, Subscribe: begin, Unsubscribe: end})
	}
	free := func(key string) {
		t.Helper()
		_, err := n2.Free(t.Context(), connect.NewRequest(&pilasterv1.FreeRequest{Tenant: "green", Key: key}))
		if err != nil {
			t.Fatal(err)
		}
	}
	allocate(t, n2, "green", "c1/eth0") // 10.0.0.2
	get(all, "10.0.0.2/32 n2 c1/eth0")
	ask(subscriptions("green", "10.0.0.2", "10.0.0.4"), nil)
	get(f, "10.0.0.2/32 n2, ended 10.0.0.4/32")
	allocate(t, n2, "green", "c2/eth0") // 10.0.0.3, to which n1 does not subscribe
	get(all, "10.0.0.3/32 n2 c2/eth0")
	allocate(t, n2, "green", "c3/eth0")
	get(f, "10.0.0.4/32 n2")
	get(all, "10.0.0.4/32 n2 c3/eth0")
	free("c1/eth0")
	get(f, "ended 10.0.0.2/32")
	get(all, "ended 10.0.0.2/32")
	if n := metric(t, s.config.RunDir, "pilaster_orchestrator_mapping_subscriptions"); n != 2 {
		t.Errorf("the metric counts %d subscriptions, want 2", n)
	}

	// Without a subscription, and of a tenant that the node does not host, it receives nothing.
	ask(subscriptions("lime", "10.0.0.2"), subscriptions("green", "10.0.0.4"))
	ask(subscriptions("green", "10.0.0.9"), nil)
	get(f, "ended 10.0.0.9/32")
	allocate(t, n2, "lime", "l1/eth0")
	free("c3/eth0")
	resolve(t, n1, "green", "db")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || len(d.GetMappings())+len(d.GetEndedMappings()) > 0 {
		t.Errorf("received %v, want one app and no mappings", d)
	}
	// A tenant that the node no longer hosts has no subscriptions.
	f.send(t, hosting())
	f.send(t, hosting("green"))
	f.next(t)
	if n := metric(t, s.config.RunDir, "pilaster_orchestrator_mapping_subscriptions"); n != 0 {
		t.Errorf("the metric counts %d subscriptions, want none", n)
	}

	allocate(t, n1, "green", "d1/eth0")
	own, err := n1.ListMappings(t.Context(), connect.NewRequest(
		&pilasterv1.ListMappingsRequest{Tenant: "green", Own: true}))
	if err != nil || len(own.Msg.Mappings) != 1 || own.Msg.Mappings[0].Key != "d1/eth0" || own.Msg.NextPageToken != "" {
		t.Errorf("the node's own mappings: %v, %v", own, err)
	}
}

// TestBadSubscriptions: what no agent sends ends the stream.
func TestBadSubscriptions(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	for i, bad := range []*pilasterv1.FollowRequest{
		{Subscribe: subscriptions("green", "10.0.0.2")},
		{Unsubscribe: subscriptions("green", "10.0.0.2")},
		{OnlySubscriptions: true, Subscribe: []*pilasterv1.Subscriptions{{Addresses: [][]byte{{1, 2, 3}}}}},
	} {
		f := follow(t, registered(t, s, testNode(i+1)), hosting())
		f.next(t)
		f.send(t, bad)
		_, err := f.Receive()
		wantCode(t, err, connect.CodeInvalidArgument)
	}
}
