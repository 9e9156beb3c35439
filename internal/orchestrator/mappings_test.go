package orchestrator

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/tenant"
)

func createNimitz(t *testing.T, s *Server, name string, overlays ...*pilasterv1.Overlay) *pilasterv1.Tenant {
	t.Helper()
	resp, err := operator(s.config.RunDir).CreateTenant(t.Context(), connect.NewRequest(
		&pilasterv1.CreateTenantRequest{Name: name, Network: tenant.Nimitz, Overlays: overlays}))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.Tenant
}

func allocate(t *testing.T, c *join.Client, tenant, key string) string {
	t.Helper()
	resp, err := c.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: tenant, Key: key}))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(resp.Msg.Prefixes, " ")
}

func list(t *testing.T, c *join.Client, tenant string) (*pilasterv1.ListMappingsResponse, error) {
	t.Helper()
	resp, err := c.ListMappings(t.Context(), connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: tenant}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

func TestCreateTenantOnANetwork(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	green := createNimitz(
		t,
		s,
		"green",
		&pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24},
		&pilasterv1.Overlay{Cidr: "fd12:3456::/48", NodeBits: 80, Given: 7},
	)
	if green.Network != tenant.Nimitz || green.Addressing != pilasterv1.Addressing_ADDRESSING_OWN ||
		len(green.Overlays) != 2 ||
		green.Overlays[1].Given != 0 ||
		green.Ids[0].Id != 1 {
		t.Errorf("created %v", green)
	}
	if blue := createTenant(t, s, "blue"); blue.Network != tenant.Netpila ||
		blue.Addressing != pilasterv1.Addressing_ADDRESSING_ENCRYPTED {
		t.Errorf("created %v", blue)
	}
	overlay := func(cidr string, nodeBits uint32) []*pilasterv1.Overlay {
		return []*pilasterv1.Overlay{{Cidr: cidr, NodeBits: nodeBits}}
	}
	one := overlay("10.0.0.0/16", 24)
	const nimitz = tenant.Nimitz
	for name, c := range map[string]struct {
		req  *pilasterv1.CreateTenantRequest
		text string
	}{
		"unknown network":  {&pilasterv1.CreateTenantRequest{Network: "vlan"}, `no network "vlan"`},
		"CIDRs on netpila": {&pilasterv1.CreateTenantRequest{Overlays: one}, "netpila"},
		"clear on nimitz": {
			&pilasterv1.CreateTenantRequest{
				Network: nimitz, Overlays: one, Addressing: pilasterv1.Addressing_ADDRESSING_CLEAR,
			},
			"not one of network nimitz, which are [own]",
		},
		"own on netpila": {
			&pilasterv1.CreateTenantRequest{Addressing: pilasterv1.Addressing_ADDRESSING_OWN}, "addressing 3",
		},
		"no overlay": {&pilasterv1.CreateTenantRequest{Network: nimitz}, "--cidr"},
		"invalid CIDR": {
			&pilasterv1.CreateTenantRequest{Network: nimitz, Overlays: overlay("x", 0)}, "not a prefix",
		},
		"base prefix": {
			&pilasterv1.CreateTenantRequest{Network: nimitz, Overlays: overlay("fd70:696c::/32", 80)}, "base prefix",
		},
		"gateway prefix": {
			&pilasterv1.CreateTenantRequest{Network: nimitz, Overlays: overlay("100.64.0.0/10", 24)}, "gateway prefix",
		},
		"too many node bits": {
			&pilasterv1.CreateTenantRequest{Network: nimitz, Overlays: overlay("10.0.0.0/16", 1<<31)}, "leave no room",
		},
	} {
		c.req.Name = "red"
		_, err := op.CreateTenant(t.Context(), connect.NewRequest(c.req))
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got error %v, want %q", name, err, c.text)
		}
	}
	_, err := op.RotateKey(t.Context(), connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: "green"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
}

