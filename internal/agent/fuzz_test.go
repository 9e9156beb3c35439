package agent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/fuzzmutate"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

const fuzzKey, otherKey = "000102030405060708090a0b0c0d0e0f", "f00102030405060708090a0b0c0d0e0f"

// tenantFiles are good ones, at the limits of what they may hold.
var tenantFiles = []string{
	`{"version":1,"name":"blue","addressing":"encrypted","created":"2026-11-01T00:00:00Z","changes":3,` +
		`"ids":[{"id":1,"key":"` + fuzzKey + `"},{"id":2,"key":"` + otherKey + `","onlyAccepted":true}],` +
		`"apps":[{"id":1,"labels":{"app":"web"}},{"id":65279,"labels":{}}]}`,
	`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":16777215,"key":"` + fuzzKey +
		`"}],"apps":null,"deleted":true}`,
	`{"version":1,"name":"blue","network":"nimitz","overlays":[{"cidr":"10.0.0.0/16","nodeBits":24},` +
		`{"cidr":"fd12:3456::/48","nodeBits":80}],"nodeSubnets":["10.0.3.0/24","fd12:3456:0:0:3::/80"],` +
		`"addressing":"own","ids":[{"id":7,"key":"` + fuzzKey + `"}],"apps":null}`,
}

// FuzzTenantFile: a tenant that is accepted from disk is usable, is what the file says, and is the same when written
// again.
func FuzzTenantFile(f *testing.F) {
	for _, text := range tenantFiles {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	for _, twice := range []string{`"ids":[{"id":1,"key":"` + fuzzKey + `"},{"id":1,"key":"` + otherKey + `"}]`,
		`"ids":[{"id":1,"key":"` + fuzzKey + `"}],"apps":[{"id":1,"labels":{}},{"id":2,"labels":{}}]`} {
		f.Add([]byte(`{"version":1,"name":"blue","addressing":"clear",`+twice+`}`), fuzzmutate.Nothing)
	}
	tenants := &Tenants{dir: f.TempDir()}
	path := filepath.Join(tenants.dir, "read")
	f.Fuzz(func(t *testing.T, text, script []byte) {
		text = fuzzmutate.JSON(text, script, tenantFiles...)
		write(t, path, text)
		h, _, err := readTenant(statefile.Disk{}, path)
		if err != nil {
			return
		}
		if c := h.Tenant.Current(); c.ID < 1 || c.ID > address.MaxTenantID {
			t.Fatalf("draws from tenant id %d", c.ID)
		}
		for i, a := range h.Apps {
			if a.ID == 0 || a.ID >= 0xff00 {
				t.Fatalf("app %#x", a.ID)
			}
			if id, ok := h.app(a.Labels); !ok || id != a.ID {
				t.Fatalf("labels %v are app %#x and %#x, the %d.", a.Labels, id, a.ID, i)
			}
		}
		for i, subnet := range h.subnets {
			if o := h.Tenant.Overlays[i]; subnet.Bits() != o.NodeBits || !o.CIDR.Contains(subnet.Addr()) ||
				subnet.Masked() != subnet {
				t.Fatalf("node subnet %v of %v", subnet, o)
			}
		}
		if own := h.Tenant.Addressing == tenant.Own; own != (h.Tenant.Network == tenant.Nimitz) ||
			own != (len(h.Tenant.Overlays) > 0) {
			t.Fatalf(
				"a tenant of network %s with %s addressing and CIDRs %v",
				h.Tenant.Network,
				h.Tenant.Addressing,
				h.Tenant.Overlays,
			)
		}
		keys := map[address.TenantID]address.Key{}
		for _, id := range h.Tenant.IDs {
			if _, twice := keys[id.ID]; twice {
				t.Fatalf("id %d has two keys", id.ID)
			}
			keys[id.ID] = id.Key
			if !strings.Contains(strings.ToLower(string(text)), id.Key.String()) {
				t.Fatalf("key of id %d is not in %s", id.ID, text)
			}
		}
		h.Tenant.Name = "written" // the file's name
		if err := tenants.write(h); err != nil {
			t.Fatalf("accepted and not written: %v", err)
		}
		back, _, err := readTenant(statefile.Disk{}, tenants.path("written"))
		if err != nil || !back.Tenant.Created.Equal(h.Tenant.Created) {
			t.Fatalf("became %+v, %v", back, err)
		}
		back.Tenant.Created = h.Tenant.Created
		if !reflect.DeepEqual(back, h) {
			t.Fatalf("became %+v, was %+v", back, h)
		}
	})
}

// FuzzDiskState: the output for a state directory, which operators send to others, contains no key.
func FuzzDiskState(f *testing.F) {
	for _, text := range tenantFiles {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	dir := f.TempDir()
	if err := os.Mkdir(filepath.Join(dir, state.TenantsFolder), 0o700); err != nil {
		f.Fatal(err)
	}
	path := filepath.Join(dir, state.TenantsFolder, "blue.json")
	f.Fuzz(func(t *testing.T, text, script []byte) {
		write(t, path, fuzzmutate.JSON(text, script, tenantFiles...))
		h, _, err := readTenant(statefile.Disk{}, path)
		if err != nil {
			return
		}
		s, _ := ReadDiskState(dir) // node.json is missing
		said, err := json.Marshal(s)
		if err != nil || len(s.Tenants) != 1 || len(s.Tenants[0].IDs) != len(h.Tenant.IDs) ||
			len(s.Tenants[0].Apps) != len(h.Apps) {
			t.Fatalf("of %+v the output is %s, %v", h, said, err)
		}
		for _, id := range h.Tenant.IDs {
			if strings.Contains(strings.ToLower(string(said)), id.Key.String()) &&
				!strings.Contains(h.state(), id.Key.String()) {
				t.Fatalf("the output has a key: %s", said)
			}
		}
	})
}

// state is what the agent sends of a tenant, in which an operator may have written a key.
func (h *hosted) state() string {
	text, _ := json.Marshal([]any{h.Tenant.Name, h.Apps})
	return strings.ToLower(string(text))
}

// FuzzKnown: of what the orchestrator says, only what can be used is taken, and it is what was said. A tenant keeps the
// key of an id, and the ids of its endpoints, whatever is said next.
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
		list, err := statesFromProto(said.Tenants, said.Apps, func(string) bool { return true })
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
			h := newHosted(TenantState{Tenant: tenant.Tenant{Name: k.Tenant.Name, IDs: []tenant.ID{had}, Changes: 1}})
			h.endpoints[had.ID] = 1
			if err := h.mergeIDs(k); err == nil {
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

// checkNews: of mappings too, all that is taken can be used.
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
				m.Node.Bits() != 64 ||
				m.Node != m.Node.Masked() ||
				!m.Node.Addr().Is6() {
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

func write(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
