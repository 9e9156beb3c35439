package agent

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

// FuzzTenantFile: a tenant that is accepted from disk is usable, and is the same when written again.
func FuzzTenantFile(f *testing.F) {
	const key = "000102030405060708090a0b0c0d0e0f"
	for _, text := range []string{
		`{"version":1,"name":"blue","addressing":"encrypted","created":"2026-11-01T00:00:00Z","ids":[{"id":1,"key":"` + key + `"}],"apps":[{"id":1,"labels":{"app":"web"}}]}`,
		`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":16777215,"key":"` + key + `"}],"apps":null,"deleted":true}`,
		`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":16777216,"key":"` + key + `"}]}`,
		`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":0,"key":"` + key + `"}]}`,
		`{"version":1,"name":"blue","addressing":"clear","ids":[{"id":1,"key":"` + key + `"}],"apps":[{"id":65280}]}`,
		`{"version":1,"name":"blue","addressing":"clear","ids":[]}`,
	} {
		f.Add([]byte(text))
	}
	tenants := &Tenants{dir: f.TempDir()}
	path := filepath.Join(tenants.dir, "read")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		h, err := readTenant(path)
		if err != nil {
			return
		}
		if c := h.Tenant.Current(); c.ID < 1 || c.ID > address.MaxTenantID {
			t.Fatalf("draws from tenant id %d", c.ID)
		}
		for _, a := range h.Apps {
			if a.ID == 0 || a.ID >= address.FirstReservedApp {
				t.Fatalf("app %#x", a.ID)
			}
		}
		h.Tenant.Name = "written" // the file's name
		if err := tenants.write(h); err != nil {
			t.Fatalf("accepted and not written: %v", err)
		}
		back, err := readTenant(tenants.path("written"))
		if err != nil || !back.Tenant.Created.Equal(h.Tenant.Created) {
			t.Fatalf("became %+v, %v", back, err)
		}
		back.Tenant.Created = h.Tenant.Created
		if !reflect.DeepEqual(back, h) {
			t.Fatalf("became %+v, was %+v", back, h)
		}
	})
}

// FuzzNodeFile: a node starts only from a file that leaves no doubt who it is.
func FuzzNodeFile(f *testing.F) {
	for _, text := range []string{
		`{"version":1,"name":"n1","uuid":"u1"}`,
		`{"version":1,"name":"n1","uuid":"u1","cluster":{"uuid":"c","prefix":"fd70:696c:6100:1::/64","basePrefix":"fd70:696c:6100::/40","privatePrefix":"fc00::/8"}}`,
		`{"version":1,"name":"n1","uuid":"u1","cluster":{"uuid":"c","prefix":"fd70:696c:6200:1::/64","basePrefix":"fd70:696c:6100::/40","privatePrefix":"fc00::/8"}}`,
		`{"version":2,"name":"n1","uuid":"u1"}`, ``,
	} {
		f.Add([]byte(text))
	}
	dir := f.TempDir()
	path := filepath.Join(dir, nodeFileName)
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		n, err := OpenNode(dir, "n1")
		if err != nil {
			return
		}
		m, joined := n.Membership()
		if n.Name() != "n1" || n.UUID() == "" || joined && (m.ClusterUUID == "" || m.Plan.Validate() != nil || !m.Plan.ContainsNode(m.Prefix)) {
			t.Fatalf("node %q with UUID %q in %+v", n.Name(), n.UUID(), m)
		}
	})
}