// A node receives the mappings of tenants that it hosts: all of them as a list, then changes on its stream. It receives
// none of other tenants.
func TestMappings(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	resolve(t, n2, "lime", "web")
	f := follow(t, n1, hosting("green"))
	f.next(t)
	if own, other := allocate(t, n1, "green", "c1/eth0"), allocate(t, n2, "green", "c2/eth0"); own != "10.0.0.2/32" ||
		other != "10.0.0.3/32" {
		t.Fatalf("allocated %s and %s, want 10.0.0.2/32 and 10.0.0.3/32", own, other)
	}
	own, other := f.next(t), f.next(t)
	for i, m := range []*pilasterv1.Mapping{own.GetDelta().GetMappings()[0], other.GetDelta().GetMappings()[0]} {
		want := fmt.Sprintf("green 10.0.0.%d/32 fd70:696c:6100:%d::/64 n%d", i+2, i+1, i+1)
		if got := strings.Join([]string{m.Tenant, m.To, m.Node, m.Name}, " "); got != want ||
			(m.Key != "") != (i == 0) {
			t.Errorf("n1 received %v, want %s, with a key only if n1 allocated it", m, want)
		}
	}
	page, err := list(t, n1, "green")
	if err != nil || len(page.Mappings) != 2 || page.Mappings[0].Key != "c1/eth0" || page.Mappings[1].Key != "" ||
		page.Revision < other.Revision ||
		page.NextPageToken != "" {
		t.Errorf("got list %v, %v; want both mappings, with a key for the first only", page, err)
	}

	// n1 receives no mapping of lime, which it does not host; its next message is about green.
	if got := allocate(t, n2, "lime", ""); got != "10.0.1.0/24" {
		t.Errorf("n2 allocated %s, want 10.0.1.0/24", got)
	}
	if _, err := n2.Free(t.Context(), connect.NewRequest(&pilasterv1.FreeRequest{
		Tenant: "green", Key: "c2/eth0",
	})); err != nil {
		t.Fatal(err)
	}
	r := f.next(t)
	if d := r.GetDelta(); len(d.GetMappings()) != 0 || len(d.GetEndedMappings()) != 1 ||
		d.EndedMappings[0].Tenant != "green" ||
		d.EndedMappings[0].To != "10.0.0.3/32" {
		t.Errorf("n1 received %v, want the end of mapping 10.0.0.3/32", r)
	}
	_, err = list(t, n1, "lime")
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = n1.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "lime"}))
	wantCode(t, err, connect.CodeFailedPrecondition)

	// A resumed stream starts with the changes after its revision.
	again := follow(t, n1, &pilasterv1.FollowRequest{
		HostedTenants: []string{"green"}, ResumeRevision: own.Revision,
	})
	if d := again.next(t).GetDelta(); len(d.GetMappings()) != 1 || d.Mappings[0].To != "10.0.0.3/32" {
		t.Errorf("resumed: first message %v, want mapping 10.0.0.3/32", d)
	}
	if d := again.next(t).GetDelta(); len(d.GetEndedMappings()) != 1 {
		t.Errorf("resumed: second message %v, want one ended mapping", d)
	}

	allocated := func(name string) uint64 {
		t.Helper()
		resp, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg.Tenant.Overlays[0].Given
	}
	all, err := op.ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil || allocated("green") != 1 || allocated("lime") != 1 || all.Msg.Tenants[0].Overlays[0].Given != 1 {
		t.Errorf("%d prefixes of green and %d of lime are allocated, want 1 and 1; listed %v, %v",
			allocated("green"), allocated("lime"), all, err)
	}
	// A node cannot register a mapping of another node.
	_, err = n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{
		Mappings: []*pilasterv1.Mapping{{Tenant: "lime", To: "10.0.1.0/24"}}}}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	_, err = n1.Register(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.RegisterRequest{
				Held: &pilasterv1.Held{Mappings: make([]*pilasterv1.Mapping, cache.MaxMappings+1)},
			},
		),
	)
	wantCode(t, err, connect.CodeInvalidArgument)
}

