package store

import (
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// What a node makes up is not asked for together with what others need.
func TestHeldKeysAreOfPossibleNames(t *testing.T) {
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
	if i := slices.IndexFunc(keys, func(key string) bool { return len(key) > maxAsked }); i >= 0 {
		t.Errorf("a key of %d bytes", len(keys[i]))
	}
	if !slices.Contains(keys, dirTenants+"blue") {
		t.Errorf("keys %.500q, want tenant blue's among them", keys)
	}
}
