package control

import (
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant whose networks this build lacks, or which do not fit its addresses, is refused.
func TestTenantsOfALaterBuild(t *testing.T) {
	for _, p := range []*pilasterv1.Tenant{
		{Name: "green", Network: "netpila", Leaving: "later"},
		{Name: "green", Network: "nimitz", Leaving: "nimitz", Addressing: 3},
		{Name: "green", Network: "netpila", Leaving: "nimitz"},
		{Name: "green", Network: "netpila", Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}}},
	} {
		p.Ids = []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}}
		if _, err := tenantFromProto(p); err == nil || !strings.Contains(err.Error(), "upgrade the agent") {
			t.Errorf("%v: %v", p, err)
		}
	}
}

// TestRegionsOfMessages: what no orchestrator can have said is not believed.
func TestRegionsOfMessages(t *testing.T) {
	said := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{
			Name: "green", Network: tenant.Nimitz, Addressing: pilasterv1.Addressing_ADDRESSING_OWN,
			Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}},
			Ids:      []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}},
			Regions: []*pilasterv1.TenantRegion{
				{
					Name:     "east",
					Cidrs:    []string{"10.1.0.0/16"},
					Edge:     agenttest.NodePrefix.String(),
					PeerEdge: "fd71:696c:6100:5::/64",
					PeerVni:  12,
				},
			},
		}
	}
	got, err := tenantFromProto(said())
	if err != nil || len(got.Regions) != 1 || got.Regions[0].PeerVNI != 12 ||
		got.Regions[0].PeerEdge.String() != "fd71:696c:6100:5::/64" {
		t.Errorf("%+v, %v", got.Regions, err)
	}
	for what, change := range map[string]func(*pilasterv1.TenantRegion){
		"CIDR":  func(r *pilasterv1.TenantRegion) { r.Cidrs = []string{"10.1.0.1/16"} },
		"edge":  func(r *pilasterv1.TenantRegion) { r.PeerEdge = "fd71:696c:6100:5::/63" },
		"VNI 0": func(r *pilasterv1.TenantRegion) { r.PeerVni = 0 },
	} {
		wrong := said()
		change(wrong.Regions[0])
		if _, err := tenantFromProto(wrong); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want an error with %q", err, what)
		}
	}
}
