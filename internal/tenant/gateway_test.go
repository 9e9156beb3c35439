package tenant

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

func TestGateway(t *testing.T) {
	plan, node := address.DefaultPlan(), netip.MustParsePrefix("fd70:696c:6100:3::/64")
	ids := []ID{{ID: 7, Key: address.Key{1}}, {ID: 8, Key: address.Key{2}}}
	blue := Tenant{Name: "blue", Addressing: Encrypted, IDs: ids}
	seen := map[netip.Addr]bool{}
	for _, id := range ids {
		guest, err := blue.Gateway(plan, node, id)
		if err != nil {
			t.Fatal(err)
		}
		p := address.Split(guest.Plaintext)
		if p.Node != node || p.Tenant != id.ID || p.App != address.GatewayApp || p.Index == 0 {
			t.Errorf("the guest of id %d is %+v", id.ID, p)
		}
		cipher := address.NewCipher(id.Key)
		if !plan.Private.Contains(guest.Address) || cipher.Decrypt(guest.Address) != guest.Plaintext {
			t.Errorf("containers of id %d see %v for %v", id.ID, guest.Address, guest.Plaintext)
		}
		for p.Index--; p.Index > 0; p.Index-- {
			if plan.Private.Contains(cipher.Encrypt(p.Addr())) {
				t.Errorf("index %d of id %d serves and was passed over", p.Index, id.ID)
			}
		}
		seen[guest.Address] = true
		if again, _ := blue.Gateway(plan, node, id); again != guest {
			t.Errorf("the guest of id %d is %v, then %v", id.ID, guest, again)
		}
	}
	if len(seen) != len(ids) {
		t.Error("two ids have one guest: each has its own key")
	}

	blue.Addressing = Clear
	guest, err := blue.Gateway(plan, node, ids[0])
	want := NodeAddress(node)
	if err != nil || guest != (Guest{want, want}) {
		t.Errorf("the guest of a clear tenant is %v, %v; want %v", guest, err, want)
	}
}
