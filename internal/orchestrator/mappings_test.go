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
	resp, err := operator(
		s.config.RunDir,
	).CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name, Network: tenant.Nimitz, Overlays: overlays}))
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
		t.Errorf("made %v", green)
	}
	if blue := createTenant(t, s, "blue"); blue.Network != tenant.Netpila ||
		blue.Addressing != pilasterv1.Addressing_ADDRESSING_ENCRYPTED {
		t.Errorf("made %v", blue)
	}
	one := []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: 24}}
	for name, c := range map[string]struct {
		req   *pilasterv1.CreateTenantRequest
		words string
	}{
		"no such network":      {&pilasterv1.CreateTenantRequest{Network: "vlan"}, `no network "vlan"`},
		"CIDRs on netpila":     {&pilasterv1.CreateTenantRequest{Overlays: one}, "netpila"},
		"clear on nimitz":      {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz, Overlays: one, Addressing: pilasterv1.Addressing_ADDRESSING_CLEAR}, "not one of network nimitz, which are [own]"},
		"own on netpila":       {&pilasterv1.CreateTenantRequest{Addressing: pilasterv1.Addressing_ADDRESSING_OWN}, "addressing 3"},
		"nothing":              {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz}, "--cidr"},
		"no CIDR":              {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz, Overlays: []*pilasterv1.Overlay{{Cidr: "x"}}}, "not a prefix"},
		"the base prefix":      {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz, Overlays: []*pilasterv1.Overlay{{Cidr: "fd70:696c::/32", NodeBits: 80}}}, "base prefix"},
		"the gateway prefix":   {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz, Overlays: []*pilasterv1.Overlay{{Cidr: "100.64.0.0/10", NodeBits: 24}}}, "gateway prefix"},
		"node bits beyond all": {&pilasterv1.CreateTenantRequest{Network: tenant.Nimitz, Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: 1 << 31}}}, "leave no room"},
	} {
		c.req.Name = "red"
		_, err := op.CreateTenant(t.Context(), connect.NewRequest(c.req))
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v, want %q", name, err, c.words)
		}
	}
	_, err := op.RotateKey(t.Context(), connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: "green"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
}

// A node is told of the mappings of tenants that it hosts, by list and then as they change, and of no others.
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
		t.Fatalf("given %s and %s", own, other)
	}
	own, other := f.next(t), f.next(t)
	for i, m := range []*pilasterv1.Mapping{own.GetDelta().GetMappings()[0], other.GetDelta().GetMappings()[0]} {
		want := fmt.Sprintf("green 10.0.0.%d/32 fd70:696c:6100:%d::/64 n%d", i+2, i+1, i+1)
		if got := strings.Join([]string{m.Tenant, m.To, m.Node, m.Name}, " "); got != want ||
			(m.Key != "") != (i == 0) {
			t.Errorf("n1 heard %v, want %s, and a key of its own alone", m, want)
		}
	}
	page, err := list(t, n1, "green")
	if err != nil || len(page.Mappings) != 2 || page.Mappings[0].Key != "c1/eth0" || page.Mappings[1].Key != "" ||
		page.Revision < other.Revision ||
		page.NextPageToken != "" {
		t.Errorf("listed %v, %v", page, err)
	}

	// What is another tenant's it does not hear; the next it hears is green's.
	if got := allocate(t, n2, "lime", ""); got != "10.0.1.0/24" {
		t.Errorf("n2 has %s", got)
	}
	if _, err := n2.Free(t.Context(), connect.NewRequest(&pilasterv1.FreeRequest{Tenant: "green", Key: "c2/eth0"})); err != nil {
		t.Fatal(err)
	}
	r := f.next(t)
	if d := r.GetDelta(); len(d.GetMappings()) != 0 || len(d.GetEndedMappings()) != 1 ||
		d.EndedMappings[0].Tenant != "green" ||
		d.EndedMappings[0].To != "10.0.0.3/32" {
		t.Errorf("n1 heard %v", r)
	}
	_, err = list(t, n1, "lime")
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = n1.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "lime"}))
	wantCode(t, err, connect.CodeFailedPrecondition)

	// Resumed, it hears what it missed.
	again := follow(t, n1, &pilasterv1.FollowRequest{HostedTenants: []string{"green"}, ResumeRevision: own.Revision})
	if d := again.next(t).GetDelta(); len(d.GetMappings()) != 1 || d.Mappings[0].To != "10.0.0.3/32" {
		t.Errorf("first of what was missed: %v", d)
	}
	if d := again.next(t).GetDelta(); len(d.GetEndedMappings()) != 1 {
		t.Errorf("then %v", d)
	}

	counts := func(name string) uint64 {
		t.Helper()
		resp, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg.Tenant.Overlays[0].Given
	}
	all, err := op.ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil || counts("green") != 1 || counts("lime") != 1 || all.Msg.Tenants[0].Overlays[0].Given != 1 {
		t.Errorf("%d of green and %d of lime are given; listed %v, %v", counts("green"), counts("lime"), all, err)
	}
	// A node that registers with what is another's is refused.
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

// A node may have as much as it can have endpoints for, whether it asks for it or says that it holds it. What it has it
// may say again.
func TestAddressesOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	own := &pilasterv1.Mapping{Tenant: "green", To: allocate(t, n1, "green", "c1/eth0"), Key: "c1/eth0"}
	has := func(n int) {
		s.cache.Mu.Lock()
		defer s.cache.Mu.Unlock()
		s.cache.Allocations.ByNode["n1"] = n
	}
	holds := func(c *join.Client, m ...*pilasterv1.Mapping) error {
		_, err := c.Register(
			t.Context(),
			connect.NewRequest(&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{Mappings: m}}),
		)
		return err
	}
	if err := s.cache.Await(t.Context(), func() bool { return s.cache.Allocations.ByNode["n1"] == 1 }); err != nil {
		t.Fatal(err)
	}
	has(cache.MaxMappings)
	_, err := n1.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green", Key: "c2/eth0"}))
	for what, err := range map[string]error{"asked": err, "said": holds(n1, own, &pilasterv1.Mapping{Tenant: "green", To: "10.0.7.0/32", Key: "c7/eth0"})} {
		if wantCode(t, err, connect.CodeResourceExhausted); err != nil &&
			!strings.Contains(err.Error(), "node n1 has 131070 addresses") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := holds(n1, own); err != nil {
		t.Errorf("what it has: %v", err)
	}
	allocate(t, n2, "green", "c2/eth0")
	has(cache.MaxMappings - 1)
	allocate(t, n1, "green", "c2/eth0")
}

// of each tenant nodes together may ask only so often; who comes too late is told when to come again, and is counted.
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
			t.Errorf("refused with %v, %v", e.Meta(), e)
		}
	}
	if refused == 0 {
		t.Error("12 queries at once are not too many")
	}
	wantRefusals(t, s, admission.LimitLists, refused)
	if _, err := list(t, nodes[0], "lime"); err != nil {
		t.Errorf("of the other tenant: %v", err)
	}
}

// A node without virtual addresses takes no tenant that needs them, and all others.
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
		t.Fatalf("registered with %v, %v", resp, err)
	}
	resolve(t, far, "green", "web")
	resolve(t, far, "lime", "web")
	_, err = far.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green"}))
	if connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "number 16384") ||
		!strings.Contains(err.Error(), "100.64.0.0/10") {
		t.Errorf("node 16384: %v", err)
	}
	if got := allocate(t, far, "lime", ""); got != "fd12:3456:0:0:1::/80" {
		t.Errorf("of IPv6 it has %s", got)
	}
}
