package control

import (
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/fuzzmutate"
	"pilaster.io/pilaster/internal/tenant"
)

// FuzzKnown: the agent accepts only usable states from the orchestrator, and decodes them unchanged. A tenant keeps the
// key of an id, and the ids of its endpoints, whatever the next message contains.
func FuzzKnown(f *testing.F) {
	var deltas []string
	for _, said := range []*pilasterv1.Delta{
		{
			Tenants: []*pilasterv1.Tenant{{Name: "blue",
				Ids: []*pilasterv1.TenantId{{Id: 7, Key: make([]byte, 16)},
					{Id: 8, Key: make([]byte, 16), OnlyAccepted: true}}, Changes: 2}},
			Apps: []*pilasterv1.App{{Tenant: "blue", Id: 65279, Labels: map[string]string{"app": "web"}},
				{Tenant: "red", Id: 1}},
		},
		{Tenants: []*pilasterv1.Tenant{{Name: "blue", Addressing: pilasterv1.Addressing_ADDRESSING_CLEAR,
			Ids: []*pilasterv1.TenantId{{Id: 16777215, Key: make([]byte, 16)}}, Changes: 9}}},
		{Tenants: []*pilasterv1.Tenant{{Name: "green", Network: "nimitz",
			Addressing: pilasterv1.Addressing_ADDRESSING_OWN,
			Ids:        []*pilasterv1.TenantId{{Id: 9, Key: make([]byte, 16)}},
			Overlays:   []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: 24}}}},
			Mappings: []*pilasterv1.Mapping{{Tenant: "green", To: "10.0.3.0/24", Node: "fd70:696c:6100:1::/64"}}},
		{Tenants: []*pilasterv1.Tenant{{Name: "blue",
			Ids: []*pilasterv1.TenantId{{Id: 8, Key: make([]byte, 16)}, {Id: 8, Key: make([]byte, 16)}}}}},
	} {
		text, err := protojson.Marshal(said)
		if err != nil {
			f.Fatal(err)
		}
		deltas = append(deltas, string(text))
		f.Add(text, fuzzmutate.Nothing)
	}
	had := tenant.ID{ID: 7, Key: address.Key{}}
	f.Fuzz(func(t *testing.T, text, script []byte) {
		said := new(pilasterv1.Delta)
		if protojson.Unmarshal(fuzzmutate.JSON(text, script, deltas...), said) != nil {
			return
		}
		checkNews(t, said)
		list, err := statesFromProto(said.Tenants, said.Apps, func(string) bool { return true },
			address.DefaultPlan())
		if err != nil {
			return
		}
		apps := 0
		for _, k := range list {
			apps += len(k.Apps)
			for _, a := range k.Apps {
				if a.ID == 0 || a.ID >= 0xff00 {
					t.Fatalf("app %#x", a.ID)
				}
			}
			if !k.Whole {
				continue // apps without their tenant
			}
			checkIDs(t, k.Tenant.IDs)
			h := agent.TenantState{Tenant: tenant.Tenant{Name: k.Tenant.Name, IDs: []tenant.ID{had}, Changes: 1}}
			used := func(id address.TenantID) bool { return id == had.ID }
			if err := h.MergeIDs(k, used); err == nil {
				checkIDs(t, h.Tenant.IDs)
				if id, _ := keyOf(h.Tenant.IDs, had.ID); id.Key != had.Key || !h.Tenant.Has(had.ID) {
					t.Fatalf("the id of an endpoint is gone, or has another key: %+v", h.Tenant.IDs)
				}
			}
		}
		if apps != len(said.Apps) {
			t.Fatalf("%d apps became %d", len(said.Apps), apps)
		}
	})
}

// checkNews checks that all accepted mappings are usable.
func checkNews(t *testing.T, said *pilasterv1.Delta) {
	t.Helper()
	by, err := mappingUpdates(&pilasterv1.FollowResponse{Revision: 5,
		Event: &pilasterv1.FollowResponse_Delta{Delta: said}})
	if err != nil {
		return
	}
	count := 0
	for name, n := range by {
		count += len(n.add) + len(n.remove)
		for _, m := range n.add {
			if m.Tenant != name || !m.To.IsValid() || m.To != m.To.Masked() || m.To.Addr().Is4In6() ||
				(m.Node.IsValid() || len(m.NextHops) == 0) && (m.Node.Bits() != 64 || m.Node != m.Node.Masked() ||
					!m.Node.Addr().Is6()) || m.App >= 0xff00 || m.MAC != nil && len(m.MAC) != 6 {
				t.Fatalf("taken for tenant %q: %+v", name, m)
			}
		}
		for _, m := range n.remove {
			if m.Tenant != name || !m.To.IsValid() {
				t.Fatalf("taken away from tenant %q: %+v", name, m)
			}
		}
	}
	if count != len(said.Mappings)+len(said.EndedMappings) {
		t.Fatalf("%d of %v are taken", count, said)
	}
}

func keyOf(ids []tenant.ID, want address.TenantID) (tenant.ID, bool) {
	for _, id := range ids {
		if id.ID == want {
			return id, true
		}
	}
	return tenant.ID{}, false
}

// checkIDs: there is a current id, and each id has one key.
func checkIDs(t *testing.T, ids []tenant.ID) {
	t.Helper()
	seen, draws := map[address.TenantID]bool{}, false
	for _, id := range ids {
		if id.ID < 1 || id.ID > 1<<24-1 || seen[id.ID] {
			t.Fatalf("id %d is none, or there twice: %+v", id.ID, ids)
		}
		seen[id.ID] = true
		draws = draws || !id.OnlyAccepted
	}
	if !draws {
		t.Fatalf("nothing to draw from: %+v", ids)
	}
}
