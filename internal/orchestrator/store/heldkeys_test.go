package store

import (
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Keys with invalid names from a node's report are not read together with keys of other nodes.
func TestHeldKeysHaveValidNames(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	r := Registration{
		Tenants: []*pilasterv1.Tenant{{Name: long}, {Name: "blue"}},
		Apps:    []*pilasterv1.App{{Tenant: long, Id: 1}},
		Mappings: []*pilasterv1.Mapping{
			{Tenant: long, To: "10.0.0.0/24"},
			{Tenant: "blue", To: "10.0.0.0/24", Key: long},
		},
	}
	keys := r.heldKeys()
	if i := slices.IndexFunc(keys, func(key string) bool { return len(key) > maxFetched }); i >= 0 {
		t.Errorf("a key has %d bytes, want at most %d", len(keys[i]), maxFetched)
	}
	if !slices.Contains(keys, dirTenants+"blue") {
		t.Errorf("keys %.500q, want the key of tenant blue among them", keys)
	}
}