// A node may have as many addresses as endpoints. The limit applies when it allocates an address, and when it registers
// one that the orchestrator does not know. It may register the addresses that it has again.
func TestMaxAddressesOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	own := &pilasterv1.Mapping{Tenant: "green", To: allocate(t, n1, "green", "c1/eth0"), Key: "c1/eth0"}
	setCount := func(n int) {
		s.cache.Mu.Lock()
		defer s.cache.Mu.Unlock()
		s.cache.Allocations.ByNode["n1"] = n
	}
	register := func(c *join.Client, m ...*pilasterv1.Mapping) error {
		_, err := c.Register(
			t.Context(),
			connect.NewRequest(&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{Mappings: m}}),
		)
		return err
	}
	if err := s.cache.Await(t.Context(), func() bool { return s.cache.Allocations.ByNode["n1"] == 1 }); err != nil {
		t.Fatal(err)
	}
	setCount(cache.MaxMappings)
	_, err := n1.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green", Key: "c2/eth0"}))
	another := &pilasterv1.Mapping{Tenant: "green", To: "10.0.7.0/32", Key: "c7/eth0"}
	for call, err := range map[string]error{"Allocate": err, "Register": register(n1, own, another)} {
		if wantCode(t, err, connect.CodeResourceExhausted); err != nil &&
			!strings.Contains(err.Error(), "node n1 has 131070 addresses") {
			t.Errorf("%s: got error %v", call, err)
		}
	}
	if err := register(n1, own); err != nil {
		t.Errorf("register the node's own address again: %v", err)
	}
	allocate(t, n2, "green", "c2/eth0")
	setCount(cache.MaxMappings - 1)
	allocate(t, n1, "green", "c2/eth0")
}

// All nodes together may list a tenant's mappings at a limited rate. A refusal says when to retry, and is counted.
func TestListRate(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Lists = 3
	s := start(t, c)
	nodes := []*join.Client{registered(t, s, testNode(1)), registered(t, s, testNode(2))}
	for _, name := range []string{"green", "lime"} {
		createNimitz(t, s, name, &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
		for _, n := range nodes {
			resolve(t, n, name, "web")
		}
	}
	refused := 0
	for i := range 12 {
		_, err := list(t, nodes[i%2], "green")
		if err == nil {
			continue
		}
		refused++
		wantCode(t, err, connect.CodeResourceExhausted)
		e := err.(*connect.Error)
		if e.Meta().Get("Retry-After") != "1" || !strings.Contains(e.Message(), "--list-rate") ||
			!strings.Contains(e.Message(), "green") {
			t.Errorf("refused with metadata %v, error %v", e.Meta(), e)
		}
	}
	if refused == 0 {
		t.Error("no query was refused, of 12 with a rate of 3 a second")
	}
	wantRefusals(t, s, admission.LimitLists, refused)
	if _, err := list(t, nodes[0], "lime"); err != nil {
		t.Errorf("query for another tenant: %v", err)
	}
}

// A node whose number is beyond the IPv4 gateway prefix cannot allocate IPv4 addresses. It can allocate IPv6 addresses.
func TestNodesBeyondTheGatewayPrefix(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "fd12:3456::/48", NodeBits: 80})
	far := dial(t, s, testNode(1))
	resp, err := far.Register(
		t.Context(),
		connect.NewRequest(&pilasterv1.RegisterRequest{WantedPrefix: "fd70:696c:6100:4000::/64"}),
	)
	if err != nil || strings.Join(resp.Msg.Plan.GatewayPrefixes, " ") != "100.64.0.0/10 fd70:696c:6700::/48" {
		t.Fatalf("register: got %v, %v", resp, err)
	}
	resolve(t, far, "green", "web")
	resolve(t, far, "lime", "web")
	_, err = far.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green"}))
	if connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "number 16384") ||
		!strings.Contains(err.Error(), "100.64.0.0/10") {
		t.Errorf("IPv4 on node 16384: got error %v", err)
	}
	if got := allocate(t, far, "lime", ""); got != "fd12:3456:0:0:1::/80" {
		t.Errorf("IPv6: allocated %s, want fd12:3456:0:0:1::/80", got)
	}
}
