package agent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/fuzzmutate"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

const fuzzKey, otherKey = "000102030405060708090a0b0c0d0e0f", "f00102030405060708090a0b0c0d0e0f"

// tenantFiles are valid tenant files, with the smallest and largest values that the agent accepts.
var tenantFiles = []string{
	`{"version":1,"name":"blue","addressing":"encrypted","created":"2026-11-01T00:00:00Z","changes":3,` +
		`"ids":[{"id":1,"key":"` + fuzzKey + `"},{"id":2,"key":"` + otherKey + `","onlyAccepted":true}],` +
		`"apps":[{"id":1,"labels":{"app":"web"}},{"id":65279,"labels":{}}]}`,
	`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":16777215,"key":"` + fuzzKey +
		`"}],"apps":null,"deleted":true}`,
	`{"version":1,"name":"blue","network":"nimitz","overlays":[{"cidr":"10.0.0.0/16","nodeBits":24},` +
		`{"cidr":"fd12:3456::/48","nodeBits":80}],"nodeSubnets":["10.0.3.0/24","fd12:3456:0:0:3::/80"],` +
		`"addressing":"own","ids":[{"id":7,"key":"` + fuzzKey + `"}],"apps":null}`,
	`{"version":1,"name":"blue","network":"nimitz","overlays":[{"cidr":"10.0.0.0/16","nodeBits":24}],` +
		`"addressing":"own","ids":[{"id":7,"key":"` + fuzzKey + `"}],"apps":null,"carried":true,"offloads":[` +
		`{"id":16777215,"node":"n2","prefix":"fd70:696c:6100:2::/64","phase":"active","epoch":4294967295,"since":3,` +
		`"frontends":[{"node":"n1","prefix":"fd70:696c:6100:1::/64"},{"node":"n3","prefix":"fd70:696c:6100:3::/64",` +
		`"draining":true}],"endpoints":[{"address":"10.0.2.9","app":65279}]}]}`,
	`{"version":1,"name":"blue","addressing":"encrypted","ids":[{"id":1,"key":"` + fuzzKey + `"}],"apps":null,` +
		`"egress":[{"to":"::/0"},{"to":"2001:db8:9::/48","allow":true,"via":[{"node":"n1",` +
		`"prefix":"fd70:696c:6100:1::/64","address":"2001:db8:7::9"}]}],"nodes":["fd70:696c:6100::/40"],` +
		`"protected":["2001:db8:5::/48"]}`,
}

// FuzzTenantFile: a tenant that is accepted from disk is usable, equals the file, and stays equal when written again.
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

func write(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
